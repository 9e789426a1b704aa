"""The draft vocabulary: which tokens of the target a head can propose.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856) lists them in a file beside the head, by frequency:
`token_map.json`, `token_map.pt`, `freq_<count>.pt` or `freq_<count>.json`; a `.pt` holds a list or
a tensor of ids. EAGLE-3 stores tensors: `d2t`, what is to be added to each draft id, and `t2d`,
whether each token of the target is among them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coppice.errors import StartError
from coppice.models.heads.stored import MEND, StoredHead, unpickled

FILES = ("token_map.json", "token_map.pt", "freq_*.json", "freq_*.pt")


def read_token_map(stored: StoredHead, vocab_size: int, device: torch.device) -> Tensor | None:
    """Target ids [draft_vocab] int64, all different; None: the head covers all of the vocabulary,
    in its order. Raises StartError for ids that a target of `vocab_size` tokens has not."""
    path = stored.path
    files = sorted(file for pattern in FILES for file in path.glob(pattern))
    sources = [file.name for file in files]
    sources += ["d2t"] if "d2t" in stored or "t2d" in stored else []
    if len(sources) > 1:
        raise StartError(f"head {path} has several token maps: {', '.join(sources)}: keep one")
    if not sources:
        return None
    ids, where = _listed(files[0]) if files else _added(stored), f"head {path}: {sources[0]}"
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        known = f"the target's [0, {vocab_size})"
        raise StartError(f"{where}: token {outside[0]} is outside of {known}")
    if len(ids.unique()) != len(ids):
        raise StartError(f"{where}: a token is listed twice")
    _check_mask(stored, ids, vocab_size)
    in_order = files or torch.equal(ids, torch.arange(len(ids)))
    if len(ids) == vocab_size and in_order:  # the order of a file is that of nothing stored
        return None
    return ids.to(device)


def _listed(file: Path) -> Tensor:
    """The ids in a file of FR-Spec."""
    content: Any = unpickled(file) if file.suffix == ".pt" else _json(file)
    if isinstance(content, Tensor):
        content = content.tolist() if _holds_ids(content) else None
    if not isinstance(content, Sequence) or not content or not all(type(i) is int for i in content):
        raise StartError(f"{file}: expected a list of token ids")
    return torch.tensor(content, dtype=torch.int64)  # [draft_vocab]


def _json(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"{file} cannot be read as JSON: {error}") from None


def _added(stored: StoredHead) -> Tensor:
    """The ids of EAGLE-3's offsets."""
    offsets = stored.raw("d2t")
    if not _holds_ids(offsets):
        found = f"{list(offsets.shape)} of {offsets.dtype}"
        raise StartError(f"head {stored.path}: tensor d2t is {found}, expected one row of integers")
    return torch.arange(len(offsets)) + offsets.to(torch.int64)  # [draft_vocab]


def _check_mask(stored: StoredHead, ids: Tensor, vocab_size: int) -> None:
    """`t2d` says nothing that `ids` do not say, so the two may at most disagree."""
    if "t2d" not in stored:
        return
    mask = stored.raw("t2d")
    if list(mask.shape) != [vocab_size]:
        raise StartError(
            f"head {stored.path}: tensor t2d is {list(mask.shape)}, the target's vocabulary has "
            f"{vocab_size} tokens: {MEND}"
        )
    marked = set(mask.nonzero().flatten().tolist())
    listed = set(ids.tolist())
    if marked != listed:
        raise StartError(
            f"head {stored.path}: t2d marks {len(marked)} tokens, d2t leads to {len(listed)}, and "
            f"the two disagree about {len(marked ^ listed)}"
        )


def _holds_ids(tensor: Tensor) -> bool:
    integral = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.dim() == 1 and integral and not tensor.is_complex()
