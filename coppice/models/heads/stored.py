"""The tensors of a published head, under one spelling of their names.

Spellings in use for the one layer: `layers.0.` (EAGLE-1/2), `midlayer.` (EAGLE-3) and
`transformer.` (EAGLE-1/2 in the speculators layout, where `fc` is `fusion_fc`).
"""

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from coppice.errors import StartError
from coppice.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, converted

PICKLE_FILE = "pytorch_model.bin"
MEND = "set speculation.head to a head trained for this target"
SPELLINGS = (
    ("layers.0.", "layer."),
    ("midlayer.", "layer."),
    ("transformer.", "layer."),
    ("fusion_fc.", "fc."),
)


class StoredHead:
    """Named tensors of a head. It remembers which were read, since one that would be left out
    silently makes another head of it."""

    def __init__(
        self, path: Path, names: Sequence[str], load: Callable[[str], Tensor], files: Sequence[Path]
    ) -> None:
        """`load` gives the tensor of a stored name. Raises StartError for one in two spellings."""
        self.path = path
        self._load = load
        self._files = files
        self._stored: dict[str, str] = {}  # our name -> the stored one
        self._left = {_spelt(name) for name in names}
        for name in names:
            other = self._stored.setdefault(_spelt(name), name)
            if other != name:
                raise StartError(f"head {path}: tensors {other} and {name} are one and the same")

    @classmethod
    def open(cls, path: Path) -> "StoredHead":
        """The weights in the directory `path`: safetensors, or a pickle of nothing but tensors."""
        if (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists():
            checkpoint = Checkpoint.open(path)
            files = sorted(set(checkpoint.shards.values()))
            return cls(path, sorted(checkpoint.shards), checkpoint.raw, files)
        if not (path / PICKLE_FILE).exists():
            raise StartError(f"head {path} has no weights: neither {SINGLE_FILE} nor {PICKLE_FILE}")
        tensors = _unpickle(path / PICKLE_FILE)
        return cls(path, sorted(tensors), tensors.__getitem__, [path / PICKLE_FILE])

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def rows(self, name: str) -> int:
        """The first dimension of a tensor that is there."""
        return len(self.raw(name))

    def raw(self, name: str) -> Tensor:
        """The tensor as it is stored. Raises StartError when it is missing."""
        if name not in self._stored:
            raise StartError(f"head {self.path}: tensor {name} is missing: {MEND}")
        self._left.discard(name)
        return self._load(self._stored[name])

    def read(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The tensor [shape] of floats. Raises StartError when it is missing or something else."""
        if name not in self._stored:
            raise StartError(f"head {self.path}: tensor {name} {list(shape)} is missing: {MEND}")
        what = f"head {self.path}: tensor {self._stored[name]}"
        return converted(self.raw(name), what, shape, dtype, device)

    def refuse_unread(self, kind: str) -> None:
        """Raises StartError when a tensor is left that no part of a head of this kind has."""
        for name in sorted(self._left):
            if not name.endswith("rotary_emb.inv_freq"):  # made from the config
                stored = self._stored[name]
                raise StartError(f"head {self.path}: tensor {stored} has no place in {kind}")

    def digest(self) -> str:
        """sha256 of the weights, hex."""
        digest = hashlib.sha256()
        for path in self._files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def _spelt(name: str) -> str:
    for theirs, ours in SPELLINGS:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def unpickled(path: Path) -> object:
    """What a pickle of nothing but plain values and tensors holds. Raises StartError for any
    other: it could run code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StartError(f"{path} cannot be read as plain weights: {reason}") from None


def _unpickle(path: Path) -> Mapping[str, Tensor]:
    content = unpickled(path)
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise StartError(f"{path} holds something else than named tensors")
    return content
