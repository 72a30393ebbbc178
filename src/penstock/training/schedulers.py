"""What a scheduler's own code touches besides the numbers of its optimizer's groups, found in that code's names.

While trials are trained together, the optimizers' state lies in the rows of the bundle, and no parameter has a gradient
of its own. A scheduler that asks for either has it only where each trial's own optimizer steps.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from penstock.task import Task
from penstock.training.comparing import filled
from penstock.training.contents import PLAIN, STORES, of_user

_TORCHS = {kind for kind in vars(lr_scheduler).values() if isinstance(kind, type)}


def reads_state(scheduler: Any) -> bool:
    """Whether a scheduler may read or write the state of its optimizer."""
    return any(named & {"state", "state_dict", "load_state_dict"} for named, _ in _codes(scheduler))


def reads_gradients(scheduler: Any) -> bool:
    """Whether a scheduler may read or write gradients."""
    return any("grad" in named for named, _ in _codes(scheduler))


def writes(scheduler: Any) -> set[str]:
    """The names of the attributes and globals that a scheduler may write, besides its own attributes."""
    return {name for _, stored in _codes(scheduler) for name in stored if not hasattr(scheduler, name)}


def _codes(scheduler: Any) -> Iterator[tuple[set[str], set[str]]]:
    """The names in each function of the user's that a scheduler calls, and those that it stores."""
    left, seen = [scheduler], set[int]()
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (*PLAIN, Task, nn.Module, torch.optim.Optimizer)):
            continue
        seen.add(id(value))
        if isinstance(value, types.CodeType):
            stored = (one.argval for one in dis.get_instructions(value) if one.opname in STORES)
            yield set(value.co_names), {str(name) for name in stored}
            left += [inner for inner in value.co_consts if isinstance(inner, types.CodeType)]
        elif isinstance(value, types.FunctionType):
            if not of_user(value.__module__ or ""):
                continue
            left += [value.__code__, *(cell.cell_contents for cell in value.__closure__ or () if filled(cell))]
            left += [value.__globals__[name] for name in value.__code__.co_names if _function(value.__globals__, name)]
        elif isinstance(value, types.MethodType):
            left += [value.__func__]
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, lr_scheduler.LRScheduler) or of_user(type(value).__module__):
            left += [one for name, one in getattr(value, "__dict__", {}).items() if name != "optimizer"]
            for kind in type(value).__mro__:
                if kind not in _TORCHS and of_user(kind.__module__):
                    left += [one for name, one in vars(kind).items() if name not in _SAVING and callable(one)]


_SAVING = {"__init__", "state_dict", "load_state_dict", "__getstate__", "__setstate__"}


def _function(names: dict[str, Any], name: str) -> bool:
    return isinstance(names.get(name), types.FunctionType)
