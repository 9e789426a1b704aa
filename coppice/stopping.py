"""When an answer ends, decided token by token. Imports no torch."""

from dataclasses import dataclass
from enum import Enum

from coppice.grammar import Grammar
from coppice.request import StoppingParams
from coppice.tokenizer import StopMatcher, Tokenizer

BY_GRAMMAR = "grammar"  # nothing more can come


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    by: str = ""  # the stop string, the id of the stop token, or BY_GRAMMAR


class AnswerText:
    """The text of an answer as its tokens come, cut before the first stop string.

    Stop strings count only in text that begins after `min_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, params: StoppingParams) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(params.stop)
        self._unchecked_tokens = params.min_tokens

    @property
    def matched(self) -> str | None:
        return self._matcher.matched

    def push(self, token: int) -> str:
        """Takes one more token; returns the text that is now certain."""
        text = self._detokenizer.push(token)
        if self._unchecked_tokens > 0:
            self._unchecked_tokens -= 1
            return text
        return self._matcher.push(text)

    def flush(self) -> str:
        """At the end: what was held back because more might have followed."""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()


class Stopper:
    """Says after each committed token whether the answer ends there."""

    def __init__(
        self,
        params: StoppingParams,
        eos_token_ids: tuple[int, ...],
        max_tokens: int,
        tokenizer: Tokenizer | None,
        grammar: Grammar | None = None,
    ) -> None:
        """`max_tokens` counts the answer, whatever limits it. Stop strings need a tokenizer.
        `grammar` is advanced by the sampler, before `push`."""
        self.grammar = grammar
        self._ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            self._ending |= set(eos_token_ids)
        self._min_tokens = params.min_tokens
        self._left = max_tokens
        self._text = AnswerText(tokenizer, params) if params.stop and tokenizer else None

    @property
    def ending_ids(self) -> list[int]:
        return sorted(self._ending)

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self._left

    def push(self, token: int) -> Finish | None:
        self._left -= 1
        self._min_tokens -= 1
        if token in self._ending and self._min_tokens < 0:
            return Finish(FinishReason.STOP, str(token))
        if self._text is not None:
            self._text.push(token)
            if self._text.matched is not None:
                return Finish(FinishReason.STOP, self._text.matched)
        complete = self.grammar is not None and self.grammar.complete
        if self._left > 0 and not complete:
            return None
        if self._text is not None:
            self._text.flush()  # what was held back may complete a stop string
            if self._text.matched is not None:
                return Finish(FinishReason.STOP, self._text.matched)
        return Finish(FinishReason.STOP, BY_GRAMMAR) if complete else Finish(FinishReason.LENGTH)
