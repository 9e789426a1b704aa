"""What the machine can do at most, and how long a call takes."""

import math
import statistics
import time
from collections.abc import Callable

import torch

READ_BYTES = 1 << 29  # beyond the caches
PEAK_SIZE = 2048
HOPELESS = 10  # times as slow as the best


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def median_seconds(run: Callable[[], object], calls: int, warm_up: int = 2) -> float:
    """Median seconds of a call."""
    for _ in range(warm_up):
        run()
    return statistics.median(timed(run) for _ in range(calls))


def read_gb_s() -> float:
    """Sequential read bandwidth in GB/s: torch's sum over fp32 values, the best of ten."""
    values = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(timed(values.sum) for _ in range(10)) / 1e9


def peak_gflop_s(*dtypes: torch.dtype) -> float:
    """GFLOP/s of a large square product in torch, the best of ten in each type. In a type that the
    processor has no instructions for one takes seconds, and there is no second."""
    best = math.inf
    for dtype in dtypes:
        a = torch.randn(PEAK_SIZE, PEAK_SIZE).to(dtype)
        b = torch.randn(PEAK_SIZE, PEAK_SIZE).to(dtype)
        for _ in range(10):
            seconds = timed(lambda a=a, b=b: a @ b)
            best = min(best, seconds)
            if seconds > HOPELESS * best:
                break
    return 2 * PEAK_SIZE**3 / best / 1e9
