"""One verifier with ranks on two hosts. One host is cut off mid-stream, and joined again."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
import pytest_asyncio
import torch

from benchmarks.hosts import Host, HostedService, namespaces_fault, service_on_hosts
from benchmarks.inprocess import generate
from benchmarks.rank_processes import rank_group
from coppice.models.hub import DEFAULT_MODEL, resolve_model
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.target import Target

pytestmark = [
    pytest.mark.service,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

KEPT = Path(__file__).parents[1] / "exactness" / "reference_tokens.json"
PROMPT: list[int] = json.loads(KEPT.read_text())["entries"][0]["prompt"]
TOKENS, SLOTS = 120, 1024
# The bound on an exchange is 20 s, keepalive notices after 15; the rest is for a slow machine.
GROUP_ENDS_SECONDS = 45.0
FIRST, SECOND = "ray::VerifierWorker", "ray::Follower"  # ranks' names of processes
FLAGS = (
    *("--verifiers", "1", "--tensor-parallel", "2", "--verifier-placement", "strict_spread"),
    *("--verifier-threads", "1", "--verifier-kv-slots", str(SLOTS), "--verifier-row-budget", "32"),
    *("--drafters", "1", "--drafter-threads", "1"),
    *("--model-dtype", "float32", "--speculation-budget", "fixed"),
)
Said = list[tuple[int, float]]  # tokens with their log-probs, whose bits are compared


@dataclass
class Spread:
    service: HostedService
    stub: "inference_pb2_grpc.InferenceAsyncStub"
    on_one_host: Said  # the answer

    def start(self, speculation: bool = True):
        request = inference_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=PROMPT),
            sampling=common_pb2.SamplingParams(temperature=0.0, logprobs=0),
            stopping=common_pb2.StoppingParams(max_tokens=TOKENS, ignore_eos=True),
            speculation=speculation,
        )
        return self.stub.Generate(request, timeout=300.0)

    def ranks(self) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """Those on either host."""
        return list(ranks_on(self.service.head)), list(ranks_on(self.service.other))


def ranks_on(host: Host) -> Iterator[psutil.Process]:
    for pid in host.pids():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.name().startswith((FIRST, SECOND)):
                yield process


async def rest(call) -> list[inference_pb2.GenerateResponse]:
    pieces = []
    while (piece := await call.read()) is not grpc.aio.EOF:
        pieces.append(piece)
    return pieces


def said(pieces: list[inference_pb2.GenerateResponse]) -> Said:
    return [(each.chosen.token_id, each.chosen.logprob) for p in pieces for each in p.logprobs]


def said_by_two_ranks_on_this_machine() -> Said:
    """Without a service around them."""
    path = resolve_model(DEFAULT_MODEL, Settings().cache_dir)
    target = Target(path, torch.device("cpu"), torch.float32, False, None)
    settings = Settings.model_validate({"verifier": {"kv_slots": SLOTS}})
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    stopping = StoppingParams(max_tokens=TOKENS, ignore_eos=True)
    with pytest.MonkeyPatch.context() as environment:
        # Nothing of it is for the hosts, which inherit the environment.
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        environment.setenv("NCCL_SOCKET_IFNAME", "lo")
        with rank_group(target, 2, SLOTS) as group:
            engine = Engine(group.runner, settings, VerifierMetrics("test"))
            (answer,) = generate(engine, [PROMPT], sampling, stopping)
    # As the wire rounds.
    pairs = [common_pb2.TokenProb(logprob=each.logprob) for each in answer.logprobs]
    return [(token, pair.logprob) for token, pair in zip(answer.tokens, pairs, strict=True)]


@pytest.fixture(scope="module")
def on_one_host() -> Said:
    if (fault := namespaces_fault()) is not None:
        # Beside the skip, which a quiet run only counts.
        warnings.warn(f"ranks on several hosts were NOT tested: {fault}", stacklevel=1)
        pytest.skip(f"no network namespaces: {fault}")
    return said_by_two_ranks_on_this_machine()


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[(4, 2), (2, 4)],
    ids=["first rank stays", "first rank's host is cut off"],
)
async def spread(request: pytest.FixtureRequest, on_one_host: Said) -> AsyncIterator[Spread]:
    with ExitStack() as parts:
        hosts = service_on_hosts(*FLAGS, cores=request.param)
        service = await asyncio.to_thread(parts.enter_context, hosts)
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            spread = Spread(service, stub, on_one_host)
            (here,), (there,) = spread.ranks()
            wanted = (FIRST, SECOND) if request.param == (4, 2) else (SECOND, FIRST)
            assert here.name().startswith(wanted[0]) and there.name().startswith(wanted[1])
            yield spread


async def test_ranks_on_two_hosts_answer_as_on_one_with_trees_and_without(spread: Spread) -> None:
    plain = await rest(spread.start(speculation=False))
    assert len(plain) > TOKENS - 2
    assert said(plain) == spread.on_one_host
    speculative = await rest(spread.start())
    assert speculative[-1].speculation.accepted_nodes > 0
    assert said(speculative) == spread.on_one_host


async def test_a_stream_goes_on_when_the_host_of_a_rank_was_cut_off_and_is_joined_again(
    spread: Spread,
) -> None:
    cut = spread.service.other
    before = [rank for ranks in spread.ranks() for rank in ranks]
    call = spread.start()
    pieces = [await call.read()]
    cut.cut()
    # No rank waits for ever, on either side.
    _, waiting = await asyncio.to_thread(psutil.wait_procs, before, GROUP_ENDS_SECONDS)
    assert not waiting
    cut.join()
    pieces += await rest(call)
    assert len(pieces[0].token_ids) < TOKENS
    assert said(pieces) == spread.on_one_host
    assert not any(piece.numerics_changed for piece in pieces)
    assert [len(ranks) for ranks in spread.ranks()] == [1, 1]
