"""The scheduling policy, on views alone."""

from hypothesis import given
from hypothesis import strategies as st

from verifier_svc.scheduler import Limits, Plan, SessionView, Share, plan

LIMITS = Limits(prefill_chunk=8, row_budget=16, headroom=4)


def view(
    name: str,
    pending: int = 1,
    held: int = 3,
    waiting: bool = False,
    nodes: int = 0,
    until: float | None = None,
) -> SessionView:
    return SessionView(name, waiting, pending, 0 if waiting else held, nodes, until)


def test_nothing_to_do_waits_for_a_message() -> None:
    assert plan([], 10, LIMITS) == Plan()


def test_trees_single_tokens_and_prefill_chunks_share_a_pass() -> None:
    views = [view("tree", nodes=5), view("plain"), view("prompt", pending=20)]
    assert plan(views, 100, LIMITS).shares == (
        Share("tree", 1, 5),
        Share("plain"),
        Share("prompt", 8),
    )


def test_the_prefill_budget_is_shared_in_order_of_arrival() -> None:
    views = [view("first", pending=5), view("second", pending=5), view("third", pending=5)]
    assert plan(views, 100, LIMITS).shares == (Share("first", 5), Share("second", 3))


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


def test_a_prompt_does_not_wait_for_drafts() -> None:
    views = [view("ready", nodes=3), view("late", until=2.0), view("prompt", pending=4)]
    assert plan(views, 100, LIMITS).shares == (Share("ready", 1, 3), Share("prompt", 4))


def test_admission_is_first_come_first_served() -> None:
    views = [
        view("running"),
        view("big", pending=30, waiting=True),
        view("small", pending=2, waiting=True),
    ]
    assert plan(views, 20, LIMITS).admitted == ()
    assert plan(views, 60, LIMITS).admitted == ("big", "small")


def test_drafts_are_dropped_before_anybody_is_preempted() -> None:
    views = [view("old", nodes=5), view("young", nodes=5)]
    assert plan(views, 4, LIMITS) == Plan((Share("old"), Share("young")))


def test_the_youngest_is_preempted_when_slots_run_out() -> None:
    views = [view("old"), view("middle"), view("young")]
    assert plan(views, 1, LIMITS) == Plan((Share("old"), Share("middle")), (), ("young",))


@st.composite
def states(draw: st.DrawFn) -> tuple[list[SessionView], int]:
    views = [
        view(
            str(index),
            pending=draw(st.integers(1, 30)),
            held=draw(st.integers(0, 30)),
            waiting=draw(st.booleans()),
            nodes=draw(st.integers(0, 20)),
            until=draw(st.sampled_from([None, None, 0.5, 1.5])),
        )
        for index in range(draw(st.integers(1, 8)))
    ]
    return views, draw(st.integers(0, 60))


@given(states())
def test_a_plan_never_takes_more_slots_than_there_are(state: tuple[list[SessionView], int]) -> None:
    views, free = state
    # A session alone in the pool fits by admission; the pool here is big enough for each.
    free = max(free, 40 - sum(v.held for v in views))
    result = plan(views, free, LIMITS)
    by_name = {v.session_id: v for v in views}
    freed = sum(by_name[name].held for name in result.preempted)
    assert sum(share.rows + share.nodes for share in result.shares) <= free + freed
    active = {v.session_id for v in views if not v.waiting} | set(result.admitted)
    assert {share.session_id for share in result.shares} <= active - set(result.preempted)
    assert all(share.rows <= by_name[share.session_id].pending for share in result.shares)
    assert all(
        share.nodes == 0 or by_name[share.session_id].pending == 1 for share in result.shares
    )


@given(states())
def test_there_is_always_progress_or_a_bounded_wait(state: tuple[list[SessionView], int]) -> None:
    views, free = state
    free = max(free, 40 - sum(v.held for v in views))
    result = plan(views, free, LIMITS)
    assert result.shares or result.preempted or result.wait_until is not None
