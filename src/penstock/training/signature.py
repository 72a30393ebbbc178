"""The signature: everything that must be equal for trials to be trained as one model, as one opaque string.

One module runs for all trials of a bundle with its own Python attributes, so equal shapes are not enough: a
LeakyReLU(0.9) fused by shape alone would silently train as its neighbour's LeakyReLU(0.1). Everything that a forward
could read is compared, but for the numbers that the fused operators take per trial. A value that
cannot be compared counts as different.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from penstock.task import Task
from penstock.training.comparing import Comparing, compared
from penstock.training.fused.operators.scripts import refuse_scripts
from penstock.training.fused.optimizers import vector_flags
from penstock.training.fused.per_trial import PER_TRIAL
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.structure import refuse_kept_data
from penstock.training.unlike import Signature

REGISTRIES = {
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_flat_weights",
    "_flat_weight_refs",
}
_HOOKS = {name for name in vars(nn.Module()) if name.endswith(("_hooks", "_pre_hooks"))}


def signature(
    task: Task,
    looks: list[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_size: int,
    reads: Mapping[str, Any],
    besides: Mapping[str, Any],
) -> str:
    """The string that is equal for trials that can be one model; raises ``Unfusable`` for a trial that never can.

    ``looks`` are the model's ``attributes`` before its first forward, ``reads`` the values that the task's loss,
    metrics and data took from the config, and ``besides`` those that they find elsewhere.
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
    if besides:
        parts.append(f"besides {compared(dict(sorted(besides.items())))}")
    of_all = "\n".join(part.replace(f"batch {batch_size} ", "batch ", 1) for part in parts)
    digest = hashlib.blake2b(of_all.encode(), digest_size=12).hexdigest()
    return Signature.of(f"{batch_size}.{digest}", parts)  # as ``family`` and ``batch_size`` read it


def attributes(model: nn.Module) -> list[str]:
    """Everything about a model but the values of its parameters and buffers, a line for each attribute."""
    parts = []
    params = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    buffers: set[int] = set()
    refuse_scripts(model)
    names = {id(p): f"parameter {name}" for name, p in model.named_parameters()}
    named = Comparing(names | {id(module): f"module {path}" for path, module in model.named_modules()})
    for path, module in model.named_modules():
        kind = type(module)
        if kind.get_extra_state is not nn.Module.get_extra_state:
            raise Unfusable(
                f"the module {path or kind.__name__} saves what get_extra_state gives, which the steps of all trials "
                "would share: register a buffer"
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise Unfusable(
                f"the module {path or kind.__name__} has a backward hook, which would see the gradients of all trials "
                "at once: use a hook of a parameter, or a torch.autograd.Function in the forward"
            )
        free = {attribute for attribute, _ in PER_TRIAL.get(kind, ())}
        parts.append(f"module {path} {named.class_of(module)}")
        computed = computed_before(module) | _COMPILED
        for name, value in sorted(vars(module).items()):
            if name == "forward" and "_orig_mod" in module._modules:
                continue
            if name in computed or name in REGISTRIES or (name in _HOOKS and not value):
                continue
            if name in _HOOKS:
                value = _in_order(module, name)
            told = str(value is None) if name in free else named(value)
            if "tensor torch.sparse_" in told and "tensor torch.sparse_coo" not in told:
                raise Unfusable(
                    f"the model's {f'{path}.{name}'.lstrip('.')} is a sparse tensor of a layout that torch cannot "
                    "copy: use to_sparse_coo()"
                )
            if "<parameter " in told:
                raise Unfusable(_keeps(f"{path}.{name}".lstrip("."), told))
            parts.append(f" {name} {told}")
        for name, p in module._parameters.items():
            if is_lazy(p):
                where = f"{path}.{name}".lstrip(".")
                raise Unfusable(f"{where} gets its shape in the first forward, which does not reach it: give its shape")
            if p is not None and p.is_complex():
                raise Unfusable(
                    f"the parameter {f'{path}.{name}'.lstrip('.')} is complex, and optimizers step real and imaginary "
                    "parts apart: keep a real parameter, and use torch.view_as_complex in the forward"
                )
            shape = None if p is None else (tuple(p.shape), p.dtype, p.requires_grad, params[id(p)])
            parts.append(f" parameter {name} {shape}")
        for name, b in module._buffers.items():
            if b is not None and id(b) in buffers:
                raise Unfusable(
                    f"the buffer {f'{path}.{name}'.lstrip('.')} is shared by two modules: give each its own"
                )
            buffers.add(id(b))
            lasting = name not in module._non_persistent_buffers_set
            if b is not None and b.layout != torch.strided:
                raise Unfusable(
                    f"the buffer {f'{path}.{name}'.lstrip('.')} is sparse, and buffers of several trials are stacked: "
                    "keep it as a plain attribute, which the trials of a bundle share"
                )
            parts.append(f" buffer {name} {None if b is None else (tuple(b.shape), b.dtype, lasting)}")
    return parts


# What ``torch.compile`` and ``Module.compile`` leave on a module: it computes what the module was written to.
_COMPILED = {"_compiled_call_impl", "dynamo_ctx", "_torchdynamo_orig_callable", "_torchdynamo_wrapper_id",
             "get_compiler_config", "_super_module_initialized"}  # fmt: skip


def computed_before(module: nn.Module) -> set[str]:
    """The attributes that hooks of torch's own compute before each forward, from parameters and buffers alone."""
    hooks = module._forward_pre_hooks.values()
    return {getattr(hook, _WRITTEN[base]) for hook in hooks for base in _WRITTEN if isinstance(hook, base)}


_WRITTEN: dict[type, str] = {WeightNorm: "name", SpectralNorm: "name", BasePruningMethod: "_tensor_name"}


def _in_order(module: nn.Module, name: str) -> list[Any]:
    """The hooks of a module, or what it knows of some of them, without the numbers that torch gives to all hooks."""
    held = vars(module)[name]
    kind = name.replace("_with_kwargs", "").replace("_always_called", "")
    places = {key: place for place, key in enumerate(vars(module).get(kind, held))}
    return [(places.get(key), value) for key, value in held.items()]


def _keeps(where: str, told: str) -> str:
    name = told.split("<parameter ", 1)[1].split(">")[0]
    return (
        f"the model's {where} holds the parameter {name} a second time, outside of what torch registers: read it by "
        "its own name in the forward, or keep a ParameterList"
    )


def _optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    refuse_kept_data(model, optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    flags = vector_flags(optimizer) or [(("alone", True),)] * len(optimizer.param_groups)
    parts = [f"optimizer {compared(type(optimizer))}"]
    for group, of_group in zip(optimizer.param_groups, flags, strict=True):
        for p in group["params"]:
            if id(p) not in names:
                raise Unfusable("the optimizer holds a parameter that is not the model's")
        parts.append(f" group {compared({**dict(of_group), 'parameters': [names[id(p)] for p in group['params']]})}")
    return parts
