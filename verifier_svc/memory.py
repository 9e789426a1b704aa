"""How many token slots fit into the memory that is left, before they are taken: a CPU's is taken as
it is written, long after the start, and a GPU's fails with a message about something else.
"""

from pathlib import Path

import psutil
import torch

from coppice.errors import StartError
from coppice.models.config import DecoderConfig
from coppice.settings import MIN_SLOTS, VerifierSettings

# Unless the settings say otherwise. A CPU's memory is not ours alone, and in time what the prefix
# tree keeps fills any pool.
_MOST, _OF_CPU = 0.9, 0.25
_GROUP = Path("/sys/fs/cgroup")  # version 2


def slot_bytes(own: DecoderConfig, features: int, dtype: torch.dtype) -> int:
    """Of one slot: K and V of all layers of a process's `own` part of the target, and as many
    values of features."""
    return (2 * own.layers * own.kv_heads * own.head_dim + features) * dtype.itemsize


def pool_slots(verifier: VerifierSettings, each: int, free: int, fraction: float) -> int:
    """How many slots of `each` bytes the pool has: as many as the settings say, or as that fraction
    of the `free` bytes holds. Raises StartError when they do not fit, or are too few."""
    most, wanted = int(fraction * free) // each, verifier.kv_slots
    share = (
        f"{free / 1e9:.2f} GB that are free beside the target verifier.memory_fraction = "
        f"{fraction:g} is theirs"
    )
    if wanted is None and most < MIN_SLOTS:
        raise StartError(
            f"the KV pool has room for {most} tokens, and {MIN_SLOTS} is the least: of the {share}"
        )
    if wanted is not None and wanted > most:
        raise StartError(
            f"verifier.kv_slots = {wanted} take {wanted * each / 1e9:.2f} GB, and of the {share}: "
            f"set it to {most} at most"
        )
    return most if wanted is None else wanted


def fraction_of(verifier: VerifierSettings, device: torch.device) -> float:
    """The share of the memory free on `device` that one verifier's pool may take."""
    if device.type != "cpu" or verifier.kv_slots is not None:
        return verifier.memory_fraction or _MOST
    # What others will take of the same memory is not taken yet, and they may be on this host.
    return (verifier.memory_fraction or _OF_CPU) / verifier.count


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
