"""Prompts that the target invents itself: its own chat template, up to where the user speaks, is
continued by the model, which has learnt from such turns (Magpie, arXiv 2406.08464).
"""

import json
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
from rich.console import Console

from coppice.chat_template import ChatMessage
from coppice.errors import StartError
from coppice.models.hub import resolve_model
from coppice.models.loading import load_target
from coppice.models.placement import choose_device
from coppice.request import SamplingParams
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from kernels import ops
from training.generation import Generator, Question

SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)
MAX_TOKENS = 96
SHORTEST = 12  # characters of a prompt


def begun_turn(tokenizer: Tokenizer, opening: str) -> list[int]:
    """The chat prompt of a user who has said no more than `opening`, without what the template puts
    after a user's words."""
    silent, begun = (tokenizer.encode_chat([ChatMessage("user", words)]) for words in ("", opening))
    before = 0
    while before < len(silent) and silent[before] == begun[before]:
        before += 1
    return begun[: len(begun) - (len(silent) - before)]


def invent(
    settings: Settings,
    openings: Sequence[str],
    count: int,
    sessions: int,
    seed: int,
    output: Path,
    console: Console,
) -> None:
    """Writes `count` prompts at most, each beginning with one of `openings`, as JSON lines; what is
    cut off, too short or a repetition is left out."""
    ops.set_threads(settings.verifier.threads)
    path = resolve_model(settings.model.path, settings.cache_dir)
    tokenizer = Tokenizer.load(path)
    device = choose_device(settings.model.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    chosen = random.Random(seed).choices(openings, k=count)
    asked = [
        Question(
            begun_turn(tokenizer, opening),
            SAMPLING.model_copy(update={"seed": seed + number}),
            MAX_TOKENS,
        )
        for number, opening in enumerate(chosen)
    ]
    longest = max(len(question.tokens) for question in asked) + MAX_TOKENS
    generator = Generator(load_target(path, dtype, device), min(sessions, count), longest)
    written: dict[str, None] = {}
    with console.status("inventing prompts"):
        for opening, sample in zip(chosen, generator.answer(asked), strict=True):
            invented = sample.tokens[sample.prompt_length :].tolist()
            text = (opening + tokenizer.decode(invented)).strip()
            if len(invented) < MAX_TOKENS and len(text) >= SHORTEST:
                written[text] = None
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in written]
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print(f"{len(lines)} prompts in {output}")


def read_openings(path: Path | None) -> list[str]:
    r"""The lines of a file, `\n` in them meaning a new line; without a file, those that come with
    the package. Raises StartError when there are none."""
    file = path or Path(str(files("training") / "openings.txt"))
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"openings {file} cannot be read: {error}") from None
    openings = [line.replace("\\n", "\n") for line in lines if line.strip()]
    if not openings:
        raise StartError(f"openings {file}: no line in it")
    return openings
