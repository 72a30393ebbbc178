"""Matrix products: one batched product over the trials."""

from __future__ import annotations

from typing import Any

import torch

from penstock.training.fused.operators.sparse import sparse_product
from penstock.training.fused.stacked import Stacked, by_vmap, rule


def rows(x: torch.Tensor, trials: int) -> torch.Tensor:
    """A tensor with its last dimension kept and the others folded: [trials, n, last]; a shared tensor is expanded."""
    if isinstance(x, Stacked):
        whole = x.moved(0)
        return whole if whole.dim() == 3 else whole.reshape(trials, -1, whole.shape[-1])
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat.expand(trials, -1, -1)


class _Product(torch.autograd.Function):
    """x · wᵀ, whose gradient of w lies as w does: an optimizer's step then reads both in the order of memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.mT)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        of_x, of_w = ctx.needs_input_grad
        return torch.bmm(grads[0], w) if of_x else None, torch.bmm(grads[0].mT, x) if of_w else None


def by_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x · wᵀ for each trial, with the gradient of ``_Product``."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # autocast does not reach into a Function
        x, w = (value.to(torch.get_autocast_dtype(x.device.type)) for value in (x, w))
    made: torch.Tensor = _Product.apply(x, w)  # type: ignore[no-untyped-call]
    return made


@rule("linear")
def linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    """A weight per trial is one ``baddbmm``; a shared weight is the plain function."""
    x = input
    if not isinstance(weight, Stacked):
        if isinstance(bias, Stacked):
            return torch.nn.functional.linear(x, weight) + bias
        return Stacked(func(x.moved(0), weight, bias), 0)
    trials, w = weight.trials, weight.moved(0)
    if w.ndim == 2:  # a weight without a row for each output
        w = w.unsqueeze(1)
    x2 = rows(x, trials)
    if x2.is_cuda and w.requires_grad:
        made = by_product(x2, w)
        if bias is not None:
            own = bias.moved(0).unsqueeze(1) if isinstance(bias, Stacked) else bias
            made = made + own.to(made.dtype)
    elif isinstance(bias, Stacked):
        made = torch.baddbmm(bias.moved(0).unsqueeze(1), x2, w.transpose(1, 2))
    elif bias is not None:
        made = torch.baddbmm(bias.expand(trials, 1, -1), x2, w.transpose(1, 2))
    else:
        made = torch.bmm(x2, w.transpose(1, 2))
    if x.dim() == 2 and weight.ndim == 2:
        return Stacked(made, 0)
    shape = x.shape[:-1] if weight.ndim == 1 else (*x.shape[:-1], weight.shape[0])
    return Stacked(made.reshape(trials, *shape), 0)


@rule("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "inner_")
def matmul(func: Any, *operands: Any, **named: Any) -> Any:
    """Batched over the trials; where one operand is a shared matrix, the trials are rows of the other."""
    a, b = (*operands, *named.values())  # the first is always named or given first
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if isinstance(b, Stacked) and a.layout != torch.strided and a.ndim == 2 and b.ndim < 3:
        return sparse_product(a, b)
    if isinstance(a, Stacked) and not isinstance(b, Stacked) and b.ndim == 2 and a.ndim >= 1:
        return Stacked(torch.matmul(a.moved(0), b), 0) if a.ndim > 1 else Stacked(torch.mm(a.moved(0), b), 0)
    if a.ndim == 1 or b.ndim == 1:
        return by_vmap(torch.matmul, a, b)
    rank = max(a.ndim, b.ndim)
    return Stacked(torch.matmul(_batched(a, rank), _batched(b, rank)), 0)


def _batched(x: torch.Tensor, rank: int) -> torch.Tensor:
    if isinstance(x, Stacked):
        return x.moved(0).reshape(x.trials, *[1] * (rank - x.ndim), *x.shape)
    return x


_ADDED = {"addmm": ("mat1", "mat2"), "addmv": ("mat", "vec"), "addr": ("vec1", "vec2"),
          "baddbmm": ("batch1", "batch2"), "addbmm": ("batch1", "batch2")}  # fmt: skip


@rule(*_ADDED, *(f"{name}_" for name in _ADDED))
def addmm(func: Any, bias: Any, *operands: Any, beta: Any = 1, alpha: Any = 1, **named: Any) -> Any:
    """``beta`` times the first plus ``alpha`` times a product; a ``beta`` of 0 leaves the first out, NaN and all."""
    name = func.__name__.rstrip("_")
    a, b = (*operands, *(named[key] for key in _ADDED[name] if key in named))
    made = torch.outer(a, b) if name == "addr" else torch.matmul(a, b)
    made = made.sum(0) if name == "addbmm" else made
    made = made if isinstance(alpha, int) and alpha == 1 else made * alpha
    if not isinstance(beta, int) or beta != 0:
        made = made + (bias if isinstance(beta, int) and beta == 1 else bias * beta)
    elif made.shape != bias.shape:
        made = made.expand(bias.shape)
    return made if func.__name__ == name else torch.Tensor.copy_(bias, made)


@rule("bilinear")
def bilinear(func: Any, input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    made = by_vmap(func, input1, input2, weight)
    return made if bias is None else made + bias
