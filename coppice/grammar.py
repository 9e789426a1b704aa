"""Structured output: which tokens may come next so that the text of an answer stays within a
grammar. Imports no torch.

The library (llguidance) walks the grammar over the bytes of the tokens. Its state is a function of
the answer's tokens alone: forced text may be spelled by any tokens (`no_forcing`), and drafts are
tried on a matcher compiled for them, since copies share what is counted against their limits.
"""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from coppice.errors import FailedPrecondition, InvalidArgument
from coppice.request import StructuredOutput
from coppice.tree import DraftTree

# Forced text is not looked for: it would be tokenized in one way only, and a regex such as
# a{1000000} would be spelled out at every token. At the end, where it overrules what a grammar
# says of itself.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# Of one matcher: about 2 kB of memory for every state.
_MAX_LEXER_STATES = 50_000
_MAX_REASON_CHARACTERS = 300


class GrammarError(ValueError):
    """A grammar that cannot be compiled. The message says why."""


class Grammar:
    """Where one answer stands in its grammar. The end of text is allowed where it may end."""

    def __init__(
        self,
        matcher: LLMatcher,
        scout: LLMatcher,
        vocab_size: int,
        end_ids: Sequence[int],
        ignore_end: bool,
    ) -> None:
        """`scout`: compiled from the same grammar. `ignore_end`: the end of text is not allowed,
        unless there is nothing else."""
        self._matcher = matcher
        self._scout = scout
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._ignore_end = ignore_end
        self._length = 0
        self._ended = False

    @property
    def complete(self) -> bool:
        """True when nothing more can come."""
        return self._ended or self._matcher.is_stopped()

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next: bool [vocab], at least one.

        Raises FailedPrecondition when no token fits, or the library's limits are exceeded.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or not allowed.any():
            raise self._failure("no token fits")
        if self._ignore_end:
            others = allowed.copy()
            others[self._end_ids] = False
            return others if others.any() else allowed
        return allowed

    def advance(self, token: int) -> None:
        """Takes the answer's next token. Raises FailedPrecondition when the grammar forbids it."""
        if token in self._end_ids and self._matcher.is_accepting():
            self._ended = True
        elif not self._matcher.consume_token(token):
            raise self._failure(f"token {token} does not fit")
        else:
            self._scout.consume_token(token)
        self._length += 1

    def pruned(self, tree: DraftTree) -> DraftTree:
        """The tree without the nodes that the grammar forbids along their paths."""
        scout = self._scout.deep_copy()
        children = tree.children()
        kept: list[int] = []

        def visit(row: int) -> None:
            for token, child in children[row].items():
                if not scout.validate_tokens([token]):
                    continue
                kept.append(child - 1)
                if children[child] and scout.consume_token(token):
                    visit(child)
                    scout.rollback(1)

        visit(0)
        # Past a limit of the library the scout knows nothing more; the walk decides anyway.
        return tree if scout.is_error() else tree.keeping(sorted(kept))

    def _failure(self, what: str) -> FailedPrecondition:
        where = f"{what} as token {self._length + 1} of the answer"
        return FailedPrecondition(f"sampling.structured_output: {where}: {_reason(self._matcher)}")


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Safe to use from several threads."""

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """`vocab_size` is that of the logits. Without `eos_token_ids` the library looks for the
        tokenizer's own."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids) or None
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The library's view of the vocabulary. Takes half a second, which only those wait for who
        ask for a grammar."""
        try:
            return LLTokenizer(
                self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        except ValueError as error:
            raise GrammarError(f"not with this model's tokenizer: {error}") from None

    def compile(self, output: StructuredOutput, ignore_end: bool = False) -> Grammar:
        """The grammar at the start of an answer; `ignore_end` as in `Grammar`. Raises
        GrammarError."""
        definition = json.dumps({"grammars": [{"lark_grammar": _lark(output) + _OPTIONS}]})
        matcher = self._matcher(definition)
        if not matcher.is_error():
            matcher.compute_bitmask()  # notices where there is no first token
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        scout = self._matcher(definition)
        return Grammar(matcher, scout, self._vocab_size, self.tokens.eos_tokens, ignore_end)

    def _matcher(self, definition: str) -> LLMatcher:
        return LLMatcher(self.tokens, definition, log_level=0, limits=self._limits)


def refusal(output: StructuredOutput, why: str) -> InvalidArgument:
    """What a client is told of a grammar that cannot be compiled."""
    kind, value = next(iter(output.model_dump(exclude_none=True).items()), ("", None))
    name = ".".join(part for part in ("sampling.structured_output", kind) if part)
    return InvalidArgument(name, value, f"a grammar that compiles: {why}")


def _lark(output: StructuredOutput) -> str:
    """The one constraint that is set, in the library's own language."""
    match output.model_dump(exclude_none=True):
        case {"json_schema": schema}:
            return f"start: %json {_normalized_json(schema)}"
        case {"json_object": True}:
            return 'start: %json {"type": "object"}'
        case {"regex": regex}:
            return json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]
        case {"choice": {"values": values}}:
            return "start: " + " | ".join(json.dumps(value) for value in values)
        case {"grammar": grammar}:
            return grammar
        case _:
            raise GrammarError("set json_schema, regex, choice, grammar, or json_object to true")


def _normalized_json(text: str) -> str:
    try:
        value: Any = json.loads(text)
        return json.dumps(value)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not JSON: {error}") from None


def _reason(matcher: LLMatcher) -> str:
    """What went wrong, in one line."""
    message = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    if message in ("", "NoExtensionBias"):
        return "no text fits, or none that the vocabulary can spell"
    return message[:_MAX_REASON_CHARACTERS]
