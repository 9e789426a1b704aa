"""A request at the door: checked, and every default resolved. Allocates nothing."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.message import Message

from coppice.errors import InvalidArgument
from coppice.request import (
    SamplingParams,
    StoppingParams,
    StructuredOutput,
    check_tokens,
    parse_params,
)
from coppice.tokenizer import ChatMessage, Tokenizer
from gateway.grammar_trial import GrammarTrial
from protos import common_pb2, inference_pb2

ROLES = ("system", "user", "assistant", "tool")
SEED_BITS = 63  # also fits the signed integers of many clients
LONG_TEXT_CHARACTERS = 10_000  # tokenized in a thread, so that other streams go on


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be generated. `max_tokens` and the seed are resolved."""

    prompt: tuple[int, ...]
    sampling: common_pb2.SamplingParams
    stopping: common_pb2.StoppingParams
    ends: StoppingParams  # `stopping`, parsed
    speculation: bool


@dataclass(frozen=True, slots=True)
class _Limits:
    """Parameters that were checked, but not resolved for a prompt."""

    sampling: common_pb2.SamplingParams
    stopping: common_pb2.StoppingParams
    ends: StoppingParams
    output: StructuredOutput | None


class Door:
    """Turns requests into orders. Every method raises InvalidArgument that names the field, its
    value and what is allowed; ResourceExhausted where too many grammars are to be tried."""

    def __init__(
        self, tokenizer: Tokenizer, model: common_pb2.ModelInfo, grammars: GrammarTrial
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._grammars = grammars

    def check_model(self, name: str) -> None:
        if name not in ("", self._model.model):
            raise InvalidArgument("model", name, f"{self._model.model!r}, or empty")

    async def generate(self, request: inference_pb2.GenerateRequest) -> Order:
        self.check_model(request.model)
        limits = self._limits(request.sampling, request.stopping)
        match request.WhichOneof("prompt"):
            case "text":
                field, prompt = "text", await self._encode(request.text)
            case "token_ids":
                field, ids = "token_ids.ids", request.token_ids.ids
                self._check_length(field, len(ids))  # first, as it costs nothing
                prompt = tuple(ids)
                check_tokens(field, prompt, self._model.vocab_size)
            case _:
                raise InvalidArgument("prompt", None, "text or token_ids")
        speculation = request.speculation if request.HasField("speculation") else True
        return await self._order(field, prompt, limits, speculation)

    async def chat(self, request: inference_pb2.ChatRequest) -> Order:
        self.check_model(request.model)
        limits = self._limits(request.sampling, request.stopping)
        if not request.messages:
            raise InvalidArgument("messages", [], "at least one message")
        self._check_length("messages", len(request.messages))  # each is a token at least
        for index, message in enumerate(request.messages):
            if message.role not in ROLES:
                field = f"messages[{index}].role"
                raise InvalidArgument(field, message.role, f"one of {', '.join(ROLES)}")
        messages = [ChatMessage(message.role, message.content) for message in request.messages]
        prompt = await self._encode_chat(messages)
        speculation = request.speculation if request.HasField("speculation") else True
        return await self._order("messages", prompt, limits, speculation)

    async def _encode(self, text: str) -> tuple[int, ...]:
        if not text:
            raise InvalidArgument("text", text, "at least one character")
        if len(text) < LONG_TEXT_CHARACTERS:
            return tuple(self._tokenizer.encode(text))
        return tuple(await asyncio.to_thread(self._tokenizer.encode, text))

    async def _encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        if sum(len(message.content) for message in messages) < LONG_TEXT_CHARACTERS:
            return tuple(self._tokenizer.encode_chat(messages))
        return tuple(await asyncio.to_thread(self._tokenizer.encode_chat, messages))

    def _limits(
        self, sampling: common_pb2.SamplingParams, stopping: common_pb2.StoppingParams
    ) -> _Limits:
        vocab_size = self._model.vocab_size
        parsed = parse_params(SamplingParams, "sampling", _fields(sampling))
        check_tokens("sampling.logit_bias", tuple(parsed.logit_bias), vocab_size)
        ends = parse_params(StoppingParams, "stopping", _fields(stopping))
        check_tokens("stopping.stop_token_ids", ends.stop_token_ids, vocab_size)
        return _Limits(sampling, stopping, ends, parsed.structured_output)

    def _check_length(self, field: str, tokens: int) -> None:
        last = self._model.max_context - 1
        if not 1 <= tokens <= last:
            allowed = f"in [1, {last}], since prompt and answer share the context"
            raise InvalidArgument(f"number of tokens of {field}", tokens, allowed)

    async def _order(
        self, field: str, prompt: tuple[int, ...], limits: _Limits, speculation: bool
    ) -> Order:
        """Draws the seed if there is none and fits the length of the answer into the context. Tries
        the grammar last, as that takes longest."""
        self._check_length(field, len(prompt))
        context = self._model.max_context
        ends = limits.ends
        max_tokens = min(ends.max_tokens or context, context - len(prompt))
        if ends.min_tokens > max_tokens:
            allowed = f"an integer in [0, {max_tokens}], the tokens that the answer may have"
            raise InvalidArgument("stopping.min_tokens", ends.min_tokens, allowed)
        if limits.output is not None:
            await self._grammars.check(limits.output)
        sampling = common_pb2.SamplingParams()
        sampling.CopyFrom(limits.sampling)
        if not sampling.HasField("seed"):
            sampling.seed = secrets.randbits(SEED_BITS)
        stopping = common_pb2.StoppingParams()
        stopping.CopyFrom(limits.stopping)
        stopping.max_tokens = max_tokens
        return Order(prompt, sampling, stopping, ends, speculation)


def _fields(message: Message) -> dict[str, Any]:
    """The fields that are set, as plain values. (MessageToDict would spell a NaN as a string.)"""
    return {field.name: _plain(value) for field, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(cast("Mapping[int, float]", value))
    if isinstance(value, Message):
        return _fields(value)
    return value if isinstance(value, int | float | str) else tuple(value)
