"""What differs from one kind of drafter to the next: its features, its learner, its files."""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from safetensors.torch import load_file, save_file
from torch import Tensor

from coppice.errors import StartError
from coppice.models.checkpoint import SINGLE_FILE, Checkpoint, read_json
from coppice.models.config import DecoderConfig
from training.batches import Lesson
from training.dataset import Sample
from training.draft_model import SHARED, DraftModelLearner, chosen_layers, shrunk
from training.learners import Eagle3Learner, EagleLearner, Learner, Lecture, MedusaLearner

TOKEN_MAP_FILE = "token_map.json"
MEDUSA_FILE = "medusa_lm_head.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# Of the target's config, what a head's does not share.
NOT_SHARED = ("torch_dtype", "dtype", "transformers_version", "_name_or_path")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for, as far as a fit needs it."""

    path: Path
    config: DecoderConfig
    lm_head: Tensor  # [vocab, hidden] fp32
    norm: Tensor  # [hidden] fp32, the final one
    token_map: Tensor  # [draft_vocab] int64, ascending

    @classmethod
    def weight(cls, path: Path, name: str, *shape: int) -> Tensor:
        return Checkpoint.open(path).tensor(name, shape, torch.float32, CPU)


class Kind(ABC):
    """A kind of drafter that can be trained."""

    drafter: str  # as speculation.drafter names it
    reduced_vocabulary = True
    file = SINGLE_FILE  # of the weights

    def speculation(self, path: Path) -> dict[str, object]:
        """The settings that draft with what is in the directory `path`."""
        return {"drafter": self.drafter, "head": path}

    @abstractmethod
    def learner(self, target: Target, lecture: Lecture) -> Learner: ...

    def lesson(self, sample: Sample, layers: tuple[int, ...], target: Target) -> Lesson:
        """With the features that this kind reads, out of a dataset of `layers`."""
        return Lesson.final_only(final_view(sample, layers, target))

    def config(self, target: Target) -> dict[str, Any]:
        """The config.json: the target's own with one layer."""
        return {**_shared(target.path), "num_hidden_layers": 1, "dtype": "bfloat16"}

    def stored(self, path: Path) -> Mapping[str, Tensor]:
        """The weights in the directory `path`."""
        return load_file(path / self.file)

    def write(self, path: Path, weights: Mapping[str, Tensor], target: Target) -> None:
        """A whole directory in the published layout; an older one is replaced."""
        path.mkdir(parents=True, exist_ok=True)
        _write_json(path / "config.json", self.config(target))
        _write_weights(path / self.file, weights)


class EagleKind(Kind):
    drafter = "eagle"

    def learner(self, target: Target, lecture: Lecture) -> Learner:
        return EagleLearner(DecoderConfig.from_hf(self.config(target)), lecture)

    def config(self, target: Target) -> dict[str, Any]:
        return {**super().config(target), "bias": False}

    def write(self, path: Path, weights: Mapping[str, Tensor], target: Target) -> None:
        super().write(path, weights, target)
        _write_json(path / TOKEN_MAP_FILE, target.token_map.tolist(), indent=None)


class Eagle3Kind(Kind):
    drafter = "eagle"

    def learner(self, target: Target, lecture: Lecture) -> Learner:
        config = DecoderConfig.from_hf(self.config(target))
        return Eagle3Learner(config, lecture, target.lm_head, target.token_map)

    def lesson(self, sample: Sample, layers: tuple[int, ...], target: Target) -> Lesson:
        if not layers:
            raise StartError("the dataset has no layers' features: prepare it with --layers")
        final = final_view(sample, layers, target).features
        size = final.shape[1]
        return Lesson(replace(sample, features=sample.features[:, :-size]), final)

    def config(self, target: Target) -> dict[str, Any]:
        return {
            **super().config(target),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(target.token_map),
            "tie_word_embeddings": False,
        }


class MedusaKind(Kind):
    drafter = "medusa"
    reduced_vocabulary = False
    file = MEDUSA_FILE

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def learner(self, target: Target, lecture: Lecture) -> Learner:
        return MedusaLearner(target.config.hidden_size, lecture)

    def config(self, target: Target) -> dict[str, Any]:
        return {
            "model_type": "medusa",
            "medusa_num_heads": self._heads,
            "medusa_num_layers": 1,
            "hidden_size": target.config.hidden_size,
            "vocab_size": target.config.vocab_size,
        }


class DraftModelKind(Kind):
    drafter = "model"
    reduced_vocabulary = False

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def speculation(self, path: Path) -> dict[str, object]:
        return {"drafter": self.drafter, "draft_model": str(path)}

    def learner(self, target: Target, lecture: Lecture) -> Learner:
        learner = DraftModelLearner(target.config, lecture, self._layers)
        chosen = chosen_layers(self._layers, target.config.layers)
        learner.load_published(shrunk(_all_weights(target.path), chosen))
        return learner

    def config(self, target: Target) -> dict[str, Any]:
        return {**super().config(target), "num_hidden_layers": self._layers}

    def write(self, path: Path, weights: Mapping[str, Tensor], target: Target) -> None:
        checkpoint = Checkpoint.open(target.path)
        shared = {name: checkpoint.raw(name) for name in SHARED if name in checkpoint}
        super().write(path, {**shared, **weights}, target)
        for name in TOKENIZER_FILES:
            if (target.path / name).exists():
                shutil.copyfile(target.path / name, path / name)


KINDS = ("eagle", "eagle3", "medusa", "model")


def kind_named(name: str, steps: int, layers: int) -> Kind:
    """`steps` is the number of Medusa heads, `layers` that of a draft model's layers."""
    kinds: dict[str, Kind] = {
        "eagle": EagleKind(),
        "eagle3": Eagle3Kind(),
        "medusa": MedusaKind(steps),
        "model": DraftModelKind(layers),
    }
    if name not in kinds:
        raise StartError(f"kind = {name!r}: must be one of {', '.join(KINDS)}")
    return kinds[name]


def final_view(sample: Sample, layers: tuple[int, ...], target: Target) -> Sample:
    """The sample with the target's final features; those of `layers` end with the output of its
    last layer, which the norm makes the final feature."""
    if not layers:
        return sample
    size = target.config.hidden_size
    outputs = sample.features[:, -size:].float()
    final = F.rms_norm(outputs, (size,), target.norm, target.config.rms_norm_eps)
    return replace(sample, features=final.to(torch.bfloat16))


def _shared(target: Path) -> dict[str, Any]:
    return {k: v for k, v in read_json(target / "config.json").items() if k not in NOT_SHARED}


def _all_weights(target: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(target)
    return {name: checkpoint.raw(name) for name in checkpoint.shards}


def _write_json(path: Path, content: object, indent: int | None = 1) -> None:
    path.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")


def _write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """In bf16 what is of floats; the file appears by a rename, hence whole or not at all."""
    stored = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous()
        for name, value in weights.items()
    }
    partial = path.with_suffix(".partial")
    save_file(stored, partial)
    partial.rename(path)
