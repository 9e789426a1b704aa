"""Eight-bit floats (e4m3, without infinities: Micikevicius et al. 2022) by their bits, since Triton
converts them on sm_89 and above alone."""

# Triton compiles these functions: they are Python by their syntax alone.
# pyright: basic, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)


@triton.jit
def from_fp8(bits):
    """uint8 -> fp16, exact: e4m3's exponent in the place of fp16's, whose bias is 8 more. Codes of
    NaN, which `to_fp8` never writes, read as 480."""
    wide = bits.to(tl.uint16)
    halves = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return halves.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def to_fp8(x):
    """fp32 -> uint8, to the nearest, ties to even; beyond the largest (448) the largest."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    # Below 2^-6 a step is 2^-9: adding 2^14 rounds to it, and leaves the steps in the low bits.
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    whole = magnitude.to(tl.uint32, bitcast=True)
    whole = (whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20
    code = tl.where(magnitude < 0.015625, small, whole - (120 << 3))
    return (sign | code).to(tl.uint8)
