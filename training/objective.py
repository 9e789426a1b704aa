"""What a head is trained for: the target's next features, and its distribution of next tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from training.module import Batch

# Logits [rows, chosen] of features [rows, hidden] for chosen indices into the draft vocabulary.
ReadOut = Callable[[Tensor, Tensor], Tensor]

STEP_DECAY = 0.8  # weight of each further step of the unrolling (EAGLE-3)
# A batch teaches the tokens that its targets find likeliest, and some others, so that none is
# forgotten: products with all of the draft vocabulary would be half of the work.
LIKELY_TOKENS, OTHER_TOKENS = 3072, 512


@dataclass(frozen=True, slots=True)
class Losses:
    total: Tensor  # scalar, with gradient
    agreement: tuple[float, ...]  # per step: how often the likeliest token is the target's


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of -sum_v p(v) log softmax(logits)(v), p not normalized. The gradient is made
    on the way, in the memory of the log-probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor) -> Tensor:
        log_q = logits.log_softmax(-1)  # [rows, vocab]
        loss = -torch.einsum("rv,rv->", p, log_q)
        gradient = log_q.exp_().mul_(p.sum(-1, keepdim=True)).sub_(p)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (own,) = ctx.saved_tensors
        return own.mul_(gradients[0]), None


class Objective:
    """Cross-entropy over the draft vocabulary plus SmoothL1 on the features (EAGLE, section 4.2;
    the weight of the latter is a setting). Positions where the target goes on with a token out of
    the draft vocabulary teach features alone (EAGLE-3, section 3)."""

    def __init__(
        self,
        lm_head: Tensor,
        token_map: Tensor | None,
        feature_weight: float,
        generator: torch.Generator,
    ) -> None:
        """`lm_head` [vocab, hidden] fp32; `token_map` [draft_vocab] ids, None for all."""
        drafted = torch.arange(len(lm_head)) if token_map is None else token_map
        self._draft_rows = lm_head[drafted].contiguous()  # [draft_vocab, hidden]
        self._in_map = torch.zeros(len(lm_head), dtype=torch.bool)
        self._in_map[drafted] = True
        self._feature_weight = feature_weight
        self._generator = generator

    def __call__(
        self, outputs: Sequence[Tensor], batch: Batch, read_out: ReadOut | None = None
    ) -> Losses:
        """Of predicted features of every step, each [sequences, answer, hidden]. `read_out` is the
        head's own LM head; without one it is the target's."""
        valid, in_map = batch.valid, self._in_map[batch.labels]
        with torch.no_grad():
            teacher = F.linear(batch.targets[valid], self._draft_rows).softmax(-1)
            taught = self._taught(teacher)
            rows, teacher = self._draft_rows[taught], teacher[:, taught]
            best = teacher.argmax(-1)  # [valid rows]
            teacher *= in_map[valid][:, None] / teacher.sum(-1, keepdim=True)
        total = batch.targets.new_zeros(())
        agreement: list[float] = []
        for step, output in enumerate(outputs):
            usable = valid.clone()
            usable[:, :step] = False  # no chain began before the answer
            among = usable[valid]
            predicted = output[usable]
            logits = F.linear(predicted, rows) if read_out is None else read_out(predicted, taught)
            loss = SoftCrossEntropy.apply(logits, teacher[among])
            assert isinstance(loss, Tensor)
            loss = loss / in_map[usable].sum().clamp_min(1)
            if self._feature_weight:
                features = F.smooth_l1_loss(predicted, batch.targets[usable])
                loss = loss + self._feature_weight * features
            total = total + STEP_DECAY**step * loss
            agrees = (logits.detach().argmax(-1) == best[among]) & in_map[usable]
            agreement.append(float(agrees.float().mean()))
        return Losses(total, tuple(agreement))

    def _taught(self, teacher: Tensor) -> Tensor:
        """Indices into the draft vocabulary, of teacher [rows, draft_vocab]."""
        size = teacher.shape[1]
        likely = teacher.sum(0).topk(min(LIKELY_TOKENS, size)).indices
        others = torch.randint(size, (OTHER_TOKENS,), generator=self._generator)
        return torch.cat((likely, others)).unique()
