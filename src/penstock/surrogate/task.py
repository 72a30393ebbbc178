"""A task whose model is a narrower twin of another task's: the same data, loss, metrics, optimizer and scheduler.

It is an instance of a subclass of the user's own class, so that whatever looks at a task sees the user's methods and
attributes. Each trial's model is the user's, made at full width and narrowed, so the initial values are the user's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from penstock.errors import TaskError
from penstock.surrogate.settings import Surrogate
from penstock.task import Task
from penstock.trial import Config, is_reduced, scale_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from penstock.surrogate.parametrize import Part
    from penstock.training.rates import Factor

_PARTS: WeakKeyDictionary[nn.Module, dict[str, Part]] = WeakKeyDictionary()  # by narrow model


class Narrowed(Task):
    """The task of a surrogate; ``narrowed`` makes it. Its ``target`` is the user's task."""

    target: Task
    surrogate: Surrogate
    _traced: dict[str, Any]  # what was found of a model, by its structure

    def model(self, config: Config) -> nn.Module:
        from penstock.surrogate.twin import own_twin, twin

        if hasattr(self.target, "narrow"):
            model, parts = own_twin(self, config)
        else:
            model, parts = twin(self, super().model(config), config)
        _PARTS[model] = parts
        return model

    def data(self, config: Config) -> tuple[Any, Any]:
        made = super().data(config)
        if own_data(self) is None:
            return made
        import torch

        from penstock.surrogate.reduce import reduced

        return reduced(made, self.surrogate, torch.initial_seed())  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return narrowed, (self.target, self.surrogate, self._traced)


def narrowed(task: Task, surrogate: Surrogate, traced: dict[str, Any] | None = None) -> Narrowed:
    """The task of a task's surrogates; ``traced`` is what was found of its models already."""
    kind = type(task)
    made: Any = copy.copy(task)
    made.__class__ = type(kind.__name__, (Narrowed, kind), {"__module__": kind.__module__, "shards": 1})
    made.target, made.surrogate, made._traced = task, surrogate, {} if traced is None else traced
    return made  # type: ignore[no-any-return]


def task_of(task: Task, surrogate: Surrogate, variant: str, traced: dict[str, Any] | None = None) -> Narrowed:
    """The task of a variant of a study's task, by the variant's name."""
    settings = surrogate if is_reduced(variant) else surrogate.plain
    return narrowed(task, replace(settings, scale=scale_of(variant)), traced)


def own_data(task: Task) -> tuple[float, float] | None:
    """The parts of rows and of pixels that a task's data have, where they are not the study's own data."""
    if not isinstance(task, Narrowed) or (task.surrogate.data, task.surrogate.resolution) == (1.0, 1.0):
        return None
    return task.surrogate.data, task.surrogate.resolution


def rates_of(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Factor]:
    """The factors of a trial's learning rates, by parameter, as far as they are not 1; none for a target."""
    if not isinstance(task, Narrowed):
        return {}
    from penstock.surrogate.parametrize import rates

    if model not in _PARTS:
        raise TaskError("The model of a surrogate was replaced after it was made: keep the module that model() gives.")
    return rates(_PARTS[model], optimizer)


def parts_of(model: nn.Module) -> Mapping[str, Part]:
    """The parameters of a surrogate's model, as they are in the parametrization."""
    return _PARTS[model]
