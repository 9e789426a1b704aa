"""Shared prefixes and preemption in the engine, on a tiny random target: the same bits as cold."""

import random

import pytest

from coppice.request import SamplingParams, StoppingParams
from kernels import ops
from protos import verifier_pb2

pytestmark = pytest.mark.skipif(
    not ops.native_backends(), reason="the native kernels were not built: no C++ compiler"
)

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, logprobs=2)
SYSTEM = [3 + (7 * index) % 40 for index in range(70)]


def stop_after(tokens: int) -> StoppingParams:
    return StoppingParams(max_tokens=tokens, ignore_eos=True)


def said(bench, name: str) -> list[object]:
    """Tokens and log-probabilities, which are compared as equal floats."""
    entries = [entry for event in bench.events[name] for entry in event.logprobs]
    assert [entry.token for entry in entries] == bench.tokens(name)
    return entries


def cold(new_bench, prompt: list[int], params: SamplingParams, tokens: int = 24) -> list[object]:
    bench = new_bench(verifier={"prefix_cache": False})
    bench.open("cold", prompt, params, stop_after(tokens))
    bench.run()
    assert bench.engine.slots.free == bench.engine.slots.capacity
    return said(bench, "cold")


def hits(bench) -> float:
    return bench.engine.metrics.prefix_cache_hits._value.get()


def prefill(bench, session) -> int:
    """Runs until the session has its first token; returns the passes of that."""
    passes = 0
    while len(session.tokens) == session.prompt_length:
        bench.engine.step(block=False)
        passes += 1
    return passes


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "top-p"])
def test_a_second_request_skips_what_it_shares_and_says_the_same_bits(new_bench, params) -> None:
    bench = new_bench(verifier={"prefill_chunk": 8})
    first = bench.open("first", [*SYSTEM, 5, 6], params, stop_after(24))
    assert prefill(bench, first) == 9
    bench.run()
    second = bench.open("second", [*SYSTEM, 9, 8, 7], params, stop_after(24))
    assert prefill(bench, second) == 1
    assert hits(bench) == len(SYSTEM)
    bench.run()
    assert said(bench, "first") == cold(new_bench, [*SYSTEM, 5, 6], params)
    assert said(bench, "second") == cold(new_bench, [*SYSTEM, 9, 8, 7], params)


def test_the_next_turn_of_a_conversation_skips_the_answer_too(new_bench) -> None:
    bench = new_bench()
    bench.open("first", SYSTEM, GREEDY)
    bench.run()
    history = [*SYSTEM, *bench.tokens("first"), 4, 5]
    bench.open("second", history, GREEDY)
    bench.run()
    # The last token of an answer was never run.
    assert hits(bench) == len(history) - 3
    assert said(bench, "second") == cold(new_bench, history, GREEDY)


def test_the_same_prompt_again_computes_its_last_token_alone(new_bench) -> None:
    bench = new_bench()
    for name in ("first", "second"):
        bench.open(name, SYSTEM, SAMPLED)
        bench.run()
    assert hits(bench) == len(SYSTEM) - 1
    assert said(bench, "second") == said(bench, "first") == cold(new_bench, SYSTEM, SAMPLED)


def test_prompts_that_come_together_are_read_once(new_bench) -> None:
    bench = new_bench(verifier={"prefill_chunk": 10})
    for name in "abcd":
        bench.open(name, [*SYSTEM, ord(name) - 90], SAMPLED)
    bench.run()
    assert hits(bench) >= 3 * (len(SYSTEM) - 10)
    for name in "abcd":
        assert said(bench, name) == cold(new_bench, [*SYSTEM, ord(name) - 90], SAMPLED)


def features(bench, session, stop: int) -> bytes:
    message = verifier_pb2.FeatureRequest(session_id=session.session_id, epoch=1, start=0, end=stop)
    return bench.engine.read_features(message)


def test_a_drafter_pulls_the_features_of_the_cached_part(new_bench) -> None:
    prompt = [*SYSTEM, 11, 12]
    fresh = new_bench()
    session = fresh.open("cold", prompt, GREEDY)
    prefill(fresh, session)
    wanted = features(fresh, session, len(prompt))
    bench = new_bench()
    bench.open("first", SYSTEM, GREEDY)
    bench.run()
    session = bench.open("second", prompt, GREEDY)
    prefill(bench, session)
    assert hits(bench) == len(SYSTEM)
    assert features(bench, session, len(prompt)) == wanted
    assert len(wanted) == 4 * 32 * len(prompt)


def test_a_cancelled_prompt_leaves_what_was_computed(new_bench) -> None:
    bench = new_bench(verifier={"prefill_chunk": 16})
    session = bench.open("gone", SYSTEM, GREEDY)
    for _ in range(2):
        bench.engine.step(block=False)
    bench.engine.cancel(session)
    assert (bench.engine.slots.used, bench.engine.slots.cached) == (0, 32)
    bench.open("next", SYSTEM, GREEDY)
    bench.run()
    assert hits(bench) == 32
    assert said(bench, "next") == cold(new_bench, SYSTEM, GREEDY)


def hostile(message: verifier_pb2.Committed) -> verifier_pb2.Tree:
    """Four wrong nodes and, by chance, a right one."""
    root = message.base_length
    tokens = [(root * 5 + index) % 48 for index in range(8)]
    return verifier_pb2.Tree(
        session_id=message.session_id, epoch=message.epoch, base_length=root, draft_id=root,
        tokens=tokens, parents=[0, 0, 0, 0, 1, 2, 3, 4], scores=[0.0] * 8,
    )  # fmt: skip


def test_drafted_tokens_never_enter_the_tree(new_bench, new_link) -> None:
    bench = new_bench()
    link = new_link(bench.engine, hostile)
    session = bench.open("a", SYSTEM, GREEDY, stop_after(60))
    link.join("a")
    bench.run()
    assert any(event.nodes for event in bench.events["a"])
    # Tokens, the last one excepted, which was never run.
    assert bench.engine.slots.cached == len(session.tokens) - 1
    bench.open("b", [*session.tokens, 3], GREEDY)
    bench.run()
    assert hits(bench) == len(session.tokens) - 1
    assert said(bench, "b") == cold(new_bench, [*session.tokens, 3], GREEDY)


def test_prefixes_are_evicted_before_anybody_is_preempted(new_bench) -> None:
    bench = new_bench(verifier={"kv_slots": 200})
    for index in range(6):
        prompt = [index + 2] * 60
        bench.open(str(index), prompt, GREEDY, stop_after(30))
        bench.run()
        assert said(bench, str(index)) == cold(new_bench, prompt, GREEDY, 30)
    assert bench.engine.slots.cached > 120
    assert bench.engine.metrics.preemptions._value.get() == 0


def crowd(bench, count: int, tokens: int) -> dict[str, list[int]]:
    """Opens sessions whose prompts begin with one of three beginnings."""
    rng = random.Random(3)
    starts = [[rng.randrange(2, 48) for _ in range(6)] for _ in range(3)]
    prompts = {
        f"s{index}": rng.choice(starts) + [rng.randrange(2, 48) for _ in range(4)]
        for index in range(count)
    }
    for name, prompt in prompts.items():
        params = GREEDY if rng.random() < 0.5 else SAMPLED
        bench.open(name, prompt, params, stop_after(tokens))
    return prompts


def test_two_hundred_sessions_in_a_pool_for_twenty_say_the_same_bits(new_bench, new_link) -> None:
    roomy = new_bench(verifier={"prefix_cache": False})
    prompts = crowd(roomy, 200, tokens=6)
    roomy.run()
    guard = {"enter": 500, "exit": 400}
    tight = new_bench(verifier={"kv_slots": 20 * (10 + 6)}, guard=guard)
    crowd(tight, 200, tokens=6)
    link = new_link(tight.engine, hostile)
    for name in list(prompts)[::3]:
        link.join(name)
    tight.run()
    assert {name: said(tight, name) for name in prompts} == {
        name: said(roomy, name) for name in prompts
    }
    assert 0 < tight.engine.metrics.preemptions._value.get() < 200


def test_a_preempted_sessions_drafter_is_told_and_not_blamed(new_bench, new_link) -> None:
    bench = new_bench(verifier={"kv_slots": 140})
    bench.open("old", SYSTEM, GREEDY, stop_after(60))
    bench.open("young", [4, 5, 6], GREEDY, stop_after(40))
    late: list[verifier_pb2.Tree] = []

    def draft(message: verifier_pb2.Committed) -> verifier_pb2.Tree | None:
        late.append(hostile(message))
        return late[-1] if message.base_length < 6 else None

    link = new_link(bench.engine, draft)
    link.join("young")
    bench.engine.step(block=False)
    young = bench.engine.sessions["young"]
    bench.engine.step(block=False)
    while not young.waiting:
        young.draft.awaited = None  # nobody waits for a tree, and all but the first are late
        bench.engine.step(block=False)
    length = len(young.tokens)
    assert len(link.sent("paused")) == 1
    missed, stale = young.stats.missed_drafts, young.stats.stale_drafts
    bench.engine.receive_tree(link, late[-1])
    assert young.draft.tree is None
    bench.run()
    stats = bench.events["young"][-1].stats
    assert (stats.missed_drafts, stats.stale_drafts) == (missed, stale)
    assert late[-1].base_length > length, "it is asked again afterwards"
    assert said(bench, "young") == cold(new_bench, [4, 5, 6], GREEDY, 40)


def test_a_long_prompt_is_read_in_small_chunks_beside_a_stream(new_bench) -> None:
    bench = new_bench()
    stream = bench.open("stream", [4, 5, 6], GREEDY, stop_after(60))
    prefill(bench, stream)
    bench.engine.budget.observe_step(1, 1.0)
    bench.engine.pace.measure_rows(1, 1.0)
    bench.engine.pace.measure_rows(9, 1.79)  # 8 tokens more are within the bound
    long = bench.open("long", SYSTEM, GREEDY)
    bench.engine.step(block=False)
    assert (len(stream.tokens), len(long.slots)) == (3 + 2, 8)
    bench.run()
    assert said(bench, "long") == cold(new_bench, SYSTEM, GREEDY)


def test_a_request_that_can_never_fit_is_refused(new_bench) -> None:
    bench = new_bench(verifier={"kv_slots": 128})
    bench.open("large", SYSTEM, GREEDY, stop_after(59))
    bench.open("fits", SYSTEM, GREEDY, stop_after(58))
    bench.engine.step(block=False)
    assert "prompt and max_tokens = 129: must be of 128" in str(bench.events["large"][0].error)
    bench.run()
    assert said(bench, "fits") == cold(new_bench, SYSTEM, GREEDY, 58)


def test_what_a_broken_request_computed_is_not_kept(new_bench) -> None:
    bench = new_bench()
    session = bench.open("broken", [7, 8, 9], SAMPLED)
    prefill(bench, session)
    bench.engine.step(block=False)

    def fail(*_: object) -> None:
        raise IndexError("a defect")

    session.sampler.sample = fail
    bench.run()
    assert bench.engine.slots.cached == 3, "the prompt alone"
