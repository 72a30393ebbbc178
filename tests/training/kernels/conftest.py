"""Kernels run in Triton's interpreter where there is no GPU. It is asked for before the first of them is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
