"""BatchNorm over a batch of which several workers have parts: its sums are over all parts.

``torch.nn.SyncBatchNorm`` refuses modules on a CPU. Here the sums are plain ones, on any device: the mean
first and then the squares around it, as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Together(Protocol):
    """The workers that have the other parts, and whether this part counts."""

    present: bool

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all workers, in place."""


def synchronize(model: nn.Module, together: Together | None) -> None:
    """Let a model's BatchNorm modules see all parts of a batch while they train; None makes them plain again."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
            module.__dict__.pop("forward", None)
            if together is not None:
                module.__dict__["forward"] = partial(_forward, module, together)


@contextmanager
def unsynchronized(model: nn.Module) -> Iterator[None]:
    """Let each worker have batches of its own, as in validation: its BatchNorm modules are plain meanwhile."""
    held = [(m.__dict__, m.__dict__.pop("forward")) for m in model.modules() if _synced(m)]
    try:
        yield
    finally:
        for attributes, forward in held:
            attributes["forward"] = forward


def _synced(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _forward(module: Any, together: Together, x: Tensor) -> Tensor:
    out: Tensor
    if not module.training and module.running_mean is not None:
        out = type(module).forward(module, x)
        return out
    module._check_input_dim(x)
    tracked = module.training and module.track_running_stats
    if tracked and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    rate = module.momentum
    if rate is None:
        rate = 1 / float(module.num_batches_tracked) if tracked else 0.0
    normal, mean, variance, count = _Normalize.apply(x, module.eps, together)  # type: ignore[no-untyped-call]
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    if tracked and module.running_mean is not None:
        with torch.no_grad():
            module.running_mean.mul_(1 - rate).add_(mean.to(module.running_mean.dtype), alpha=rate)
            unbiased = variance * (count / (count - 1))
            module.running_var.mul_(1 - rate).add_(unbiased.to(module.running_var.dtype), alpha=rate)
    if module.weight is None:
        out = normal.to(x.dtype)
        return out
    shape = [1, -1, *[1] * (x.dim() - 2)]
    weight, bias = (one.view(shape) for one in (module.weight, module.bias))
    out = torch.addcmul(bias, normal, weight).to(x.dtype)
    return out


class _Normalize(torch.autograd.Function):
    """(x - mean) / deviation of each channel, over all parts; gives the moments and how many values they are of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, together: Together) -> tuple[Tensor, Tensor, Tensor, int]:
        over = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        ours = float(together.present)
        number = wide.new_tensor([x.numel() // x.shape[1] * ours])
        sums = together.sum(torch.cat([wide.sum(over) * ours, number]))
        count = round(float(sums[-1]))
        mean = sums[:-1] / count
        centered = wide - mean.view(shape)
        variance = together.sum(centered.square().sum(over) * ours) / count
        scale = torch.rsqrt(variance + eps).view(shape)
        normal = centered * scale
        ctx.save_for_backward(normal, scale)
        ctx.over, ctx.shape, ctx.count, ctx.together, ctx.dtype = over, shape, count, together, x.dtype
        ctx.mark_non_differentiable(mean, variance)
        return normal, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        normal, scale = ctx.saved_tensors
        ours = float(ctx.together.present)
        gradient = gradient * ours
        sums = torch.cat([gradient.sum(ctx.over), (gradient * normal).sum(ctx.over)])
        mean, slope = (ctx.together.sum(sums) / ctx.count).chunk(2)
        given = (gradient - mean.view(ctx.shape) - normal * slope.view(ctx.shape)) * scale * ours
        return given.to(ctx.dtype), None, None
