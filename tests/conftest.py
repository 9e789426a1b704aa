"""Without a GPU the Triton kernels run in Triton's interpreter: to be said before anything imports
triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
