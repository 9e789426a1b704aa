"""Whole fits on a tiny target, the served drafters included."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from coppice.errors import StartError
from coppice.settings import Settings
from drafter_svc.building import build_drafter
from training.acceptance import acceptance
from training.dataset import Dataset
from training.fit import FitOptions, fit, judging
from training.kinds import KINDS, kind_named
from training.prepare import PrepareOptions, prepare
from training.run import CHECKPOINT_FILE, Rhythm
from training.trainer import Trainer

QUIET = Console(quiet=True)
RHYTHM = Rhythm(report_steps=2)


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "prompts.txt").write_text("\n".join(f"w{n} w{n * n % 57}" for n in range(40)))
    settings = Settings.model_validate({"model": {"path": str(target)}, "verifier": {"threads": 1}})
    options = PrepareOptions(
        [folder / "prompts.txt"], [], folder / "data", 40, (0.0,), 8, 12, 16, True, 0
    )
    return prepare(settings, options, QUIET).path


@pytest.fixture
def options(data: Path) -> FitOptions:
    return FitOptions(
        kind="eagle",
        data=(data,),
        init=None,
        epochs=2,
        batch_tokens=64,
        learning_rate=2e-2,
        steps=2,
        layers=2,
        feature_weight=0.1,
        noise=0.05,
        vocabulary=40,
        held_out=8,
        seed=0,
    )


def losses(output: Path) -> list[float]:
    with (output / "curve.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_learns_and_can_be_served(
    settings: Settings, options: FitOptions, tmp_path: Path, name: str
) -> None:
    output = tmp_path / name
    fit(settings, options.model_copy(update={"kind": name, "epochs": 4}), output, QUIET, RHYTHM)
    curve = losses(output)
    assert sum(curve[-3:]) < 0.9 * sum(curve[:3])
    assert (output / "curve.png").stat().st_size > 0
    with (output / "curve.csv").open() as file:
        (judged,) = [row["acceptance_length"] for row in csv.DictReader(file) if not row["loss"]]
    assert float(judged) >= 1.0
    served = judging(settings, kind_named(name, 2, 2), output)
    assert build_drafter(served).vocab_size == 60


def test_a_killed_run_goes_on_to_the_same_bits(
    settings: Settings, options: FitOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(settings, options, tmp_path / "whole", QUIET, RHYTHM)
    step, calls = Trainer._step, 0

    def killed(self: Trainer) -> object:
        nonlocal calls
        if calls == 5:
            raise KeyboardInterrupt
        calls += 1
        return step(self)

    monkeypatch.setattr(Trainer, "_step", killed)
    often = replace(RHYTHM, checkpoint_seconds=-1.0)
    with pytest.raises(KeyboardInterrupt):
        fit(settings, options, tmp_path / "cut", QUIET, often)
    monkeypatch.undo()
    fit(settings, options, tmp_path / "cut", QUIET, RHYTHM)
    whole, cut = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert [row.split(",")[0] for row in (tmp_path / "cut/curve.csv").read_text().split()][-1] == (
        (tmp_path / "whole/curve.csv").read_text().split()[-1].split(",")[0]
    )


def test_a_fit_can_go_on_from_a_head(
    settings: Settings, options: FitOptions, tmp_path: Path
) -> None:
    fit(settings, options, tmp_path / "first", QUIET, RHYTHM)
    further = options.model_copy(
        update={"init": tmp_path / "first", "learning_rate": 0.0, "epochs": 1}
    )
    fit(settings, further, tmp_path / "second", QUIET, RHYTHM)
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "second"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_misfits_are_refused(settings: Settings, options: FitOptions, tmp_path: Path) -> None:
    output = tmp_path / "run"
    fit(settings, options.model_copy(update={"epochs": 1}), output, QUIET, RHYTHM)
    assert (output / CHECKPOINT_FILE).exists()
    with pytest.raises(StartError, match="other options"):
        fit(settings, options, output, QUIET, RHYTHM)
    with pytest.raises(StartError, match="too few to learn"):
        few = options.model_copy(update={"held_out": 1000})
        fit(settings, few, tmp_path / "few", QUIET, RHYTHM)
    with pytest.raises(StartError, match="must be one of eagle"):
        fit(settings, options.model_copy(update={"kind": "eagel"}), tmp_path / "k", QUIET, RHYTHM)
    with pytest.raises(StartError, match="not of the kind and size"):
        other = options.model_copy(update={"kind": "medusa", "init": output})
        fit(settings, other, tmp_path / "medusa", QUIET, RHYTHM)


def test_a_perfect_drafter_is_accepted_whole(settings: Settings, target: Path, data: Path) -> None:
    """The target itself as the draft model guesses every greedy token: all levels are accepted."""
    samples = list(Dataset.open(data).samples())[:6]
    speculation = {"drafter": "model", "draft_model": str(target), "depth": 3, "top_k": 1}
    served = settings.model_copy(
        update={"speculation": settings.speculation.model_copy(update=speculation)}
    )
    result = acceptance(build_drafter(served), samples, 3)
    assert result.accepted_at_depth == result.offered_at_depth
    tokens = [len(sample.tokens) - sample.prompt_length - 1 for sample in samples]
    assert result.tokens == sum(tokens)
    assert result.verifications == sum(-(-count // 4) for count in tokens)
    assert sum(result.nodes_in_bin) == 3 * result.verifications
