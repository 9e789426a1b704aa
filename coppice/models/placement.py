"""Where a model runs and in which dtype, from the settings."""

import torch

from coppice.errors import StartError
from kernels import ops

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """As settings and messages spell it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU where there is one. Raises StartError for a device that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise StartError(f"model.device = {name}: {str(error).splitlines()[0]}") from None
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16, but fp32 on a CPU without the native kernels: there the bits of torch's bf16
    products depend on how many rows are multiplied together, and answers would differ with them."""
    if name == "auto":
        exact = device.type != "cpu" or bool(ops.native_backends())
        return torch.bfloat16 if exact else torch.float32
    return _DTYPES[name]


def choose_quantization(
    name: str, dtype: torch.dtype, device: torch.device, setting: str = "model.quantization"
) -> bool:
    """Whether the weights are to be int8; `auto`: where that is faster. Raises StartError, which
    names the setting, where they are to be and cannot."""
    if name == "none":
        return False
    if name == "auto":
        return ops.quantizing_speeds_up(dtype, device)
    if not ops.quantizes(dtype, device):
        kernels = f" ({ops.describe()})" if device.type == "cpu" else ""
        raise StartError(
            f"{setting} = {name}: needs bfloat16 or float32 on a CPU with the native "
            f"kernels, this is {dtype_name(dtype)} on {device.type}{kernels}"
        )
    return True


def fingerprint(
    dtype: torch.dtype, device: torch.device, quantize: bool = False, ranks: int = 1
) -> str:
    """What decides the bits of a result: kernels, instruction set or GPU, dtypes, ranks."""
    if device.type == "cuda":
        chip = f"{ops.describe(device)} {torch.cuda.get_device_name(device)}"
    else:
        chip = f"{ops.describe()} {torch.backends.cpu.get_cpu_capability()}"
    weights = dtype_name(dtype) + ("-int8" if quantize else "")
    return f"torch-{torch.__version__}/{device.type}/{chip}/{weights}/tp{ranks}"
