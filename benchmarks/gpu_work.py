"""What benchmarks.gpu runs kernels on, how it takes the time, and a line of its table."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coppice.models.config import DecoderConfig
from kernels import reference
from kernels.batch import AttentionBatch, Segment

BF16 = torch.bfloat16
FLUSHED_BYTES = 1 << 30  # more than any cache
WARM_UPS, CALLS = 3, 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. `share` is the achieved part of the ceiling that is the nearer one."""

    what: str
    micros: float | None = None
    reached: str = ""
    share: float | None = None
    other: str = ""
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class Ceilings:
    bytes_s: float
    flop_s: float

    def line(self, what: str, seconds: float, size: float, flop: float, other: str = "") -> Line:
        least = max(size / self.bytes_s, flop / self.flop_s)
        reached = f"{size / seconds / 1e9:,.0f} GB/s, {flop / seconds / 1e12:,.1f} TFLOP/s"
        return Line(what, seconds * 1e6, reached, least / seconds, other)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call whose operands are in no cache. Emptying the caches takes the GPU
    longer than Python takes to launch a few kernels, so that no launch is waited for."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    cache = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    for _ in range(WARM_UPS):
        run()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
    for start, end in marks:
        cache.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def ceilings(device: torch.device, size: int = 1 << 30, side: int = 8192) -> Ceilings:
    """Bytes per second of a copy (read and written), FLOP/s of a square bf16 product."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    a = torch.randn((side, side), device=device).to(BF16)
    copied = seconds_of(lambda: target.copy_(source), device)
    return Ceilings(2 * size / copied, 2 * side**3 / seconds_of(lambda: a @ a, device))


class Tree:
    """Rows below a context in scattered slots. A tree's row hangs from the row (i - 1) // 2."""

    def __init__(
        self, config: DecoderConfig, context: int, rows: int, causal: bool, device: torch.device
    ) -> None:
        shape = (context + rows, config.kv_heads, config.head_dim)
        self.slots = torch.randperm(context + rows, device=device)
        self.k = torch.randn(shape, device=device).to(BF16)
        self.v = torch.randn(shape, device=device).to(BF16)
        self.q = torch.randn((rows, config.heads, config.head_dim), device=device).to(BF16)
        self.context, self.rows = context, rows
        self.ways: list[list[int]] = [[0]]
        for row in range(1, rows):
            self.ways.append([*self.ways[row - 1 if causal else (row - 1) // 2], row])
        self.masks = None if causal else torch.tensor([word(way) for way in self.ways]).to(device)

    @property
    def batch(self) -> AttentionBatch:
        own = self.slots[self.context :]
        segment = Segment(self.rows, self.slots[: self.context], own, self.masks)
        return AttentionBatch(own, own, (segment,))

    @property
    def visible(self) -> Tensor:
        return reference.visible(self.batch.segments[0])

    def plain(self, row: int) -> AttentionBatch:
        """The same row as a plain step, its path committed."""
        keys = torch.cat((self.slots[: self.context], self.slots[self.context :][self.ways[row]]))
        one = torch.ones(1, dtype=torch.int64, device=keys.device)
        return AttentionBatch(keys[-1:], keys[-1:], (Segment(1, keys[:-1], keys[-1:], one),))


def word(way: list[int]) -> int:
    bits = sum(1 << node for node in way)
    return bits - (1 << 64) if bits >> 63 else bits
