"""Whether the pool of token slots fits into the memory that is left, before it is taken: a CPU's is
taken as it is written, long after the start, and a GPU's fails with a message about something else.
"""

from pathlib import Path

import psutil
import torch

from coppice.errors import StartError
from coppice.models.config import DecoderConfig

_GROUP = Path("/sys/fs/cgroup")  # version 2


def slot_bytes(own: DecoderConfig, features: int, dtype: torch.dtype) -> int:
    """Of one slot: K and V of all layers of a process's `own` part of the target, and as many
    values of features."""
    return (2 * own.layers * own.kv_heads * own.head_dim + features) * dtype.itemsize


def check_pool(slots: int, each: int, free: int, fraction: float) -> None:
    """Raises StartError when `slots` of `each` bytes are more than that of the `free` ones."""
    most = int(fraction * free) // each
    if slots > most:
        raise StartError(
            f"verifier.kv_slots = {slots} take {slots * each / 1e9:.2f} GB, and of the "
            f"{free / 1e9:.2f} GB that are free beside the target verifier.memory_fraction = "
            f"{fraction:g} is theirs: set it to {most} at most"
        )


def free_bytes(device: torch.device) -> int:
    """What this process could still take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch has reserved and does not use is ours as well.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + reserved
    return min(psutil.virtual_memory().available, _left_in(_GROUP))


def _left_in(group: Path) -> int:
    """Of a container's limit. What caches files is given back when it is needed."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(counts["file"]))
    except (OSError, ValueError, KeyError):  # not in a container, or it has no limit
        return psutil.virtual_memory().total
