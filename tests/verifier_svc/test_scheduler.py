"""The scheduling policy, on views alone."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from verifier_svc.scheduler import Limits, Plan, SessionView, Share, admits, plan


def five(rows: int, prompts: Sequence[SessionView]) -> list[int]:
    parts: list[int] = []
    for prompt in prompts:
        parts.append(min(5 - sum(parts), prompt.pending))
    return [part for part in parts if part]


LIMITS = Limits(prefill_chunk=8, prefill_beside=five, row_budget=16, headroom=4)


def view(name: str, pending: int = 1, nodes: int = 0, until: float | None = None) -> SessionView:
    return SessionView(name, pending, nodes, until)


def test_nothing_to_do_waits_for_a_message() -> None:
    assert plan([], 10, LIMITS) == Plan()


def test_trees_single_tokens_and_prefill_chunks_share_a_pass() -> None:
    views = [view("tree", nodes=5), view("plain"), view("prompt", pending=20)]
    assert plan(views, 100, LIMITS).shares == (
        Share("tree", 1, 5),
        Share("plain"),
        Share("prompt", 5),
    )


def test_the_prefill_budget_is_shared_in_order_of_arrival() -> None:
    views = [view("first", pending=5), view("second", pending=5), view("third", pending=5)]
    assert plan(views, 100, LIMITS).shares == (Share("first", 5), Share("second", 3))


def test_prompts_are_read_in_smaller_chunks_while_others_decode() -> None:
    prompts = [view("first", pending=4), view("second", pending=20)]
    alone = plan(prompts, 100, LIMITS).shares
    assert alone == (Share("first", 4), Share("second", 4))
    beside = plan([view("streams"), *prompts], 100, LIMITS).shares
    assert beside == (Share("streams"), Share("first", 4), Share("second", 1))
    # Whoever waits for a tree streams as well: it may come at any time.
    awaiting = plan([view("awaits", until=9.0), *prompts], 100, LIMITS).shares
    assert awaiting == (Share("first", 4), Share("second", 1))


def test_parts_of_prompts_are_measured_by_all_who_decode_and_by_their_contexts() -> None:
    asked: list[tuple[int, Sequence[SessionView]]] = []

    def beside(rows: int, prompts: Sequence[SessionView]) -> list[int]:
        asked.append((rows, prompts))
        return [2, 1]

    prompts = [SessionView("first", 9, context=40), SessionView("second", 7)]
    views = [view("tree", nodes=3), view("awaits", until=9.0), view("plain"), *prompts]
    shares = plan(views, 100, replace(LIMITS, prefill_beside=beside)).shares
    assert shares[2:] == (Share("first", 2), Share("second", 1))
    assert asked == [(4 + 1 + 1, prompts)]


def test_trees_are_cut_to_the_row_budget() -> None:
    views = [view(str(index), nodes=15) for index in range(4)]
    assert all(share.nodes == 3 for share in plan(views, 100, LIMITS).shares)


def test_an_awaited_tree_holds_the_pass_until_its_time_is_over() -> None:
    views = [view("ready", nodes=3), view("late", until=2.0), view("later", until=3.0)]
    assert plan(views, 100, LIMITS) == Plan(wait_until=2.0)
    views[1] = view("late")
    assert plan(views, 100, LIMITS).shares == (Share("ready", 1, 3), Share("late"))


def test_plain_decoding_does_not_wait_for_the_drafts_of_others() -> None:
    views = [view("plain"), view("ready", nodes=3), view("late", until=2.0)]
    assert plan(views, 100, LIMITS).shares == (Share("plain"), Share("ready", 1, 3))


def test_a_few_who_decode_plainly_wait_for_the_trees_of_many() -> None:
    views = [view("plain"), view("one", until=7.0), view("other", until=5.0)]
    assert plan(views, 100, LIMITS) == Plan(wait_until=5.0)
    assert plan([*views, view("second")], 100, LIMITS).shares == (Share("plain"), Share("second"))


def test_a_prompt_does_not_wait_for_drafts() -> None:
    views = [view("ready", nodes=3), view("late", until=2.0), view("prompt", pending=4)]
    assert plan(views, 100, LIMITS).shares == (Share("ready", 1, 3), Share("prompt", 4))


def test_what_running_prompts_lack_is_spoken_for() -> None:
    assert admits(10, 20, [1, 5], LIMITS)
    assert not admits(10, 20, [2, 5], LIMITS)
    assert admits(100, 20, [], LIMITS), "alone in the pool every session fits"


def test_drafts_are_dropped_before_anybody_is_preempted() -> None:
    views = [view("old", nodes=5), view("young", nodes=5)]
    assert plan(views, 4, LIMITS) == Plan((Share("old"), Share("young")))


def test_the_youngest_is_preempted_when_slots_run_out() -> None:
    views = [view("old"), view("middle"), view("young")]
    assert plan(views, 2, LIMITS) == Plan(preempted="young")
    assert plan(views[:2], 2, LIMITS) == Plan((Share("old"), Share("middle")))


@st.composite
def states(draw: st.DrawFn) -> tuple[list[SessionView], int]:
    views = [
        view(
            str(index),
            pending=draw(st.integers(1, 30)),
            nodes=draw(st.integers(0, 20)),
            until=draw(st.sampled_from([None, None, 0.5, 1.5])),
        )
        for index in range(draw(st.integers(1, 8)))
    ]
    # A session alone in the pool fits by admission.
    return views, draw(st.integers(views[0].pending if len(views) == 1 else 0, 60))


@given(states())
def test_a_plan_takes_no_more_slots_than_are_available(
    state: tuple[list[SessionView], int],
) -> None:
    views, available = state
    result = plan(views, available, LIMITS)
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
    result = plan(views, available, LIMITS)
    outcomes = [result.shares, result.preempted, result.wait_until]
    assert sum(outcome not in ((), None) for outcome in outcomes) == 1
    assert result.preempted in (None, views[-1].session_id)


@given(states())
def test_nobody_who_streams_is_left_out_of_a_pass(state: tuple[list[SessionView], int]) -> None:
    views, available = state
    shares = plan(views, available, LIMITS).shares
    ready = {v.session_id for v in views if v.pending == 1 and v.awaited_until is None}
    assert not shares or ready <= {share.session_id for share in shares}
