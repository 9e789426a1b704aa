"""Opens the shared library and declares its C interface. No library: None."""

import ctypes
import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

TYPES = {torch.bfloat16: 0, torch.float32: 1}  # of `type`
_ADDRESS, _SIZE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_WIDE = ctypes.c_double
# Of src/library.cpp, in its order; `kernels`, `type` and what the names say.
_SIGNATURES = {
    "coppice_set_threads": [ctypes.c_int],
    "coppice_pack": [_SIZE, _ADDRESS, _SIZE, _SIZE, _ADDRESS],
    "coppice_quantize": [_SIZE, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS],
    "coppice_linear": [
        _ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS,
        _SIZE, _SIZE, _ADDRESS,
    ],
    "coppice_rms_norm": [_ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _REAL, _ADDRESS],
    "coppice_rope": [
        _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE, _ADDRESS,
    ],
    "coppice_silu_mul": [_ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _ADDRESS],
    "coppice_attention": [
        _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS,
        _SIZE, _ADDRESS,
    ],
    "coppice_layers": [
        _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS,
        _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE,
    ],
    "coppice_best": [_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE],
    "coppice_sample": [
        _ADDRESS, _ADDRESS, _SIZE, _SIZE, _WIDE, _SIZE, _WIDE, _WIDE, _ADDRESS, _ADDRESS,
    ],
    "coppice_angles": [_ADDRESS, _ADDRESS, _SIZE, _SIZE, _REAL, _ADDRESS, _ADDRESS],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One compiled variant that this processor can run."""

    name: str
    kernels: int  # address of its table of functions


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    functions: ctypes.CDLL
    instruction_sets: tuple[InstructionSet, ...]  # best first


@cache
def open_library() -> Library | None:
    """The library that was built with this package; None where there was no compiler."""
    spec = importlib.util.find_spec("kernels.cpu._native")
    if spec is None or spec.origin is None:
        return None
    functions = ctypes.CDLL(spec.origin)
    for name, arguments in _SIGNATURES.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, None
    return Library(functions, tuple(_instruction_sets(functions)))


def _instruction_sets(functions: ctypes.CDLL) -> list[InstructionSet]:
    functions.coppice_kernels.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    functions.coppice_kernels.restype = ctypes.c_void_p
    found: list[InstructionSet] = []
    name = ctypes.c_char_p()
    index = 0
    while (kernels := functions.coppice_kernels(index, ctypes.byref(name))) is not None:
        if name.value:
            found.append(InstructionSet(name.value.decode(), kernels))
        index += 1
    return found
