"""The threads behind the operations: safe from several callers, after a fork, and quiet."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kernels.cpu.backend import CpuBackend


def test_callers_on_several_threads_get_their_own_results(backend: CpuBackend) -> None:
    packed = backend.pack(torch.randn(400, 256))
    inputs = [torch.randn(20, 256) for _ in range(40)]
    expected = [backend.linear(x, packed, None, None, True) for x in inputs]
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda x: backend.linear(x, packed, None, None, True), inputs))
    assert all(torch.equal(ours, alone) for ours, alone in zip(results, expected, strict=True))


def test_a_forked_child_computes_the_same() -> None:
    script = """
import os, sys, torch
from kernels import ops
ops.set_threads(3)
packed, x = ops.pack(torch.randn(900, 300)), torch.randn(9, 300)
before = ops.linear(x, packed)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(ops.linear(x, packed), before) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, timeout=60)


def test_idle_threads_use_no_processor(backend: CpuBackend) -> None:
    backend.set_threads(2)
    packed = backend.pack(torch.randn(2000, 500))
    backend.linear(torch.randn(4, 500), packed, None, None, False)
    time.sleep(0.02)  # longer than they spin
    before = os.times()
    time.sleep(0.2)
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.05
