"""Torch's optimizers without torch's compiler, which they import on first use: that takes a second or more.

Nothing here compiles an optimizer. Torch marks some methods of optimizers as not to be compiled, and imports its
compiler when one of them is first called; a step does so to tell the compiler where to stop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from penstock.training.fused.optimizers import hooked_step

_COMPILER = "torch._dynamo"


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
    written = _written(optimizer) if _COMPILER not in sys.modules else None
    if written is None or hooked_step(optimizer) or optimizer.defaults.get("differentiable"):
        optimizer.step()
        return
    with torch.no_grad():
        written(optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn that nothing stepped it


def _written(optimizer: torch.optim.Optimizer) -> Any:
    """The function inside the two wrappers that torch puts around a step: for profiling, and for the compiler.

    None where it is not torch's, or where somebody replaced it. A scheduler puts a third wrapper around it.
    """
    kind, own = type(optimizer), vars(optimizer).get("step")
    kinds = kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]  # AdamW has its step from Adam
    profiled = next((vars(one)["step"] for one in kinds if "step" in vars(one)), None)
    if own is not None and getattr(own, "__wrapped__", None) is not profiled:
        return None
    wrapped = getattr(profiled, "__wrapped__", None)
    written = getattr(wrapped, "__wrapped__", None)
    theirs = kind.__module__.startswith("torch.optim.") and _of(wrapped) == "torch.optim.optimizer"
    return written if theirs and _of(written) in {one.__module__ for one in kinds} else None


def _of(function: Any) -> str:
    """The module that a function was written in."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))
