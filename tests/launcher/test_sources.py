from pathlib import Path

import pytest

from coppice.errors import StartError
from launcher.sources import leaves, load_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    for leaf in leaves():
        monkeypatch.delenv(leaf.variable, raising=False)
    monkeypatch.delenv("COPPICE_CONFIG", raising=False)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "coppice.toml"
    path.write_text('log_level = "error"\n[guard]\nenter = 10\nexit = 5\n[gateway]\nport = 1\n')
    return path


def test_flags_win_over_environment_over_file_over_defaults(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COPPICE_GUARD__ENTER", "20")
    monkeypatch.setenv("COPPICE_GATEWAY__PORT", "2")
    settings = load_settings({"gateway.port": "3"}, toml)
    assert settings.gateway.port == 3
    assert settings.guard.enter == 20
    assert settings.guard.exit == 5
    assert settings.guard.dwell_seconds == 1.0
    assert settings.log_level == "error"


def test_the_file_may_come_from_the_environment(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COPPICE_CONFIG", str(toml))
    assert load_settings({}).guard.enter == 10


def test_an_empty_variable_is_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_REDIS__URL", "")
    assert load_settings({}).redis.url is None


def test_a_number_as_text_stays_text_where_text_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_MODEL__PATH", "123")
    assert load_settings({}).model.path == "123"


def refusal(flags: dict[str, object], config: Path | None = None) -> str:
    with pytest.raises(StartError) as caught:
        load_settings(flags, config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_variable_is_refused_with_the_nearest_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COPPICE_GUARD__ENTR", "1")
    message = refusal({})
    assert "COPPICE_GUARD__ENTR:" in message
    assert "did you mean COPPICE_GUARD__ENTER?" in message


def test_a_group_is_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_GUARD", '{"enter": 3}')
    assert "COPPICE_GUARD: no such setting" in refusal({})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[guard]\nentr = 1\n", "guard.entr; did you mean guard.enter?"),
        ("zzz = 1\n", "no setting zzz; `coppice up --help`"),
        ("guard = 1\n", "no setting guard;"),
        ("guard = [", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(content)
    message = refusal({}, path)
    assert str(path) in message
    assert named in message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal({}, tmp_path / "absent.toml")


def test_a_wrong_value_is_named_with_its_flag() -> None:
    message = refusal({"guard.enter": "many"})
    assert message.startswith("guard.enter = 'many' (--guard-enter): must be")


def test_a_wrong_value_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_SPECULATION__NODES", "64")
    message = refusal({})
    assert message.startswith("speculation.nodes = '64' (COPPICE_SPECULATION__NODES): must be")
    assert "63" in message


def test_a_wrong_value_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[speculation]\ndrafter = "eagel"\n')
    message = refusal({}, path)
    assert f"speculation.drafter = 'eagel' ({path})" in message
    assert "'eagle'" in message


def test_a_rule_over_a_group_names_the_group() -> None:
    assert refusal({"guard.enter": "3", "guard.exit": "4"}) == (
        "settings guard: exit (4) must not be above enter (3)"
    )
