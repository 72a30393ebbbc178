"""Whether Penstock's kernels are used: only where they are wanted, by whoever measured that they are faster."""

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


def wanted(x: torch.Tensor) -> bool:
    """Whether a kernel is wanted for such a tensor."""
    return _WANTED.get() and runs(x)


def runs(x: torch.Tensor) -> bool:
    """Whether a kernel, and not its twin, computes such a tensor."""
    return x.dtype in TYPES and (x.is_cuda or interpreted())


def exact() -> bool:
    """Whether float32 products are not to be rounded to TF32, as cuDNN is told."""
    return not torch.backends.cudnn.allow_tf32
