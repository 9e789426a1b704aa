"""How near the kernels come to the machine: `python -m benchmarks.kernels --json FILE`.

Ratios inside one run. Weights are read from memory, not from a cache: calls go round copies of a
weight that are larger than the caches together.
"""

import gc
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.inprocess import LocalLink, generate
from benchmarks.machine import median_seconds, peak_gflop_s, read_gb_s, timed
from benchmarks.peers_llama_cpp import greedy_seconds, write_bf16
from benchmarks.prompts import chat_prompts
from coppice.machine import machine
from coppice.models.hub import DEFAULT_MODEL, default_gguf, resolve_model
from coppice.models.loading import load_target
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from coppice.tree import DraftTree
from drafter_svc.building import build_drafter
from kernels import ops
from kernels.batch import AttentionBatch, Segment
from kernels.packed import PackedWeight
from launcher.sources import load_settings
from training.evaluation_prompts import DEFAULT_FOLDER
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Rows, Runner

SHAPES = {  # outputs, inputs
    "smollm2-135m": {
        "qkv": (960, 576),
        "o": (576, 576),
        "gate_up": (3072, 576),
        "down": (576, 1536),
        "lm_head": (49152, 576),
    },
    "llama-1b": {
        "qkv": (3072, 2048),
        "o": (2048, 2048),
        "gate_up": (16384, 2048),
        "down": (2048, 8192),
        "lm_head": (128256, 2048),
    },
}
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64)
CONTEXT = 200  # of the steps
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
COLD_BYTES = 600 << 20
CALLS = 15
PREFILL = 512
PEER_TURNS = 3


def linears(read: float, failures: list[str]) -> dict[str, dict[str, dict[int, float]]]:
    """By shape and rows: the fraction of the read bandwidth, and GFLOP/s."""
    fraction: dict[str, dict[int, float]] = {}
    gflop_s: dict[str, dict[int, float]] = {}
    shapes = [(f"{m} {n}", s) for m, each in SHAPES.items() for n, s in each.items()]
    for name, (outputs, inputs) in track(shapes, "linear", console=Console(stderr=True)):
        bytes_read = 2 * outputs * inputs
        weight = ops.pack(torch.randn(outputs, inputs).bfloat16() / inputs**0.5)
        assert isinstance(weight, PackedWeight), "the native library is missing"
        copies = [weight] + [
            PackedWeight(weight.panels.clone(), outputs, inputs)
            for _ in range(COLD_BYTES // bytes_read)
        ]
        x = torch.randn(max(ROWS), inputs).bfloat16()
        whole = ops.linear(x, weight)
        for rows in ROWS:
            if not torch.equal(ops.linear(x[:rows], weight), whole[:rows]):
                failures.append(f"linear {name} {rows}")
            seconds = _round(copies, x[:rows])
            fraction.setdefault(name, {})[rows] = round(bytes_read / seconds / 1e9 / read, 3)
            flop = 2 * outputs * inputs * rows
            gflop_s.setdefault(name, {})[rows] = round(flop / seconds / 1e9, 1)
    return {"linear_fraction_of_read": fraction, "linear_gflop_s": gflop_s}


def _round(copies: list[PackedWeight], x: Tensor) -> float:
    """Seconds of one call, the median of several rounds over all copies."""
    some = copies[: max(4, min(len(copies), 400))]

    def run() -> None:
        for weight in some:
            ops.linear(x, weight)

    return median_seconds(run, calls=5, warm_up=1) / len(some)


def step(runner: Runner, rows: int, context: int) -> Callable[[], Tensor]:
    """One pass over a root and `rows` - 1 nodes below it, four wide."""
    nodes = rows - 1
    tree = DraftTree((100,) * nodes, tuple(max(0, n - 3) for n in range(nodes)), (0.0,) * nodes)
    positions = [context + depth for depth in tree.depths()]
    slots = range(context, context + rows)
    work = Rows([100] * rows, positions, slots, range(context), tree.masks(), rows)
    return lambda: ops.argmax(runner.run([work])[0])


def steps(runner: Runner) -> dict[str, object]:
    """Milliseconds of a pass by its rows, and by its context with one row."""
    by_rows: dict[int, list[float]] = {}
    runs = {rows: step(runner, rows, CONTEXT) for rows in ROWS}
    for run in runs.values():
        run()
    for _ in range(CALLS):  # all sizes in turn, so that the machine's mood hits all
        for rows, run in runs.items():
            by_rows.setdefault(rows, []).append(1e3 * timed(run))
    ms = {rows: round(statistics.median(each), 2) for rows, each in by_rows.items()}
    by_context = {
        context: round(1e3 * median_seconds(step(runner, 1, context), 7), 2) for context in CONTEXTS
    }
    return {
        "step_ms": ms,
        "rows8_over_rows1": round(ms[8] / ms[1], 3),
        "rows16_over_rows1": round(ms[16] / ms[1], 3),
        "step_ms_by_context": by_context,
    }


def attention(runner: Runner, read: float) -> float:
    """The fraction of the read bandwidth at which one row reads 8192 keys of every layer."""
    config, context = runner.model.config, max(CONTEXTS)
    slots = torch.arange(context + 1)
    segment = Segment(1, slots[:-1], slots[-1:], torch.ones(1, dtype=torch.int64))
    batch = AttentionBatch(slots[-1:], slots[-1:], (segment,))
    q = torch.randn(1, config.heads, config.head_dim).bfloat16()

    def run() -> None:
        for k, v in zip(runner.cache.k, runner.cache.v, strict=True):
            ops.tree_attention(q, k, v, batch)

    read_bytes = config.layers * 2 * context * config.kv_heads * config.head_dim * 2
    return round(read_bytes / median_seconds(run, CALLS) / 1e9 / read, 3)


def prefill(runner: Runner, peak: float) -> float:
    """The fraction of the peak that a chunk of a prompt reaches, its arithmetic in the linears."""
    slots = range(PREFILL)
    work = Rows([100] * PREFILL, slots, slots, [], None, 1)
    layers = runner.model.weights.layers
    weights = sum(w.shape[0] * w.shape[1] for x in layers for w in (x.qkv, x.o, x.gate_up, x.down))
    seconds = median_seconds(lambda: runner.run([work]), 5)
    return round(2 * weights * PREFILL / seconds / 1e9 / peak, 3)


def weight_bytes(runner: Runner) -> int:
    """What one step must read."""
    model = runner.model
    parts = [w for x in model.weights.layers for w in (x.qkv, x.o, x.gate_up, x.down)]
    return sum(2 * w.shape[0] * w.shape[1] for w in (*parts, model.lm_head))


def decoding(
    settings: Settings, runner: Runner, read: float, row1_ms: float, llama_cpp: Path | None
) -> dict[str, object]:
    """Plain decoding against its floor and llama.cpp, and what drafting costs against a step."""
    tokenizer = Tokenizer.load(resolve_model(settings.model.path, settings.cache_dir))
    prompt = chat_prompts(tokenizer, "mt_bench", 1, DEFAULT_FOLDER)[0]
    fixed = settings.speculation.model_copy(update={"budget": "fixed"})
    engine = Engine(
        runner, settings.model_copy(update={"speculation": fixed}), VerifierMetrics("benchmark")
    )
    drafter = build_drafter(settings)
    greedy = SamplingParams(temperature=0.0)

    def answer(tokens: int, link: LocalLink | None = None) -> float:
        stopping = StoppingParams(max_tokens=tokens, ignore_eos=True)
        return timed(lambda: generate(engine, [prompt], greedy, stopping, link))

    def token_seconds() -> float:
        return (answer(129) - answer(1)) / 128

    answer(64)
    per_token = statistics.median(token_seconds() for _ in range(5))
    link = LocalLink(engine, drafter)
    answer(128, link)
    link.seconds, link.batches = 0.0, 0
    answer(128, link)
    levels = drafter.times.seconds_per_depth
    draft_ms = 1e3 * link.seconds / link.batches
    floor = weight_bytes(runner) / read / 1e9
    return {
        "plain_tok_s": round(1 / per_token, 1),
        "plain_over_floor": round(floor / per_token, 3),
        **(beside_llama_cpp(llama_cpp, prompt, token_seconds) if llama_cpp else {}),
        "draft_ms": round(draft_ms, 2),
        "draft4_over_rows1": round(draft_ms / row1_ms, 3),
        "draft_level_over_rows1": round(1e3 * statistics.median(levels) / row1_ms, 3),
        "not_arithmetic_fraction": round(1 - arithmetic(runner) / per_token, 3),
    }


def beside_llama_cpp(
    python: Path, prompt: list[int], token_seconds: Callable[[], float]
) -> dict[str, object]:
    """The default model's plain rate over that of llama.cpp in bf16, by turns."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "bf16.gguf"
        write_bf16(default_gguf(), model)
        turns = [
            (greedy_seconds(python, model, prompt), token_seconds()) for _ in range(PEER_TURNS)
        ]
    theirs, ours = (statistics.median(each) for each in zip(*turns, strict=True))
    return {
        "llama_cpp_tok_s": round(1 / theirs, 1),
        "plain_over_llama_cpp": round(theirs / ours, 3),
    }


def arithmetic(runner: Runner) -> float:
    """Seconds inside of the native library in one step of one row, its threads awake."""
    model, context = runner.model, CONTEXT
    slots = torch.arange(context + 1)
    segment = Segment(1, slots[:-1], slots[-1:], torch.ones(1, dtype=torch.int64))
    batch = AttentionBatch(slots[-1:], slots[-1:], (segment,))
    hidden = torch.randn(1, model.config.hidden_size).bfloat16()
    angles = model.rotary(batch.positions)
    inside: list[float] = []
    for _ in range(CALLS):
        total = timed(
            lambda: ops.run_layers(hidden, model.weights.layers, angles, runner.cache, batch)
        )
        total += timed(lambda: model.logits(hidden))
        inside.append(total)
    return statistics.median(inside)


def main(
    json_file: Annotated[Path, typer.Option("--json", help="where the results go")],
    linear: Annotated[bool, typer.Option(help="the linear layers alone as well")] = True,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Python of an environment that has llama-cpp-python")
    ] = None,
) -> None:
    """Measures, prints and writes one JSON object."""
    settings = load_settings({"model.dtype": "bfloat16", "verifier.prefix_cache": False})
    if llama_cpp and settings.model.path.lower() != DEFAULT_MODEL:
        raise typer.BadParameter(f"--llama-cpp compares {DEFAULT_MODEL}, not {settings.model.path}")
    path = resolve_model(settings.model.path, settings.cache_dir)
    runner = Runner(load_target(path, torch.bfloat16, torch.device("cpu")), 8192 + 128)
    gc.freeze()  # as the services do
    failures: list[str] = []
    with torch.inference_mode():
        read, peak = read_gb_s(), peak_gflop_s(torch.float32, torch.bfloat16)
        ops.set_threads(None)
        by_step = steps(runner)
        row1_ms = by_step["step_ms"][1]  # pyright: ignore
        results: dict[str, object] = {
            "machine": machine(),
            "read_gb_s": round(read, 1),
            "peak_gflop_s": round(peak, 1),
            **by_step,
            "attention_fraction_of_read_8192": attention(runner, read),
            "prefill_fraction_of_peak": prefill(runner, peak),
            **decoding(settings, runner, read, row1_ms, llama_cpp),
            **(linears(read, failures) if linear else {}),
            "row_invariance_failures": failures,
        }
    text = json.dumps(results, indent=2)
    json_file.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)
