"""Two verifiers and two drafters: they share the load, replace each other, and come and go."""

import asyncio

import pytest
import pytest_asyncio
import ray

from coppice.redis_calls import close_client, redis_client
from coppice.settings import Settings
from gateway.sessions import session_key
from launcher.scaling import Wanted, scale
from protos import common_pb2

pytestmark = [pytest.mark.service, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

PREFILL = common_pb2.DECODING_MODE_PREFILL
# Every one begins in its own way, or it would follow a cached beginning to one verifier.
QUESTIONS = [
    "Count from one to fifty in words.",
    "Name the planets and tell of each of them.",
    "Rivers of Europe: list ten with their lengths.",
    "Why is the sky blue? Explain it to a child.",
    "Tell a story of a fox and a crow.",
    "Describe how bread is made, step by step.",
]
TOKENS = 160


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(start_service):
    """The service with two workers of each kind."""
    async with start_service(verifier={"count": 2}, drafter={"count": 2}) as whole:
        yield whole


async def both_begin(whole, questions):
    """An answer at each verifier."""
    replies = await asyncio.gather(
        *(whole.ask_until(PREFILL, text, tokens=TOKENS) for text in questions)
    )
    port = whole.running.address.rpartition(":")[2]
    client = redis_client((Settings().cache_dir / "running" / port).read_text())
    keys = [session_key(reply.last.request_id) for reply in replies]
    verifiers = [await client.hget(key, "verifier") for key in keys]
    await close_client(client)
    assert sorted(verifiers) == [b"verifier-0", b"verifier-1"]
    return replies


async def both_end(whole, questions, replies):
    """Whatever happened to them, they are the plain ones."""
    for text, reply in zip(questions, replies, strict=True):
        await whole.rest(reply)
        plain = await whole.ask(text, tokens=TOKENS, speculation=False)
        assert reply.tokens == plain.tokens
        assert not any(piece.numerics_changed for piece in reply.pieces)


async def test_a_session_of_a_killed_verifier_goes_on_at_the_other(pair) -> None:
    replies = await both_begin(pair, QUESTIONS[:2])
    ray.kill(pair.actor("verifier-1"), no_restart=False)
    await both_end(pair, QUESTIONS[:2], replies)
    assert await pair.metric("coppice_session_recoveries_total", 'cause="lost"') == 1
    await pair.until(lambda: workers(pair, verifiers=2, drafters=2), 90.0)


async def test_workers_leave_and_join_while_answers_run(pair) -> None:
    port = int(pair.running.address.rpartition(":")[2])
    settings = Settings.model_validate({"gateway": {"port": port}})
    replies = await both_begin(pair, QUESTIONS[2:4])
    await scale(settings, Wanted(verifiers=1, drafters=1, grace_seconds=1.5))
    await both_end(pair, QUESTIONS[2:4], replies)
    assert await pair.metric("coppice_session_recoveries_total", 'cause="drained"') == 1
    await pair.until(lambda: workers(pair, verifiers=1, drafters=1))
    await scale(settings, Wanted(verifiers=2, drafters=2, grace_seconds=0.0))
    await pair.until(lambda: workers(pair, verifiers=2, drafters=2))
    replies = await both_begin(pair, QUESTIONS[4:])
    await both_end(pair, QUESTIONS[4:], replies)


async def workers(pair, verifiers: int, drafters: int) -> bool:
    found = [
        await pair.metric("coppice_workers", f'kind="{kind}"') for kind in ("verifier", "drafter")
    ]
    return found == [verifiers, drafters]
