from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest

from protos import common_pb2, inference_pb2, inference_pb2_grpc


@dataclass
class ScriptedInference(inference_pb2_grpc.InferenceServicer):
    """Plays `script` to every Chat, and remembers the requests."""

    script: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    refusal: tuple[grpc.StatusCode, str] | None = None
    requests: list[inference_pb2.ChatRequest] = field(default_factory=list)

    def Chat(  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        yield from self.script
        if self.refusal is not None:
            context.abort(*self.refusal)

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        raise NotImplementedError

    def GetModelInfo(  # noqa: N802
        self, request: inference_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> common_pb2.ModelInfo:
        return common_pb2.ModelInfo(model="scripted")


@dataclass(frozen=True)
class Peer:
    address: str
    inference: ScriptedInference


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A real gRPC server with a scripted answer: two pieces, 11 tokens, 4 trees."""
    last = inference_pb2.GenerateResponse(
        text="world",
        token_ids=[3],
        finish_reason=common_pb2.FINISH_REASON_STOP,
        usage=inference_pb2.Usage(
            prompt_tokens=5,
            completion_tokens=11,
            time_to_first_token_seconds=0.25,
            total_seconds=2.25,
        ),
        speculation=common_pb2.SpeculationStats(
            speculative_steps=4, accepted_nodes=6, offered_depth=12
        ),
    )
    inference = ScriptedInference(
        [inference_pb2.GenerateResponse(text="Hello ", token_ids=[1, 2]), last]
    )
    server = grpc.server(ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Peer(f"127.0.0.1:{port}", inference)
    server.stop(0).wait()
