"""Answers of the target with its features, on disk: written in shards, read as samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from coppice.errors import StartError

DESCRIPTION_FILE = "dataset.json"


class Description(BaseModel):
    """What a dataset holds and how it came about."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str  # its name, for the model card
    target_hash: str
    vocab_size: int
    feature_size: int  # of one position
    feature_layers: tuple[int, ...]  # of the target, whose inputs they are; none: its final feature
    prompts: tuple[str, ...]  # names of their files
    held_out: tuple[str, ...]  # names of the files that nothing may overlap
    temperatures: tuple[float, ...]
    max_prompt_tokens: int
    max_answer_tokens: int
    seed: int
    shards: int
    shard_prompts: int  # of one shard, but for the last


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with the target's answer."""

    tokens: Tensor  # [length] int32
    prompt_length: int
    temperature: float  # of the answer
    features: Tensor  # [length - 1, feature_size] bf16: the last token was never an input

    @property
    def answer_rows(self) -> int:
        """Positions whose prediction counts: the answer's second token is the first drafted."""
        return len(self.tokens) - self.prompt_length - 1


class Dataset:
    """A directory of samples. A shard appears by a rename, hence whole or not at all."""

    def __init__(self, path: Path, description: Description) -> None:
        self.path = path
        self.description = description

    @classmethod
    def open(cls, path: Path) -> "Dataset":
        """Raises StartError when there is none."""
        try:
            text = (path / DESCRIPTION_FILE).read_text(encoding="utf-8")
            return cls(path, Description.model_validate_json(text))
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise StartError(
                f"{path} is no dataset ({reason}): make one with `coppice train prepare`"
            ) from None

    @classmethod
    def begin(cls, path: Path, description: Description) -> "Dataset":
        """A new dataset, or the one that was begun before with the same description. Raises
        StartError when another one is there."""
        if (path / DESCRIPTION_FILE).exists():
            found = cls.open(path)
            for name, value in description.model_dump().items():
                if (before := getattr(found.description, name)) != value:
                    raise StartError(
                        f"{path} was begun with {name} = {before}, now it is {value}: "
                        "go on with the same options, or take another --output"
                    )
            return found
        path.mkdir(parents=True, exist_ok=True)
        (path / DESCRIPTION_FILE).write_text(description.model_dump_json(indent=1) + "\n")
        return cls(path, description)

    def missing(self) -> list[int]:
        """Numbers of the shards that are not written yet."""
        return [n for n in range(self.description.shards) if not self._file(n).exists()]

    def write(self, shard: int, samples: Sequence[Sample]) -> None:
        tensors = {
            "tokens": torch.cat([sample.tokens for sample in samples]),
            "lengths": torch.tensor([len(sample.tokens) for sample in samples]),
            "prompt_lengths": torch.tensor([sample.prompt_length for sample in samples]),
            "temperatures": torch.tensor([sample.temperature for sample in samples]),
            "features": torch.cat([sample.features for sample in samples]),
        }
        partial = self._file(shard).with_suffix(".partial")
        save_file(tensors, partial)
        partial.rename(self._file(shard))

    def samples(self) -> Iterator[Sample]:
        """All that are written so far, shard after shard."""
        for number in range(self.description.shards):
            if self._file(number).exists():
                yield from self.read(number)

    def answers(self) -> Iterator[Tensor]:
        """The tokens [answer] of all answers written so far. Features, nearly all of a shard, are
        not read."""
        for number in range(self.description.shards):
            if self._file(number).exists():
                with safe_open(self._file(number), framework="pt") as file:
                    lengths: list[int] = file.get_tensor("lengths").tolist()
                    prompts: list[int] = file.get_tensor("prompt_lengths").tolist()
                    tokens = file.get_tensor("tokens").split(lengths)
                for each, prompt in zip(tokens, prompts, strict=True):
                    yield each[prompt:]

    def size(self) -> tuple[int, int]:
        """How many answers are written so far, and of how many tokens they are in all."""
        lengths = [len(answer) for answer in self.answers()]
        return len(lengths), sum(lengths)

    def read(self, shard: int) -> list[Sample]:
        tensors = load_file(self._file(shard))
        lengths: list[int] = tensors["lengths"].tolist()
        tokens = tensors["tokens"].split(lengths)
        features = tensors["features"].split([length - 1 for length in lengths])
        prompts: list[int] = tensors["prompt_lengths"].tolist()
        temperatures: list[float] = tensors["temperatures"].tolist()
        return [
            Sample(*sample) for sample in zip(tokens, prompts, temperatures, features, strict=True)
        ]

    def _file(self, shard: int) -> Path:
        return self.path / f"shard-{shard:05d}.safetensors"


def token_counts(dataset: Dataset) -> Tensor:
    """How often each token occurs in the answers: [vocab] int64."""
    counts = torch.zeros(dataset.description.vocab_size, dtype=torch.int64)
    for answer in dataset.answers():
        counts += torch.bincount(answer.long(), minlength=len(counts))
    return counts


def frequent_tokens(counts: Tensor, size: int) -> list[int]:
    """A draft vocabulary: the `size` commonest tokens of counts [vocab], in ascending order; the
    lower id where they tie (FR-Spec, arXiv 2502.14856)."""
    order = torch.argsort(counts, descending=True, stable=True)
    return sorted(order[:size].tolist())
