import pickle

import pytest
from pydantic import ValidationError

from coppice.settings import GuardSettings, Settings, SpeculationSettings


def test_defaults_need_no_source() -> None:
    settings = Settings()
    assert settings.guard.thresholds("eagle") == (48, 36)
    assert settings.gateway.port == 50051


def test_the_environment_has_no_influence_on_direct_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COPPICE_GUARD__ENTER", "99")
    assert Settings().guard.enter is None


@pytest.mark.parametrize("unknown", [{"gard": {}}, {"guard": {"entr": 1}}])
def test_unknown_keys_are_refused(unknown: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Settings(**unknown)  # pyright: ignore[reportArgumentType]


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().guard.enter = 1


def test_a_copy_on_another_machine_is_equal() -> None:
    settings = Settings(guard=GuardSettings(enter=5, exit=3))
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_the_guard_cannot_close_below_where_it_opens() -> None:
    with pytest.raises(ValidationError, match="must not be above enter"):
        GuardSettings(enter=3, exit=4)
    with pytest.raises(ValidationError, match="needs enter"):
        GuardSettings(exit=4)


def test_the_guards_thresholds_follow_the_drafter_and_each_other() -> None:
    assert GuardSettings().thresholds("model") == (24, 18)
    assert GuardSettings().thresholds("ngram") == (48, 36)
    assert GuardSettings(enter=5).thresholds("model") == (5, 3)
    assert GuardSettings(enter=5, exit=0).thresholds("eagle") == (5, 0)


@pytest.mark.parametrize(
    ("depth", "top_k", "fits"), [(5, 16, True), (6, 12, True), (6, 13, False), (12, 8, False)]
)
def test_the_frontier_of_a_tree_fits_one_mask_word(depth: int, top_k: int, fits: bool) -> None:
    if fits:
        assert SpeculationSettings(depth=depth, top_k=top_k).depth == depth
    else:
        with pytest.raises(ValidationError, match="at most 64"):
            SpeculationSettings(depth=depth, top_k=top_k)


@pytest.mark.parametrize(
    ("speculation", "said"),
    [
        ({"drafter": "model"}, "needs draft_model"),
        ({"drafter": "medusa"}, "needs head"),
        ({"tree": "statik"}, "'dynamic' or 'static'"),
    ],
)
def test_a_drafter_without_what_it_needs_is_refused(
    speculation: dict[str, object], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        SpeculationSettings.model_validate(speculation)
