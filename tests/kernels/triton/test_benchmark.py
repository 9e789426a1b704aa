"""The harness of benchmarks.gpu, in the interpreter with tiny sizes."""

import io
from collections.abc import Callable

import pytest
import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn.attention import flex_attention

from benchmarks import gpu, gpu_checks, gpu_measures, gpu_work
from coppice.models.config import DecoderConfig, RopeConfig
from kernels import reference
from kernels.triton.backend import TritonBackend

TINY = DecoderConfig("llama", 64, 48, 32, 1, 2, 1, 16, 1e-5, RopeConfig(), 512)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stop:
        gpu.main()
    assert stop.value.exit_code == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_a_wrong_result_is_seen(device: torch.device) -> None:
    exact = torch.ones(4, dtype=torch.float64)
    assert not gpu_checks.held("x", exact.float(), exact, 1e-3, True).wrong
    assert gpu_checks.held("x", exact.float() * 1.01, exact, 1e-3, True).wrong
    assert gpu_checks.held("x", exact.float() * torch.nan, exact, 1e-3, True).wrong
    assert gpu_checks.held("x", exact.float(), exact, 1e-3, False).wrong


@torch.inference_mode()
def test_everything_is_right_and_in_one_table(
    backend: TritonBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_work, "ceilings", lambda _: gpu_work.Ceilings(1e9, 1e9))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
    monkeypatch.setattr(gpu, "CHECKED", (20, 5))
    monkeypatch.setattr(gpu, "ATTENTION", ((30, 1, False), (30, 3, False), (5, 4, True)))
    monkeypatch.setattr(gpu, "CONTEXTS", (10,))
    monkeypatch.setattr(gpu, "ROWS", (1, 3))
    lines = list(gpu.measured(backend, TINY, device, flex=False))
    assert [line.what for line in lines if line.wrong] == []
    timed = [line for line in lines if line.what.startswith(("linear", "attention", "step"))]
    assert len(timed) == 12 + 3 + 2
    assert all(line.micros and line.micros > 0 and line.share is not None for line in timed)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(gpu.table(lines, "title"))
    text = console.export_text()
    for line in lines:
        assert line.what in text


def test_a_model_that_does_not_fit_is_not_measured(
    backend: TritonBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (16 << 30, 16 << 30))
    (line,) = gpu.steps(backend, gpu.LLAMA_8B, device, gpu_work.Ceilings(1e9, 1e9))
    assert line.reached == "19 GiB needed, 16 free: take fewer --layers"


@pytest.mark.parametrize(
    ("context", "rows", "causal"), [(20, 1, False), (20, 6, False), (20, 6, True), (0, 6, True)]
)
def test_the_torch_side_of_the_comparison_is_the_same_work(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    context: int,
    rows: int,
    causal: bool,
) -> None:
    case = gpu_work.Tree(TINY, context, rows, causal, device)
    exact = reference.tree_attention(case.q.double(), case.k.double(), case.v.double(), case.batch)
    if device.type == "cpu":  # where compiling it takes a C++ compiler and half a minute
        monkeypatch.setattr(torch, "compile", uncompiled)
        monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    for run in (gpu_measures.sdpa(case), gpu_measures.flexible(case)):
        theirs = run()[0].transpose(0, 1)
        torch.testing.assert_close(theirs.double(), exact, atol=0.02, rtol=0.02)


def uncompiled(function: Callable[..., Tensor], dynamic: bool) -> Callable[..., Tensor]:
    return function


def test_the_floor_of_a_step_is_what_it_reads() -> None:
    size, flop = gpu_measures.cost_of_step(gpu.LLAMA_8B, 0, 1)
    assert 14.9e9 < size < 15.1e9  # 8.03e9 weights less the embedding, in bf16
    assert size == pytest.approx(flop, rel=1e-3)
