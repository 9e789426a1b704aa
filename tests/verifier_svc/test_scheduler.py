"""The scheduling policy, on views alone."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_svc.awaiting import Awaited
from verifier_svc.scheduler import Limits, Plan, SessionView, Share, admits, plan


def five(rows: int, decoding: Sequence[int], prompts: Sequence[SessionView]) -> list[int]:
    parts: list[int] = []
    for prompt in prompts:
        parts.append(min(5 - sum(parts), prompt.pending))
    return [part for part in parts if part]


def flat(rows: int) -> float:
    """The weights are all that a pass reads."""
    return 1.0


LIMITS = Limits(prefill_chunk=8, prefill_beside=five, row_budget=16, step_seconds=flat, headroom=4)


def view(name: str, pending: int = 1, nodes: int = 0) -> SessionView:
    return SessionView(name, pending, nodes, gain=1.0 if nodes else 0.0)


def awaits(name: str, until: float = 9.0, expected: float = 0.5, gain: float = 1.0) -> SessionView:
    """Its tree of 3 nodes was asked for at 0."""
    return SessionView(name, 1, awaited=Awaited(0.0, expected, until, 3), gain=gain)


def many(sessions: int, made: SessionView) -> list[SessionView]:
    return [replace(made, session_id=f"{made.session_id}{i}") for i in range(sessions)]


def test_nothing_to_do_waits_for_a_message() -> None:
    assert plan([], 10, LIMITS, 0.0) == Plan()


def test_trees_single_tokens_and_prefill_chunks_share_a_pass() -> None:
    views = [view("tree", nodes=5), view("plain"), view("prompt", pending=20)]
    assert plan(views, 100, LIMITS, 0.0).shares == (
        Share("tree", 1, 5),
        Share("plain"),
        Share("prompt", 5),
    )


def test_the_prefill_budget_is_shared_in_order_of_arrival() -> None:
    views = [view("first", pending=5), view("second", pending=5), view("third", pending=5)]
    assert plan(views, 100, LIMITS, 0.0).shares == (Share("first", 5), Share("second", 3))


def test_prompts_are_read_in_smaller_chunks_while_others_decode() -> None:
    prompts = [view("first", pending=4), view("second", pending=20)]
    alone = plan(prompts, 100, LIMITS, 0.0).shares
    assert alone == (Share("first", 4), Share("second", 4))
    beside = plan([view("streams"), *prompts], 100, LIMITS, 0.0).shares
    assert beside == (Share("streams"), Share("first", 4), Share("second", 1))
    awaiting = plan([awaits("awaits", gain=0.0), *prompts], 100, LIMITS, 0.0).shares
    assert awaiting == (Share("awaits"), Share("first", 4), Share("second", 1))


def test_parts_of_prompts_are_measured_by_all_who_decode_and_by_their_contexts() -> None:
    asked: list[tuple[int, Sequence[int], Sequence[SessionView]]] = []

    def beside(rows: int, decoding: Sequence[int], prompts: Sequence[SessionView]) -> list[int]:
        asked.append((rows, decoding, prompts))
        return [2, 1]

    prompts = [SessionView("first", 9, context=40), SessionView("second", 7)]
    plain = SessionView("plain", 1, context=300)
    views = [view("tree", nodes=3), awaits("awaits", gain=0.0), plain, *prompts]
    shares = plan(views, 100, replace(LIMITS, prefill_beside=beside), 0.0).shares
    assert shares[3:] == (Share("first", 2), Share("second", 1))
    assert asked == [(4 + 1 + 1, [0, 0, 300], prompts)]


def test_trees_are_cut_to_the_row_budget() -> None:
    views = [view(str(index), nodes=15) for index in range(4)]
    assert all(share.nodes == 3 for share in plan(views, 100, LIMITS, 0.0).shares)


def waits(views: Sequence[SessionView], now: float = 0.0, limits: Limits = LIMITS) -> bool:
    planned = plan(views, 1000, limits, now)
    assert (planned.wait_until is None) == bool(planned.shares)
    return planned.wait_until is not None


def test_where_all_await_their_trees_each_has_its_own_time() -> None:
    views = [awaits("late", until=2.0), awaits("later", until=3.0)]
    assert plan(views, 100, LIMITS, 1.9) == Plan(wait_until=2.0)


def test_a_tree_that_is_there_waits_for_those_that_are_about_to_come() -> None:
    views = [view("ready", nodes=3), *many(3, awaits("late", until=2.0))]
    assert waits(views)
    # All trees in time are 8 tokens in 1.5 passes: 3 tokens are worth 0.56 passes of delay.
    assert waits(views, now=1.0)
    assert plan(views, 100, LIMITS, 1.0).wait_until == pytest.approx(0.5 + 3 / (8 / 1.5))
    assert not waits(views, now=1.1)


def test_a_pass_that_does_not_wait_takes_all_with_their_roots() -> None:
    views = [*many(4, view("ready", nodes=3)), awaits("late", expected=5.0)]
    roots = [Share("late")]
    assert plan(views, 100, LIMITS, 0.0).shares == (
        *(Share(f"ready{i}", 1, 2) for i in range(4)),
        *roots,
    )


@pytest.mark.parametrize(("plain", "waiting"), [(1, True), (3, True), (6, False), (60, False)])
def test_whoever_decodes_plainly_waits_for_trees_that_bring_more_than_the_wait_costs(
    plain: int, waiting: bool
) -> None:
    # Four trees of one token each, in half the time of a pass: (p + 8) / 1.5 against p + 4.
    views = [*many(plain, view("plain")), *many(4, awaits("late"))]
    assert waits(views) == waiting


def test_of_several_trees_only_those_are_waited_for_that_come_soon() -> None:
    views = [view("plain"), *many(3, awaits("soon", expected=0.1)), awaits("slow", expected=8.0)]
    assert waits(views)
    there = [view("plain"), *many(3, view("soon", nodes=3)), awaits("slow", expected=8.0)]
    assert not waits(there, now=0.1)


def test_a_prompt_waits_for_trees_as_if_it_decoded() -> None:
    prompt, late = view("prompt", pending=9), awaits("late")
    # A token more in half a pass more: (2 + 1) / 1.5 is not above 2, for the prompt's part counts.
    assert plan([replace(late, gain=0.9), prompt], 100, LIMITS, 0.0).shares
    assert waits([replace(late, gain=1.1), prompt])
    # Where all who decode await their trees, none of their times counts by itself.
    assert plan([awaits("late", expected=8.0), prompt], 100, LIMITS, 0.0).shares == (
        Share("late"),
        Share("prompt", 5),
    )


@pytest.mark.parametrize(("reading", "waiting"), [(0, True), (40, False)])
def test_what_a_pass_reads_besides_counts_in_what_trees_are_worth(
    reading: int, waiting: bool
) -> None:
    # Trees bring 2.4 tokens beside 4: worth a wait of half a pass, if it is not ten passes.
    limits = replace(
        LIMITS,
        step_seconds=lambda rows: 1.0 if rows < 20 else 0.05,
        prefill_beside=lambda rows, decoding, prompts: [reading],
    )
    prompts = [view("prompt", pending=99)] if reading else []
    views = [*many(2, view("plain")), *many(2, awaits("late", gain=1.2))]
    assert waits([*views, *prompts], limits=limits) == waiting


def test_what_running_prompts_lack_is_spoken_for() -> None:
    assert admits(10, 20, [1, 5], LIMITS)
    assert not admits(10, 20, [2, 5], LIMITS)
    assert admits(100, 20, [], LIMITS), "alone in the pool every session fits"


def test_drafts_are_dropped_before_anybody_is_preempted() -> None:
    views = [view("old", nodes=5), view("young", nodes=5)]
    assert plan(views, 4, LIMITS, 0.0) == Plan((Share("old"), Share("young")))


def test_the_youngest_is_preempted_when_slots_run_out() -> None:
    views = [view("old"), view("middle"), view("young")]
    assert plan(views, 2, LIMITS, 0.0) == Plan(preempted="young")
    assert plan(views[:2], 2, LIMITS, 0.0) == Plan((Share("old"), Share("middle")))


NOW = 1.0


@st.composite
def trees_to_come(draw: st.DrawFn) -> Awaited:
    expected = draw(st.floats(0.0, 5.0))
    return Awaited(0.0, expected, draw(st.floats(1.001, 6.0)), draw(st.integers(1, 15)))


@st.composite
def states(draw: st.DrawFn) -> tuple[list[SessionView], int]:
    views = [
        SessionView(
            str(index),
            pending=draw(st.integers(1, 30)),
            nodes=draw(st.integers(0, 20)),
            awaited=draw(st.none() | trees_to_come()),
            gain=draw(st.floats(0.0, 4.0)),
        )
        for index in range(draw(st.integers(1, 8)))
    ]
    # A session alone in the pool fits by admission.
    return views, draw(st.integers(views[0].pending if len(views) == 1 else 0, 60))


def linear(rows: int) -> float:
    return 0.5 + 0.05 * rows


PRICED = replace(LIMITS, step_seconds=linear)


@given(states())
def test_a_plan_takes_no_more_slots_than_are_available(
    state: tuple[list[SessionView], int],
) -> None:
    views, available = state
    result = plan(views, available, PRICED, NOW)
    by_name = {v.session_id: v for v in views}
    assert sum(share.rows + share.nodes for share in result.shares) <= available
    assert {share.session_id for share in result.shares} <= by_name.keys()
    assert all(share.rows <= by_name[share.session_id].pending for share in result.shares)
    assert all(
        share.nodes == 0 or by_name[share.session_id].pending == 1 for share in result.shares
    )


@given(states())
def test_there_is_a_pass_or_a_preemption_or_a_bounded_wait(
    state: tuple[list[SessionView], int],
) -> None:
    views, available = state
    result = plan(views, available, PRICED, NOW)
    outcomes = [result.shares, result.preempted, result.wait_until]
    assert sum(outcome not in ((), None) for outcome in outcomes) == 1
    assert result.preempted in (None, views[-1].session_id)
    if result.wait_until is not None:
        untils = [v.awaited.until for v in views if v.awaited is not None and v.pending == 1]
        assert NOW < result.wait_until <= min(untils)


@given(states())
def test_nobody_who_streams_is_left_out_of_a_pass(state: tuple[list[SessionView], int]) -> None:
    views, available = state
    shares = plan(views, available, PRICED, NOW).shares
    streaming = {v.session_id for v in views if v.pending == 1}
    assert not shares or streaming <= {share.session_id for share in shares}


@given(states())
def test_where_no_tree_comes_any_more_there_is_a_pass_within_the_longest_time(
    state: tuple[list[SessionView], int],
) -> None:
    views = state[0]
    last = max(
        (v.awaited.until for v in views if v.awaited is not None and v.pending == 1), default=NOW
    )
    now, looks = NOW, 0
    while (until := plan(views, 1000, PRICED, now).wait_until) is not None:
        assert now < until <= last
        now, looks = until, looks + 1
        views = [
            replace(v, awaited=None) if v.awaited is not None and v.awaited.until <= now else v
            for v in views
        ]
    assert looks <= 2 * len(views)


@given(
    st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 4.0), st.floats(0.01, 4.0), st.data()
)
def test_a_choice_between_all_trees_and_none_is_made_by_tokens_per_second(
    plain: int, late: int, expected: float, gain: float, data: st.DataObject
) -> None:
    seconds = {False: 1.0, True: data.draw(st.floats(1.0, 3.0))}  # of a pass without, with trees
    sessions = plain + late
    limits = replace(LIMITS, step_seconds=lambda rows: seconds[rows > sessions])
    without = sessions / seconds[False]
    with_trees = (sessions + gain * late) / (expected + seconds[True])
    views = [*many(plain, view("plain")), *many(late, awaits("late", 9.0, expected, gain))]
    if with_trees != pytest.approx(without):
        assert waits(views, limits=limits) == (with_trees > without)


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.0, 1.0))
def test_trees_that_come_at_once_and_pay_for_their_rows_are_always_waited_for(
    ready: int, late: int, now: float
) -> None:
    views = [*many(ready, view("ready", nodes=3)), *many(late, awaits("late", 9.0, expected=now))]
    assert waits(views, now)


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 1.0))
def test_trees_that_bring_nothing_hold_nobody_up(ready: int, late: int, expected: float) -> None:
    views = [
        *many(ready, view("ready", nodes=3)),
        *many(late, awaits("late", 9.0, expected, gain=0.0)),
    ]
    assert not waits(views)
