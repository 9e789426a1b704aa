"""Bookkeeping of one attachment."""

import torch

from drafter_svc.drafter import FeatureRows
from drafter_svc.session import TOKENS_BETWEEN_ATTEMPTS, Outcome, Session, Update


def rows(start: int, end: int) -> FeatureRows:
    """Rows that hold their own position."""
    return FeatureRows(start, torch.arange(start, end, dtype=torch.float32)[:, None])


def held(session: Session) -> list[float]:
    features = session.request().features
    return [] if features is None else features.rows[:, 0].tolist()


def update(start: int, end: int, epoch: int = 3, budget: int = 7, **known: FeatureRows) -> Update:
    return Update(epoch, start, end, list(range(start, end)), budget, **known)


def joined(length: int = 10) -> Session:
    session = Session("s", 3)
    assert session.apply(update(0, length)) is Outcome.APPLIED
    return session


def test_the_first_update_makes_a_request_of_all_tokens_due() -> None:
    session = joined(4)
    assert session.due
    request = session.request()
    assert (request.session_id, request.tokens, request.budget) == ("s", (0, 1, 2, 3), 7)


def test_updates_continue_the_tokens() -> None:
    session = joined(4)
    assert session.apply(update(4, 7)) is Outcome.APPLIED
    assert session.request().tokens == (0, 1, 2, 3, 4, 5, 6)


def test_another_epoch_is_ignored() -> None:
    session = joined(4)
    for epoch in (2, 4):
        assert session.apply(update(4, 7, epoch)) is Outcome.IGNORED
        session.pause(epoch)
    assert session.base_length == 4
    assert session.due


def test_a_gap_asks_for_a_join_and_ignores_everything_up_to_its_answer() -> None:
    session = joined(4)
    assert session.apply(update(6, 8)) is Outcome.GAP
    assert not session.due
    assert session.apply(update(8, 9)) is Outcome.IGNORED
    session.renew()
    assert not session.due
    assert session.apply(update(0, 9)) is Outcome.APPLIED
    assert session.base_length == 9


def test_a_base_length_that_disagrees_with_the_tokens_is_a_gap() -> None:
    session = joined(4)
    assert session.apply(Update(3, 4, 9, [1, 2], 7)) is Outcome.GAP


def test_no_budget_means_no_request() -> None:
    session = joined(4)
    session.apply(update(4, 5, budget=0))
    assert not session.due


def test_after_a_pause_nothing_is_due_until_the_next_update() -> None:
    session = joined(4)
    session.pause(3)
    session.renew()
    assert not session.due
    session.apply(update(4, 9))
    assert session.due


def test_features_of_consecutive_updates_are_joined() -> None:
    session = joined(4)
    session.apply(update(4, 6, features=rows(3, 5)))
    session.apply(update(6, 9, features=rows(5, 8)))
    assert session.request().features is not None
    assert held(session) == [3, 4, 5, 6, 7]


def test_missing_features_are_those_between_what_the_drafter_and_the_session_hold() -> None:
    session = joined(10)
    assert session.missing_features(4) == range(4, 9)
    session.add_features(rows(2, 7))
    assert session.missing_features(4) == range(7, 9)
    assert session.missing_features(1) == range(1, 9)
    session.add_features(rows(7, 9))
    assert len(session.missing_features(4)) == 0


def test_pulled_features_go_before_those_that_came_meanwhile() -> None:
    session = joined(10)
    session.apply(update(10, 12, features=rows(9, 11)))
    session.add_features(rows(0, 9))
    assert held(session) == list(range(11))


def test_a_hole_between_features_keeps_the_new_ones() -> None:
    session = joined(10)
    session.add_features(rows(0, 4))
    session.add_features(rows(6, 9))
    assert held(session) == [6, 7, 8]


def test_overlapping_features_are_held_once() -> None:
    session = joined(10)
    session.add_features(rows(2, 6))
    session.add_features(rows(4, 9))
    assert held(session) == [2, 3, 4, 5, 6, 7, 8]


def test_features_behind_replaced_tokens_are_dropped() -> None:
    session = joined(10)
    session.add_features(rows(2, 9))
    session.apply(update(5, 8))
    assert held(session) == [2, 3, 4]


def test_drafted_features_are_let_go_and_later_ones_stay() -> None:
    session = joined(10)
    session.add_features(rows(2, 9))
    request = session.request()
    session.apply(update(10, 12, features=rows(9, 11)))
    session.drafted(request, proposed=True)
    assert held(session) == [9, 10]


def test_a_drafter_without_room_is_left_alone_for_a_while() -> None:
    session = joined(10)
    session.drafted(session.request(), proposed=False)
    assert not session.worth_drafting
    session.apply(update(10, 10 + TOKENS_BETWEEN_ATTEMPTS))
    assert session.worth_drafting


def test_an_empty_draft_below_a_single_token_costs_no_patience() -> None:
    session = joined(1)
    session.drafted(session.request(), proposed=False)
    assert session.worth_drafting


def test_a_request_is_not_changed_by_later_updates() -> None:
    session = joined(4)
    request = session.request()
    session.apply(update(4, 6))
    assert request.tokens == (0, 1, 2, 3)
