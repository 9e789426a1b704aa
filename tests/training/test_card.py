"""Model cards: what they tell, and that they tell nothing of the machine."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from coppice.errors import StartError
from coppice.settings import Settings
from launcher.cli import app
from training.card import note_data, note_evaluation, write_card
from training.dataset import Dataset, Description, Sample
from training.fit import FitOptions, fit
from training.prepare import PrepareOptions, prepare
from training.run import Rhythm

DESCRIPTION = Description(
    target="/somewhere/models/tiny-chat",
    target_hash="ab12" * 16,
    vocab_size=60,
    feature_size=4,
    feature_layers=(),
    prompts=("questions.jsonl", "chats.json"),
    held_out=("judged.jsonl",),
    temperatures=(0.0, 0.7),
    max_prompt_tokens=9,
    max_answer_tokens=7,
    seed=5,
    shards=2,
    shard_prompts=2,
)
OPTIONS = FitOptions(
    kind="eagle",
    data=(Path("/somewhere/data/first"),),
    init=Path("/somewhere/heads/older"),
    epochs=3,
    batch_tokens=64,
    learning_rate=5e-4,
    steps=3,
    layers=2,
    feature_weight=1.0,
    noise=0.1,
    vocabulary=40,
    held_out=8,
    seed=11,
)
EVALUATION = {
    "setting": {"prompts": 40, "tokens": 128, "depth": 6, "top_k": 8, "dtype": "float32"},
    "acceptance_length": {
        "gsm8k": {"0": {"8": 2.123, "16": 2.5}, "1": {"8": 1.5, "16": 1.75}},
        "mt_bench": {"0": {"8": 1.99, "16": 2.25}, "1": {"8": 1.375, "16": 1.625}},
    },
}


def sample(prompt: int, answer: int) -> Sample:
    length = prompt + answer
    return Sample(
        torch.arange(length, dtype=torch.int32), prompt, 0.0, torch.zeros(length - 1, 4).bfloat16()
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a fit leaves behind."""
    dataset = Dataset.begin(tmp_path / "first", DESCRIPTION)
    dataset.write(0, [sample(3, 5), sample(2, 6)])
    dataset.write(1, [sample(4, 1300)])
    output = tmp_path / "tiny-head"
    output.mkdir()
    (output / "options.json").write_text(OPTIONS.model_dump_json())
    (output / "curve.csv").write_text(
        "step,epoch,tokens,seconds,loss,agreement,acceptance_length\n"
        "20,1.5,2500,10.5,4.25,0.25,\n"
        "40,3,5000,21,3.125,0.5,\n"
        "40,,,,,,1.875\n"
    )
    note_data(output, [dataset])
    return output


def test_a_card_tells_data_settings_and_cost(run: Path) -> None:
    write_card(run)
    card = (run / "README.md").read_text()
    assert "EAGLE-2 draft head for tiny-chat" in card
    assert "ab12" * 16 in card
    assert "| first | questions.jsonl, chats.json | 3 | 1,311 | 0, 0.7 | 5 |" in card
    assert "40 steps over 3.0 epochs, 5,000 positions taught in 21 s; loss 3.125" in card
    assert "16 rows: 1.875." in card
    assert "| learning_rate | 0.0005 |" in card
    assert "Not evaluated yet." in card


def test_an_evaluation_goes_into_the_card_and_stays_there(run: Path) -> None:
    note_evaluation(run, EVALUATION)
    card = (run / "README.md").read_text()
    assert "| set | t 0, 8 rows | t 0, 16 rows | t 1, 8 rows | t 1, 16 rows |" in card
    assert "| gsm8k | 2.12 | 2.50 | 1.50 | 1.75 |" in card
    assert "| mt_bench | 1.99 | 2.25 | 1.38 | 1.62 |" in card
    write_card(run)
    assert (run / "README.md").read_text() == card


def test_a_card_names_no_place_on_a_machine(run: Path) -> None:
    note_evaluation(run, EVALUATION)
    card = (run / "README.md").read_text()
    assert "/somewhere" not in card
    assert str(run.parent) not in card


def test_the_commands_of_a_card_are_commands(run: Path) -> None:
    """They parse, down to the first file that is not here."""
    write_card(run)
    block = (run / "README.md").read_text().split("```sh\n")[1].split("\n```")[0]
    commands = [shlex.split(line) for line in block.splitlines()]
    assert [words[:3] for words in commands] == [
        ["coppice", "train", "prepare"],
        ["coppice", "train", "fit"],
    ]
    for words in commands:
        result = CliRunner().invoke(app, words[1:])
        assert isinstance(result.exception, StartError), result.output
        assert "tiny-chat" in str(result.exception)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"options\.json is missing"):
        write_card(tmp_path)
    with pytest.raises(StartError, match="no run of `coppice train fit`"):
        note_evaluation(tmp_path, EVALUATION)
    assert list(tmp_path.iterdir()) == []


def test_a_fit_ends_with_a_card(settings: Settings, prompts: Path, tmp_path: Path) -> None:
    quiet = Console(quiet=True)
    data = PrepareOptions([prompts], [], tmp_path / "data", 24, (0.0,), 12, 8, 16, False, 0)
    prepare(settings, data, quiet)
    options = OPTIONS.model_copy(
        update={"data": (tmp_path / "data",), "init": None, "epochs": 1, "held_out": 4}
    )
    fit(settings, options, tmp_path / "head", quiet, Rhythm(report_steps=1))
    card = (tmp_path / "head" / "README.md").read_text()
    told = json.loads((tmp_path / "head" / "data.json").read_text())
    answers = sum(1 for _ in Dataset.open(tmp_path / "data").samples())
    assert told[0]["answers"] == answers
    assert f"| data | prompts.jsonl | {answers} |" in card
    assert str(tmp_path) not in card
