"""Memory for what every step reads: few large pages instead of many small ones.

A pass streams hundreds of megabytes; with pages of 4 KB the processor looks up tens of thousands
of addresses and its prefetchers stop at every border. Linux gives pages of 2 MB where it is asked
to (transparent huge pages, `madvise`).
"""

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 32 * _PAGE  # what is asked of the system at once
_ALIGNMENT = 64
LARGE = 1 << 20  # bytes of a result that is worth a mapping of its own


class Arena:
    """Hands out pieces of large mappings; a mapping lives as long as any of its tensors."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._used = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the CPU; its memory is taken when it is written."""
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self._mapping is None or self._used + size > len(self._mapping):
            self._mapping, self._used = _map(max(size, _CHUNK)), 0
        tensor = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=self._used)
        self._used += size
        return tensor.view(shape)


class Recycler:
    """Memory for large results that come and go with every pass, logits above all.

    From malloc they lie among small blocks that stay, and glibc (2.36) does not put an aligned
    block into a hole of its own size: with 128 rows of logits the heap grew by gigabytes in half an
    hour. Mapped anew each time, they would cost a page fault for every 4 KB.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}  # by size, a power of two

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the CPU of any content; its memory comes back when nothing refers
        to it any more."""
        count = math.prod(shape)
        size = 1 << max(_PAGE - 1, count * dtype.itemsize - 1).bit_length()
        free = self._free.setdefault(size, [])
        try:
            mapping = free.pop()
        except IndexError:
            mapping = _map(size)
        lent = np.frombuffer(mapping, np.uint8, count * dtype.itemsize)
        weakref.finalize(lent, free.append, mapping).atexit = False
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))


def _map(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, -(-size // _PAGE) * _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # On a kernel without them small pages serve as well, more slowly.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
