"""Sizes of tiles: by the shapes of heads and weights and by the architecture, never by the rows.

Sizes along a reduction (chunk, keys or inputs of a step, splits) decide the order of sums. The
other ones are constants all the same: on Hopper and Blackwell another number of lanes is another
matrix instruction. They were chosen by what compiles without spills: see docs/kernels-gpu.md.
"""

from dataclasses import dataclass

CHUNK = 256  # keys whose partial softmax is merged as one
TREE = 64  # tail keys of a tree: bits of an ancestry word
NARROW = 8192  # a weight with fewer outputs has tiles of 64 outputs
LEAST_TILES = 192  # fewer cannot keep the memory of a GPU busy, so inputs are split
LEAST_INPUTS = 512  # of a split


@dataclass(frozen=True, slots=True)
class AttentionTile:
    queries: int  # lanes: rows times the query heads of one KV head
    keys: int  # of one step; divides CHUNK
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class LinearTile:
    rows: int
    outputs: int
    inputs: int  # of one step
    splits: int  # parts of the inputs that are summed apart, and then in order
    warps: int
    stages: int


def attention_tile(head_dim: int, quantized: bool, capability: int) -> AttentionTile:
    """For a capability such as 80. Below 90 it stays within 99 KiB of shared memory, which is all
    that consumer cards have."""
    if head_dim > 128:
        return AttentionTile(queries=32, keys=32, warps=8, stages=3)
    if capability // 10 not in (9, 10):
        return AttentionTile(queries=64, keys=64, warps=8, stages=3)
    keys = 32 if quantized or capability // 10 == 10 else 64
    return AttentionTile(queries=64, keys=keys, warps=4, stages=3)


def linear_tile(outputs: int, inputs: int, capability: int) -> LinearTile:
    """64 rows, so that the rows of a whole tree read the weight once."""
    width, step = (64 if outputs < NARROW else 128), 64
    splits = 1
    while (
        -(-outputs // width) * splits < LEAST_TILES
        and inputs % (2 * splits * step) == 0
        and inputs // (2 * splits) >= LEAST_INPUTS
    ):
        splits *= 2
    stages = 4 if capability // 10 in (9, 10) else 3
    return LinearTile(rows=64, outputs=width, inputs=step, splits=splits, warps=4, stages=stages)
