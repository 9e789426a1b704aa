"""Before anything imports triton: without a GPU its kernels run in Triton's interpreter. And tests
that run side by side share out the cores."""

import os

import torch

from kernels import ops

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

CORES = len(os.sched_getaffinity(0))
SIDE_BY_SIDE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
ops.set_threads(max(1, CORES // SIDE_BY_SIDE))
