import json
import socket
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from coppice.models.hub import DEFAULT_MODEL
from coppice.settings import Settings
from kernels import ops
from launcher.checkpoints import model_and_head
from launcher.cli import app
from launcher.doctor import cpu_info, ray


def diagnose(tmp_path: Path, *flags: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and findings by name, with an empty cache and any free ports."""
    given = ("--cache-dir", str(tmp_path), "--port", "0", "--gateway-http-port", "0", *flags)
    result = CliRunner().invoke(app, ["doctor", "--json", *given], catch_exceptions=False)
    report = json.loads(result.stdout)
    assert report["ok"] == (result.exit_code == 0)
    return result.exit_code, {finding["name"]: finding for finding in report["findings"]}


def test_a_sound_machine_lacks_nothing(tmp_path: Path) -> None:
    code, findings = diagnose(tmp_path)
    assert code == 0
    assert {"python", "cpu", "memory", "gpu", "kernels", "torch", "ray", "grpcio"} <= set(findings)
    assert findings["numerics"]["found"].startswith("torch-")
    assert ops.describe() in findings["numerics"]["found"]
    assert findings["redis server"]["state"] == "ok"
    assert findings["port"]["state"] == "ok"


def test_a_model_that_has_to_be_converted_is_noted_and_not_converted(tmp_path: Path) -> None:
    _, findings = diagnose(tmp_path)
    assert findings["model"]["state"] == "note"
    assert "coppice pull" in findings["model"]["mend"]
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_everything_missing_has_its_mend(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, findings = diagnose(
            tmp_path,
            *("--port", port),
            *("--redis-url", "redis://127.0.0.1:1"),
            *("--ray-address", "127.0.0.1:1"),
            *("--model", "/nowhere"),
        )
    assert code == 1
    missing = {name for name, finding in findings.items() if finding["state"] == "missing"}
    assert missing == {"port", "redis server", "ray cluster", "model"}
    assert all(findings[name]["mend"] for name in missing)


def test_a_broken_checkpoint_is_missing(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{")
    settings = Settings.model_validate({"model": {"path": str(tmp_path)}})
    (finding,) = model_and_head(settings)
    assert finding.is_missing
    assert "config.json" in finding.found


def tiny_model(directory: Path, first_word: str) -> Path:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = {first_word: 0, "b": 1}
    Tokenizer(WordLevel(words, unk_token="b")).save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize(("word", "state"), [("a", "ok"), ("other", "missing")])
def test_a_draft_model_is_held_against_the_target(tmp_path: Path, word: str, state: str) -> None:
    target, draft = tiny_model(tmp_path / "target", "a"), tiny_model(tmp_path / "draft", word)
    speculation = {"drafter": "model", "draft_model": str(draft)}
    settings = Settings.model_validate({"model": {"path": str(target)}, "speculation": speculation})
    (_, head) = model_and_head(settings)
    assert head.state == state
    assert "draft" in head.found


def test_a_draft_model_that_has_to_be_converted_is_noted_and_not_converted(tmp_path: Path) -> None:
    speculation = {"drafter": "model", "draft_model": DEFAULT_MODEL}
    path = tiny_model(tmp_path / "target", "a")
    settings = Settings.model_validate(
        {"model": {"path": str(path)}, "speculation": speculation, "cache_dir": tmp_path / "cache"}
    )
    (_, head) = model_and_head(settings)
    assert head.state == "note"
    assert "coppice pull" in head.mend
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())


def test_the_table_shows_every_finding(tmp_path: Path) -> None:
    flags = ["--cache-dir", str(tmp_path), "--port", "0", "--gateway-http-port", "0"]
    result = CliRunner().invoke(app, ["doctor", *flags], env={"COLUMNS": "200"})
    for name in ("python", "cpu", "redis server", "ray cluster", "model", "http port"):
        assert f"\n{name} " in result.stdout


def test_a_ray_address_without_a_port_is_not_tried() -> None:
    assert ray("auto").state == "note"


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("flags\t\t: fpu avx2\n", "flags", "fpu avx2"),
        ("model name\t: X: Y\n", "model name", "X: Y"),
    ],
)
def test_cpu_info_is_read_by_key(line: str, key: str, value: str) -> None:
    assert cpu_info(f"processor\t: 0\n{line}\n")[key] == value
