"""What guard and budget make of a load, by simulation: `python -m benchmarks.simulate`.

Without options a table of concurrency by mode for each hardware: `auto` is the service as it is,
`on` is a fixed budget without a guard, `off` is plain decoding. With `--poisson`, `--steps` or
`--trace` the same for that load, and with `--drafters 1,2` for two drafters, of which one takes
twice as long. With `--prompt 200` everybody begins with a prompt of about so many tokens.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.hardware import HARDWARE, Hardware
from benchmarks.simulation import MODES, Mode, Outcome, Simulation
from benchmarks.traffic import Constant, Replay, Traffic, poisson, read_trace
from coppice.settings import Settings, SpeculationSettings, VerifierSettings

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128)
WALKS = 16_000  # of all sessions of a run together, and
PASSES = 400  # at least
POISSON_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """A name, and traffic that begins anew with each call."""

    name: str
    traffic: Callable[[], Traffic]


@dataclass(frozen=True, slots=True)
class Run:
    hardware: str
    load: str
    mode: Mode
    outcome: Outcome


def at_concurrency(hardware: Hardware, sessions: int, seed: int = 0, walks: int = WALKS) -> Load:
    """Always so many sessions, for the time of as many plain steps as `walks` asks for."""
    seconds = max(PASSES, walks // sessions) * hardware.step_seconds(sessions)
    return Load(str(sessions), lambda: Constant([(0.0, sessions)], seconds, Random(seed)))


def simulate(
    hardware: Hardware,
    load: Load,
    settings: Settings,
    seed: int = 0,
    drafters: Sequence[float] = (1.0,),
    prompt: int = 1,
) -> list[Run]:
    """One run per mode; `drafters` by how many times as long as the hardware's they take."""
    return [
        Run(
            hardware.name,
            load.name,
            mode,
            Simulation(hardware, mode, load.traffic(), settings, seed, drafters, prompt).run(),
        )
        for mode in MODES
    ]


def main(
    hardware: Annotated[str, typer.Option(help=f"{', '.join(HARDWARE)} or all")] = "all",
    nodes: Annotated[int, typer.Option(help="speculation.nodes")] = 15,
    row_budget: Annotated[int, typer.Option(help="verifier.row_budget")] = 128,
    rate: Annotated[float | None, typer.Option("--poisson", help="arrivals per second")] = None,
    steps: Annotated[
        str | None, typer.Option(help="sessions from second on: 0:4,10:64,20:4")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help='lines of {"at": s, "tokens": n}')] = None,
    drafters: Annotated[str, typer.Option(help="relative times of their drafts: 1,2")] = "1",
    prompt: Annotated[int, typer.Option(min=1, help="mean tokens of a prompt")] = 1,
    seed: Annotated[int, typer.Option(help="of arrivals, lengths and acceptance")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="also to this file")] = None,
) -> None:
    """Simulates the verifier's policy under load."""
    if hardware not in (*HARDWARE, "all"):
        raise typer.BadParameter(f"--hardware {hardware}: {', '.join(HARDWARE)} or all")
    settings = Settings(
        speculation=SpeculationSettings(nodes=nodes),
        verifier=VerifierSettings(row_budget=row_budget),
    )
    try:
        slowness = [float(each) for each in drafters.split(",")]
    except ValueError:
        slowness = []
    if not slowness or min(slowness) <= 0:
        raise typer.BadParameter(f"--drafters {drafters}: numbers above 0, as in 1,2")
    given = _given_loads(rate, steps, trace, seed)
    runs: list[Run] = []
    for each in HARDWARE.values() if hardware == "all" else [HARDWARE[hardware]]:
        loads = given or [at_concurrency(each, sessions, seed) for sessions in CONCURRENCY]
        mine = [
            run for load in loads for run in simulate(each, load, settings, seed, slowness, prompt)
        ]
        Console().print(as_table(each.name, mine))
        runs.extend(mine)
    if json_path is not None:
        json_path.write_text(json.dumps([as_json(run) for run in runs], indent=1) + "\n")


def _given_loads(
    rate: float | None, steps: str | None, trace: Path | None, seed: int
) -> list[Load]:
    loads: list[Load] = []
    if rate is not None:
        arrivals = list(poisson(rate, POISSON_SECONDS, Random(seed)))
        loads.append(Load(f"poisson {rate:g}/s", lambda: Replay(arrivals)))
    if steps is not None:
        pairs = [step.split(":") for step in steps.split(",")]
        levels = [(float(start), int(sessions)) for start, sessions in pairs]
        end = levels[-1][0] + 10.0
        loads.append(Load(f"steps {steps}", lambda: Constant(levels, end, Random(seed))))
    if trace is not None:
        recorded = read_trace(trace)
        loads.append(Load(trace.name, lambda: Replay(recorded)))
    return loads


def as_table(name: str, runs: list[Run]) -> Table:
    table = Table(title=f"{name}: tokens/s (node budget, share of time guarded)")
    table.add_column("sessions", justify="right")
    for column in (*MODES, "auto / best"):
        table.add_column(column, justify="right")
    for load in dict.fromkeys(run.load for run in runs):
        row = {run.mode: run.outcome for run in runs if run.load == load}
        best = max(row["on"].tokens_per_second, row["off"].tokens_per_second)
        table.add_row(
            load,
            *(_shown(row[mode]) for mode in MODES),
            f"{row['auto'].tokens_per_second / best:.3f}",
        )
    return table


def _shown(outcome: Outcome) -> str:
    share = f", {outcome.guard_share:.0%}" if outcome.guard_share else ""
    return f"{outcome.tokens_per_second:,.0f} ({outcome.node_budget_mean:.1f}{share})"


def as_json(run: Run) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "hardware": run.hardware,
        "load": run.load,
        "mode": run.mode,
        "tok_s": round(outcome.tokens_per_second, 2),
        "node_budget_mean": round(outcome.node_budget_mean, 3),
        "guard_mode_share": round(outcome.guard_share, 4),
        "guard_switches": outcome.switches,
        "drafter_s": round(outcome.drafting_seconds, 3),
        "waiting_s": round(outcome.waiting_seconds, 3),
        "seconds": round(outcome.seconds, 3),
    }


if __name__ == "__main__":
    typer.run(main)
