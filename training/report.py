"""An evaluation as tables, as JSON and as a picture."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coppice.machine import machine
from training.acceptance import CALIBRATION_BINS, Acceptance
from training.evaluate import BestShape, Evaluation, Result
from training.picture import new_figure


def depth_shares(counts: Acceptance) -> list[float]:
    """How often a tree that reaches a depth is right down to it, by depth from 1 on."""
    pairs = zip(counts.accepted_at_depth, counts.offered_at_depth, strict=True)
    return [accepted / offered for accepted, offered in pairs]


def pooled(parts: Iterable[Acceptance]) -> Acceptance:
    """The nodes of all parts, by predicted probability."""
    whole = Acceptance()
    for part in parts:
        for interval in range(CALIBRATION_BINS):
            whole.nodes_in_bin[interval] += part.nodes_in_bin[interval]
            whole.predicted_in_bin[interval] += part.predicted_in_bin[interval]
            whole.accepted_in_bin[interval] += part.accepted_in_bin[interval]
    return whole


def calibration(counts: Acceptance) -> list[tuple[float, float, int]]:
    """Mean predicted probability, observed share and number of nodes of every bin with nodes."""
    bins = zip(counts.predicted_in_bin, counts.accepted_in_bin, counts.nodes_in_bin, strict=True)
    return [(predicted / n, accepted / n, n) for predicted, accepted, n in bins if n]


def calibration_error(counts: Acceptance) -> float:
    """Expected calibration error: mean over nodes of |predicted - observed| of their bin."""
    bins = calibration(counts)
    nodes = sum(n for _, _, n in bins)
    return sum(n * abs(predicted - observed) for predicted, observed, n in bins) / max(1, nodes)


def by_temperature_and_rows(results: Sequence[Result]) -> dict[tuple[float, int], Acceptance]:
    """All sets together."""
    keys = dict.fromkeys((result.temperature, result.rows) for result in results)
    return {
        key: pooled(r.acceptance for r in results if (r.temperature, r.rows) == key) for key in keys
    }


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Acceptance length and share accepted per depth are by set, temperature and rows (the root
    counted); calibration, over all sets, by temperature and rows."""
    options, results = evaluation.options, evaluation.results
    calibrations: dict[str, dict[str, Any]] = {}
    for (temperature, rows), counts in by_temperature_and_rows(results).items():
        calibrations.setdefault(f"{temperature:g}", {})[str(rows)] = {
            "expected_error": round(calibration_error(counts), 4),
            "bins": [
                {"predicted": round(predicted, 4), "observed": round(observed, 4), "nodes": n}
                for predicted, observed, n in calibration(counts)
            ],
        }
    return {
        "head": evaluation.head,
        "target": evaluation.target,
        "setting": {
            "prompts": options.count,
            "tokens": options.tokens,
            "seed": options.seed,
            "dtype": evaluation.dtype,
            "depth": evaluation.depth,
            "top_k": evaluation.top_k,
        },
        "acceptance_length": _nested(results, lambda counts: round(counts.length, 4)),
        "per_depth": _nested(results, lambda c: [round(share, 4) for share in depth_shares(c)]),
        "calibration": calibrations,
        "best_static": None if evaluation.shape is None else _shape_json(evaluation.shape),
        "machine": machine(),
    }


def _nested(
    results: Sequence[Result], value: Callable[[Acceptance], object]
) -> dict[str, dict[str, dict[str, object]]]:
    found: dict[str, dict[str, dict[str, object]]] = {}
    for result in results:
        of_set = found.setdefault(result.prompts, {})
        rows = of_set.setdefault(f"{result.temperature:g}", {})
        rows[str(result.rows)] = value(result.acceptance)
    return found


def _shape_json(found: BestShape) -> dict[str, Any]:
    shape, costs = found.best.shape, found.costs
    assert shape is not None, "the best of the shapes that draft"
    return {
        "depth": shape.depth,
        "top_k": shape.top_k,
        "nodes": shape.nodes,
        "acceptance_length": round(found.best.acceptance_length, 4),
        "tokens_per_second": round(found.best.tokens_per_second, 2),
        "plain_tokens_per_second": round(found.plain.tokens_per_second, 2),
        "pays": found.pays,
        "step_ms": {str(rows): round(1e3 * s, 3) for rows, s in costs.steps.items()},
        "draft_ms": {
            str(width): [round(1e3 * s, 3) for s in levels]
            for width, levels in costs.drafts.items()
        },
    }


def show(evaluation: Evaluation, console: Console) -> None:
    for table in (_lengths(evaluation), _depths(evaluation), _calibrations(evaluation)):
        console.print(table)
        console.print()
    if evaluation.shape is not None:
        console.print(_sentence(evaluation.shape), highlight=False)


def _sentence(found: BestShape) -> str:
    shape = found.best.shape
    assert shape is not None, "the best of the shapes that draft"
    plain = f"plain decoding: {found.plain.tokens_per_second:.1f} tokens/s"
    best = (
        f"depth {shape.depth}, top_k {shape.top_k}, {shape.nodes} nodes: "
        f"{found.best.tokens_per_second:.1f} tokens/s, "
        f"acceptance length {found.best.acceptance_length:.2f}"
    )
    if found.pays:
        return f"Best static shape by this machine's costs: {best}; {plain}."
    return f"No static shape beats {plain} on this machine. The best: {best}."


def _lengths(evaluation: Evaluation) -> Table:
    options = evaluation.options
    title = f"Acceptance length of {evaluation.head}, rows with the root"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("set")
    for temperature in options.temperatures:
        for nodes in options.nodes:
            table.add_column(f"t {temperature:g}, {nodes + 1} rows", justify="right")
    for name in dict.fromkeys(result.prompts for result in evaluation.results):
        mine = [result for result in evaluation.results if result.prompts == name]
        table.add_row(name, *(f"{result.acceptance.length:.2f}" for result in mine))
    return table


def _depths(evaluation: Evaluation) -> Table:
    """Of the largest trees."""
    rows = max(result.rows for result in evaluation.results)
    results = [result for result in evaluation.results if result.rows == rows]
    title = f"Accepted down to a depth, share of the trees that reach it, {rows} rows"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    deepest = max(len(result.acceptance.offered_at_depth) for result in results)
    for heading in ("set", "t", *(str(depth) for depth in range(1, deepest + 1))):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    for result in results:
        shares = (f"{share:.2f}" for share in depth_shares(result.acceptance))
        table.add_row(result.prompts, f"{result.temperature:g}", *shares)
    return table


def _calibrations(evaluation: Evaluation) -> Table:
    """Of the largest trees."""
    rows = max(result.rows for result in evaluation.results)
    pools = {
        temperature: counts
        for (temperature, of_rows), counts in by_temperature_and_rows(evaluation.results).items()
        if of_rows == rows
    }
    errors = ", ".join(f"{calibration_error(c):.3f} at t {t:g}" for t, c in pools.items())
    title = f"Calibration of path probabilities, {rows} rows: expected error {errors}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("predicted")
    for temperature in pools:
        table.add_column(f"observed, t {temperature:g}", justify="right")
        table.add_column("nodes", justify="right")
    for interval in range(CALIBRATION_BINS):
        counted = [(c.accepted_in_bin[interval], c.nodes_in_bin[interval]) for c in pools.values()]
        cells = [(f"{hits / n:.2f}", f"{n:,}") if n else ("", "") for hits, n in counted]
        if any(n for _, n in counted):
            low, high = interval / CALIBRATION_BINS, (interval + 1) / CALIBRATION_BINS
            table.add_row(f"{low:.2f} to {high:.2f}", *(part for cell in cells for part in cell))
    return table


def draw(evaluation: Evaluation, path: Path) -> None:
    """Acceptance length by rows, share accepted by depth and calibration, side by side. Raises
    StartError without matplotlib."""
    figure = new_figure(13, 4)
    lengths, depths, calibrated = figure.subplots(1, 3)
    largest = max(result.rows for result in evaluation.results)
    coldest = min(evaluation.options.temperatures)
    names = list(dict.fromkeys(result.prompts for result in evaluation.results))
    for index, name in enumerate(names):
        for temperature in evaluation.options.temperatures:
            mine = [
                r for r in evaluation.results if r.prompts == name and r.temperature == temperature
            ]
            style = "-" if temperature == coldest else "--"
            label = f"{name}, t {temperature:g}"
            points = [(r.rows, r.acceptance.length) for r in mine]
            lengths.plot(*zip(*points, strict=True), f"C{index}{style}", marker=".", label=label)
            shares = depth_shares(next(r for r in mine if r.rows == largest).acceptance)
            depths.plot(range(1, len(shares) + 1), shares, f"C{index}{style}", marker=".")
    for (temperature, rows), counts in by_temperature_and_rows(evaluation.results).items():
        if rows == largest:
            points = [(predicted, observed) for predicted, observed, _ in calibration(counts)]
            calibrated.plot(*zip(*points, strict=True), marker=".", label=f"t {temperature:g}")
    calibrated.plot((0, 1), (0, 1), "k:", linewidth=1)
    lengths.set(xlabel="rows of a tree", ylabel="acceptance length")
    depths.set(xlabel="depth", ylabel=f"share accepted, {largest} rows")
    calibrated.set(xlabel="predicted path probability", ylabel=f"observed, {largest} rows")
    lengths.legend()
    calibrated.legend()
    figure.savefig(path, dpi=120)
