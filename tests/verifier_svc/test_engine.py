"""The engine on a tiny random target: whatever drafters do, the output is plain decoding's."""

import random
import struct
from collections.abc import Callable
from itertools import chain, cycle, pairwise, repeat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.models.decoder import Decoder
from coppice.request import SamplingParams, StoppingParams
from coppice.tree import MAX_ROWS
from kernels.batch import AttentionBatch, Segment
from protos import common_pb2, verifier_pb2
from verifier_svc import drafting
from verifier_svc.awaiting import MAX_STRIKES, Awaited
from verifier_svc.budget import Budget, Grant
from verifier_svc.catching_up import Gap

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
PENALIZED = SamplingParams(
    temperature=0.8, seed=9, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={3: 2.0}
)
PROMPT = [3, 4, 5, 6, 7, 8, 9]


def tree(
    message: verifier_pb2.Committed,
    tokens: list[int],
    parents: list[int],
    scores: list[float] | None = None,
) -> verifier_pb2.Tree:
    if scores is None:
        scores = [0.0] * len(tokens)
    return verifier_pb2.Tree(
        session_id=message.session_id, epoch=message.epoch, base_length=message.base_length,
        draft_id=message.base_length, tokens=tokens, parents=parents, scores=scores,
    )  # fmt: skip


def drafter_that_knows(answer: list[int], wrong: float, seed: int = 0, prompt: int = len(PROMPT)):
    """Draws bushy trees around the true continuation, wrong with a probability per node."""
    rng = random.Random(seed)

    def draft(message: verifier_pb2.Committed) -> verifier_pb2.Tree:
        done = message.base_length - prompt
        tokens: list[int] = []
        parents: list[int] = []
        row = 0
        for true in answer[done : done + rng.randint(1, 6)]:
            token = true if rng.random() > wrong else (true + 1) % 48
            siblings = [token, (token + 7) % 48, (token + 9) % 48][: rng.randint(1, 3)]
            rng.shuffle(siblings)
            below = row
            for sibling in siblings:
                tokens.append(sibling)
                parents.append(below)
                if sibling == token:
                    row = len(tokens)
        return tree(message, tokens[: message.node_budget], parents[: message.node_budget])

    return draft


def dense_greedy(target: Decoder, prompt: list[int], count: int) -> list[int]:
    """Plain decoding by the definition: the whole sequence anew for every token."""
    tokens = list(prompt)
    for _ in range(count):
        cache = target.new_cache(len(tokens))
        every = torch.arange(len(tokens))
        segment = Segment(len(tokens), every[:0], every, None)
        with torch.inference_mode():
            features = target.forward(
                torch.tensor(tokens), cache, AttentionBatch(every, every, (segment,))
            )
            tokens.append(int(target.logits(features)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_plain_decoding_equals_running_the_whole_sequence_anew(
    new_bench, target: Decoder, chunk: int
) -> None:
    bench = new_bench(verifier={"prefill_chunk": chunk})
    bench.open("a", PROMPT)
    bench.run()
    assert bench.tokens("a") == dense_greedy(target, PROMPT, 24)


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "top-p", "penalties"]
)
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_speculation_changes_nothing_but_the_number_of_steps(
    new_bench, new_link, params: SamplingParams, wrong: float
) -> None:
    stopping = StoppingParams(max_tokens=60, ignore_eos=True)
    plain = new_bench()
    plain.open("a", PROMPT, params, stopping)
    plain.run()
    answer = plain.tokens("a")
    assert len(set(answer)) > 5, "a degenerate target proves nothing"
    bench = new_bench()
    bench.open("a", PROMPT, params, stopping)
    link = new_link(bench.engine, drafter_that_knows(answer, wrong))
    link.join("a")
    bench.run()
    assert bench.tokens("a") == answer
    stats = bench.events["a"][-1].stats
    if wrong < 1.0:
        assert stats.accepted_nodes > 10
    steps = stats.speculative_steps + stats.plain_steps
    assert steps + stats.accepted_nodes in (59, 60)


def test_logprobs_are_the_same_with_and_without_speculation(new_bench, new_link) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    plain = new_bench()
    plain.open("a", PROMPT, params)
    plain.run()
    bench = new_bench()
    bench.open("a", PROMPT, params)
    new_link(bench.engine, drafter_that_knows(plain.tokens("a"), 0.2)).join("a")
    bench.run()
    wanted = [entry for event in plain.events["a"] for entry in event.logprobs]
    got = [entry for event in bench.events["a"] for entry in event.logprobs]
    assert [entry.token for entry in got] == plain.tokens("a")
    # The products of fp32 matrices in torch depend on the number of rows in the last bits.
    assert [e.logprob for e in got] == pytest.approx([e.logprob for e in wanted], abs=1e-5)


def test_many_sessions_in_one_batch_answer_as_if_alone(new_bench, new_link) -> None:
    prompts = {f"s{index}": [index + 2, *range(5, 5 + index)] for index in range(8)}
    alone: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        bench = new_bench()
        bench.open(name, prompt, SAMPLED)
        bench.run()
        alone[name] = bench.tokens(name)
    bench = new_bench()

    def draft(message: verifier_pb2.Committed) -> verifier_pb2.Tree:
        name = message.session_id
        known = drafter_that_knows(alone[name], 0.3, message.base_length, len(prompts[name]))
        return known(message)

    link = new_link(bench.engine, draft)
    for name, prompt in prompts.items():
        bench.open(name, prompt, SAMPLED)
        link.join(name)
    bench.run()
    assert {name: bench.tokens(name) for name in prompts} == alone


@pytest.mark.parametrize("cut", [1, 5, 23])
def test_a_resumed_session_goes_on_as_if_nothing_had_happened(new_bench, cut: int) -> None:
    whole = new_bench()
    whole.open("a", PROMPT, PENALIZED)
    whole.run()
    answer = whole.tokens("a")
    resumed = new_bench()
    resumed.open("a", PROMPT, PENALIZED, epoch=2, committed=tuple(answer[:cut]))
    resumed.run()
    assert resumed.tokens("a") == answer[cut:]


def test_preemption_and_waiting_change_no_output(new_bench) -> None:
    prompts = {f"s{index}": [index + 2] * 9 for index in range(12)}
    stopping = StoppingParams(max_tokens=40, ignore_eos=True)
    alone: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        bench = new_bench()
        bench.open(name, prompt, SAMPLED, stopping)
        bench.run()
        alone[name] = bench.tokens(name)
    tight = new_bench(verifier={"kv_slots": 150})
    for name, prompt in prompts.items():
        tight.open(name, prompt, SAMPLED, stopping)
    tight.run()
    assert {name: tight.tokens(name) for name in prompts} == alone
    assert tight.engine.metrics.preemptions._value.get() > 0


Message = verifier_pb2.Committed


def too_many(message: Message) -> verifier_pb2.Tree:
    return tree(message, list(range(40)) * 2, [0] * 80)


def not_a_number(message: Message) -> verifier_pb2.Tree:
    return tree(message, [1], [0], [float("nan")])


def out_of_vocabulary(message: Message) -> verifier_pb2.Tree:
    return tree(message, [48], [0])


def orphan(message: Message) -> verifier_pb2.Tree:
    return tree(message, [1, 2], [2, 0])


def from_the_future(message: Message) -> verifier_pb2.Tree:
    ahead = tree(message, [1], [0])
    ahead.base_length += 5
    return ahead


def inside_of_the_prompt(message: Message) -> verifier_pb2.Tree:
    behind = tree(message, [1], [0])
    behind.base_length = 2
    return behind


@pytest.mark.parametrize(
    "hostile",
    [too_many, not_a_number, out_of_vocabulary, orphan, from_the_future, inside_of_the_prompt],
)
def test_a_malformed_tree_is_refused_and_the_session_goes_on(
    new_bench, new_link, target: Decoder, hostile: Callable[[Message], verifier_pb2.Tree]
) -> None:
    bench = new_bench()
    bench.open("a", PROMPT)
    link = new_link(bench.engine, hostile)
    link.join("a")
    bench.run()
    assert bench.tokens("a") == dense_greedy(target, PROMPT, 24)
    assert bench.events["a"][-1].stats.malformed_drafts == len(link.sent("refused")) == 23


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_drafters_gateways_and_cancels_never_change_an_answer(
    new_bench_module, seed: int
) -> None:
    """Trees late, stale, malformed, of old epochs; joins, leaves, cancels; gateways that do not
    read; a tight pool."""
    make, link_type, target = new_bench_module
    rng = random.Random(seed)
    answer = ANSWERS.setdefault("a", dense_greedy(target, PROMPT, 40))
    bench = make(
        verifier={
            "kv_slots": rng.choice([140, 400]),
            "prefill_chunk": rng.choice([2, 64]),
            "max_untaken": rng.choice([1, 5, 256]),
        },
        guard={"enter": rng.choice([1, 48]), "exit": 1, "dwell_seconds": 0.0},
    )
    engine = bench.engine
    late: list[verifier_pb2.Tree] = []
    know = drafter_that_knows(answer, 0.3, seed)

    def draft(message: Message) -> verifier_pb2.Tree | verifier_pb2.Pass | None:
        drawn = know(message)
        kind = rng.random()
        if kind < 0.2:
            late.append(drawn)
            return None
        if kind < 0.3:
            return rng.choice([too_many, orphan, from_the_future])(message)
        if kind < 0.4:
            return verifier_pb2.Pass(
                session_id=message.session_id, epoch=message.epoch, base_length=message.base_length
            )
        return drawn

    links = [link_type(engine, draft, name=str(index)) for index in range(2)]
    names = [f"s{index}" for index in range(rng.randint(1, 4))]
    open_sessions = {
        name: bench.open(name, PROMPT, stopping=StoppingParams(max_tokens=40, ignore_eos=True))
        for name in names
    }
    cancelled: set[str] = set()
    epochs = iter(range(2, 10**6))
    for _ in range(300):
        action = rng.random()
        name = rng.choice(names)
        link = rng.choice(links)
        if action < 0.1:
            link.known.pop(name, None)
            link.join(name, next(epochs))
        elif action < 0.15:
            engine.post(lambda link=link: engine.lose(link))
        elif action < 0.2 and late:
            message = late.pop(0)
            engine.post(lambda link=link, message=message: engine.receive_tree(link, message))
        elif action < 0.21:
            cancelled.add(name)
            engine.post(lambda s=open_sessions[name]: engine.cancel(s))
        elif action < 0.4:
            bench.take(name)
        engine.step(block=False)
        engine.check_integrity()
    engine.guard.update(0, 1e18)
    bench.run()
    for name in names:
        got = bench.tokens(name)
        assert got == answer[: len(got)]
        assert name in cancelled or len(got) == 40


ANSWERS: dict[str, list[int]] = {}


@pytest.fixture(scope="module")
def new_bench_module(request: pytest.FixtureRequest):
    module = request.config.pluginmanager
    conftest = next(p for p in module.get_plugins() if hasattr(p, "tiny_decoder"))
    return conftest.make_bench, conftest.Link, conftest.tiny_decoder()


def test_a_cancel_frees_the_slots_before_the_next_pass(new_bench) -> None:
    bench = new_bench()
    session = bench.open("a", PROMPT)
    bench.engine.step(block=False)
    assert bench.engine.slots.used > 0
    passes = bench.engine.timings.passes
    bench.engine.post(lambda: bench.engine.cancel(session))
    bench.engine.step(block=False)
    assert (bench.engine.slots.used, bench.engine.timings.passes) == (0, passes)


def test_above_the_threshold_decoding_is_plain_and_no_draft_is_asked_for(
    new_bench, new_link
) -> None:
    bench = new_bench(guard={"enter": 2, "exit": 2, "dwell_seconds": 0.0})
    names = ["a", "b", "c"]
    link = new_link(bench.engine, lambda message: tree(message, [1], [0]))
    for name in names:
        bench.open(name, PROMPT, stopping=StoppingParams(max_tokens=20, ignore_eos=True))
        link.join(name)
    bench.run()
    for name in names:
        decoded = [event.mode for event in bench.events[name] if event.tokens][1:]
        assert set(decoded) == {common_pb2.DECODING_MODE_GUARDED}
    assert not link.sent("committed")
    assert len(link.sent("paused")) == 3


def test_a_plain_pass_between_trees_leaves_the_drafter_in_play(
    new_bench, new_link, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = new_bench()
    grants = cycle([Grant(1, 1), Grant(1, 1), Grant(0, 1, once=True)])
    monkeypatch.setattr(Budget, "choose", lambda *_: next(grants))
    link = new_link(bench.engine, lambda message: tree(message, [1], [0]))
    bench.open("a", PROMPT, stopping=StoppingParams(max_tokens=40, ignore_eos=True))
    link.join("a")
    bench.run()
    committed = [item.committed for item in link.sent("committed")]
    steps = [after.base_length - before.base_length for before, after in pairwise(committed)]
    assert max(steps) > 1, "what was committed in between is told with the next tokens"
    assert [c.start for c in committed[1:]] == [c.base_length for c in committed[:-1]]
    row = len(committed[1].features) // (committed[1].base_length - 1 - committed[1].features_from)
    for each in committed[1:]:  # pushed, without a gap
        assert len(each.features) == row * (each.base_length - 1 - each.features_from)
        assert each.features_from == each.start - 1
    assert not link.sent("paused")


def test_a_drafter_hears_at_once_of_all_that_a_pass_has_committed(new_bench, new_link) -> None:
    bench = new_bench()
    link = new_link(bench.engine, lambda message: tree(message, [5], [0]))
    for name in "abc":
        bench.open(name, PROMPT)
        link.join(name)
    while len(link.sent("committed")) < 3:
        bench.engine.step(block=False)
    link.sends.clear()
    for _ in range(5):
        bench.engine.step(block=False)
    assert link.sends == [3] * 5
    bench.run()


def test_where_trees_do_not_pay_beside_a_prompt_its_drafter_stays_in_play(
    new_bench, new_link, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = new_bench(verifier={"prefill_chunk": 1})
    asked: list[tuple[int, int]] = []

    def choose(_: Budget, decoding: int, reading: int, gap: Gap | None) -> Grant:
        asked.append((decoding, reading))
        return Grant(int(not reading), decoding, once=True)

    monkeypatch.setattr(Budget, "choose", choose)
    link = new_link(bench.engine, lambda message: tree(message, [1], [0]))
    bench.open("a", PROMPT, stopping=StoppingParams(max_tokens=60, ignore_eos=True))
    link.join("a")
    while not link.sent("committed"):
        bench.engine.step(block=False)
    before = len(link.sent("committed"))
    reader = bench.open("b", [20, 21, 22, 23, 24, 25, 26], speculation=False)
    bench.engine.step(block=False)
    while reader.pending > 1:
        asked.clear()
        bench.engine.step(block=False)
        assert len(link.sent("committed")) <= before + 1
        assert asked == [(1, 1)] or reader.pending == 1, "who reads does not decode"
    bench.run()
    told = [item.committed for item in link.sent("committed")[before:]]
    longest = max(told, key=lambda each: each.base_length - each.start)
    assert longest.base_length - longest.start >= 6, "what came meanwhile is told at once"
    assert longest.features_from == longest.start - 1
    assert not link.sent("paused")


def test_where_trees_pay_beside_a_prompt_they_share_its_passes(new_bench, new_link) -> None:
    bench = new_bench(verifier={"prefill_chunk": 1})
    link = new_link(bench.engine, lambda message: tree(message, [1], [0]))
    bench.open("a", PROMPT, stopping=StoppingParams(max_tokens=60, ignore_eos=True))
    link.join("a")
    reader = bench.open("b", [20, 21, 22, 23, 24, 25, 26], speculation=False)
    nodes: list[int] = []
    while reader.pending > 1:
        bench.engine.step(block=False)
        nodes.append(bench.events["a"][-1].nodes)
    assert nodes[-5:] == [1] * 5
    bench.run()


@pytest.mark.parametrize(("plain_passes", "lags"), [(MAX_ROWS - 2, False), (MAX_ROWS, True)])
def test_nobody_waits_for_a_drafter_that_has_much_to_read_first(
    new_bench, new_link, monkeypatch: pytest.MonkeyPatch, plain_passes: int, lags: bool
) -> None:
    bench = new_bench()
    wanted, unwanted = Grant(1, 1), Grant(0, 1, once=True)
    grants = chain([wanted] * 3, [unwanted] * plain_passes, [wanted], repeat(unwanted))
    monkeypatch.setattr(Budget, "choose", lambda *_: next(grants))
    timed: list[Grant] = []
    monkeypatch.setattr(Budget, "observe_draft", lambda _, grant, seconds: timed.append(grant))
    link = new_link(bench.engine, lambda message: tree(message, [1], [0]))
    stopping = StoppingParams(max_tokens=2 * MAX_ROWS, ignore_eos=True)
    session = bench.open("a", PROMPT, stopping=stopping)
    link.join("a")
    while len(link.sent("committed")) < 4:
        bench.engine.step(block=False)
    assert session.draft.patience.benched == lags
    before = len(timed)
    bench.run()
    assert len(link.sent("committed")) == 4
    assert len(timed) - before == (not lags), "what it reads is no part of what trees take"


def test_passes_beside_a_draft_are_not_timed_unless_its_drafter_is_silent_or_gone(
    new_bench, new_link, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = new_bench()
    timed: list[int] = []
    monkeypatch.setattr(Budget, "observe_step", lambda budget, rows, seconds: timed.append(rows))
    silent = new_link(bench.engine, lambda message: None)
    session = bench.open("a", PROMPT, stopping=StoppingParams(max_tokens=40, ignore_eos=True))
    silent.join("a")
    bench.engine.step(block=False)
    for _ in range(MAX_STRIKES):  # asked for so many trees
        bench.engine.step(block=False)
        assert not timed
    bench.engine.step(block=False)
    assert timed == [1], "it is not at work any more"
    other = new_link(bench.engine, lambda message: None)
    other.join("a", epoch=2)
    for _ in range(2):
        bench.engine.step(block=False)
    assert timed == [1]
    bench.engine.lose(other)
    bench.engine.step(block=False)
    assert timed == [1, 1]
    assert session.draft.link is None


def test_after_the_guard_the_drafter_catches_up_without_pushed_features(
    new_bench, new_link
) -> None:
    bench = new_bench(guard={"enter": 2, "exit": 2, "dwell_seconds": 0.0})
    link = new_link(bench.engine, lambda message: tree(message, [1], [0]))
    bench.open("long", PROMPT, stopping=StoppingParams(max_tokens=30, ignore_eos=True))
    link.join("long")
    for _ in range(5):
        bench.engine.step(block=False)
    for name in ("short", "other"):
        bench.open(name, PROMPT, stopping=StoppingParams(max_tokens=4, ignore_eos=True))
    bench.run()
    committed = [item.committed for item in link.sent("committed")]
    # Message ranges join up without a gap, over the guarded stretch too.
    assert [c.start for c in committed[1:]] == [c.base_length for c in committed[:-1]]
    gap = [c for c in committed[1:] if c.base_length - c.start > 2]
    assert len(gap) == 1
    assert gap[0].features == b""
    modes = {event.mode for event in bench.events["long"]}
    assert common_pb2.DECODING_MODE_GUARDED in modes
    assert common_pb2.DECODING_MODE_SPECULATIVE in modes


def test_while_the_guard_is_closed_drafters_hear_nothing_and_coming_back_costs_one_catch_up(
    new_bench, new_link
) -> None:
    bench = new_bench(guard={"enter": 2, "exit": 2, "dwell_seconds": 0.0})
    link = new_link(bench.engine, lambda message: tree(message, [1], [0]))
    session = bench.open("long", PROMPT, stopping=StoppingParams(max_tokens=60, ignore_eos=True))
    link.join("long")
    for _ in range(5):
        bench.engine.step(block=False)
    for name in ("short", "other"):
        bench.open(name, PROMPT, stopping=StoppingParams(max_tokens=12, ignore_eos=True))
    bench.engine.step(block=False)
    assert bench.engine.guard.closed
    heard, asked = list(link.items), link.sent("committed")[-1].committed
    assert heard[-1].WhichOneof("item") == "paused"
    while bench.engine.guard.closed:
        # A tree that was on its way is verified by nobody.
        bench.engine.receive_tree(link, tree(asked, [session.tokens[asked.base_length]], [0]))
        bench.engine.step(block=False)
        if bench.engine.guard.closed:
            assert link.items == heard
    bench.run()
    after = [item.committed for item in link.items[len(heard) :] if item.HasField("committed")]
    assert len(after) > 2
    # One message without features, after which the drafter pulls; from then on they are pushed.
    assert [bool(message.features) for message in after] == [False] + [True] * (len(after) - 1)
    guarded = [e for e in bench.events["long"] if e.mode == common_pb2.DECODING_MODE_GUARDED]
    assert guarded
    assert all(event.nodes == 0 for event in guarded)


@pytest.mark.parametrize(("answered", "missed"), [(0, 0), (2, 3)])
def test_a_drafter_is_awaited_once_it_keeps_up_and_no_more_after_misses(
    new_bench, new_link, answered: int, missed: int
) -> None:
    bench = new_bench()
    answers = iter([True] * answered)
    link = new_link(
        bench.engine, lambda message: tree(message, [1], [0]) if next(answers, False) else None
    )
    bench.engine.budget.observe_step(1, 0.001)
    bench.open("a", PROMPT)
    link.join("a")
    bench.engine.step(block=False)
    while bench.engine.sessions:
        bench.engine.step()
    assert bench.events["a"][-1].stats.missed_drafts == missed


def test_one_late_drafter_costs_no_other_session_a_strike_nor_time(new_bench, new_link) -> None:
    bench = new_bench()
    budget = bench.engine.budget
    for rows in (1, 2, 3, 24):
        budget.observe_step(rows, 1000.0)  # waits would not end
    for _ in range(20):
        budget.observe_draft(Grant(budget.most, 2), 5000.0)
    silent = new_link(bench.engine, lambda m: tree(m, [1], [0]) if m.base_length < 10 else None)
    bench.open("speculative", PROMPT)
    silent.join("speculative")
    bench.open("plain", PROMPT)
    while not bench.events.get("plain") or bench.events["plain"][-1].finish is None:
        assert bench.engine.step(block=False), "plain decoding waits for another session's draft"
    stats = bench.events["speculative"][-1].stats
    assert stats.speculative_steps == 2 and stats.plain_steps > 10, "it is not left out"
    assert stats.missed_drafts == 0, "what is not due yet was not missed"


def test_what_is_given_up_before_it_is_due_is_not_a_miss(new_bench) -> None:
    bench = new_bench()
    session = bench.open("a", PROMPT)
    awaited = session.draft.awaited = Awaited(asked=0.0, expected=1.0, until=9.0, nodes=3)
    drafting.give_up(session, 0.5, bench.engine.budget)
    assert (session.draft.awaited, session.stats.missed_drafts) == (awaited, 0)
    drafting.give_up(session, 1.5, bench.engine.budget)
    assert (session.draft.awaited, session.stats.missed_drafts) == (None, 1)


def test_a_tree_is_verified_once_and_never_after_its_pass(new_bench, new_link) -> None:
    bench = new_bench(speculation={"nodes": 3, "budget": "auto"})
    budget = bench.engine.budget
    for _ in range(100):
        budget.observe_step(1, 0.001)
        budget.observe_step(4, 1.0)  # trees do not pay
    link = new_link(bench.engine, lambda m: tree(m, [1, 2, 3], [0, 0, 0]))
    bench.open("a", PROMPT, stopping=StoppingParams(max_tokens=200, ignore_eos=True))
    link.join("a")
    bench.run()
    verified = sum(event.nodes > 0 for event in bench.events["a"])
    assert verified <= len(link.sent("committed"))
    assert verified < 30


def test_a_late_tree_does_not_end_the_wait_for_the_one_in_time(new_bench, new_link) -> None:
    bench = new_bench()
    for rows in (1, 2, 4):
        bench.engine.budget.observe_step(rows, 1000.0)
    link = new_link(bench.engine, lambda m: tree(m, [1], [0]) if m.base_length < 10 else None)
    session = bench.open("a", PROMPT)
    link.join("a")
    for _ in range(4):
        bench.engine.step(block=False)
    awaited = session.draft.awaited
    assert awaited is not None
    late = link.sent("committed")[-2].committed
    token = session.tokens[late.base_length]
    bench.engine.receive_tree(link, tree(late, [token, 5], [0, 1]))
    assert len(session.draft.tree) == 1
    assert session.draft.awaited == awaited
    bench.engine.receive_tree(link, tree(link.sent("committed")[-1].committed, [5], [0]))
    assert session.draft.awaited is None


def test_a_replaced_drafter_is_told_and_its_late_tree_is_ignored(new_bench, new_link) -> None:
    bench = new_bench()
    old = new_link(bench.engine, lambda message: tree(message, [1], [0]), name="old")
    new = new_link(bench.engine, lambda message: tree(message, [1], [0]), name="new")
    bench.open("a", PROMPT)
    old.join("a", 2)
    bench.engine.step(block=False)
    new.join("a", 3)
    bench.run()
    assert [item.closed.epoch for item in old.sent("closed")] == [2]
    assert [item.closed.reason for item in new.sent("closed")] == ["over"]


def test_a_tree_of_more_nodes_than_granted_is_cut_to_its_best(new_bench, new_link) -> None:
    bench = new_bench(speculation={"nodes": 3, "budget": "fixed"})
    link = new_link(
        bench.engine, lambda m: tree(m, list(range(20)), [0] * 20, [-i / 10 for i in range(20)])
    )
    bench.open("a", PROMPT)
    link.join("a")
    bench.run()
    assert {e.nodes for e in bench.events["a"] if e.nodes} == {3}


def raise_index_error(*_: object) -> None:
    raise IndexError("a defect")


def test_a_request_that_breaks_the_sampler_ends_alone(new_bench) -> None:
    bench = new_bench()
    broken = bench.open("broken", PROMPT, SAMPLED)
    bench.open("good", PROMPT)
    bench.engine.step(block=False)
    # What no request can ask for, as far as we know: stands for a defect not found yet.
    broken.sampler.sample = raise_index_error
    bench.run()
    assert "sampling failed" in str(bench.events["broken"][-1].error)
    assert len(bench.tokens("good")) == 24


def test_a_message_that_fails_ends_nothing(new_bench) -> None:
    bench = new_bench()
    bench.open("a", PROMPT)
    bench.engine.post(raise_index_error)
    bench.run()
    assert len(bench.tokens("a")) == 24


def test_pushed_features_are_the_rows_of_the_new_positions(new_bench, new_link, target) -> None:
    bench = new_bench()
    bench.open("a", PROMPT)
    answer = dense_greedy(target, PROMPT, 24)
    link = new_link(bench.engine, drafter_that_knows(answer, 0.3))
    link.join("a")
    bench.run()
    rows: dict[int, torch.Tensor] = {}
    for item in link.sent("committed"):
        message = item.committed
        values = torch.tensor(struct.unpack(f"<{len(message.features) // 4}f", message.features))
        for index, row in enumerate(values.view(-1, target.config.hidden_size)):
            rows[message.features_from + index] = row
        assert len(values) == 32 * (message.base_length - 1 - message.features_from)
    every = torch.arange(len(PROMPT) + 23)
    cache = target.new_cache(len(every))
    batch = AttentionBatch(every, every, (Segment(len(every), every[:0], every, None),))
    wanted = target.forward(torch.tensor(PROMPT + answer[:-1]), cache, batch)
    assert sorted(rows) == list(range(len(PROMPT), max(rows) + 1))
    for position, row in rows.items():
        torch.testing.assert_close(row, wanted[position], atol=1e-4, rtol=1e-4)


def test_a_stop_token_inside_of_an_accepted_run_ends_the_answer_there(
    new_bench, new_link, target: Decoder
) -> None:
    answer = dense_greedy(target, PROMPT, 24)
    stop = answer[9]
    first = answer.index(stop)
    bench = new_bench()
    stopping = StoppingParams(max_tokens=24, stop_token_ids=(stop,), ignore_eos=True)
    bench.open("a", PROMPT, stopping=stopping)
    new_link(bench.engine, drafter_that_knows(answer, 0.0)).join("a")
    bench.run()
    assert bench.tokens("a") == answer[: first + 1]
    finish = bench.events["a"][-1].finish
    assert (finish.reason.value, finish.by) == ("stop", str(stop))


def test_a_second_session_of_the_same_id_needs_a_higher_epoch(new_bench) -> None:
    bench = new_bench()
    bench.open("a", PROMPT, epoch=3)
    bench.engine.step(block=False)
    bench.open("a", PROMPT, epoch=3)
    bench.engine.step(block=False)
    errors = [event.error for event in bench.events["a"] if event.error]
    assert [str(error) for error in errors] == ["session a is open with epoch 3 already"]
    bench.open("a", PROMPT, epoch=4)
    bench.run()
    assert len([event for event in bench.events["a"] if event.error]) == 2


def test_too_many_sessions_are_refused(new_bench) -> None:
    bench = new_bench(verifier={"max_sessions": 1})
    bench.open("a", PROMPT)
    bench.open("b", PROMPT)
    bench.engine.step(block=False)
    assert "1 sessions already" in str(bench.events["b"][0].error)
    bench.run()
