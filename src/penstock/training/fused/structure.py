"""How a trial's optimizer is built: its groups, flags and step, and which parameters it trains.

A scheduler may change all of that in the middle of training: freeze parameters or free them, add a group, set
``nesterov``, take momentum through 0. So it is looked at before every step, at the cost of a few reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_flatten

from penstock.training.fused.optimizers import VECTORISED, vector_flags
from penstock.training.fused.stacked import Unfusable
from penstock.training.loop import Training

Kind = tuple[Any, tuple[tuple[str, ...], ...], frozenset[str]]

# Schedulers of torch's that write nothing but the numbers of groups; others may call the user's own code.
_TAME = frozenset(
    getattr(lr_scheduler, name)
    for name in ("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR",
                 "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "OneCycleLR", "ReduceLROnPlateau")
)  # fmt: skip


def kind_of(trial: Training) -> Kind:
    """The flags of a trial's optimizer, None where it must step alone; its groups; the parameters that it trains."""
    names = {id(p): name for name, p in trial.model.named_parameters()}
    groups = trial.optimizer.param_groups
    held = tuple(tuple(names[id(p)] for p in group["params"] if id(p) in names) for group in groups)
    trained = {names[id(p)] for group in groups for p in group["params"] if id(p) in names and p.requires_grad}
    return vector_flags(trial.optimizer), held, frozenset(trained)


def refuse_kept_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps ``p.data``: a trial's parameters lie elsewhere while it is in a bundle."""
    if type(optimizer) in VECTORISED and type(optimizer).__module__.startswith("torch.optim."):
        return
    params = {p.data_ptr(): (name, p) for name, p in model.named_parameters() if p.numel()}
    for attribute, value in vars(optimizer).items():
        if attribute in ("param_groups", "state"):
            continue
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.data_ptr() in params:
                name, p = params[leaf.data_ptr()]
                if leaf is not p:
                    raise Unfusable(
                        f"{type(optimizer).__name__} keeps the data of {name} in {attribute}, which lie elsewhere "
                        "while trials are trained together: keep the parameter itself"
                    )


class Looks:
    """What is looked at of one trial before every step: ``changed`` is whether it is other than the last time."""

    def __init__(self, trial: Training) -> None:
        self._trial = trial
        kind = VECTORISED.get(type(trial.optimizer))
        self._flags = () if kind is None else kind.flags
        self._tame = trial.scheduler is None or type(trial.scheduler) in _TAME
        self._last = self._now()

    def changed(self) -> bool:
        if self._trial.scheduler is None:
            return False
        now = self._now()
        if now == self._last:
            return False
        self._last = now
        return True

    def _now(self) -> list[Any]:
        optimizer = self._trial.optimizer
        seen: list[Any] = [optimizer.__dict__.get("step")]
        for group in optimizer.param_groups:
            seen += [not group.get(flag) for flag in self._flags]
            if not self._tame:
                seen += [id(p) if p.requires_grad else -id(p) for p in group["params"]]
        return seen
