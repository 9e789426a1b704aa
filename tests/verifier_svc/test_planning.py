"""Scheduler, prefix tree and slots together, without a model: random traffic in a tight pool."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.request import SamplingParams, StoppingParams
from coppice.stopping import Stopper
from coppice.tree import DraftTree
from verifier_svc.awaiting import Awaited
from verifier_svc.planning import PassPlan, plan_pass
from verifier_svc.scheduler import Limits, SessionView, Share
from verifier_svc.session import Session, new_session
from verifier_svc.slot_pool import SlotPool


def digests(tokens: list[int]) -> list[int]:
    """One number for each prefix: what is written into the slot of its last token."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=7))[1:]


def next_token(tokens: list[int]) -> int:
    """The target: a function of the tokens before."""
    return digests(tokens)[-1] % 3


def answer(prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens


@dataclass
class House:
    """An engine without tensors: a slot holds the digest of the tokens up to its own."""

    capacity: int
    limits: Limits
    caching: bool = True
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    sessions: dict[str, Session] = field(default_factory=dict)
    done: dict[str, list[int]] = field(default_factory=dict)
    written: dict[int, int | None] = field(default_factory=dict)
    names: "count[int]" = field(default_factory=count)
    resumed: set[str] = field(default_factory=set)  # and waiting since
    preemptions: int = 0
    matched: int = 0
    computed: int = 0

    def __post_init__(self) -> None:
        self.slots = SlotPool(self.capacity, self.caching)

    def arrive(self, prompt: list[int], max_tokens: int) -> str:
        name = str(next(self.names))
        stopper = Stopper(StoppingParams(ignore_eos=True), (), max_tokens, None)
        greedy = SamplingParams(temperature=0.0)
        session = new_session(name, 1, prompt, greedy, 0, stopper, print, True)
        assert session.longest <= self.capacity
        self.sessions[name] = session
        return name

    def leave(self, name: str) -> None:
        session = self.sessions.pop(name)
        self.slots.give_up(session.table, session.tokens)

    def pause(self, name: str) -> None:
        """Its gateway does not read."""
        session = self.sessions[name]
        self.slots.give_up(session.table, session.tokens)
        session.draft.forget_tree()
        session.waiting = session.paused = True

    def resume(self, name: str) -> None:
        self.sessions[name].paused = False
        self.resumed.add(name)

    def step(self) -> PassPlan:
        planned = plan_pass(self.sessions.values(), self.slots, self.limits, now=0.5)
        self.preemptions += len(planned.preempted)
        for session in planned.preempted:
            session.draft.forget_tree()
        self.matched += planned.matched
        self.check(planned)
        works = [(share, self.take(share)) for share in planned.shares]
        for share, taken in works:
            self.write(self.sessions[share.session_id], share, taken)
        if not planned.shares:
            for session in self.sessions.values():
                session.draft.awaited = None
        self.slots.check_integrity([session.table for session in self.sessions.values()])
        return planned

    def check(self, planned: PassPlan) -> None:
        """Slots hold what their readers believe, and the old run before the young."""
        self.resumed -= {s.session_id for s in self.sessions.values() if not s.waiting}
        queue = [s for n, s in self.sessions.items() if not (s.paused or n in self.resumed)]
        waiting = [session.waiting for session in queue]
        assert waiting == sorted(waiting), "a younger session runs while an older one waits"
        running = [session for session in self.sessions.values() if not session.waiting]
        assert not any(session.slots for session in self.sessions.values() if session.waiting)
        for session in running:
            assert 0 <= len(session.slots) < len(session.tokens)
            believed = digests(session.tokens)[: len(session.slots)]
            assert [self.written[slot] for slot in session.slots] == believed
        if running and not planned.shares:
            awaited = [session.draft.awaited for session in running]
            assert planned.wait_until is not None
            assert planned.wait_until <= min(each.until for each in awaited if each is not None)

    def take(self, share: Share) -> list[int]:
        taken = self.slots.allocate(share.rows + share.nodes)
        assert taken is not None, "more was planned than there is"
        self.written.update(dict.fromkeys(taken))  # whatever was there is lost
        return taken

    def write(self, session: Session, share: Share, taken: list[int]) -> None:
        """What a pass does: a part of the prompt, or the root and what was accepted."""
        prefill = session.pending > 1
        kept = share.rows if prefill else 1 + self.rng.randint(0, share.nodes)
        self.computed += kept
        start = len(session.slots)
        for slot in taken[:kept]:
            if not session.pending:
                session.tokens.append(next_token(session.tokens))
                if session.stopper.push(session.tokens[-1]) is not None:
                    break
            session.slots.append(slot)
        for slot, digest in zip(
            session.slots[start:], digests(session.tokens)[start:], strict=False
        ):
            self.written[slot] = digest
        self.slots.release(set(taken) - set(session.slots[start:]))
        if prefill:
            self.slots.share(session.table, session.tokens)
        finished = session.stopper.left == 0
        if not session.pending and not finished:
            session.tokens.append(next_token(session.tokens))
            finished = session.stopper.push(session.tokens[-1]) is not None
        session.draft.forget_tree()
        if finished:
            self.done[session.session_id] = session.tokens
            self.leave(session.session_id)
        elif session.pending > 1:
            return
        elif self.rng.random() < 0.5:
            nodes = self.rng.randint(1, 6)
            session.draft.tree = DraftTree(tuple(range(nodes)), (0,) * nodes, (0.0,) * nodes)
        elif self.rng.random() < 0.3:
            until = self.rng.uniform(0.5, 1.0)
            session.draft.awaited = Awaited(0.0, self.rng.uniform(0.0, until), until, 4)
            session.draft.gain = self.rng.random()

    def run(self, passes: int) -> None:
        while self.sessions and passes:
            self.step()
            passes -= 1
        assert not self.sessions, "somebody never gets through"


def at_most(tokens: int) -> Callable[[int, Sequence[int], Sequence[SessionView]], list[int]]:
    """Parts of one prompt at a time."""
    return lambda rows, decoding, prompts: [min(tokens, prompts[0].pending)] if prompts else []


def limits(chunk: int = 16, beside: int = 5, row_budget: int = 24, headroom: int = 6) -> Limits:
    return Limits(chunk, at_most(beside), row_budget, lambda rows: 0.01 * rows, headroom)


LIMITS = limits()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), caching=st.booleans())
def test_any_traffic_is_served_to_its_end_with_the_right_tokens(seed: int, caching: bool) -> None:
    rng = random.Random(seed)
    chosen = limits(rng.choice([1, 4, 16]), rng.choice([1, 5]), rng.choice([4, 24]))
    house = House(rng.randint(50, 120), chosen, caching, rng)
    systems = [[rng.randrange(3) for _ in range(rng.randint(0, 20))] for _ in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    for _ in range(60):
        if rng.random() < 0.5:
            prompt = rng.choice(systems) + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
            length = rng.randint(1, 15)
            asked[house.arrive(prompt, length)] = (prompt, length)
        if house.sessions and rng.random() < 0.1:
            name = rng.choice(list(house.sessions))
            house.leave(name)
            del asked[name]
        if house.sessions and rng.random() < 0.2:
            house.pause(rng.choice(list(house.sessions)))
        for name, session in house.sessions.items():
            if session.paused and rng.random() < 0.2:
                house.resume(name)
        if house.sessions:
            house.step()
    for name in house.sessions:
        house.resume(name)
    house.run(passes=60 * len(asked) + 60)
    assert house.done.keys() == asked.keys()
    for name, (prompt, length) in asked.items():
        assert house.done[name] == answer(prompt, length)
    assert house.slots.used == 0


def test_a_long_prompt_gets_through_a_stream_of_short_ones() -> None:
    house = House(120, LIMITS)
    for index in range(3):
        house.arrive([index, 1, 2], 6)
    long = house.arrive([0, 1] * 50, 4)
    for index in range(200):
        house.arrive([index % 3, index % 2, 0], 4)
        house.step()
        if long in house.done:
            break
    assert long in house.done
    assert len(house.done) < 40, "it waits no longer than those who came before it"


def test_whoever_streams_gets_a_token_in_each_pass_that_a_long_prompt_has_a_part_in() -> None:
    house = House(400, LIMITS)
    streaming = [house.arrive([index, 1, 2], 60) for index in range(4)]
    while any(house.sessions[name].pending > 1 for name in streaming):
        house.step()
    for session in house.sessions.values():
        session.draft.forget_tree()
    house.arrive([2, 1] * 50, 4)
    before = {name: len(house.sessions[name].tokens) for name in streaming}
    passes = 0
    while passes < 15:
        for name in streaming:
            house.sessions[name].draft.forget_tree()
        planned = house.step()
        passes += 1
        prompt = [share for share in planned.shares if share.session_id not in streaming]
        assert sum(share.rows for share in prompt) == 5
    after = {name: len(house.sessions[name].tokens) for name in streaming}
    assert after == {name: length + passes for name, length in before.items()}


def test_prompts_that_begin_alike_are_read_once_even_when_they_come_together() -> None:
    house = House(400, limits(beside=16))
    system = [2] * 64
    for index in range(10):
        house.arrive([*system, index % 3, index // 3], 1)
    house.run(100)
    assert house.computed <= 64 + 2 * 16 + 10 * 2
    assert house.matched >= 9 * 64 - 16


def test_sharing_lets_more_sessions_run_than_would_fit_alone() -> None:
    house = House(100, LIMITS)
    system = [1, 0] * 30
    house.arrive([*system, 2], 30)
    while house.sessions["0"].pending > 1:
        house.step()
    for index in range(5):
        house.arrive([*system, index % 3], 30)
    house.step()
    assert sum(not session.waiting for session in house.sessions.values()) > 2


def test_nobody_starts_whose_prompt_has_no_room() -> None:
    house = House(100, LIMITS)
    house.arrive([0, 1] * 30, 10)
    house.arrive([1, 0] * 30, 10)
    house.step()
    assert [session.waiting for session in house.sessions.values()] == [False, True]
    house.run(100)
    assert house.preemptions == 0


@pytest.mark.parametrize("caching", [True, False])
def test_two_hundred_sessions_get_through_a_pool_for_twenty(caching: bool) -> None:
    house = House(20 * 30, LIMITS, caching)
    for index in range(200):
        house.arrive([index % 3, *(int(digit) % 3 for digit in f"{index:016b}")], 13)
    house.run(5000)
    assert len(house.done) == 200
    assert house.preemptions < 200


@pytest.mark.parametrize("caching", [True, False])
def test_sessions_that_outgrow_the_pool_do_not_push_each_other_out_again_and_again(
    caching: bool,
) -> None:
    house = House(600, LIMITS, caching)
    for index in range(60):
        house.arrive([index % 3, *(int(digit) % 3 for digit in f"{index:08b}")], 90)
    house.run(10_000)
    assert 60 < house.preemptions < 4 * 60
    assert house.computed < 2 * 60 * (9 + 90)


def test_a_preempted_session_finds_again_what_nobody_needed() -> None:
    house = House(64, limits(64, 64, headroom=1))
    old, young = house.arrive([0] * 20, 30), house.arrive([1] * 20, 14)
    while not house.preemptions:
        house.step()
    assert house.sessions[young].waiting and not house.sessions[old].waiting
    tokens = list(house.sessions[young].tokens)
    house.leave(old)
    matched = house.matched
    house.step()
    assert len(tokens) - 1 >= house.matched - matched >= len(tokens) - 4
