"""Prompts to train on, read from whatever layout they come in."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from coppice.chat_template import ChatMessage
from coppice.errors import StartError

READ_CHARACTERS = 1 << 20
OVERLAP_WORDS = 8  # a prompt that shares so many words in a row with a held-out one is left out
USER_NAMES = ("user", "human")

Prompt = tuple[ChatMessage, ...]  # up to where the answer begins


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts in a file: up to the end of the first user turn of every entry.

    By suffix: `.txt` has a prompt a line; `.jsonl` an object a line; `.json` a list of objects,
    which may be cut off in the middle (the rest counts). An object is a chat (`messages` of `role`
    and `content`), ShareGPT's layout (`conversations` of `from` and `value`), or has the text in
    `turns` (the first one), `prompt`, `instruction` or `text`. What has no user turn is skipped.
    Raises StartError where the file holds something else.
    """
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix == ".txt":
                yield from (_user(line.strip()) for line in file if line.strip())
                return
            entries = _lines(path, file) if path.suffix == ".jsonl" else _elements(path, file)
            for entry in entries:
                prompt = _prompt(path, entry)
                if prompt:
                    yield prompt
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"prompts {path} cannot be read: {error}") from None


def _user(text: str) -> Prompt:
    return (ChatMessage("user", text),)


def _lines(path: Path, file: TextIO) -> Iterator[Any]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise StartError(f"prompts {path}, line {number}: not JSON: {error}") from None


def _elements(path: Path, file: TextIO) -> Iterator[Any]:
    """The elements of one long JSON list, without holding all of it."""
    decoder, text, more = json.JSONDecoder(), "", True
    while more:
        read = file.read(READ_CHARACTERS)
        more, text = bool(read), text + read
        while text := text.lstrip(" \r\n\t,[" if more or text else ""):
            try:
                element, end = decoder.raw_decode(text)
            except ValueError:
                break  # the rest of it is not read yet, or was cut off
            yield element
            text = text[end:]
            if text.lstrip().startswith("]"):
                return
        if more and len(text) > 64 * READ_CHARACTERS:
            raise StartError(f"prompts {path}: an element is longer than 64 MB, or not JSON")


def _prompt(path: Path, entry: Any) -> Prompt:
    if not isinstance(entry, Mapping):
        raise StartError(f"prompts {path}: expected objects, found {type(entry).__name__}")
    turns = entry.get("messages", entry.get("conversations"))
    if isinstance(turns, Sequence):
        return _first_turn(turns)
    first = entry.get("turns")
    text = first[0] if isinstance(first, Sequence) and first else None
    for key in ("prompt", "instruction", "text"):
        text = text or entry.get(key)
    if not isinstance(text, str):
        known = "messages, conversations, turns, prompt, instruction or text"
        raise StartError(f"prompts {path}: an object has {sorted(entry)}, expected {known}")
    return _user(text.strip()) if text.strip() else ()


def _first_turn(turns: Sequence[Any]) -> Prompt:
    messages: list[ChatMessage] = []
    for turn in turns:
        role = str(turn.get("role", turn.get("from", "")))
        content = str(turn.get("content", turn.get("value", ""))).strip()
        if role == "system" and not messages:
            messages.append(ChatMessage("system", content))
        elif role in USER_NAMES and content:
            return (*messages, ChatMessage("user", content))
        else:
            return ()
    return ()


class HeldOut:
    """Prompts for evaluation alone: nothing that overlaps them may be trained on."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._seen: set[tuple[str, ...]] = set()
        for prompt in prompts:
            self._seen |= _runs(prompt[-1].content)

    def __contains__(self, prompt: Prompt) -> bool:
        return not self._seen.isdisjoint(_runs(prompt[-1].content))


def _runs(text: str) -> set[tuple[str, ...]]:
    """All runs of OVERLAP_WORDS words of a text; of a shorter one, the whole of it."""
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    count = max(1, len(words) - OVERLAP_WORDS + 1)
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(count)}
