"""Every backend that this machine can run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import ops
from kernels.cpu.backend import CpuBackend

BACKENDS = {backend.instruction_set.name: backend for backend in ops.native_backends()}


@pytest.fixture(autouse=True)
def _torch_on_one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(torch.seed() % 2**63)


@pytest.fixture(params=["avx512_bf16", "avx512", "avx2", "portable"], scope="session")
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    """Session-wide, so that hypothesis may use it."""
    if request.param not in BACKENDS:
        pytest.skip(f"{request.param}: not built, or not on this processor")
    return BACKENDS[request.param]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"], scope="session")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def chosen(backend: CpuBackend) -> Iterator[CpuBackend]:
    with ops.use_backend(backend):
        yield backend


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from coppice.models.hub import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL, tmp_path_factory.mktemp("models"))
