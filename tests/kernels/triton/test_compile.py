"""The core of the shipped configurations is compiled for every architecture, without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

from kernels.triton.compile_table import BEGIN, END, write_into
from kernels.triton.configurations import CAPABILITIES, configurations

ROOT = Path(__file__).parents[3]


def test_no_kernel_spills_or_takes_more_shared_memory_than_there_is(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = compile_core(environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for capability in CAPABILITIES:
        core = [each.name for each in configurations(capability) if each.core]
        assert len(core) >= 6
        for name in core:
            (line,) = re.findall(rf"\| {re.escape(name)} \| {capability} \|(.*)", done.stdout)
            registers, spilled = (int(line.split("|")[i].replace(",", "")) for i in (2, 4))
            assert 0 < registers <= 255
            assert spilled == 0
    for instruction in ("mma.sync", "wgmma.mma_async", "tcgen05.mma"):
        assert instruction in done.stdout


def test_a_table_replaces_the_one_that_is_there(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(document, "new")
    assert document.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


def test_the_interpreter_compiles_nothing() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = compile_core(environment)
    assert done.returncode == 1
    assert "unset it" in done.stderr


def compile_core(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernels.triton.compile_table", "--core"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
