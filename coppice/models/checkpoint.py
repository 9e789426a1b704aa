"""Reading a published checkpoint directory: its config and its safetensors, checked."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coppice.errors import StartError
from coppice.models.sharding import Part

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file. Raises StartError when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartError(f"{path} is missing: is this a checkpoint directory?") from None
    except (OSError, ValueError) as error:
        raise StartError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise StartError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content


class Checkpoint:
    """Named tensors in one safetensors file, or in several with an index."""

    def __init__(self, shards: Mapping[str, Path]) -> None:
        self.shards = MappingProxyType(dict(shards))  # name of a tensor -> the file that holds it

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Raises StartError when a file is missing or is not safetensors."""
        if (directory / INDEX_FILE).exists():
            files = set(_weight_map(directory / INDEX_FILE).values())
        elif (directory / SINGLE_FILE).exists():
            files = {SINGLE_FILE}
        else:
            raise StartError(
                f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
            )
        shards: dict[str, Path] = {}
        for file in sorted(files):
            path = directory / file
            shards.update((name, path) for name in _tensor_names(path))
        return cls(shards)

    @classmethod
    def of_file(cls, path: Path) -> "Checkpoint":
        """All tensors of one file. Raises StartError when it is not safetensors."""
        return cls(dict.fromkeys(_tensor_names(path), path))

    def __contains__(self, name: str) -> bool:
        return name in self.shards

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        part: Part | None = None,
    ) -> Tensor:
        """The tensor `name` [shape], or a part of it and no more, converted. Raises StartError when
        it is missing, has another shape, is not of floats, or holds NaN or infinity."""
        if name not in self.shards:
            raise StartError(f"checkpoint: tensor {name} {list(shape)} is missing")
        what = f"{self.shards[name]}: tensor {name}"
        if part is None or part.shape_of(shape) == list(shape):
            return converted(self.raw(name), what, shape, dtype, device)
        sliced = self._slice(name, what, shape, part)
        return converted(sliced, what, part.shape_of(shape), dtype, device)

    def _slice(self, name: str, what: str, shape: Sequence[int], part: Part) -> Tensor:
        try:
            with safe_open(self.shards[name], framework="pt", device="cpu") as file:
                stored = file.get_slice(name)
                if stored.get_shape() != list(shape):
                    raise StartError(f"{what} is {stored.get_shape()}, expected {list(shape)}")
                start, stop = part.span.start, part.span.stop
                return stored[start:stop] if part.dim == 0 else stored[:, start:stop]
        except (OSError, SafetensorError) as error:
            raise StartError(f"{what} cannot be read: {error}") from None

    def raw(self, name: str) -> Tensor:
        """The tensor `name`, one of `shards`, as it is stored."""
        path = self.shards[name]
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise StartError(f"{path}: tensor {name} cannot be read: {error}") from None


def converted(
    tensor: Tensor, what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A copy of a stored tensor [shape] in `dtype` on `device`. Raises StartError that begins with
    `what` when it has another shape, is not of floats, or holds NaN or infinity."""
    if list(tensor.shape) != list(shape):
        raise StartError(f"{what} is {list(tensor.shape)}, expected {list(shape)}")
    if not tensor.is_floating_point():
        raise StartError(f"{what} is of {tensor.dtype}, expected floats")
    # A copy: what stays mapped from the file would change or fault when the file does.
    own = tensor.to(device=device, dtype=dtype, copy=True)
    if not bool(torch.isfinite(own).all()):
        raise StartError(f"{what} holds NaN or infinity in {dtype}")
    return own


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartError(f"{path} has no weight_map")
    files = {str(name): str(file) for name, file in weight_map.items()}
    outside = [file for file in files.values() if Path(file).name != file]
    if outside:
        raise StartError(f"{path} points to {outside[0]!r}, outside of its directory")
    return files


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return list(file.keys())
    except FileNotFoundError:
        raise StartError(f"{path} is missing, though the index names it") from None
    except (OSError, SafetensorError) as error:
        raise StartError(f"{path} is not a whole safetensors file: {error}") from None
