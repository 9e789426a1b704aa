"""A verifier of two ranks in the running whole: the same answers, and back after a rank is gone."""

import grpc
import psutil
import pytest

from protos import common_pb2

pytestmark = [pytest.mark.service, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

QUESTION = "Count from one to ten in words."


def ranks() -> list[psutil.Process]:
    """Every rank but the first: processes of this one's Ray cluster."""
    family = psutil.Process().children(recursive=True)
    return [process for process in family if process.name().startswith("ray::Follower")]


async def test_two_ranks_answer_alike_with_trees_and_without_and_return_after_a_death(
    start_service,
) -> None:
    verifier = {"tensor_parallel": 2, "kv_slots": 1024, "row_budget": 32}
    async with start_service(verifier=verifier) as whole:
        info = common_pb2.ModelInfo.FromString(await whole.actor("verifier-0").model_info.remote())
        assert info.numerics_fingerprint.endswith("/tp2")
        plain = await whole.ask(QUESTION, tokens=16, speculation=False)
        speculative = await whole.ask(QUESTION, tokens=16)
        assert speculative.tokens == plain.tokens
        assert speculative.last.speculation.accepted_nodes > 0
        (rank,) = ranks()
        rank.kill()

        async def answers_as_before() -> bool:
            try:
                return (await whole.ask(QUESTION, tokens=16)).tokens == plain.tokens
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE, error
                return False

        await whole.until(answers_as_before, 60.0)
        (new,) = ranks()
        assert new.pid != rank.pid
