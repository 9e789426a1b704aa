"""The whole service under random and hostile load for a long time: `python -m benchmarks.soak`.

Clients ask what was answered plainly before, and compare; they break off, vanish, and ask for what
cannot be; a hostile drafter takes sessions over. Now and then all of it rests, and nothing may be
left: no slot held, no file open, and, after a warm-up, no memory that grows.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.hostile import hostile_drafter
from benchmarks.serving import Served, served
from benchmarks.soak_clients import Client, Question, make_questions, plain_answers
from coppice.machine import machine
from coppice.models.hub import resolve_model
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from launcher.sources import load_settings

STRETCHES = 6  # with a rest after each; the first two warm up
WARM_UP = 2
REST_SECONDS = 20.0  # in which everything must have come to rest
MORE_FILES = 4  # open after the last stretch than after the warm-up, at most
MORE_MEMORY_BYTES, MORE_MEMORY = 16 << 20, 0.03  # likewise; the sum of both
MEMORY_MINUTES = 5.0  # that a run must have for its memory to tell anything

# A pool that all clients together do not fit in, so that sessions are preempted; records of
# answers that go soon, so that the store's memory is flat.
SERVICE = {"verifier.kv_slots": 1024, "redis.session_ttl_seconds": 30}


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the processes of one name, at rest."""

    processes: int
    files: int
    bytes: int  # resident


@dataclass(slots=True)
class Soak:
    """What happened."""

    minutes: float
    rests: list[dict[str, Usage]] = field(default_factory=list[dict[str, Usage]])  # by name
    actions: Counter[str] = field(default_factory=Counter[str])
    bad_trees: int = 0  # sent
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    violations: list[str] = field(default_factory=list[str])


COUNTED = ("preemptions", "malformed_drafts", "stale_drafts", "prefix_cache_hit_tokens")


async def soak(
    one: Served,
    questions: Sequence[Question],
    vocab_size: int,
    clients: int,
    minutes: float,
    seed: int,
) -> Soak:
    """All stretches."""
    result = Soak(minutes)
    async with (
        grpc.aio.insecure_channel(one.address) as channel,
        hostile_drafter(one.verifiers[0], vocab_size, Random(seed)) as hostile,
    ):
        answers = await plain_answers(channel, questions)
        for stretch in range(STRETCHES):
            until = time.monotonic() + 60 * minutes / STRETCHES
            randoms = [Random(f"{seed} {stretch} {client}") for client in range(clients)]
            people = [
                Client(one.address, channel, hostile, questions, answers, random)
                for random in randoms
            ]
            await asyncio.gather(*(each.ask_until(until) for each in people))
            for each in people:
                result.actions += each.actions
                result.violations += each.violations
            await _rest(one, result)
        result.bad_trees = hostile.sent
        metrics = await one.metrics()
    result.metrics = {name: metrics[f"coppice_{name}_total"] for name in COUNTED}
    result.violations += growth(result.rests, minutes >= MEMORY_MINUTES)
    return result


async def _rest(one: Served, result: Soak) -> None:
    """Waits until nothing is held, and notes what the processes use then."""
    until = time.monotonic() + REST_SECONDS
    while (held := await one.slots_in_use()) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    if held:
        result.violations.append(f"{held:.0f} slots held while nobody asks")
    result.rests.append(usages(one))


def usages(one: Served) -> dict[str, Usage]:
    return {
        name: Usage(
            len(each), sum(p.num_fds() for p in each), sum(p.memory_info().rss for p in each)
        )
        for name, each in one.processes().items()
    }


def growth(rests: Sequence[dict[str, Usage]], memory: bool) -> list[str]:
    """What there is more of after the last stretch than after the warm-up."""
    found: list[str] = []
    before, after = rests[WARM_UP - 1], rests[-1]
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            found.append(f"{name}: {'gone' if name in before else 'new'}")
            continue
        old, new = before[name], after[name]
        if new.processes != old.processes:
            found.append(f"{name}: {old.processes} processes became {new.processes}")
        if new.files > old.files + MORE_FILES:
            found.append(f"{name}: {old.files} open files became {new.files}")
        if memory and new.bytes > old.bytes * (1 + MORE_MEMORY) + MORE_MEMORY_BYTES:
            found.append(f"{name}: {old.bytes >> 20} MB became {new.bytes >> 20} MB")
    return found


def run(settings: Settings, clients: int, questions: int, minutes: float, seed: int) -> Soak:
    """On a service of its own. Raises StartError."""
    tokenizer = Tokenizer.load(resolve_model(settings.model.path, settings.cache_dir))
    words = Path(__file__).with_name("soak.py").read_text(encoding="utf-8")
    asked = make_questions(questions, tokenizer.encode(words), Random(seed))
    with served(settings) as one:
        return asyncio.run(soak(one, asked, tokenizer.vocab_size, clients, minutes, seed))


def as_json(result: Soak) -> dict[str, Any]:
    return {"machine": machine(), **asdict(result), "actions": dict(result.actions)}


def show(result: Soak, console: Console) -> None:
    done = ", ".join(f"{count} {name}" for name, count in result.actions.most_common())
    counted = ", ".join(f"{count:.0f} {name}" for name, count in result.metrics.items())
    console.print(f"{done}; {result.bad_trees} bad trees; {counted}", highlight=False)
    table = Table(title="at rest: open files, MB", title_justify="left", box=None, pad_edge=False)
    table.add_column("processes", no_wrap=True)
    for stretch in range(len(result.rests)):
        table.add_column(f"{stretch + 1}", justify="right")
    for name in result.rests[-1]:
        found = [rest.get(name, Usage(0, 0, 0)) for rest in result.rests]
        table.add_row(name, *(f"{each.files}, {each.bytes >> 20}" for each in found))
    console.print(table)
    for violation, count in Counter(result.violations).most_common(20):
        console.print(f"violation, {count} times: {violation}", highlight=False, markup=False)
    verdict = "failed" if result.violations else "passed"
    console.print(f"{verdict}: {result.minutes:g} minutes, {len(result.violations)} violations")


def main(
    minutes: Annotated[float, typer.Option(min=0.01, help="of asking")] = 30.0,
    clients: Annotated[int, typer.Option(min=1, help="at once")] = 12,
    questions: Annotated[int, typer.Option(min=1, help="whose plain answers are kept")] = 32,
    seed: Annotated[int, typer.Option(help="of all that is random")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Soaks a service, prints a verdict, and exits with 1 where something was violated."""
    result = run(load_settings(SERVICE), clients, questions, minutes, seed)
    show(result, Console())
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(result), indent=2) + "\n", encoding="utf-8")
    if result.violations:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
