"""Where a model runs and in which dtype, from the settings."""

import torch

from coppice.errors import StartError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    """On a CPU `auto` is fp32: there the bits of torch's bf16 products depend on how many rows
    are multiplied together, and greedy answers would differ with them."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[name]
