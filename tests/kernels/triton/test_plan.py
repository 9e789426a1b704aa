"""How batches are cut into units: every row reads its own keys, in chunks by position."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton.plan import LIST, ROW, UNIT, lay_out
from kernels.triton.tiles import CHUNK

CONTEXTS = st.one_of(
    st.integers(0, 20),
    st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 5 * CHUNK]),
    st.integers(0, 2000),
)


@dataclass(frozen=True)
class Share:
    rows: int
    context: int
    tail: int
    masked: bool


@st.composite
def trees(draw: st.DrawFn) -> Share:
    rows = draw(st.integers(1, 64))
    return Share(rows, draw(CONTEXTS), rows, True)


@st.composite
def prefills(draw: st.DrawFn) -> Share:
    rows = draw(st.integers(1, 300))
    return Share(rows, draw(CONTEXTS), rows, False)


def as_array(shares: list[Share]) -> np.ndarray:
    values = [(s.rows, s.context, s.tail, int(s.masked)) for s in shares]
    return np.array(values, dtype=np.int64).reshape(-1, 4)


@settings(max_examples=60, deadline=None)
@given(
    shares=st.lists(st.one_of(trees(), prefills()), max_size=5),
    tile_rows=st.sampled_from([1, 9, 16, 21, 64]),
)
def test_a_row_reads_its_keys_chunk_by_chunk_whatever_the_tiles(
    shares: list[Share], tile_rows: int
) -> None:
    layout = lay_out(as_array(shares), tile_rows)
    # Per row of the batch: (chunk of the whole sequence) -> (first key, keys) of what it reads.
    read: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    lists = {int(r["list"]): int(r["row"]) for r in named(layout.rows, ROW)}
    for unit in named(layout.units, UNIT):
        assert unit["rows"] <= tile_rows
        for i in range(unit["rows"]):
            visible = unit["visible"] + i * unit["causal"]
            for chunk in range(unit["chunk"], unit["chunk"] + unit["chunks"]):
                keys = min(CHUNK, visible - chunk * CHUNK)
                if keys > 0:
                    place = unit["keys"] + chunk * CHUNK
                    read[unit["first"] + i][chunk].append((place, keys))
    row, at = 0, 0
    for share in shares:
        for i in range(share.rows):
            whole = share.context // CHUNK * CHUNK if share.masked else share.context + i + 1
            expected = {
                chunk: [(at + chunk * CHUNK, min(CHUNK, whole - chunk * CHUNK))]
                for chunk in range(-(-whole // CHUNK))
            }
            own = share.context % CHUNK + share.tail if share.masked else 0
            for chunk in range(-(-own // CHUNK)):
                (place,) = (place for place, of in lists.items() if of == row)
                keys = min(CHUNK, own - chunk * CHUNK)
                expected.setdefault(chunk, []).append((place + chunk * CHUNK, keys))
            assert read[row] == expected
            row += 1
        at += share.context + share.tail + share.masked * share.rows


def named(table: np.ndarray, columns: tuple[str, ...]) -> list[dict[str, int]]:
    assert table.shape[1] == len(columns)
    return [dict(zip(columns, map(int, line), strict=True)) for line in table]


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(trees(), min_size=1, max_size=5), tile_rows=st.sampled_from([1, 16, 21]))
def test_every_state_is_written_once_and_merged_once_in_order(
    shares: list[Share], tile_rows: int
) -> None:
    layout = lay_out(as_array(shares), tile_rows)
    written: dict[int, tuple[int, bool, int]] = {}
    for unit in named(layout.units, UNIT):
        for i in range(unit["rows"]):
            state = unit["state"] + i
            assert state not in written
            own = unit["keys"] >= layout.keys
            written[state] = (unit["first"] + i, own, unit["chunk"])
    assert sorted(written) == list(range(layout.states))
    merged: list[int] = []
    for row in named(layout.rows, ROW):
        shared = [row["shared"] + c * row["step"] for c in range(row["whole"])]
        own = [row["own"] + c for c in range(row["parts"])]
        merged += [*shared, *own]
        assert [written[s] for s in shared] == [(row["row"], False, c) for c in range(len(shared))]
        assert [written[s] for s in own] == [(row["row"], True, c) for c in range(len(own))]
    assert sorted(merged) == list(range(layout.states))


@settings(max_examples=30, deadline=None)
@given(shares=st.lists(trees(), min_size=1, max_size=4))
def test_own_lists_have_room_and_read_what_is_theirs(shares: list[Share]) -> None:
    layout = lay_out(as_array(shares), 16)
    at, rows = 0, iter(named(layout.rows, ROW))
    for share in shares:
        for i in range(share.rows):
            row = next(rows)
            rest = share.context % CHUNK
            assert (row["rest_at"], row["rest"]) == (at + share.context - rest, rest)
            assert row["tail"] == share.tail
            assert row["mask"] == at + share.context + share.tail + i
        at += share.context + share.tail + share.rows
    places = sorted(row["list"] for row in named(layout.rows, ROW))
    assert places == [layout.keys + i * LIST for i in range(len(places))]


def test_a_tree_of_more_keys_than_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="65 tail keys"):
        lay_out(as_array([Share(65, 10, 65, True)]), 16)
