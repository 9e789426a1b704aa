"""Where int8 weights can be, and where not."""

import pytest
import torch

from coppice.errors import StartError
from coppice.models.placement import choose_quantization
from kernels import ops
from kernels.cpu.backend import CpuBackend

CPU = torch.device("cpu")


def refusal(dtype: torch.dtype, device: torch.device) -> str:
    with pytest.raises(StartError) as error:
        choose_quantization("int8", dtype, device)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.skipif(not ops.native_backends(), reason="the native library is not built")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_is_for_the_native_kernels(dtype: torch.dtype) -> None:
    assert choose_quantization("int8", dtype, CPU)


def test_int8_is_refused_elsewhere() -> None:
    assert "float16 on cpu" in refusal(torch.float16, CPU)
    assert "bfloat16 on cuda" in refusal(torch.bfloat16, torch.device("cuda", 0))
    with ops.use_backend(None):
        assert "bfloat16 on cpu (torch)" in refusal(torch.bfloat16, CPU)


def test_none_and_auto_are_for_all() -> None:
    with ops.use_backend(None):
        for name in ("none", "auto"):
            assert not choose_quantization(name, torch.float16, torch.device("cuda", 0))
            assert not choose_quantization(name, torch.bfloat16, CPU)


@pytest.mark.parametrize("backend", ops.native_backends(), ids=lambda backend: backend.name)
def test_auto_takes_int8_unless_bf16_has_an_instruction(backend: CpuBackend) -> None:
    with ops.use_backend(backend):
        faster = backend.instruction_set.name != "avx512_bf16"
        assert choose_quantization("auto", torch.bfloat16, CPU) is faster
        assert choose_quantization("auto", torch.float32, CPU)
        assert not choose_quantization("auto", torch.float16, CPU)


def test_a_refusal_names_its_setting() -> None:
    with pytest.raises(StartError, match=r"^drafter\.quantization = int8: needs"):
        choose_quantization("int8", torch.float16, CPU, "drafter.quantization")
