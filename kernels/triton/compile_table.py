"""Compiles the shipped configurations without a GPU: `python -m kernels.triton.compile_table`.

Prints registers, shared memory and spills of each, on sm_80, sm_90 and sm_100, as a table in
Markdown; `--write` puts it into a document between its two marks. Fails where a kernel spills or
needs more shared memory than a thread block can have.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton.configurations import CAPABILITIES, Configuration, configurations
from kernels.triton.launch import Launch

# Shared memory of a thread block, at most (CUDA C++ Programming Guide, compute capabilities).
MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
BEGIN, END = "<!-- compile_table begin -->", "<!-- compile_table end -->"
INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a kernel takes of an SM."""

    name: str
    capability: int
    warps: int
    stages: int
    registers: int  # of a thread
    shared: int  # bytes of a thread block
    spilled: int  # bytes of a thread in local memory
    instruction: str  # of the tensor cores, if any

    @property
    def fits(self) -> bool:
        return self.spilled == 0 and self.shared <= MOST_SHARED[self.capability]


def compile_ahead(configuration: Configuration, capability: int) -> Compiled:
    """Compiles as a first call on such a GPU would."""
    launch = configuration.launch
    kernel = triton.compile(
        source_of(launch),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )
    usage = _usage(kernel.asm["cubin"])
    used = [name for name in INSTRUCTIONS if name in kernel.asm["ptx"]]
    return Compiled(
        configuration.name,
        capability,
        launch.warps,
        launch.stages,
        usage["REG"],
        # Static shared memory (the system's own on 90 and up) is in the limit, too.
        kernel.metadata.shared + usage["SHARED"],
        usage["STACK"] + usage["LOCAL"],
        ", ".join(used),
    )


def source_of(launch: Launch) -> ASTSource:
    """The kernel with types and values as triton.jit would specialize them for these arguments."""
    kernel = launch.kernel
    names = kernel.arg_names[len(launch.arguments) :]
    values = (*launch.arguments, *(launch.constants[name] for name in names))
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        kind = "constexpr" if parameter.is_constexpr else type_of(value, parameter)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[index,] = value
        elif divisible(value, parameter):
            attributes[index,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def type_of(value: Any, parameter: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{TYPE_NAMES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
    return "constexpr" if value is None or one else "i32"


def divisible(value: Any, parameter: Any) -> bool:
    """Whether triton.jit may count on multiples of 16; tensors of torch begin at one."""
    if isinstance(value, Tensor):
        return True
    return isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize


def _usage(cubin: bytes) -> dict[str, int]:
    """What `cuobjdump -res-usage` says: REG, STACK, SHARED, LOCAL."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        command = [tool, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return {
        name: int(value) for name, value in re.findall(r"(\w+):(\d+)", done.stdout + done.stderr)
    }


def compile_all(core_only: bool) -> Iterator[Compiled]:
    for capability in CAPABILITIES:
        for configuration in configurations(capability):
            if configuration.core or not core_only:
                yield compile_ahead(configuration, capability)


def table(results: list[Compiled]) -> str:
    lines = [
        f"Compiled with Triton {triton.__version__}.",
        "",
        "| kernel | sm | warps | stages | registers | shared | spilled | tensor cores |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        numbers = f"{r.warps} | {r.stages} | {r.registers} | {r.shared:,} | {r.spilled}"
        lines.append(f"| {r.name} | {r.capability} | {numbers} | {r.instruction or '-'} |")
    return "\n".join(lines)


def write_into(document: Path, text: str) -> None:
    whole = document.read_text()
    head, rest = whole.split(BEGIN)
    document.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", action="store_true", help="only the few of every test run")
    parser.add_argument("--write", type=Path, help="the document that takes the table")
    options = parser.parse_args()
    if knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set, and the interpreter compiles nothing: unset it")
    results = list(compile_all(options.core))
    text = table(results)
    print(text)
    if options.write:
        write_into(options.write, text)
    if bad := [r.name for r in results if not r.fits]:
        sys.exit(f"spills, or too much shared memory: {', '.join(bad)}")


if __name__ == "__main__":
    main()
