"""Streams over the running whole: the same answers whatever happens beside them."""

import asyncio
import contextlib
import time

import grpc
import pytest
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import common_pb2, inference_pb2, verifier_pb2, verifier_pb2_grpc

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

SPECULATIVE, PLAIN = common_pb2.DECODING_MODE_SPECULATIVE, common_pb2.DECODING_MODE_PLAIN
QUESTION = "Count from one to thirty in words, separated by commas."
QUESTIONS = [
    "Name three rivers in Europe.",
    "Write a haiku about rain.",
    "What is 12 * 7?",
    "Why is the sky blue?",
    "List five fruits.",
    "Who wrote Hamlet?",
    "Define entropy in one sentence.",
    "Translate 'good morning' to French.",
]


async def test_speculation_gives_the_same_tokens_in_fewer_steps(whole) -> None:
    plain = await whole.ask(QUESTION, speculation=False)
    speculative = await whole.ask(QUESTION)
    assert speculative.tokens == plain.tokens
    assert speculative.text == plain.text
    assert set(plain.modes[1:]) == {PLAIN}
    assert SPECULATIVE in speculative.modes
    stats = speculative.last.speculation
    assert stats.accepted_nodes > 0
    assert len(speculative.modes) < len(plain.modes)
    assert speculative.last.usage.completion_tokens == 48
    assert speculative.last.finish_reason == common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("concurrency", [4, 16])
async def test_a_seeded_sample_is_the_same_among_many_sessions(whole, concurrency: int) -> None:
    questions = (QUESTIONS * 2)[:concurrency]
    sampling = {"temperature": 0.8, "top_p": 0.95, "tokens": 24}
    alone = [
        (await whole.ask(text, seed=seed, speculation=False, **sampling)).tokens
        for seed, text in enumerate(questions)
    ]
    together = await asyncio.gather(
        *(whole.ask(text, seed=seed, **sampling) for seed, text in enumerate(questions))
    )
    assert [reply.tokens for reply in together] == alone


async def test_a_client_that_leaves_frees_its_slots(whole) -> None:
    call = whole.start(QUESTION, tokens=2000)
    for _ in range(3):
        await call.read()
    assert await whole.metric("coppice_kv_slots", 'state="used"') > 0
    call.cancel()
    await whole.until(whole.all_free)


async def test_a_deadline_ends_the_answer_and_frees_its_slots(whole) -> None:
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await whole.ask(QUESTION, tokens=4000, timeout=1.5)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 5.0
    await whole.until(whole.all_free)


async def test_a_killed_drafter_costs_speed_and_no_token(whole) -> None:
    wanted = (await whole.ask(QUESTION, tokens=160, speculation=False)).tokens
    reply = await whole.ask_until(SPECULATIVE, QUESTION, tokens=160)
    # Plain decoding would be over long before the actor is back: the session must be long.
    ray.kill(whole.actor("drafter-0"), no_restart=False)
    await whole.rest(reply)
    assert reply.tokens == wanted
    assert PLAIN in reply.modes

    async def speculates_again() -> bool:
        return SPECULATIVE in (await whole.ask(QUESTION)).modes

    await whole.until(speculates_again, 60.0)


async def test_speculation_resumes_in_the_running_stream_after_a_drafter_was_killed(whole) -> None:
    reply = await whole.ask_until(SPECULATIVE, QUESTION, tokens=1500)
    ray.kill(whole.actor("drafter-0"), no_restart=False)
    killed_at = len(reply.pieces)
    while PLAIN not in reply.modes[killed_at:]:
        reply.pieces.append(await reply.call.read())
    plain_at = len(reply.pieces)
    while SPECULATIVE not in reply.modes[plain_at:]:
        piece = await reply.call.read()
        assert piece is not grpc.aio.EOF, "the answer ended before speculation was back"
        reply.pieces.append(piece)
    reply.call.cancel()
    plain = await whole.ask(QUESTION, tokens=len(reply.tokens), speculation=False)
    assert reply.tokens == plain.tokens


async def test_a_hostile_drafter_changes_nothing_but_speed(whole) -> None:
    wanted = (await whole.ask(QUESTION, tokens=64, speculation=False)).tokens
    address = await whole.actor("verifier-0").ready.remote()
    async with grpc.aio.insecure_channel(address) as channel:
        call = verifier_pb2_grpc.VerifierStub(channel).Draft(timeout=60.0)
        hello = verifier_pb2.Hello(
            protocol_version=1, drafter_id="hostile", features=verifier_pb2.FEATURE_KIND_NONE
        )
        await call.write(verifier_pb2.DraftMessage(items=[verifier_pb2.DraftItem(hello=hello)]))
        await call.read()
        stream = whole.start(QUESTION, tokens=64)
        first = await stream.read()
        hostile = asyncio.create_task(_attack(call, first.request_id))
        pieces = [first]
        while (piece := await stream.read()) is not grpc.aio.EOF:
            pieces.append(piece)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await hostile
    assert [token for piece in pieces for token in piece.token_ids] == wanted
    assert pieces[-1].speculation.malformed_drafts > 5
    await whole.until(whole.all_free)


async def _attack(call, session: str) -> None:
    """Takes the session over with a high epoch; answers with all that a drafter must not send."""
    epoch = 1000

    async def send(**item: object) -> None:
        await call.write(verifier_pb2.DraftMessage(items=[verifier_pb2.DraftItem(**item)]))

    def tree(base: int, tokens: list[int], parents: list[int], scores: list[float], epoch=epoch):
        return verifier_pb2.Tree(
            session_id=session, epoch=epoch, base_length=base, draft_id=base,
            tokens=tokens, parents=parents, scores=scores,
        )  # fmt: skip

    await send(join=verifier_pb2.Join(session_id=session, epoch=epoch))
    while (message := await call.read()) is not grpc.aio.EOF:
        for item in message.items:
            if item.WhichOneof("item") != "committed":
                continue
            base = item.committed.base_length
            await send(tree=tree(base, [7] * 3, [0, 0, 0], [-1.0] * 3))  # duplicate siblings
            await send(tree=tree(base, [7], [5], [-1.0]))  # no such parent
            await send(tree=tree(base, [10**6], [0], [-1.0]))  # outside of the vocabulary
            await send(tree=tree(base, [7], [0], [float("nan")]))
            await send(tree=tree(base + 9, [7], [0], [-1.0]))  # from the future
            await send(tree=tree(base, list(range(5000)), [0] * 5000, [-1.0] * 5000))  # oversized
            await send(tree=tree(max(0, base - 1), [7], [0], [-1.0]))  # late
            await send(tree=tree(base, [7], [0], [-1.0], epoch=3))  # of a replaced attachment
            await send(tree=tree(base, [7, 8], [0, 1], [-1.0, -2.0]))  # well-formed and wrong


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"token_ids": {"ids": []}}, "prompt"),
        ({"text": ""}, "text"),
        ({"token_ids": {"ids": [1] * 9000}}, "prompt"),
        ({"token_ids": {"ids": [49152]}}, "49152"),
        ({"text": "x", "model": "gpt-5"}, "model"),
        ({"text": "x", "stopping": {"max_tokens": 0}}, "max_tokens = 0"),
        ({"text": "x", "stopping": {"stop": ["a"] * 17}}, "stopping.stop"),
        ({"text": "x", "sampling": {"temperature": -1.0}}, "temperature = -1"),
        ({"text": "x", "sampling": {"temperature": float("nan")}}, "temperature"),
        ({"text": "x", "sampling": {"top_p": 0.0}}, "top_p"),
    ],
)
async def test_bad_input_is_refused_by_name_and_nothing_is_allocated(
    whole, change: dict[str, object], complaint: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await whole.stub.Generate(inference_pb2.GenerateRequest(**change), timeout=30.0).read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert complaint in error.value.details()
    assert await whole.all_free()


async def test_bad_utf8_is_refused_by_name(whole) -> None:
    async with grpc.aio.insecure_channel(whole.running.address) as channel:
        generate = channel.unary_stream("/coppice.v1.Inference/Generate")
        with pytest.raises(grpc.aio.AioRpcError, match="text") as error:
            await generate(b"\x12\x02\xff\xfe", timeout=30.0).read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_metrics_of_all_workers_are_on_one_page(whole) -> None:
    await whole.ask(QUESTION)
    for name in (
        "coppice_speculative_acceptance_rate",
        "coppice_speculative_tokens_per_step",
        "coppice_queue_depth",
        "coppice_guard_mode",
        "coppice_time_to_first_token_seconds_count",
        "coppice_inter_token_latency_seconds_count",
        "coppice_draft_latency_seconds_count",
        "coppice_verify_latency_seconds_count",
        "coppice_requests_total",
    ):
        assert await whole.metric(name) >= 0
    assert 0 < await whole.metric("coppice_speculative_acceptance_rate") <= 1
    assert await whole.metric("coppice_speculative_tokens_per_step") > 1


async def test_a_killed_verifier_is_a_pause_and_costs_no_token(whole) -> None:
    reply = await whole.ask_until(SPECULATIVE, QUESTION, tokens=300, logprobs=1)
    ray.kill(whole.actor("verifier-0"), no_restart=False)
    killed_at = len(reply.pieces)
    await whole.rest(reply)
    assert SPECULATIVE in reply.modes[killed_at:]
    assert not any(piece.numerics_changed for piece in reply.pieces)
    plain = await whole.ask(QUESTION, tokens=300, speculation=False, logprobs=1)
    assert reply.tokens == plain.tokens
    assert reply.text == plain.text
    assert logprobs_of(reply) == logprobs_of(plain)
    assert reply.last.usage.completion_tokens == 300
    stats = reply.last.speculation
    assert stats.speculative_steps == reply.modes.count(SPECULATIVE)
    assert stats.plain_steps == reply.modes.count(PLAIN)
    assert await whole.metric("coppice_session_recoveries_total", 'cause="lost"') == 1
    async with grpc.aio.insecure_channel(whole.running.address) as channel:
        request = health_pb2.HealthCheckRequest(service="coppice.v1.Inference")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10.0)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def logprobs_of(reply) -> list[float]:
    return [entry.chosen.logprob for piece in reply.pieces for entry in piece.logprobs]
