"""How a batch is cut into units of attention: pure arithmetic over the sizes of its segments.

A unit is a tile of rows, all query heads of one KV head, and some chunks of their keys. The keys of
a row, in their logical order, are cut into chunks of CHUNK by position, wherever they come from:

- a causal segment (prefill) is units that run from the first chunk to their last row's last key;
- of a tree, whole chunks of the context are units of all rows, one chunk each, since they hold the
  same keys for every row; then come units of one row each over what is left of the context and the
  row's own path, gathered in order (`lists`), so that no sibling makes a gap.

Units of trees leave partial states, which are merged per row from the first chunk to the last.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.triton.tiles import CHUNK, TREE

Integers = NDArray[np.int64]

# Columns of a unit, and of a row of a tree, as kernels/triton/attention.py reads them.
UNIT = ("first", "rows", "keys", "visible", "causal", "chunk", "chunks", "state")
ROW = ("row", "shared", "step", "whole", "own", "parts", "list", "rest_at", "rest", "tail", "mask")
LIST = CHUNK + TREE  # room for a row's own keys: less than a chunk of context, and its path


@dataclass(frozen=True, slots=True)
class Layout:
    units: Integers  # [units, len(UNIT)]
    rows: Integers  # [rows of trees, len(ROW)]
    states: int  # rows of partial states
    keys: int  # length of the batch's own list; the rows' own lists follow it


def lay_out(shares: Integers, tile_rows: int) -> Layout:
    """The units of a batch with `shares` [segments, 4] (rows, context, tail, masked), of at most
    `tile_rows` rows each. Raises ValueError for a tree with more keys than an ancestry word has
    bits."""
    rows, context, tail, masked = shares.T
    if (masked * tail).max(initial=0) > TREE:
        raise ValueError(f"a tree has {tail[masked == 1].max()} tail keys: an ancestry word has 64")
    first = np.cumsum(rows) - rows
    lengths = context + tail + masked * rows
    segments = np.stack((rows, context, tail, first, np.cumsum(lengths) - lengths), axis=1)
    total = int(lengths.sum())
    causal = _causal_units(segments[masked == 0], tile_rows)
    units, tree_rows, states = _tree_units(segments[masked == 1], tile_rows, total)
    return Layout(np.concatenate((causal, units)), tree_rows, states, total)


def _causal_units(segments: Integers, tile_rows: int) -> Integers:
    rows, context, _, first, keys = segments.T
    owner, tile = _ragged(-(-rows // tile_rows))
    begin = tile * tile_rows
    count = np.minimum(tile_rows, rows[owner] - begin)
    visible = context[owner] + begin + 1
    chunks = -(-(visible + count - 1) // CHUNK)
    units = _columns(first[owner] + begin, count, keys[owner], visible, 1, 0, chunks, -1)
    return units[np.argsort(-chunks, kind="stable")]  # the long ones first


def _tree_units(segments: Integers, tile_rows: int, lists: int) -> tuple[Integers, Integers, int]:
    """Units, rows and the number of partial states; `lists` is where the rows' own lists begin."""
    rows, context, tail, first, keys = segments.T
    whole, rest = context // CHUNK, context % CHUNK
    shared_states = whole * rows
    shared_at = np.cumsum(shared_states) - shared_states

    tiles = -(-rows // tile_rows)
    owner, index = _ragged(whole * tiles)
    chunk, begin = index // tiles[owner], index % tiles[owner] * tile_rows
    count = np.minimum(tile_rows, rows[owner] - begin)
    state = shared_at[owner] + chunk * rows[owner] + begin
    shared = _columns(
        first[owner] + begin, count, keys[owner], whole[owner] * CHUNK, 0, chunk, 1, state
    )

    owner, row = _ragged(rows)
    parts = -(-(rest + tail)[owner] // CHUNK)
    own_at = shared_states.sum() + np.cumsum(parts) - parts
    list_at = lists + np.arange(len(owner)) * LIST
    end = keys + context
    table = _columns(
        first[owner] + row, shared_at[owner] + row, rows[owner], whole[owner], own_at, parts,
        list_at, (end - rest)[owner], rest[owner], tail[owner], (end + tail)[owner] + row,
    )  # fmt: skip

    of, part = _ragged(parts)
    visible = (rest + tail)[owner[of]]
    own = _columns(table[of, 0], 1, list_at[of], visible, 0, part, 1, own_at[of] + part)
    return np.concatenate((shared, own)), table, int(shared_states.sum() + parts.sum())


def _ragged(counts: Integers) -> tuple[Integers, Integers]:
    """For counts [n]: the owner of each of their sum's items, and its index within the owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _columns(*values: Integers | int) -> Integers:
    return np.stack(np.broadcast_arrays(*values), axis=1).astype(np.int64)
