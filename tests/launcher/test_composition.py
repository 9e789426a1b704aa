import logging
import stat
import tempfile
from pathlib import Path

import pytest

from coppice.errors import StartError
from coppice.settings import ModelSettings, Settings
from launcher.cluster import start_message
from launcher.compose import named, off_loop, private_folder
from launcher.demo import agreement
from launcher.logs import FieldFormatter


def test_the_model_is_served_by_the_name_it_was_asked_for_by() -> None:
    assert named(Settings(model=ModelSettings(path="org/m/"))).model.served_name == "org/m"


def test_a_given_served_name_stays() -> None:
    settings = Settings(model=ModelSettings(path="org/m", served_name="mine"))
    assert named(settings) == settings


def test_the_folder_is_private_and_gone_after_a_failure() -> None:
    with pytest.raises(RuntimeError), private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "file").touch()
        raise RuntimeError
    assert not folder.exists()


def test_the_folder_leaves_room_for_the_path_of_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_folder() as folder:
        assert len(str(folder)) < 40


async def test_work_off_the_loop_hands_back_its_result() -> None:
    assert await off_loop(lambda: 7) == 7


async def test_work_off_the_loop_hands_back_its_error() -> None:
    def fail() -> None:
        raise StartError("no")

    with pytest.raises(StartError, match=r"^no$"):
        await off_loop(fail)


def test_a_workers_own_message_is_found_in_what_ray_made_of_it() -> None:
    wrapped = RuntimeError(
        "The actor died because of an error raised in its creation task\n"
        '  File "service.py", line 1, in __init__\n'
        '    raise StartError("a: b")\n'
        "coppice.errors.StartError: head h: hidden_size is 1, the target's is 2: mend it\n\n"
    )
    message = start_message("drafter-0", wrapped)
    assert message == "head h: hidden_size is 1, the target's is 2: mend it"


def test_an_unknown_failure_of_a_worker_is_its_last_line() -> None:
    wrapped = RuntimeError("The actor died\n  File x\nMemoryError: too big\n")
    assert start_message("w", wrapped) == "w did not start: MemoryError: too big"


def test_a_failure_without_words_is_named() -> None:
    assert start_message("w", RuntimeError()) == "w did not start: RuntimeError"


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ((1, 2), (1, 2), "yes, all 2"),
        ((1, 2, 3), (1, 9, 3), "no, from token 2 of 3 on"),
        ((1, 2), (1, 2, 3), "no, from token 3 of 3 on"),
    ],
)
def test_agreement_names_the_first_difference(
    one: tuple[int, ...], other: tuple[int, ...], text: str
) -> None:
    assert agreement(one, other) == text


def test_log_lines_carry_their_fields() -> None:
    record = logging.makeLogRecord({"msg": "lost", "verifier": "v 0", "epoch": 3})
    assert FieldFormatter("%(message)s").format(record) == "lost verifier='v 0' epoch=3"
