"""What the native library needs to run a whole decoder layer in one call."""

import ctypes

from torch import Tensor

from kernels.layer import LayerPlan, LayerSizes, LayerWeights
from kernels.packed import PackedWeight, Weight

_ADDRESS, _SIZE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Projection(ctypes.Structure):
    """`Projection` of src/layer.hpp."""

    _fields_ = (
        ("panels", _ADDRESS),
        ("n", _SIZE),
        ("k", _SIZE),
        ("bias", _ADDRESS),
        ("scales", _ADDRESS),
    )


class Table(ctypes.Structure):
    """`Layer` of src/layer.hpp."""

    _fields_ = (
        ("type", _SIZE),
        ("hidden", _SIZE),
        ("heads", _SIZE),
        ("kv_heads", _SIZE),
        ("d", _SIZE),
        ("inner", _SIZE),
        ("eps", _REAL),
        ("input_norm", _ADDRESS),
        ("q_norm", _ADDRESS),
        ("k_norm", _ADDRESS),
        ("post_norm", _ADDRESS),
        ("qkv", Projection),
        ("o", Projection),
        ("gate_up", Projection),
        ("down", Projection),
        ("gated", _SIZE),
    )


def plan_layer(weights: LayerWeights, sizes: LayerSizes, element: int) -> LayerPlan | None:
    """A plan for packed weights of the library's element type; None where a part is not packed.

    Raises ValueError when the parts do not fit each other, since the library trusts them.
    """
    qkv, o = _projection(weights.qkv, weights.qkv_bias), _projection(weights.o, weights.o_bias)
    gate_up = _projection(weights.gate_up, weights.gate_up_bias)
    down = _projection(weights.down, weights.down_bias)
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    _check(weights, sizes)
    table = Table(
        element,
        weights.post_norm.shape[0],
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        weights.down.shape[1],
        sizes.eps,
        _address(weights.input_norm),
        _address(weights.q_norm),
        _address(weights.k_norm),
        weights.post_norm.data_ptr(),
        qkv,
        o,
        gate_up,
        down,
        isinstance(weights.gate_up, PackedWeight) and weights.gate_up.gated,
    )
    return LayerPlan(table, sizes)


def _projection(weight: Weight, bias: Tensor | None) -> Projection | None:
    if not isinstance(weight, PackedWeight):
        return None
    return Projection(
        weight.panels.data_ptr(),
        weight.outputs,
        weight.inputs,
        _address(bias),
        _address(weight.scales),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(weights: LayerWeights, sizes: LayerSizes) -> None:
    dtype = weights.post_norm.dtype
    hidden, d, q_size = len(weights.post_norm), sizes.head_dim, sizes.heads * sizes.head_dim
    qkv_size, inner = q_size + 2 * sizes.kv_heads * d, weights.down.shape[1]
    expected = (
        ("qkv", weights.qkv, (qkv_size, hidden)),
        ("o", weights.o, (hidden, q_size)),
        ("gate_up", weights.gate_up, (2 * inner, hidden)),
        ("down", weights.down, (hidden, inner)),
        ("qkv_bias", weights.qkv_bias, (qkv_size,)),
        ("o_bias", weights.o_bias, (hidden,)),
        ("gate_up_bias", weights.gate_up_bias, (2 * inner,)),
        ("down_bias", weights.down_bias, (hidden,)),
        ("input_norm", weights.input_norm, (hidden,)),
        ("post_norm", weights.post_norm, (hidden,)),
        ("q_norm", weights.q_norm, (d,)),
        ("k_norm", weights.k_norm, (d,)),
    )
    for name, part, shape in expected:
        if part is None:
            continue
        fits = part.takes(dtype) if isinstance(part, PackedWeight) else part.dtype == dtype
        if tuple(part.shape) != shape or not fits:
            given = f"{list(part.shape)} of {part.dtype}"
            raise ValueError(f"{name} is {given}, expected {list(shape)} of {dtype}")
        if isinstance(part, Tensor) and not part.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
