"""Prompts that heads are judged with, and never trained on: the first turns of MT-bench, GSM8K and
HumanEval, where a checkout has them beside it."""

from pathlib import Path

from coppice.errors import StartError

SETS = ("mt_bench", "gsm8k", "humaneval")
DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts"


def default_files() -> list[Path]:
    """One file a set. Raises StartError where they are missing."""
    files = [DEFAULT_FOLDER / f"{name}.jsonl" for name in SETS]
    if missing := [file.name for file in files if not file.exists()]:
        raise StartError(f"no {missing[0]} in {DEFAULT_FOLDER}: name files of prompts, --prompts")
    return files
