"""The shared evaluation prompts, as chat prompts of one model."""

import json
from pathlib import Path

from coppice.tokenizer import ChatMessage, Tokenizer
from training.evaluation_prompts import DEFAULT_FOLDER


def first_turns(name: str, count: int, folder: Path = DEFAULT_FOLDER) -> list[str]:
    """The first user turn of the first `count` questions of a set."""
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["turns"][0] for line in lines]


def chat_prompts(
    tokenizer: Tokenizer, name: str, count: int, folder: Path = DEFAULT_FOLDER
) -> list[list[int]]:
    """Token ids of the first `count` questions, in the model's chat template."""
    return [
        tokenizer.encode_chat([ChatMessage("user", text)])
        for text in first_turns(name, count, folder)
    ]
