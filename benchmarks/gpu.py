"""What the Triton kernels reach on one GPU: `python -m benchmarks.gpu`.

First every kernel is held against its reference, and rows alone against rows together, bit for bit.
Then it is measured: against the ceilings of this GPU (a copy, a large product), against torch's
attention on the same work, and in whole steps of a model in the shape of Llama 3.1 8B with random
weights. Caches are emptied before every call. One table; the exit code is 1 where a result is wrong
or bits differ, and 2 without a GPU.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table

from coppice.models.config import DecoderConfig, RopeConfig
from kernels.triton.opening import LEAST_CAPABILITY, open_backend

if TYPE_CHECKING:
    from benchmarks.gpu_work import Ceilings, Line
    from kernels.triton.backend import TritonBackend

LLAMA_8B = DecoderConfig(
    "llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, RopeConfig(theta=5e5), 131072
)
CHECKED = (1000, 40)  # context and rows of the attention that is checked
# Context, rows, whether they are a prefill.
ATTENTION = (
    (1024, 1, False),
    (8192, 1, False),
    (1024, 16, False),
    (8192, 16, False),
    (8192, 64, False),
    (0, 512, True),
    (4096, 512, True),
)
CONTEXTS = (1024, 8192)
ROWS = (1, 8, 16, 32, 64)  # of a step: the root and its nodes
ROOM_BYTES = 4 << 30  # beside weights and K/V: the embedding, activations, what empties the caches


def main(
    flex: Annotated[bool, typer.Option(help="also compile and measure flex_attention")] = True,
    layers: Annotated[int, typer.Option(min=1, help="of the model: fewer on a small GPU")] = 32,
) -> None:
    if not torch.cuda.is_available():
        refuse(f"an NVIDIA GPU, and torch {torch.__version__} sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    if (backend := open_backend(device)) is None:
        refuse(f"triton, and a compute capability of {LEAST_CAPABILITY / 10} or more")
    config = replace(LLAMA_8B, layers=layers)
    with torch.inference_mode():
        lines = list(measured(backend, config, device, flex))
    name = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {backend.name}"
    Console(width=160).print(table(lines, name))
    raise typer.Exit(int(any(line.wrong for line in lines)))


def refuse(needed: str) -> NoReturn:
    Console(stderr=True).print(f"benchmarks.gpu needs {needed}")
    raise typer.Exit(2)


def measured(
    backend: "TritonBackend", config: DecoderConfig, device: torch.device, flex: bool
) -> Iterator["Line"]:
    """All lines of the table, each one shown on stderr when it is there."""
    # Here, since they import triton, which not every installation has.
    from benchmarks import gpu_checks, gpu_measures, gpu_work

    top = gpu_work.ceilings(device)
    yield gpu_work.Line("ceiling: copy", reached=f"{top.bytes_s / 1e9:,.0f} GB/s")
    yield gpu_work.Line("ceiling: product", reached=f"{top.flop_s / 1e12:,.1f} TFLOP/s")
    console = Console(stderr=True)
    for lines in (
        gpu_checks.check_all(backend, config, device, *CHECKED),
        gpu_measures.measure_linear(backend, config, device, top),
        gpu_measures.measure_attention(backend, config, device, top, flex, ATTENTION),
        steps(backend, config, device, top),
    ):
        for line in lines:
            console.print(line.what)
            yield line


def steps(
    backend: "TritonBackend", config: DecoderConfig, device: torch.device, top: "Ceilings"
) -> Iterator["Line"]:
    from benchmarks import gpu_measures, gpu_work

    needed = gpu_measures.cost_of_step(config, max(CONTEXTS), max(ROWS))[0] + ROOM_BYTES
    torch.cuda.empty_cache()
    if (free := torch.cuda.mem_get_info(device)[0]) < needed:
        short = f"{needed / 2**30:.0f} GiB needed, {free / 2**30:.0f} free: take fewer --layers"
        yield gpu_work.Line("step: not measured", reached=short)
        return
    yield from gpu_measures.measure_steps(backend, config, device, top, CONTEXTS, ROWS)


def table(lines: Iterable["Line"], title: str) -> Table:
    columns = ("what", "µs", "reached", "of ceiling", "beside")
    shown = Table(*columns, title=title)
    for line in lines:
        shown.add_row(
            line.what,
            "" if line.micros is None else f"{line.micros:,.1f}",
            line.reached,
            "" if line.share is None else f"{line.share:.0%}",
            line.other,
            style="red" if line.wrong else None,
        )
    return shown


if __name__ == "__main__":
    typer.run(main)
