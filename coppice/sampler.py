"""The one sampler: from a row of logits, a request and a position to a token.

Plain decoding calls it once per step, verification once per node of the walk; that both call the
same function is the exactness argument. Order of the processors (as in vLLM): grammar, bias,
minimum length, penalties, temperature, min-p, top-k, top-p.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from coppice.grammar import Grammar
from coppice.request import SamplingParams
from kernels import ops
from kernels.reference import GREEDY_BELOW, largest


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that belongs to a position of a request: a counter-based
    generator (Philox, Salmon et al. 2011), so that nothing but (seed, position) decides it."""
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


class Sampler:
    """Draws the tokens of one request, in order: `sample` at a position, then `accept`."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Iterable[int],
        min_tokens: int = 0,
        ending_ids: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """`ending_ids` are the tokens that may not be drawn before `min_tokens` are out, unless
        `grammar` allows nothing else. `accept` advances the grammar."""
        self._params = params
        self._greedy = params.temperature < GREEDY_BELOW
        self._seed = seed
        self._prompt = set(prompt) if params.repetition_penalty != 1.0 else set[int]()
        self._output: Counter[int] = Counter()
        self._min_tokens = min_tokens
        self._ending_ids = list(ending_ids)
        self._grammar = grammar
        self._length = 0

    @property
    def is_argmax(self) -> bool:
        """True if every token from here on is the plain argmax of its logits."""
        params = self._params
        if not self._greedy or self._grammar is not None:
            return False
        return not (params.has_penalties or params.logit_bias or self._held)

    @property
    def _held(self) -> bool:
        """True while the ending tokens may not be drawn."""
        return self._length < self._min_tokens and bool(self._ending_ids)

    def accept(self, token: int) -> None:
        """Takes note of the token that was committed at this position. Raises FailedPrecondition
        when the grammar forbids it."""
        if self._grammar is not None:
            self._grammar.advance(token)
        self._length += 1
        if self._params.has_penalties:
            self._output[token] += 1

    def sample(self, logits: Tensor, position: int) -> int:
        """The token at `position` (of the whole sequence) for logits [vocab] in fp32. Raises
        FailedPrecondition when the grammar allows none."""
        if self.is_argmax:
            return int(ops.argmax(logits[None]))
        processed = self._processed(logits)[None]
        if self._greedy:
            return int(ops.argmax(processed))
        params = self._params
        number = torch.tensor(
            [uniform(self._seed, position)], dtype=torch.float64, device=logits.device
        )
        return int(
            ops.sample(
                processed, params.temperature, params.top_k, params.top_p, params.min_p, number
            )
        )

    def _processed(self, logits: Tensor) -> Tensor:
        """Logits [vocab] after grammar, bias, minimum length and penalties."""
        params = self._params
        grammar = self._grammar
        if not (params.logit_bias or params.has_penalties or self._held or grammar is not None):
            return logits
        out = logits.clone()
        if grammar is not None:
            allowed = torch.from_numpy(grammar.allowed()).to(out.device)  # [vocab]
            out.masked_fill_(~allowed, -torch.inf)
        if params.logit_bias:
            out[list(params.logit_bias)] += torch.tensor(
                list(params.logit_bias.values()), dtype=out.dtype, device=out.device
            )
        if self._held:
            out = self._without_endings(out)
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

    def _without_endings(self, logits: Tensor) -> Tensor:
        """Logits [vocab] where no ending token can be drawn, unless the grammar has left nothing
        else: a shorter answer is better than a broken one."""
        held = logits.clone()
        held[self._ending_ids] = -torch.inf
        return logits if self._grammar is not None and held.max() == -torch.inf else held


def raw_logprobs(logits: Tensor, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """The model's own log-probabilities at logits [vocab] (fp32): of `token`, and of the `top`
    most probable tokens as (id, log-probability)."""
    logprobs = logits.log_softmax(-1)
    best = [(int(i), float(logprobs[i])) for i in largest(logprobs, top)] if top else []
    return float(logprobs[token]), best
