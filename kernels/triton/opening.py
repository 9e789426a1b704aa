"""Finds out whether this installation can serve a GPU with Triton kernels, without importing Triton
where it cannot."""

import importlib.util
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.triton.backend import TritonBackend

LEAST_CAPABILITY = 80  # bf16 and asynchronous copies


@cache
def open_backend(device: torch.device) -> "TritonBackend | None":
    """The backend of a CUDA device; None without Triton, or for a GPU older than Ampere."""
    if torch.version.hip or importlib.util.find_spec("triton") is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < LEAST_CAPABILITY:
        return None
    from kernels.triton.backend import TritonBackend

    return TritonBackend(10 * major + minor)
