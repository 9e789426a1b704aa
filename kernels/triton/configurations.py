"""The launches that are compiled ahead, on tensors without storage: shapes that models have."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton import launches
from kernels.triton.launch import Launch
from kernels.triton.plan import ROW, UNIT
from kernels.triton.tiles import attention_tile, linear_tile

CAPABILITIES = (80, 90, 100)
# Head dimension: query and KV heads of a model that has it (Llama 3.2 1B, Phi 3, Llama 3.1 8B, and
# the largest that is supported).
HEADS = {64: (32, 8), 96: (32, 32), 128: (32, 8), 256: (16, 8)}
# Outputs, inputs, and whether the result stays fp32: Llama 3.1 8B, then SmolLM2 135M.
WEIGHTS = (
    (6144, 4096, False),
    (4096, 4096, False),
    (28672, 4096, False),
    (4096, 14336, False),
    (128256, 4096, True),
    (960, 576, False),
    (576, 576, False),
    (3072, 576, False),
    (576, 1536, False),
    (49152, 576, True),
)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Configuration:
    name: str
    launch: Launch
    core: bool = False  # one of the few that every test run compiles


def configurations(capability: int) -> Iterator[Configuration]:
    for d in HEADS:
        for kind in ("bf16", "fp16", "bf16, fp8 KV"):
            yield _attend(d, kind, capability)
        yield _merge(d)
    yield Configuration("spell_paths", _spell_paths())
    for outputs, inputs, wide in WEIGHTS:
        yield from _linear(outputs, inputs, wide, capability)
    yield from _rows()
    for vocab in (49152, 128256):
        yield Configuration(f"draw, {vocab} tokens", _draw(vocab), core=vocab == 128256)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _integers(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def _floats(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.float32)


def _attend(d: int, kind: str, capability: int) -> Configuration:
    heads, kv_heads = HEADS[d]
    quantized = "fp8" in kind
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    q = _empty(16, heads, d, dtype=dtype)
    pool = _empty(1024, kv_heads, d, dtype=FP8 if quantized else dtype)
    scale = _floats(kv_heads) if quantized else None
    tile = attention_tile(d, quantized, capability)
    launch = launches.attend(
        q, pool, pool, q, _integers(4096), _integers(9, len(UNIT)), _floats(64, heads, d),
        _floats(64, heads, 2), scale, scale, tile,
    )  # fmt: skip
    return Configuration(f"attend, d = {d}, {kind}", launch, core=d == 128 and kind != "fp16")


def _merge(d: int) -> Configuration:
    heads, kv_heads = HEADS[d]
    mixed, stats, table = _floats(64, heads, d), _floats(64, heads, 2), _integers(16, len(ROW))
    launch = launches.merge(mixed, stats, table, _empty(16, heads, d), None, kv_heads)
    return Configuration(f"merge, d = {d}", launch)


def _spell_paths() -> Launch:
    return launches.spell_paths(
        _empty(4096, dtype=torch.int64), _integers(8192), _integers(16, len(ROW))
    )


def _linear(outputs: int, inputs: int, wide: bool, capability: int) -> Iterator[Configuration]:
    tile = linear_tile(outputs, inputs, capability)
    x, weight = _empty(16, inputs), _empty(outputs, inputs)
    out = _empty(16, outputs, dtype=torch.float32 if wide else torch.bfloat16)
    sums = _floats(tile.splits, 16, outputs) if tile.splits > 1 else None
    residual = None if wide or tile.splits > 1 else out
    name = f"multiply, {outputs} x {inputs}"
    core = (outputs, inputs) in ((4096, 4096), (28672, 4096))
    launch = launches.multiply(x, weight, None, residual, out, sums, tile)
    yield Configuration(name, launch, core=core)
    if sums is not None:
        launch = launches.add_splits(sums, None, out, out, torch.bfloat16)
        yield Configuration(f"add_splits, {outputs} x {inputs}", launch)


def _rows() -> Iterator[Configuration]:
    for d in (576, 4096):
        x = _empty(16, 1, d)
        yield Configuration(f"norm, d = {d}", launches.norm(x, None, x, x, None, 1e-5))
    x = _empty(16, 1, 4096)
    launch = launches.norm(x, x, x, x, x, 1e-5)
    yield Configuration("norm of a sum, d = 4096", launch)
    yield Configuration("gate, d = 14336", launches.gate(_empty(16, 28672), _empty(16, 14336)))
    for kind in (torch.bfloat16, FP8):
        yield _rotate_and_write(kind)
    angles = _floats(16, 64)
    q = _empty(16, 32, 128)
    yield Configuration("rotate, d = 128", launches.rotate(q, angles, angles, q))


def _rotate_and_write(dtype: torch.dtype) -> Configuration:
    qkv, angles = _empty(16, 48 * 128), _floats(16, 64)
    q, k, v = (part.view(16, -1, 128) for part in qkv.split((32 * 128, 8 * 128, 8 * 128), dim=1))
    pool = _empty(1024, 8, 128, dtype=dtype)
    scale = _floats(8) if dtype == FP8 else None
    slots = _empty(16, dtype=torch.int64)
    launch = launches.rotate_and_write(
        q, k, v, angles, angles, slots, _empty(16, 32, 128), pool, pool, scale, scale
    )
    name = "rotate_and_write, d = 128" + (", fp8 KV" if scale is not None else "")
    return Configuration(name, launch, core=scale is not None)


def _draw(vocab: int) -> Launch:
    def doubles(*shape: int) -> Tensor:
        return _empty(*shape, dtype=torch.float64)

    return launches.draw(
        _floats(4, vocab), doubles(4, vocab), _empty(4, dtype=torch.int64), doubles(4), doubles(4),
        _integers(4), doubles(4), doubles(4),
    )  # fmt: skip
