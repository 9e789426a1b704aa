"""The CUDA backend: Triton kernels behind the operations of kernels.reference."""
