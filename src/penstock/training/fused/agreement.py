"""Before a way is trusted: its gradients must be those of a trial alone, on a real batch.

Whatever a way might get wrong without an error shows here: a module that reads what Penstock does not compare, a
backward of the user's own that a batched forward does not call, a loss that is another one at every call.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from penstock.training.fused.stack import Stack
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import PER_TRIAL, Tensors, Way
from penstock.training.loop import Training
from penstock.training.random.generators import position
from penstock.training.random.keyed import Keyed
from penstock.training.random.masks import SoloKeys
from penstock.training.signature import attributes

# How far gradients may be from those of a trial alone, in parts of its whole gradient: in float64, and in the task's
# own precision, where bfloat16 and TF32 through many layers leave little but the direction.
EXACT, ABOUT = 1e-6, 0.5
Grads = Sequence[torch.Tensor | None]


@dataclass
class Case:
    """A step of the rows from ``first`` to ``last``: what they train on together, and the first of them alone."""

    stack: Stack
    first: int
    last: int
    batch: Any
    shared: bool
    keys: torch.Tensor | None
    alone: Any
    plain: nn.Module  # a copy of a trial's module, never trained

    @property
    def trial(self) -> Training:
        return self.stack.trials[self.first]


def agree(way: Way, case: Case) -> None:
    """Refuse a way that is not exact in float64, or not about right as it will be used."""
    stack, names = case.stack, case.stack.trained()
    before = {name: rows[case.first : case.last].clone() for name, rows in stack.buffers.items()}
    try:
        alone = _alone(case, names)
        _put_back(case, before)
        params, buffers = stack.leaves(case.first, case.last)
        numbers = way.numbers(case.first, case.last, stack.device)
        given = (params, buffers, names, case.batch, case.shared, case.keys, numbers)
        compare(names, _first(gradients(way, case.trial, *given)[1]), alone, ABOUT)
        _put_back(case, before)
        compare(names, *_in_float64(way, case, names), EXACT)
    finally:
        _put_back(case, before)


def gradients(
    way: Way,
    trial: Training,
    params: Tensors,
    buffers: Tensors,
    names: Sequence[str],
    batch: Any,
    shared: bool,
    keys: torch.Tensor | None,
    numbers: list[torch.Tensor],
    precision: AbstractContextManager[object] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The losses of all trials, and the gradients of the parameters that are named; None where there is none."""
    way.train()
    with trial.autocast() if precision is None else precision:
        losses = way.run(trial.task.loss, params, buffers, batch, shared, keys, numbers)
    if not isinstance(losses, torch.Tensor) or losses.ndim != 1:
        raise Unfusable("the loss of a trial is no scalar tensor")
    return losses, torch.autograd.grad(losses.sum(), [params[name] for name in names], allow_unused=True)


def _alone(case: Case, names: Sequence[str]) -> Grads:
    trial = case.trial
    trial.model.train()
    drawn, looks = position(), attributes(trial.model)
    params = dict(trial.model.named_parameters())
    idle = sorted(case.stack.idle)
    wanted = [params[name] for name in (*names, *idle)]
    grads = torch.autograd.grad(trial.loss(case.alone), wanted, allow_unused=True)
    if reached := [name for name, grad in zip(idle, grads[len(names) :], strict=True) if grad is not None]:
        raise Unfusable(f"the loss reaches {reached[0]} in some steps and not in others")
    if position() != drawn:
        raise Unfusable("the loss draws from Python's or numpy's random generator, which trials cannot share")
    if (changed := attributes(trial.model)) != looks:
        what = next((now for old, now in zip(looks, changed, strict=False) if old != now), " one")
        raise Unfusable(f"the model changes an attribute of its own in its forward:{what}")
    return grads[: len(names)]


def _in_float64(way: Way, case: Case, names: Sequence[str]) -> tuple[Grads, Grads]:
    """The gradients of a row, together with its neighbour and alone; none where a model takes no float64."""
    stack, trial, last = case.stack, case.trial, min(case.first + 2, case.last)
    model = copy.deepcopy(case.plain).double().train()
    model.load_state_dict(trial.model.state_dict())
    for path, module in trial.model.named_modules():
        for attribute, _ in PER_TRIAL.get(type(module), ()):
            setattr(model.get_submodule(path), attribute, getattr(module, attribute))
    own = dict(model.named_parameters())
    try:
        with Keyed(SoloKeys(trial.seed, trial.step)):
            loss = trial.task.loss(model, tree_map(_double, case.alone), trial.config)
        alone = torch.autograd.grad(loss, [own[name] for name in names], allow_unused=True)
    except Exception:
        return [], []
    params, buffers = ({k: _double(v).clone() for k, v in part.items()} for part in stack.leaves(case.first, last))
    params.update({name: params[name].detach().requires_grad_() for name in names})
    count = last - case.first
    batch = case.batch if case.shared else tree_map(lambda leaf: _rows(leaf, count), case.batch)
    keys = None if case.keys is None else case.keys[:count]
    numbers = way.numbers(case.first, last, stack.device)
    given = (params, buffers, names, tree_map(_double, batch), case.shared, keys, numbers)
    return _first(gradients(way, trial, *given, precision=nullcontext())[1]), alone


def compare(names: Sequence[str], together: Grads, alone: Grads, tolerance: float) -> None:
    """Refuse gradients that differ by more than a part of the trial's whole gradient."""
    whole = sum(float(grad.double().square().sum()) for grad in alone if grad is not None) ** 0.5
    if not math.isfinite(whole):
        return  # nothing can be told from a trial that diverges at once
    for name, one, own in zip(names, together, alone, strict=False):
        if one is None or own is None:
            if one is not own:
                raise Unfusable(f"the gradient of {name} is there or missing, unlike that of the trial alone")
            continue
        far = float((one.double() - own.double()).norm()) / max(whole, 1e-30)
        if not far <= tolerance:
            raise Unfusable(f"the gradient of {name} is off by {far:.2g} of that of the trial alone")


def _put_back(case: Case, before: Tensors) -> None:
    for name, rows in before.items():
        case.stack.buffers[name][case.first : case.last] = rows


def _first(grads: Grads) -> Grads:
    return [None if grad is None else grad[0] for grad in grads]


def _rows(leaf: Any, count: int) -> Any:
    return leaf[:count] if isinstance(leaf, torch.Tensor) else leaf


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
