"""Whether Penstock's kernels are used: only where they were measured to be faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec

import torch

from penstock.training.kernels.tuning import interpreted

_WANTED = ContextVar("wanted", default=False)
TYPES = (torch.bfloat16, torch.float16, torch.float32)


@contextmanager
def kernels(wanted: bool) -> Iterator[None]:
    """Let the rules of operators use kernels, or not."""
    token = _WANTED.set(wanted)
    try:
        yield
    finally:
        _WANTED.reset(token)


def available(device: torch.device) -> bool:
    """Whether kernels can run there."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8,)


def wanted(x: torch.Tensor, numbers: int = 0) -> bool:
    """Whether a kernel is wanted for such a tensor, where a trial reads or makes at most so many ``numbers``."""
    return _WANTED.get() and runs(x, numbers)


def runs(x: torch.Tensor, numbers: int = 0) -> bool:
    """Whether a kernel, and not its twin, computes such a tensor.

    Kernels count a trial's numbers in 32 bits, and Triton's interpreter knows no bfloat16.
    """
    known = x.is_cuda or (interpreted() and x.dtype != torch.bfloat16)
    return known and x.dtype in TYPES and numbers < 2**31


def exact() -> bool:
    """Whether float32 products must not be rounded to TF32; cuDNN's setting says so."""
    return not torch.backends.cudnn.allow_tf32


def splits(x: torch.Tensor) -> bool:
    """Whether products may take two bfloat16 for each float32: where they may be rounded to TF32.

    Triton's interpreter knows no bfloat16.
    """
    return x.dtype == torch.float32 and not exact() and not interpreted()
