"""A load as a table, as JSON and as a picture."""

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.closed_loop import percentile_ms
from benchmarks.load import Cell, Load
from benchmarks.simulation import Mode
from coppice.machine import machine
from training.picture import new_figure


def over(load: Load, concurrency: int, others: tuple[Mode, ...]) -> float | None:
    """Tokens/s of `auto` over the best of the others, median of the rounds, since windows that
    follow each other share the machine's mood; None where not all were measured."""
    found = [load.driven.cells.get((concurrency, mode)) for mode in ("auto", *others)]
    cells = [cell for cell in found if cell is not None]
    if len(cells) < len(found):
        return None
    best = max(cells[1:], key=lambda cell: cell.tally.tokens_per_second)
    return median(a / b for a, b in zip(cells[0].speeds, best.speeds, strict=True))


def as_json(load: Load) -> dict[str, Any]:
    """Latencies are in milliseconds."""
    options, settings, latencies = load.options, load.settings, load.latencies
    return {
        "machine": machine(),
        "setting": {
            "sets": [file.stem for file in options.prompts],
            "rounds": options.rounds,
            "answers": options.answers,
            "tokens": options.tokens,
            "model": settings.model.path,
            "dtype": settings.model.dtype,
            "nodes": settings.speculation.nodes,
            "row_budget": settings.verifier.row_budget,
        },
        "rows": [
            _row(concurrency, mode, cell) for (concurrency, mode), cell in load.driven.cells.items()
        ],
        "ratios": [
            {
                "concurrency": concurrency,
                "auto_over_best": _rounded(over(load, concurrency, ("on", "off"))),
                "auto_over_off": _rounded(over(load, concurrency, ("off",))),
                "auto_over_vllm": _rounded(over_vllm(load, concurrency)),
            }
            for concurrency in options.concurrency
        ],
        "vllm": [
            {"concurrency": concurrency, "tok_s": _rounded(tally.tokens_per_second)}
            for concurrency, tally in load.vllm.items()
        ],
        "latencies": {name: _rounded(value) for name, value in asdict(latencies).items()},
        "prefix_ttft_ratio": _rounded(latencies.prefix_ttft_ratio),
        "itl_beside_prompt_ratio": _rounded(latencies.itl_beside_prompt_ratio),
        "idle_cores": _rounded(load.driven.idle_cores),
        "compared_tokens": load.driven.agreement.compared,
        "differing_tokens": load.driven.agreement.differing,
    }


def over_vllm(load: Load, concurrency: int) -> float | None:
    """Tokens/s of `auto` over vLLM's; None where not both were measured."""
    cell, peer = load.driven.cells.get((concurrency, "auto")), load.vllm.get(concurrency)
    if cell is None or peer is None:
        return None
    return cell.tally.tokens_per_second / peer.tokens_per_second


def _row(concurrency: int, mode: Mode, cell: Cell) -> dict[str, Any]:
    tally = cell.tally
    return {
        "concurrency": concurrency,
        "mode": mode,
        "tok_s": _rounded(tally.tokens_per_second),
        "tok_s_by_round": [_rounded(speed) for speed in cell.speeds],
        "ttft_p50": _rounded(percentile_ms(tally.ttft, 50)),
        "ttft_p99": _rounded(percentile_ms(tally.ttft, 99)),
        "itl_p50": _rounded(percentile_ms(tally.itl, 50)),
        "itl_p99": _rounded(percentile_ms(tally.itl, 99)),
        "acceptance_length": _rounded(tally.acceptance_length),
        "node_budget_mean": _rounded(cell.node_budget_mean),
        "guard_mode_share": _rounded(tally.guarded_share),
        "drafter_cpu_s": _rounded(cell.drafter_cpu_s),
        "seconds": _rounded(tally.seconds),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def show(load: Load, console: Console) -> None:
    table = Table(title="under load", title_justify="left", box=None, pad_edge=False)
    table.add_column("clients, mode", no_wrap=True)
    for heading in (
        *("tokens/s", "over best", "over off", "TTFT p50, ms", "p99", "ITL p50, ms", "p99"),
        *("accepted", "nodes", "guarded", "drafter CPU, s"),
    ):
        table.add_column(heading, justify="right")
    for (concurrency, mode), cell in load.driven.cells.items():
        tally, auto = cell.tally, mode == "auto"
        table.add_row(
            f"{concurrency} {mode}",
            f"{tally.tokens_per_second:.1f}",
            _shown(over(load, concurrency, ("on", "off")) if auto else None, 3),
            _shown(over(load, concurrency, ("off",)) if auto else None, 3),
            *(_shown(percentile_ms(tally.ttft, percent), 0) for percent in (50, 99)),
            *(_shown(percentile_ms(tally.itl, percent), 1) for percent in (50, 99)),
            _shown(tally.acceptance_length, 2),
            f"{cell.node_budget_mean:.1f}",
            f"{tally.guarded_share:.0%}",
            f"{cell.drafter_cpu_s:.2f}",
        )
    console.print(table)
    for concurrency, peer in load.vllm.items():
        console.print(
            f"vLLM, {concurrency} clients: {peer.tokens_per_second:.1f} tokens/s; "
            f"auto is {_shown(over_vllm(load, concurrency), 2)} times as fast.",
            highlight=False,
        )
    found = load.latencies
    console.print(
        f"First token of a repeated prompt: {found.prefix_ttft_ratio:.3f} of a new one's time. "
        f"Between tokens beside a long one: {found.itl_beside_prompt_ratio:.2f} times the usual; "
        f"its own first token after {found.beside_ttft / 1e3:.1f} s. "
        f"Cores busy while idle: {load.driven.idle_cores:.3f}. Tokens that differ between modes: "
        f"{load.driven.agreement.differing} of {load.driven.agreement.compared}.",
        highlight=False,
    )


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def draw(load: Load, path: Path) -> None:
    """Tokens/s, their ratio to plain decoding, and the time between tokens, by concurrency. Raises
    StartError without matplotlib."""
    figure = new_figure(13, 4)
    speeds, ratios, latencies = figure.subplots(1, 3)
    levels = load.options.concurrency
    for index, mode in enumerate(load.options.modes):
        tallies = [load.driven.cells[level, mode].tally for level in levels]
        style, label = f"C{index}", {"label": mode}
        speeds.plot(levels, [t.tokens_per_second for t in tallies], style, marker=".", **label)
        for percent, line in ((50, "-"), (99, "--")):
            values = [percentile_ms(tally.itl, percent) for tally in tallies]
            latencies.plot(
                levels, values, f"{style}{line}", marker=".", label=f"{mode}, p{percent}"
            )
    if load.vllm:
        peers = [tally.tokens_per_second for tally in load.vllm.values()]
        speeds.plot(list(load.vllm), peers, "k:", marker="x", label="vLLM")
    for label, values in (
        ("auto over the better", [over(load, level, ("on", "off")) for level in levels]),
        ("auto over off", [over(load, level, ("off",)) for level in levels]),
    ):
        ratios.plot(levels, values, marker=".", label=label)
    ratios.axhline(1.0, color="k", linewidth=1, linestyle=":")
    for axes, ylabel in (
        (speeds, "tokens/s"),
        (ratios, "ratio"),
        (latencies, "ms between tokens"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(levels), [str(level) for level in levels])
        axes.set(xlabel="clients", ylabel=ylabel)
        axes.legend()
    speeds.set_yscale("log")
    latencies.set_yscale("log")
    figure.savefig(path, dpi=120)
