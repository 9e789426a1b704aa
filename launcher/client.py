"""A client of the public gRPC door: one answer as a stream, and what it cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from coppice.errors import CoppiceError
from protos.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_UNSPECIFIED,
    SamplingParams,
    SpeculationStats,
    StoppingParams,
)
from protos.inference_pb2 import (
    ChatMessage,
    ChatRequest,
    GenerateResponse,
    Usage,
)
from protos.inference_pb2_grpc import InferenceStub


class ServerError(CoppiceError):
    """The service refused or broke off; the message is its own, in one line."""


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the user asked for; the server's defaults apply where a message is empty."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    speculation: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: int
    usage: Usage
    speculation: SpeculationStats

    @property
    def was_cut(self) -> bool:
        return self.finish_reason == FINISH_REASON_LENGTH

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first one over the time after the first one."""
        seconds = self.usage.total_seconds - self.usage.time_to_first_token_seconds
        return max(0, self.usage.completion_tokens - 1) / seconds if seconds > 0 else 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens committed per verified tree, the new one included; None if no tree was."""
        steps = self.speculation.speculative_steps
        return 1 + self.speculation.accepted_nodes / steps if steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafted tokens over the depth that was offered; None if no tree was."""
        offered = self.speculation.offered_depth
        return self.speculation.accepted_nodes / offered if offered else None


class Pieces(Protocol):
    """A server's stream that can be broken off."""

    def __iter__(self) -> Iterator[GenerateResponse]: ...
    def cancel(self) -> object: ...


class AnswerStream:
    """Iterates over the pieces of text; `finish` has the whole."""

    def __init__(self, pieces: Pieces, address: str) -> None:
        self._pieces = pieces
        self._address = address
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        """Raises ServerError when the service refuses or breaks off."""
        try:
            for piece in self._pieces:
                self._text.append(piece.text)
                self._token_ids += piece.token_ids
                if piece.finish_reason != FINISH_REASON_UNSPECIFIED:
                    self._answer = self._finished(piece)
                if piece.text:
                    yield piece.text
        except grpc.RpcError as error:
            raise server_error(error, self._address) from None

    def finish(self) -> Answer:
        """The answer, once all of it is there. Raises ServerError."""
        for _ in self:
            pass
        if self._answer is None:
            raise ServerError("the service ended the answer without a finish reason")
        return self._answer

    def cancel(self) -> None:
        self._pieces.cancel()

    def _finished(self, last: GenerateResponse) -> Answer:
        return Answer(
            "".join(self._text),
            tuple(self._token_ids),
            last.finish_reason,
            last.usage,
            last.speculation,
        )


class Client:
    """One channel to the service. Use as a context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address)
        self._stub = InferenceStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def chat(self, turns: Sequence[Turn], options: AnswerOptions) -> AnswerStream:
        request = ChatRequest(
            messages=[ChatMessage(role=turn.role, content=turn.content) for turn in turns],
            sampling=options.sampling,
            stopping=options.stopping,
            speculation=options.speculation,
        )
        return AnswerStream(self._stub.Chat(request), self._address)


def server_error(error: grpc.RpcError, address: str) -> ServerError:
    """gRPC's error as one line a user can act on."""
    if not isinstance(error, grpc.Call):
        return ServerError(str(error))
    details = " ".join((error.details() or "no details").split())
    if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        return ServerError(f"no service at {address}: start one with `coppice up`")
    return ServerError(f"{error.code().name}: {details}")
