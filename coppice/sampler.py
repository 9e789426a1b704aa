"""The one sampler: from a row of logits, a request and a position to a token.

Plain decoding calls it once per step, verification once per node of the walk; that both call the
same function is the exactness argument. Order of the processors (as in vLLM): bias, minimum
length, penalties, temperature, min-p, top-k, top-p.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from coppice.request import SamplingParams
from kernels import ops

# Below it the most probable token has all the mass there is (the same bound as in vLLM).
_GREEDY_BELOW = 1e-5
# Sorting whole vocabularies is slow; nearly all nuclei are inside of so many tokens.
_FEW = 1024


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that belongs to a position of a request: a counter-based
    generator (Philox, Salmon et al. 2011), so that nothing but (seed, position) decides it."""
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def largest(values: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of values [n], best first, ties to the lowest id: [count]."""
    count = min(count, len(values))
    least = values.topk(count).values[-1]
    ids = (
        torch.cat(
            (
                (values > least).nonzero().flatten(),
                (values == least).nonzero().flatten(),
            )
        )[:count]
        .sort()
        .values
    )
    return ids[values[ids].sort(descending=True, stable=True).indices]


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Ids of the smallest set of most probable tokens whose mass reaches `top_p`."""
    for count in (_FEW, len(probabilities)):
        ids = largest(probabilities, count)
        mass = probabilities[ids].cumsum(0)
        if mass[-1] >= top_p - 1e-12 or len(ids) == len(probabilities):
            break
    # Sums of equal masses miss round values of top_p by their rounding.
    return ids[: int((mass < top_p - 1e-12).sum()) + 1]


class Sampler:
    """Draws the tokens of one request, in order: `sample` at a position, then `accept`."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Iterable[int],
        min_tokens: int = 0,
        ending_ids: Sequence[int] = (),
    ) -> None:
        """`ending_ids` are the tokens that may not be drawn before `min_tokens` are out."""
        self._params = params
        self._greedy = params.temperature < _GREEDY_BELOW
        self._seed = seed
        self._prompt = set(prompt) if params.repetition_penalty != 1.0 else set[int]()
        self._output: Counter[int] = Counter()
        self._min_tokens = min_tokens
        self._ending_ids = list(ending_ids)
        self._length = 0

    @property
    def is_argmax(self) -> bool:
        """True if every token from here on is the plain argmax of its logits."""
        params = self._params
        held = self._length < self._min_tokens and bool(self._ending_ids)
        return self._greedy and not (params.has_penalties or params.logit_bias or held)

    def accept(self, token: int) -> None:
        """Takes note of the token that was committed at this position."""
        self._length += 1
        if self._params.has_penalties:
            self._output[token] += 1

    def sample(self, logits: Tensor, position: int) -> int:
        """The token at `position` (of the whole sequence) for logits [vocab] in fp32."""
        if self.is_argmax:
            return int(ops.argmax(logits[None]))
        processed = self._processed(logits)
        # Infinite or no mass at all has no distribution; the best token is then the answer.
        if self._greedy or not processed.max().isfinite():
            return int(ops.argmax(processed[None]))
        ids, mass = self._distribution(processed)
        cumulative = mass.cumsum(0)
        target = uniform(self._seed, position) * cumulative[-1]
        index = int(torch.searchsorted(cumulative, target, right=True))
        return int(ids[min(index, len(ids) - 1)])

    def _processed(self, logits: Tensor) -> Tensor:
        """Logits [vocab] after bias, minimum length and penalties."""
        params = self._params
        out = logits.clone()
        if params.logit_bias:
            out[list(params.logit_bias)] += torch.tensor(
                list(params.logit_bias.values()), dtype=out.dtype, device=out.device
            )
        if self._length < self._min_tokens and self._ending_ids:
            out[self._ending_ids] = -torch.inf
        if params.repetition_penalty != 1.0:
            seen = sorted(self._prompt | self._output.keys())
            values = out[seen]
            penalty = params.repetition_penalty
            out[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self._output and (params.frequency_penalty or params.presence_penalty):
            ids = list(self._output)
            counts = torch.tensor([self._output[i] for i in ids], device=out.device)
            out[ids] -= params.frequency_penalty * counts + params.presence_penalty
        return out

    def _distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The kept token ids, ascending [kept], and their probabilities in fp64 [kept]."""
        params = self._params
        probabilities = (logits.double() / params.temperature).softmax(-1)
        kept = torch.ones_like(probabilities, dtype=torch.bool)
        if params.min_p > 0.0:
            kept &= probabilities >= params.min_p * probabilities.max()
        if params.top_k:
            kept &= _mask(largest(probabilities * kept, params.top_k), kept)
        if params.top_p < 1.0:
            remaining = probabilities * kept
            kept &= _mask(_nucleus(remaining / remaining.sum(), params.top_p), kept)
        ids = kept.nonzero().flatten()
        return ids, probabilities[ids]


def _mask(ids: Tensor, like: Tensor) -> Tensor:
    mask = torch.zeros_like(like)
    mask[ids] = True
    return mask


def raw_logprobs(logits: Tensor, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """The model's own log-probabilities at logits [vocab] (fp32): of `token`, and of the `top`
    most probable tokens as (id, log-probability)."""
    logprobs = logits.log_softmax(-1)
    best = [(int(i), float(logprobs[i])) for i in largest(logprobs, top)] if top else []
    return float(logprobs[token]), best
