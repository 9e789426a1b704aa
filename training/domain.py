"""A user's domain: its text and prompts, cut to what a head can be taught and judged with."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from coppice.errors import StartError
from coppice.models.decoder import Decoder
from coppice.request import SamplingParams
from coppice.tokenizer import Tokenizer
from training.dataset import Sample
from training.generation import Generator, Question
from training.prompts import read_prompts
from verifier_svc.runner import Rows, Runner

PASSAGE_CHARACTERS = 4  # a token, roughly; passages are cut into windows by tokens
PASS_ROWS = 1024  # of the target, at once
SESSIONS = 64  # answers at once
GREEDY = SamplingParams(temperature=0.0)
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # of the answers to learn from, in turn


@dataclass(frozen=True, slots=True)
class Piece:
    """What one sample is made of."""

    tokens: Sequence[int]
    is_text: bool  # else a prompt, in the chat template


def read_domain(
    tokenizer: Tokenizer,
    text: Sequence[Path],
    prompts: Sequence[Path],
    window: int,
    count: int,
    seed: int,
) -> list[Piece]:
    """At most `count` pieces of at most `window` tokens in an order that the seed decides; what is
    there twice counts once. Raises StartError where a file cannot be read."""
    passages = [(part, True) for file in text for part in _passages(file, window)]
    chats = [(prompt, False) for file in prompts for prompt in read_prompts(file)]
    found = list(dict.fromkeys((*passages, *chats)))
    random.Random(seed).shuffle(found)
    pieces: list[Piece] = []
    for content, is_text in found:
        if isinstance(content, str):
            tokens = tokenizer.encode(content)
            windows = (tokens[start : start + window] for start in range(0, len(tokens), window))
            pieces += [Piece(each, is_text) for each in windows if 2 * len(each) >= window]
        else:
            tokens = tokenizer.encode_chat(content)
            pieces += [Piece(tokens, is_text)] if len(tokens) <= window else []
        if len(pieces) >= count:
            return pieces[:count]
    return pieces


def _passages(file: Path, window: int) -> Iterator[str]:
    """Whole lines of a text, together a window or more."""
    lines: list[str] = []
    size = 0
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            for line in opened:
                lines.append(line)
                size += len(line)
                if size >= PASSAGE_CHARACTERS * window:
                    yield "".join(lines)
                    lines, size = [], 0
    except OSError as error:
        raise StartError(f"text {file} cannot be read: {error.strerror}") from None
    if lines:
        yield "".join(lines)


class Teacher:
    """The target, that makes samples of pieces."""

    def __init__(self, model: Decoder, window: int, feature_layers: tuple[int, ...]) -> None:
        self._runner = Runner(model, max(PASS_ROWS, window), feature_layers)
        self._generator = Generator(model, SESSIONS, 2 * window, feature_layers)
        self._window = window

    def lessons(self, pieces: Sequence[Piece], first: int, seed: int) -> list[Sample]:
        """Of text, the text itself, with the features that the target has on it (teacher forcing);
        of prompts, the target's answers. `first` is the number of the first piece."""
        asked = [
            Question(
                piece.tokens,
                GREEDY.model_copy(
                    update={
                        "temperature": TEMPERATURES[number % len(TEMPERATURES)],
                        "seed": seed + number,
                    }
                ),
                self._window,
            )
            for number, piece in enumerate(pieces, start=first)
            if not piece.is_text
        ]
        texts = [piece.tokens for piece in pieces if piece.is_text]
        return [*self._forced(texts), *self._generator.answer(asked)]

    def exams(self, pieces: Sequence[Piece]) -> list[Sample]:
        """What the target itself says, greedily: its answers to prompts, and how it goes on with
        the first half of a text."""
        asked = [
            Question(
                piece.tokens[: len(piece.tokens) // 2] if piece.is_text else piece.tokens,
                GREEDY,
                self._window // 2,
            )
            for piece in pieces
        ]
        return [sample for sample in self._generator.answer(asked) if sample.answer_rows > 0]

    def _forced(self, texts: Sequence[Sequence[int]]) -> Iterator[Sample]:
        """All tokens but the first are the answer."""
        of_pass = max(1, PASS_ROWS // self._window)
        for first in range(0, len(texts), of_pass):
            part = texts[first : first + of_pass]
            rows: list[Rows] = []
            used = 0
            for tokens in part:
                inputs = tokens[:-1]
                slots = range(used, used + len(inputs))
                rows.append(Rows(inputs, range(len(inputs)), slots, (), None, 0))
                used = slots.stop
            self._runner.run(rows)
            features = self._runner.features[:used].to("cpu", torch.bfloat16, copy=True)
            lengths = [len(tokens) - 1 for tokens in part]
            for tokens, own in zip(part, features.split(lengths), strict=True):
                yield Sample(torch.tensor(tokens, dtype=torch.int32), 1, 1.0, own)
