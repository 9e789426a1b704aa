"""The real whole, started once for many tests: Ray actors, gRPC, Redis, the real model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import httpx
import pytest
import pytest_asyncio
import ray
from rich.console import Console

from coppice.settings import Settings
from launcher.compose import Running, service
from launcher.terminal import steps
from protos import common_pb2, inference_pb2, inference_pb2_grpc

SECONDS = 120.0


@dataclass
class Reply:
    """All pieces of one answer."""

    call: object = None  # the stream that they come from
    pieces: list[inference_pb2.GenerateResponse] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def modes(self) -> list[int]:
        return [piece.mode for piece in self.pieces if piece.token_ids]

    @property
    def last(self) -> inference_pb2.GenerateResponse:
        return self.pieces[-1]


@dataclass
class Whole:
    running: Running
    stub: "inference_pb2_grpc.InferenceAsyncStub"

    def start(
        self,
        text: str,
        tokens: int = 48,
        speculation: bool = True,
        timeout: float = SECONDS,
        **sampling: object,
    ):
        request = inference_pb2.ChatRequest(
            messages=[inference_pb2.ChatMessage(role="user", content=text)],
            sampling=common_pb2.SamplingParams(**{"temperature": 0.0, **sampling}),
            stopping=common_pb2.StoppingParams(max_tokens=tokens, ignore_eos=True),
            speculation=speculation,
        )
        return self.stub.Chat(request, timeout=timeout)

    async def ask(self, text: str, **options: object) -> Reply:
        reply = Reply(self.start(text, **options))
        await self.rest(reply)
        return reply

    async def ask_until(self, mode: int, text: str, **options: object) -> Reply:
        """The beginning of an answer, up to its first step in `mode`."""
        reply = Reply(self.start(text, **options))
        while mode not in reply.modes:
            reply.pieces.append(await reply.call.read())
        return reply

    async def rest(self, reply: Reply) -> None:
        while (piece := await reply.call.read()) is not grpc.aio.EOF:
            reply.pieces.append(piece)

    async def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric over all workers, of the series with a label."""
        async with httpx.AsyncClient() as client:
            page = await client.get(f"http://{self.running.http_address}/metrics")
        values = [
            float(line.rpartition(" ")[2])
            for line in page.text.splitlines()
            if line.split("{")[0].split(" ")[0] == name and label in line
        ]
        assert values, f"no metric {name}"
        return sum(values)

    async def until(self, condition: Callable[[], object], seconds: float = 30.0) -> None:
        """Waits until `condition` holds."""
        async with asyncio.timeout(seconds):
            while not await condition():  # noqa: ASYNC110 - what is waited for is in other processes
                await asyncio.sleep(0.05)

    async def all_free(self) -> bool:
        return await self.metric("coppice_kv_slots", 'state="used"') == 0

    def actor(self, name: str):
        return ray.get_actor(name, namespace="coppice")


@asynccontextmanager
async def whole_service(**groups: dict[str, object]) -> AsyncIterator[Whole]:
    settings = Settings.model_validate(
        {
            "gateway": {"port": 0, "http_port": 0},
            "model": {"dtype": "float32"},
            **groups,
            "speculation": {"budget": "fixed", **groups.get("speculation", {})},
        }
    )
    with steps(Console(quiet=True)) as shown:
        async with (
            service(settings, shown) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            yield Whole(running, inference_pb2_grpc.InferenceStub(channel))


@pytest.fixture(scope="session")
def start_service() -> Callable[..., AbstractAsyncContextManager[Whole]]:
    return whole_service


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Whole]:
    async with whole_service() as running:
        yield running
