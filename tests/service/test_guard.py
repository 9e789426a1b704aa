"""The concurrency guard in the running whole, with a low threshold; and the n-gram drafter."""

import asyncio

import pytest

from protos import common_pb2

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

GUARDED = common_pb2.DECODING_MODE_GUARDED
SPECULATIVE = common_pb2.DECODING_MODE_SPECULATIVE
QUESTION = "Repeat the words: one two three four five six seven, ten times."


async def test_above_the_threshold_decoding_is_plain_and_the_answers_are_the_same(
    start_service,
) -> None:
    async with start_service(
        guard={"enter": 2, "exit": 2, "dwell_seconds": 0.0},
        speculation={"drafter": "ngram"},
        verifier={"kv_slots": 2048},
    ) as whole:
        alone = await whole.ask(QUESTION)
        assert SPECULATIVE in alone.modes
        assert GUARDED not in alone.modes
        replies = await asyncio.gather(*(whole.ask(QUESTION) for _ in range(6)))
        assert all(reply.tokens == alone.tokens for reply in replies)
        assert all(GUARDED in reply.modes for reply in replies)
        after = await whole.ask(QUESTION)
        assert SPECULATIVE in after.modes
        assert after.modes.count(GUARDED) == 0
        assert await whole.metric("coppice_guard_mode") == 0
