"""Ways to draft, compared on a tiny target whose own twin is the draft model."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from benchmarks.paradigms import PLAIN, Comparison, ParadigmOptions, compare
from coppice.settings import Settings
from launcher.cli import app
from training.evaluate import EvaluateOptions, evaluate
from training.fit import FitOptions, fit
from training.prepare import PrepareOptions, prepare
from training.run import Rhythm

QUIET = Console(quiet=True)
TOKENS = 16
WIDE = {"COLUMNS": "160"}


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories `eagle` and `eagle3` of barely trained heads, and the prompts."""
    folder = tmp_path_factory.mktemp("heads")
    settings = Settings.model_validate({"model": {"path": str(target)}, "verifier": {"threads": 1}})
    (folder / "prompts.txt").write_text("\n".join(f"w{n} w{n * n % 57}" for n in range(12)))
    data = PrepareOptions(
        [folder / "prompts.txt"], [], folder / "data", 12, (0.0,), 8, 12, 16, True, 0
    )
    prepare(settings, data, QUIET)
    for kind in ("eagle", "eagle3"):
        options = FitOptions(
            kind=kind,
            data=(folder / "data",),
            init=None,
            epochs=1,
            batch_tokens=64,
            learning_rate=1e-3,
            steps=1,
            layers=1,
            feature_weight=0.1,
            noise=0.0,
            vocabulary=40,
            held_out=2,
            seed=0,
        )
        fit(settings, options, folder / kind, QUIET, Rhythm())
    return folder


@pytest.fixture(scope="module")
def comparison(target: Path, made: Path) -> Comparison:
    settings = Settings.model_validate(
        {
            "model": {"path": str(target), "dtype": "float32"},
            "verifier": {"threads": 1},
            "drafter": {"quantization": "none"},
            "speculation": {"head": made / "eagle", "nodes": 3, "top_k": 1, "depth": 3},
        }
    )
    options = ParadigmOptions(None, made / "eagle3", str(target), [made / "prompts.txt"], 2, TOKENS)
    return compare(settings, options, QUIET)


def test_all_that_is_given_answers_as_plain_decoding_does(comparison: Comparison) -> None:
    assert list(comparison.measured) == [
        PLAIN, "n-gram", "draft model", "EAGLE-1 static", "EAGLE-2 dynamic",
        "EAGLE-2 + n-gram", "EAGLE-3",
    ]  # fmt: skip
    assert dict(comparison.left_out) == {"Medusa": "--medusa"}
    assert all(each.differing_tokens == 0 for each in comparison.measured.values())
    assert all(len(each.speeds) == 2 for each in comparison.measured.values())


def test_a_drafter_that_is_the_target_is_always_right(comparison: Comparison) -> None:
    """Chains of three: four tokens a step; of fifteen after the first, the last step has three."""
    assert comparison.measured["draft model"].steps == 2 * 4
    assert comparison.measured["draft model"].acceptance_length == 15 / 4
    assert comparison.measured[PLAIN].acceptance_length == 1.0


def test_evaluation_counts_what_the_engine_counted(
    comparison: Comparison, made: Path, target: Path
) -> None:
    """Of an EAGLE-3 head, which reads other features. No answer here ends before its last token."""
    speculation = {"head": made / "eagle3", "top_k": 1, "depth": 3, "ngram": False}
    settings = Settings.model_validate(
        {
            "model": {"path": str(target)},
            "verifier": {"threads": 1},
            "drafter": {"quantization": "none"},
            "speculation": speculation,
        }
    )
    options = EvaluateOptions([made / "prompts.txt"], 2, TOKENS, (0.0,), (3,), 0)
    (result,) = evaluate(settings, options, QUIET).results
    measured = comparison.measured["EAGLE-3"]
    assert result.acceptance.tokens == measured.committed == 2 * (TOKENS - 1)
    assert result.acceptance.verifications == measured.steps


def test_memory_is_that_of_the_weights_and_of_one_token(
    comparison: Comparison, target: Path
) -> None:
    stored = load_file(target / "model.safetensors")
    own = 4 * sum(tensor.numel() for tensor in stored.values())
    measured = comparison.measured
    # Padding of packed weights, and a packed copy of the tied LM head, come on top.
    assert own <= measured["draft model"].weights_bytes < 2 * own
    assert measured["draft model"].kv_bytes_per_token == 6 * 2 * 2 * 8 * 4
    assert measured["EAGLE-2 dynamic"].kv_bytes_per_token == 2 * 2 * 8 * 4
    assert 0 < measured["EAGLE-2 dynamic"].weights_bytes < measured["draft model"].weights_bytes
    for name in (PLAIN, "n-gram"):
        assert (measured[name].weights_bytes, measured[name].kv_bytes_per_token) == (0, 0)


def test_the_command_says_what_is_left_out(made: Path, target: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(target), "--head", str(made / "eagle"), "--verifier-threads", "1"]
    sizes = ["--prompts", str(made / "prompts.txt"), "--count", "1", "--tokens", "8"]
    output = ["--json", str(tmp_path / "p.json")]
    result = CliRunner().invoke(app, ["bench", "paradigms", *arguments, *sizes, *output], env=WIDE)
    assert result.exit_code == 0, result.output
    assert "EAGLE-3 (--eagle3)" in result.output
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["paradigms"]["plain"]["over_plain"] == 1.0
    assert set(found["left_out"]) == {"draft model", "Medusa", "EAGLE-3"}
