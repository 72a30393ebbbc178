"""The signature: everything that must be equal for trials to be trained as one model, as one opaque string.

One module runs for all trials of a bundle with its own Python attributes, so equal shapes are not enough: a
LeakyReLU(0.9) fused by shape alone would silently train as its neighbour's LeakyReLU(0.1). Everything that a forward
could read is compared, but for the numbers that the fused operators take per trial. A value that
cannot be compared counts as different.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.task import Task
from penstock.training.fused.optimizers import vector_flags
from penstock.training.fused.per_trial import PER_TRIAL
from penstock.training.fused.stacked import Unfusable

_REGISTRIES = {
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_flat_weights",
    "_flat_weight_refs",
}
_HOOKS = {name for name in vars(nn.Module()) if name.endswith(("_hooks", "_pre_hooks"))}
_different = itertools.count()
_numbers: weakref.WeakKeyDictionary[Any, int] = (
    weakref.WeakKeyDictionary()
)  # by class that no module gives under its name


def signature(
    task: Task,
    looks: list[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_size: int,
    reads: Mapping[str, Any],
) -> str:
    """The string that is equal for trials that can be one model; raises ``Unfusable`` for a trial that never can.

    ``looks`` are the model's ``attributes`` before its first forward, ``reads`` the values that the task's loss,
    metrics and data took from the config.
    """
    if task.precision == "fp16":
        raise Unfusable('precision "fp16" has a gradient scale of its own for each trial: use "bf16" to fuse')
    step = inspect.signature(type(optimizer).step).parameters.get("closure")
    if step is not None and step.default is inspect.Parameter.empty:
        raise Unfusable(f"{type(optimizer).__name__} needs a closure, which evaluates one trial's loss again and again")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if task.clip_grad_norm is not None and any(p.requires_grad and id(p) not in held for p in model.parameters()):
        raise Unfusable("clip_grad_norm counts gradients of parameters that the optimizer does not hold: freeze those")
    parts = [
        *looks,
        *_optimizer(model, optimizer),
        f"batch {batch_size} {task.precision} {task.clip_grad_norm} {task.unit_steps}",
        f"reads {compared(dict(sorted(reads.items())))}",
    ]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()


def attributes(model: nn.Module) -> list[str]:
    """Everything about a model but the values of its parameters and buffers, a line for each attribute."""
    parts = []
    params = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    buffers: set[int] = set()
    paths = {id(module): path for path, module in model.named_modules()}
    for path, module in model.named_modules():
        kind = type(module)
        free = {attribute for attribute, _ in PER_TRIAL.get(kind, ())}
        parts.append(f"module {path} {compared(kind)}")
        for name, value in sorted(vars(module).items()):
            if name in _REGISTRIES or (name in _HOOKS and not value):
                continue
            if isinstance(value, types.MethodType) and id(value.__self__) in paths:
                parts.append(f" {name} method of {paths[id(value.__self__)]} {compared(value.__func__)}")
                continue
            parts.append(f" {name} {value is None if name in free else compared(value)}")
        for name, p in module._parameters.items():
            if is_lazy(p):
                raise Unfusable(f"{path}.{name} gets its shape in the first forward")
            shape = None if p is None else (tuple(p.shape), p.dtype, p.requires_grad, params[id(p)])
            parts.append(f" parameter {name} {shape}")
        for name, b in module._buffers.items():
            if b is not None and id(b) in buffers:
                raise Unfusable(f"the buffer {path}.{name} is shared by two modules")
            buffers.add(id(b))
            lasting = name not in module._non_persistent_buffers_set
            parts.append(f" buffer {name} {None if b is None else (tuple(b.shape), b.dtype, lasting)}")
    return parts


def _optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    parts = [f"optimizer {compared(type(optimizer))} {vector_flags(optimizer)}"]
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise Unfusable("the optimizer holds a parameter that is not the model's")
        parts.append(f" group {[names[id(p)] for p in group['params']]}")
    return parts


def compared(value: Any) -> str:
    """A value as text that is equal for equal values alone.

    >>> compared({"widths": (64, 32)}), compared(0.1) == compared(0.2)
    ("{'widths': (64, 32)}", False)
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__} {value!r}" if type(value) not in _PLAIN else repr(value)
    if isinstance(value, torch.dtype | torch.device | torch.Size | torch.memory_format | torch.layout | enum.Enum):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = [compared(v) for v in value]
        if isinstance(value, set | frozenset):
            items.sort()
        return f"{'' if type(value) is tuple else type(value).__name__}({', '.join(items)})"
    if isinstance(value, Mapping):
        name = "" if type(value) is dict else type(value).__name__
        return f"{name}{{{', '.join(f'{compared(k)}: {compared(v)}' for k, v in value.items())}}}"
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return _unlike(value)
        data = value.detach().cpu().contiguous()
        content = hashlib.blake2b(bytes(data.reshape(-1).view(torch.uint8).numpy()), digest_size=12)
        return f"tensor {value.dtype} {tuple(value.shape)} {content.hexdigest()}"
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        content = hashlib.blake2b(value.tobytes(), digest_size=12)
        return f"array {value.dtype} {value.shape} {content.hexdigest()}"
    if isinstance(value, functools.partial):
        return f"partial({compared(value.func)}, {compared(value.args)}, {compared(value.keywords)})"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType):
        return _by_name(value)
    return _unlike(value)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _by_name(value: Any) -> str:
    """A class or function that its module gives under its name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is value or isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType):
        return f"{module}.{name}"
    if isinstance(value, types.FunctionType):  # a lambda or a function made inside another
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        cells = ["itself" if content is value else content for content in cells]
        code = value.__code__
        told = (code.co_code.hex(), compared(code.co_names), *(compared(c) for c in code.co_consts))
        given = (value.__defaults__, value.__kwdefaults__, value.__dict__)
        return f"{module}.{name} {told} {compared(cells)} {compared(given)}"
    return f"{module}.{name} {_numbers.setdefault(value, next(_different))}"


def _unlike(value: Any) -> str:
    return f"{type(value).__qualname__} unlike any other {next(_different)}"
