"""What a task returned: its scheduler, and its modules, so that a module which two trials would share is noticed.

A trial that trains a module which another trial trains too goes on where that other trial stopped. Parts that no step
changes, such as a frozen backbone without running statistics, may be shared. Nothing here keeps a module alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.errors import TaskError
from penstock.task import Task, task_name
from penstock.trial import Config

_OWNERS: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # by the id of a module, or of its parameter


def remember(model: nn.Module) -> None:
    """Keep in mind, for as long as they live, the modules that a model consists of."""
    for module in model.modules():
        _OWNERS[id(module)] = module
        for parameter in module._parameters.values():
            if parameter is not None:
                # A weak reference to the parameter itself would keep torch from swapping its content.
                _OWNERS[id(parameter)] = module


def returned_before(model: nn.Module) -> str:
    """The part of a model that an earlier model has and that training changes, with advice; nothing if all is new."""
    if _known(model):
        return "the one that it returned before: make it in model(), or return copy.deepcopy of it"
    for part in _shared(model):
        return (
            f"one with {part} of one that it returned before: make it in model(), or use copy.deepcopy of it. Only "
            "a part that no step changes may be shared: with requires_grad_(False), and without running statistics"
        )
    return ""


def _known(module: nn.Module) -> bool:
    return _OWNERS.get(id(module)) is module


def _shared(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if _known(module) and _trained(module, model):
            yield f"the submodule {path!r}"
        for name, parameter in module._parameters.items():
            owner = None if parameter is None or not parameter.requires_grad else _OWNERS.get(id(parameter))
            # An owner that lives may have dropped its parameter, whose id may be another's by now.
            if owner is not None and any(one is parameter for one in owner._parameters.values()):
                yield f"the parameter {f'{path}.{name}'.lstrip('.')!r}"


def _trained(part: nn.Module, model: nn.Module) -> bool:
    """Whether training a model changes a part of it: its parameters, or the running statistics of its forward."""
    if any(parameter.requires_grad for parameter in part.parameters()):
        return True
    norms = [one for one in part.modules() if isinstance(one, _NormBase) and one.running_mean is not None]
    if not norms:
        return False
    modes = [(module, module.training) for module in model.modules()]
    model.train()  # a part may have a train() of its own, which leaves it in evaluation
    trained = any(norm.training for norm in norms)
    for module, mode in modes:
        module.training = mode
    return trained


def made_model(task: Task, config: Config) -> nn.Module:
    """The model that ``Task.model`` returned, or a clear refusal."""
    model = task.model(config)
    if not isinstance(model, nn.Module):
        what = "None" if model is None else f"a {type(model).__name__}"
        raise TaskError(f"{task_name(task)}.model must return an nn.Module, got {what}: does it end with a return?")
    if known := returned_before(model):
        raise TaskError(f"{task_name(task)}.model must return a new module for each trial, got {known}.")
    remember(model)
    return model


def split_scheduler(given: Any) -> tuple[Any, bool]:
    """The scheduler that ``Task.scheduler`` returned, and whether it steps at every step."""
    if isinstance(given, tuple):
        if len(given) != 2 or given[1] not in ("step", "unit"):
            raise TaskError(
                'Task.scheduler must return a scheduler, (scheduler, "step"), (scheduler, "unit") or None, '
                f"got a tuple {given!r}."
            )
        return given[0], given[1] == "step"
    return given, False
