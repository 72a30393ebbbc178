"""Modules that get their shapes in their first forward, such as ``nn.LazyLinear``: given them before the first step.

An optimizer, a signature and a bundle need the shapes of all parameters. So a trial's first batch runs once when the
trial is made, in every mode, and its initial weights are drawn there. Nothing else of that forward stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def fill(model: nn.Module, run: Callable[[nn.Module], object]) -> nn.Module:
    """Let lazy parameters get their shapes and initial values in a run of the model; other models are not run.

    >>> fill(nn.LazyLinear(2), lambda model: model(torch.ones(1, 3))).weight.shape
    torch.Size([2, 3])
    """
    if not any(is_lazy(p) for p in (*model.parameters(), *model.buffers())):
        return model
    ready = [module for module in model.modules() if not _lazy(module)]
    buffers = [b for b in model.buffers() if not is_lazy(b)]
    before, mode = [b.clone() for b in buffers], model.training
    model.train()
    with unwritten(ready):
        run(model)
    model.train(mode)
    for buffer, old in zip(buffers, before, strict=True):
        buffer.copy_(old)
    for module in model.modules():
        if not _lazy(module) and module not in ready and isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()  # which its first forward has moved
    return model


@contextmanager
def unwritten(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back the attributes of modules that are assigned meanwhile."""
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, held in before:
            now = vars(module)
            if now.keys() != held.keys() or any(now[name] is not value for name, value in held.items()):
                now.clear()
                now.update(held)


def _lazy(module: nn.Module) -> bool:
    held = (*module._parameters.values(), *module._buffers.values())
    return any(is_lazy(one) for one in held if isinstance(one, torch.Tensor))
