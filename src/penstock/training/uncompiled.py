"""Torch's optimizers without torch's compiler, which they import on first use: that takes a second or more.

Nothing here compiles an optimizer. Torch marks some methods of optimizers as not to be compiled, and imports its
compiler when one of them is first called; a step does so to tell the compiler where to stop.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from penstock.training.fused.optimizers import hooked_step

_COMPILER = "torch._dynamo"
_SGD = inspect.unwrap(torch.optim.SGD.step)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Tensors = list[Any]


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let optimizers be made, saved and loaded without an import of the compiler, unless it is there already."""
    marked = [] if _COMPILER in sys.modules else _marked()
    for method in marked:
        method.__dynamo_disable = method  # as if it were marked already
    try:
        yield
    finally:
        for method in marked:
            if vars(method).get("__dynamo_disable") is method:
                del method.__dynamo_disable


def operator(made: CustomOpDef) -> CustomOpDef:
    """A custom operator of ours whose first call does not import the compiler: there is nothing in it to compile."""
    for kernel in made._backend_fns.values():
        if (written := getattr(kernel, "__wrapped__", None)) is not None:
            written.__dynamo_disable = written  # as if it were marked already
    return made


def _marked() -> list[Any]:
    marks = [one for one in vars(torch.optim.Optimizer).values() if _of(one) == "torch._compile"]
    return [one.__wrapped__ for one in marks if "__dynamo_disable" not in vars(one.__wrapped__)]


def step(optimizer: torch.optim.Optimizer) -> None:
    """One step of an optimizer; of one of torch's own, as it is written there, without the wrappers around it."""
    written = _written(optimizer)
    if written is None or hooked_step(optimizer) or optimizer.defaults.get("differentiable"):
        optimizer.step()
        return
    with torch.no_grad():
        if written is _SGD and "_init_group" not in vars(optimizer) and (lists := _lists(optimizer)) is not None:
            for group, *tensors in lists:
                _sgd(group, *tensors)
        elif _COMPILER in sys.modules:
            optimizer.step()
        else:
            written(optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn that nothing stepped it


def _lists(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], _Tensors, _Tensors, _Tensors]] | None:
    """The parameters of each group of an SGD, their gradients and momentum; None where torch's own step is to be taken.

    That is the first one, which makes the momentum, and any but that of plain tensors on a CPU: there alone torch
    steps tensor by tensor unless it is told otherwise.
    """
    lists: list[tuple[dict[str, Any], _Tensors, _Tensors, _Tensors]] = []
    for group in optimizer.param_groups:
        told = group["foreach"] or group["fused"] or group["maximize"]
        if told or any(type(group[name]) not in (float, int) for name in ("lr", "momentum", "weight_decay")):
            return None
        params = [p for p in group["params"] if p.grad is not None]
        grads, momentum = [p.grad for p in params], []
        if group["momentum"]:
            momentum = [optimizer.state[p].get("momentum_buffer") for p in params]
        if any(
            type(t) not in _PLAIN or not t.is_cpu or t.layout is not torch.strided for t in (*params, *grads, *momentum)
        ):
            return None
        if group["weight_decay"] and len({p.data_ptr() for p in params}) < len(params):
            return None  # one of them decays by what another has become
        lists.append((group, params, grads, momentum))
    return lists


def _sgd(group: dict[str, Any], params: _Tensors, grads: Any, momentum: _Tensors) -> None:
    """What torch's SGD computes tensor by tensor, in a fifth of the calls: these feel a small model's step."""
    if group["weight_decay"]:
        grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
    if momentum:
        torch._foreach_mul_(momentum, group["momentum"])
        torch._foreach_add_(momentum, grads, alpha=1 - group["dampening"])
        grads = torch._foreach_add(grads, momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
    if params:
        torch._foreach_add_(params, grads, alpha=-group["lr"])


def _written(optimizer: torch.optim.Optimizer) -> Any:
    """The function inside the two wrappers that torch puts around a step: for profiling, and for the compiler.

    None where it is not torch's, or where somebody replaced it. A scheduler puts a third wrapper around it.
    """
    kind: Any = type(optimizer)
    profiled, written = _inside(kind, kind.step)
    own = vars(optimizer).get("step")
    return written if own is None or getattr(own, "__wrapped__", None) is profiled else None


@cache
def _inside(kind: Any, profiled: Any) -> tuple[Any, Any]:
    """The step of a kind of optimizers, which it has from itself or a parent, and torch's function inside of it."""
    wrapped = getattr(profiled, "__wrapped__", None)
    written = getattr(wrapped, "__wrapped__", None)
    kinds = kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]  # AdamW has its step from Adam
    theirs = kind.__module__.startswith("torch.optim.") and _of(wrapped) == "torch.optim.optimizer"
    return profiled, written if theirs and _of(written) in {one.__module__ for one in kinds} else None


def _of(function: Any) -> str:
    """The module that a function was written in."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))
