"""The kinds of heads that can be trained, each with what it is taught.

A learner's parameters are named as published, so that its state is what is stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from coppice.models.config import DecoderConfig
from training.module import Batch, Eagle3Module, EagleModule
from training.objective import Losses, Objective

INITIAL_STD = 0.02


class Learner(Protocol):
    """A head that is being trained."""

    @property
    def module(self) -> nn.Module: ...

    def losses(self, batch: Batch) -> Losses: ...

    def published(self) -> dict[str, Tensor]:
        """Weights under their published names."""
        ...

    def load_published(self, stored: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, slots=True)
class Lecture:
    """What all learners are told."""

    embedding: Tensor  # [vocab, hidden] fp32, the target's
    objective: Objective
    steps: int  # of training-time test (1: none), or Medusa heads
    generator: torch.Generator  # of the first weights


class EagleLearner:
    """An EAGLE-1/2 head."""

    def __init__(self, config: DecoderConfig, lecture: Lecture) -> None:
        self.module = EagleModule(config, lecture.embedding)
        self._lecture = lecture
        _begin(self.module, lecture.generator)

    def losses(self, batch: Batch) -> Losses:
        return self._lecture.objective(self.module.unroll(batch, self._lecture.steps), batch)

    def published(self) -> dict[str, Tensor]:
        return self.module.published()

    def load_published(self, stored: Mapping[str, Tensor]) -> None:
        self.module.load_published(stored)


class Eagle3Learner:
    """An EAGLE-3 head, whose LM head begins as the target's."""

    def __init__(
        self, config: DecoderConfig, lecture: Lecture, lm_head: Tensor, token_map: Tensor
    ) -> None:
        """`lm_head` [vocab, hidden] is the target's, `token_map` [draft_vocab] ascending ids."""
        self.module = Eagle3Module(config, lecture.embedding, len(token_map))
        self._lecture = lecture
        self._token_map = token_map
        self._vocab_size = len(lm_head)
        _begin(self.module, lecture.generator)
        with torch.no_grad():
            self.module.lm_head.weight.copy_(lm_head[token_map])

    def losses(self, batch: Batch) -> Losses:
        outputs = self.module.unroll(batch, self._lecture.steps)
        return self._lecture.objective(outputs, batch, self._read_out)

    def _read_out(self, features: Tensor, chosen: Tensor) -> Tensor:
        return F.linear(self.module.norm(features), self.module.lm_head.weight[chosen])

    def published(self) -> dict[str, Tensor]:
        stored = {name: value.detach() for name, value in self.module.state_dict().items()}
        drafted = torch.zeros(self._vocab_size, dtype=torch.bool)
        drafted[self._token_map] = True
        offsets = self._token_map - torch.arange(len(self._token_map))
        return stored | {"d2t": offsets, "t2d": drafted}

    def load_published(self, stored: Mapping[str, Tensor]) -> None:
        take(self.module, stored)


class MedusaLearner:
    """Medusa heads of one residual block each, on the target's LM head (Medusa-1, arXiv
    2401.10774): head i reads f_t and predicts token t + 2 + i."""

    def __init__(self, hidden_size: int, lecture: Lecture) -> None:
        blocks = [Block(hidden_size) for _ in range(lecture.steps)]
        self.module = nn.ModuleList([nn.ModuleList([block]) for block in blocks])
        self._blocks = blocks
        self._lecture = lecture

    def losses(self, batch: Batch) -> Losses:
        rows = batch.positions[..., None].expand(-1, -1, batch.features.shape[-1])
        read = batch.features.gather(1, rows)  # f_t of the answer positions
        # As in the steps of an unrolling: the prediction of a row was made so many rows before.
        outputs = [
            F.pad(block(read), (0, 0, ahead, 0))[:, : read.shape[1]]
            for ahead, block in enumerate(self._blocks)
        ]
        return self._lecture.objective(outputs, batch)

    def published(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.module.state_dict().items()}

    def load_published(self, stored: Mapping[str, Tensor]) -> None:
        take(self.module, stored)


class Block(nn.Module):
    """x + silu(W x + b), beginning as x."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def take(module: nn.Module, stored: Mapping[str, Tensor], prefix: str = "") -> None:
    """All of a module's weights, from `stored` under their names behind `prefix`."""
    module.load_state_dict({name: stored[prefix + name].float() for name in module.state_dict()})


def _begin(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
