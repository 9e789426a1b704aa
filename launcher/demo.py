"""`coppice demo`: one question with and without speculation, on a service of its own."""

import contextlib
from collections.abc import Sequence

from rich.console import Console

from coppice.settings import Settings
from launcher.chat import print_answer
from launcher.client import Answer, AnswerOptions, Client, Turn
from launcher.compose import off_loop, service
from launcher.terminal import steps
from launcher.up import ready_line
from protos.common_pb2 import SamplingParams, StoppingParams

QUESTION = "What is the difference between weather and climate? Answer in a short paragraph."
MAX_TOKENS = 128


async def demo(settings: Settings, console: Console) -> int:
    async with contextlib.AsyncExitStack() as parts:
        with steps(console) as shown:
            running = await parts.enter_async_context(service(on_free_ports(settings), shown))
        console.print(
            ready_line(running), style="dim", markup=False, highlight=False, soft_wrap=True
        )
        print(f"\n> {QUESTION}\n", flush=True)
        speculative, plain = await off_loop(lambda: ask_twice(running.address))
    print(f"\n{comparison(speculative, plain)}", flush=True)
    return 0


def on_free_ports(settings: Settings) -> Settings:
    gateway = settings.gateway.model_copy(update={"port": 0, "http_port": 0})
    return settings.model_copy(update={"gateway": gateway})


def ask_twice(address: str) -> tuple[Answer, Answer]:
    """The greedy answer with speculation, streamed to stdout, and without, silent."""
    with Client(address) as client:
        client.chat([Turn("user", "Hello")], greedy(True)).finish()  # the first passes are slow
        speculative = print_answer(client.chat([Turn("user", QUESTION)], greedy(True)))
        plain = client.chat([Turn("user", QUESTION)], greedy(False)).finish()
    return speculative, plain


def greedy(speculation: bool) -> AnswerOptions:
    return AnswerOptions(
        SamplingParams(temperature=0.0), StoppingParams(max_tokens=MAX_TOKENS), speculation
    )


def comparison(speculative: Answer, plain: Answer) -> str:
    length = speculative.acceptance_length
    accepted = "no tree verified" if length is None else f"acceptance length {length:.2f}"
    return (
        f"speculative: {speculative.tokens_per_second:.1f} tokens/s, {accepted} | "
        f"plain: {plain.tokens_per_second:.1f} tokens/s | "
        f"same tokens: {agreement(speculative.token_ids, plain.token_ids)}"
    )


def agreement(one: Sequence[int], other: Sequence[int]) -> str:
    if one == other:
        return f"yes, all {len(one)}"
    pairs = zip(one, other, strict=False)
    differing = (index for index, (a, b) in enumerate(pairs) if a != b)
    first = next(differing, min(len(one), len(other)))
    return f"no, from token {first + 1} of {max(len(one), len(other))} on"
