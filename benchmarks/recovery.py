"""How long a client's stream pauses when something behind it is lost:
`python -m benchmarks.recovery --json FILE`.

A greedy answer runs through the whole service while a worker is killed, or a host is cut off.
`longest_pause_s` is what the client sees, between two pieces; `detected_s` is when the gateway
has noticed; `whole_s` is when the stream speculates again. The other verifier takes the session
over where there is one; `restarted_verifier` is the case in which both are killed.
"""

import asyncio
import contextlib
import json
import logging
import re
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc
import ray
import typer
from ray.exceptions import RayError
from rich.console import Console

from benchmarks.hosts import namespaces_fault, service_on_hosts
from coppice.machine import machine
from coppice.redis_calls import close_client, redis_client
from coppice.registry import Registry
from coppice.settings import Settings
from gateway.sessions import session_key
from launcher.compose import service
from launcher.sources import load_settings
from launcher.terminal import steps
from protos import common_pb2, inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:  # only the stub files know it
    from protos.inference_pb2_grpc import InferenceAsyncStub

PROMPT = "Count from one to nine hundred in words, separated by commas:"
TOKENS = 6000
STRIKE_AFTER = 20  # pieces
REQUEST_SECONDS = 300.0
LONGEST_CUT_SECONDS = 60.0
SPECULATIVE = common_pb2.DECODING_MODE_SPECULATIVE

# Does the damage to what serves the session of this id; false where it would miss it.
Strike = Callable[[str], Awaitable[bool]]


@dataclass(slots=True)
class Outages:
    """Seconds after the strike, a number per run."""

    longest_pause_s: list[float] = field(default_factory=list[float])
    detected_s: list[float] = field(default_factory=list[float])
    whole_s: list[float] = field(default_factory=list[float])

    def result(self) -> dict[str, object]:
        runs = {"longest_pause_s": self.longest_pause_s, "whole_s": self.whole_s}
        if self.detected_s:
            runs["detected_s"] = self.detected_s
        medians = {name: round(statistics.median(each), 3) for name, each in runs.items()}
        return {**medians, "runs": {n: [round(v, 3) for v in each] for n, each in runs.items()}}


class Noticed(logging.Handler):
    """The time at which the gateway, which runs in this process, said that it lost a session."""

    def __init__(self) -> None:
        super().__init__()
        self.at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "session interrupted" and self.at is None:
            self.at = time.monotonic()


async def outage(stub: "InferenceAsyncStub", strike: Strike, outages: Outages) -> None:
    """One stream, struck once it speculates, read until it speculates again."""
    request = inference_pb2.GenerateRequest(
        text=f"{time.monotonic()} {PROMPT}",
        sampling=common_pb2.SamplingParams(temperature=0.0),
        stopping=common_pb2.StoppingParams(max_tokens=TOKENS, ignore_eos=True),
    )
    noticed = Noticed()
    logger = logging.getLogger("gateway.generation")
    logger.addHandler(noticed)
    call = stub.Generate(request, timeout=REQUEST_SECONDS)
    try:
        for _ in range(STRIKE_AFTER):
            await _piece(call)
        await _read_until(call, speculative=True)
        session = (await _piece(call)).request_id
        struck = time.monotonic()
        if not await strike(session):
            return
        # Trees that were on their way still come.
        longest = await _read_until(call, speculative=False)
        outages.longest_pause_s.append(max(longest, await _read_until(call, speculative=True)))
        outages.whole_s.append(time.monotonic() - struck)
        if noticed.at is not None:
            outages.detected_s.append(noticed.at - struck)
    finally:
        call.cancel()
        logger.removeHandler(noticed)


async def _read_until(call: Any, speculative: bool) -> float:
    """Reads up to a piece that is, or is not, of a tree; returns the longest time for a piece."""
    longest, last = 0.0, time.monotonic()
    while True:
        piece = await _piece(call)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if (piece.mode == SPECULATIVE) == speculative:
            return longest


async def _piece(call: Any) -> inference_pb2.GenerateResponse:
    piece = await call.read()
    if not isinstance(piece, inference_pb2.GenerateResponse):
        raise RuntimeError("the answer ended before the service had recovered")
    return piece


@dataclass(frozen=True, slots=True)
class OneMachine:
    """Two verifiers and a drafter, on this machine."""

    stub: "InferenceAsyncStub"
    namespace: str

    async def kill_verifier(self, session: str) -> bool:
        """The one that has it, as its queue tells."""
        for name in ("verifier-0", "verifier-1"):
            text: str = await self._actor(name).metrics.remote()
            if re.search(r"^coppice_queue_depth(\{.*\})? [1-9]", text, re.MULTILINE):
                ray.kill(self._actor(name), no_restart=False)
                return True
        return False

    async def kill_verifiers(self, session: str) -> bool:
        for name in ("verifier-0", "verifier-1"):
            ray.kill(self._actor(name), no_restart=False)
        return True

    async def kill_drafter(self, session: str) -> bool:
        ray.kill(self._actor("drafter-0"), no_restart=False)
        return True

    async def until_whole(self) -> None:
        """All workers are back."""
        for name in ("verifier-0", "verifier-1", "drafter-0"):
            while True:
                with contextlib.suppress(RayError):
                    await self._actor(name).ready.remote()
                    break
                await asyncio.sleep(0.1)

    def _actor(self, name: str) -> Any:  # Ray's actor handle has no static type
        return ray.get_actor(name, self.namespace)


@contextlib.asynccontextmanager
async def one_machine(settings: Settings) -> AsyncGenerator[OneMachine, None]:
    with steps(Console(stderr=True)) as shown:
        async with (
            service(settings, shown) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            stub = inference_pb2_grpc.InferenceStub(channel)
            yield OneMachine(stub, settings.ray.namespace)


async def kills(settings: Settings, runs: int) -> dict[str, Outages]:
    results = {name: Outages() for name in ("dead_drafter", "dead_verifier", "restarted_verifier")}
    async with one_machine(settings) as machine:
        strikes = (machine.kill_drafter, machine.kill_verifier, machine.kill_verifiers)
        for outages, strike in zip(results.values(), strikes, strict=True):
            while len(outages.whole_s) < runs:
                await outage(machine.stub, strike, outages)
                await machine.until_whole()
    return results


async def cuts(runs: int) -> Outages:
    """The host of the session's verifier is cut off, and joined again when the stream is whole."""
    outages = Outages()
    with contextlib.ExitStack() as parts:
        hosted = await asyncio.to_thread(parts.enter_context, service_on_hosts())
        client = redis_client(hosted.redis_url)
        registry = Registry(client, Settings().ray.namespace)

        async def cut(session: str) -> bool:
            name: Any = await client.hget(session_key(session), "verifier")
            verifier = (await registry.all())[name.decode()]
            if not verifier.address.startswith(f"{hosted.other.address}:"):
                return False
            hosted.other.cut()
            return True

        async with grpc.aio.insecure_channel(hosted.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            while len(outages.whole_s) < runs:
                async with asyncio.timeout(LONGEST_CUT_SECONDS):
                    await outage(stub, cut, outages)
                hosted.other.join()
        await close_client(client)
    return outages


def main(
    json_file: Annotated[Path, typer.Option("--json", help="where the results go")],
    runs: Annotated[int, typer.Option(help="of each kind of loss")] = 3,
    hosts: Annotated[bool, typer.Option(help="cut a host off, too, made of a namespace")] = True,
) -> None:
    """Measures, prints and writes one JSON object."""
    flags = {"gateway.port": 0, "gateway.http_port": 0, "verifier.count": 2}
    settings = load_settings({**flags, "speculation.budget": "fixed"})
    results = {name: each.result() for name, each in asyncio.run(kills(settings, runs)).items()}
    fault = namespaces_fault() if hosts else "not asked for"
    cut = {"skipped": fault} if fault else asyncio.run(cuts(1)).result()
    text = json.dumps({"machine": machine(), "runs": runs, **results, "cut_host": cut}, indent=2)
    json_file.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)
