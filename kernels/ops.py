"""The one place that chooses a backend for an operation. Plain torch serves all of them today."""

from kernels.reference import linear, rms_norm, rope, silu_mul, tree_attention, write_kv

__all__ = ["linear", "rms_norm", "rope", "silu_mul", "tree_attention", "write_kv"]
