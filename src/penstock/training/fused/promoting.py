"""Tensors that a forward makes for itself, and then writes each trial's own values into.

``out = torch.zeros(n, d)`` is a plain tensor that all trials share. Once a trial's values are to be written into it, it
becomes a ``Stacked`` one, under the same name: the object changes its class and gets a copy of the numbers for each
trial. Its own memory is never touched, so that ``demote`` gives back the tensor that it was.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from penstock.training.fused.stacked import Stacked, Unfusable, refusal

_promoted: list[weakref.ref[Any]] = []


def promote(name: str, x: torch.Tensor, trials: int) -> Stacked:
    """Let a plain tensor, into which the function of this name writes, hold a row for each trial."""
    base = x._base if x._is_view() else None
    if x.is_leaf and x.requires_grad:
        raise refusal(name, "it writes into a tensor of all trials that takes a gradient")
    holders = torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1
    if holders > (1 if base is None else 2):
        raise refusal(name, "it writes each trial's own values into a tensor that is seen under other views; clone it")
    if base is None:
        return _become(x, x.unsqueeze(0).expand(trials, *x.shape).clone(memory_format=torch.contiguous_format))
    numbers = base.numel()
    if not base.is_contiguous() or base.storage_offset() or base.dtype != x.dtype:
        raise refusal(name, "it writes each trial's own values through a view of a tensor that they share; clone it")
    size, stride, offset = (trials, *x.shape), (numbers, *x.stride()), x.storage_offset()
    whole = base.unsqueeze(0).expand(trials, *base.shape).clone(memory_format=torch.contiguous_format)
    _become(base, whole)
    return _become(x, whole.as_strided(size, stride, offset))


def _become(x: torch.Tensor, whole: torch.Tensor) -> Stacked:
    x.__class__ = Stacked
    assert isinstance(x, Stacked)
    x.whole, x.at = whole, 0
    _promoted.append(weakref.ref(x))
    return x


def demote() -> None:
    """Before another run: no tensor of the last one may be left. One that is, is kept by the task from step to step."""
    left = [x for reference in _promoted if isinstance(x := reference(), Stacked)]
    _promoted.clear()
    for x in left:
        shape = list(x.shape)
        del x.whole, x.at
        x.__class__ = torch.Tensor  # type: ignore[assignment]
    if left:
        raise Unfusable(
            f"a tensor of shape {shape} that is kept from step to step outside of the model's buffers is given values "
            "that differ from trial to trial: register it as a buffer"
        )


def promoted() -> bool:
    """Whether tensors were promoted since ``demote``."""
    return bool(_promoted)


def held() -> bool:
    """Whether a tensor that was promoted since ``demote`` is still there."""
    return any(isinstance(reference(), Stacked) for reference in _promoted)
