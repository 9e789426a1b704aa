"""What the first rank tells the others of a pass is all of it."""

from hypothesis import given
from hypothesis import strategies as st

from verifier_svc.plan_words import STOP, decode, encode
from verifier_svc.runner import Rows

ID = st.integers(0, 2**31 - 1)
MASK = st.integers(-(2**63), 2**63 - 1)


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    count = draw(st.integers(1, 6))
    ids = st.lists(ID, min_size=count, max_size=count)
    masks = draw(st.none() | st.lists(MASK, min_size=count, max_size=count))
    return Rows(
        draw(ids), draw(ids), draw(ids), draw(st.lists(ID, max_size=6)), masks,
        draw(st.integers(0, count)), draw(st.booleans()),
    )  # fmt: skip


@given(st.lists(rows(), max_size=4))
def test_a_plan_is_read_as_it_was_written_in_words_of_32_bits(batch: list[Rows]) -> None:
    words = encode(batch)
    assert all(-(2**31) <= word < 2**31 for word in words)
    assert decode(words) == batch


def test_positions_may_be_a_range() -> None:
    (read,) = decode(encode([Rows([7, 8], range(4, 6), [1, 2], [], None, 1)])) or []
    assert read.positions == [4, 5]


def test_the_end_is_not_a_plan() -> None:
    assert decode([STOP]) is None
