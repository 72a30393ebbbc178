"""Copies of a model that leave out what cannot be copied, and need not be: a copy may share it."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLAIN = (torch.Tensor, nn.Parameter)
_SHARED = (torch.jit.ScriptFunction, type(threading.Lock()), type(threading.RLock()))


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a model, whose modules may hold results of a forward: torch copies no tensor that has a history.

    Modules that are compiled run as they were written in the copy: a bundle's step is compiled as a whole.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
            elif isinstance(value, _SHARED):
                memo[id(value)] = value
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        module._compiled_call_impl = None
        if "_orig_mod" in module._modules:  # what torch.compile has made
            vars(module)["forward"] = module._modules["_orig_mod"]
    return made


def on_host(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of weights on the CPU, and of what else modules save by ``get_extra_state``."""

    def copy_of(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    return {name: copy_of(value) for name, value in weights.items()}


def brought(tree: Any) -> Any:
    """Copies of all tensors of some nested containers on the CPU.

    A device is waited for once. Tensor by tensor, that takes longer than all else that saving a state does.

    >>> brought({"a": torch.ones(2), "b": [torch.tensor(3), "c"]})
    {'a': tensor([1., 1.]), 'b': [tensor(3), 'c']}
    """
    leaves, spec = tree_flatten(tree)
    kinds = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.device.type == "cpu" or type(leaf) not in _PLAIN or leaf.layout is not torch.strided:
            leaves[i] = leaf.detach().to("cpu", copy=True)
        else:
            kinds[leaf.device, leaf.dtype].append(i)
    pieces = [torch.cat([leaves[i].detach().reshape(-1) for i in places]) for places in kinds.values()]
    there = [torch.empty_like(one, device="cpu", pin_memory=True).copy_(one, non_blocking=True) for one in pieces]
    for device in {device for device, _ in kinds}:
        torch.accelerator.current_stream(device).synchronize()
    for places, piece in zip(kinds.values(), there, strict=True):
        for i, part in zip(places, torch.split(piece, [leaves[i].numel() for i in places]), strict=True):
            leaves[i] = part.view(leaves[i].shape).clone()  # of its own, or a file would hold all that it is a part of
    return tree_unflatten(leaves, spec)


def uncopied(model: nn.Module) -> str:
    """Why a model cannot be copied, as a refusal; nothing where it can."""
    try:
        copied(
            model, {id(one): one for one in (*model.parameters(), *model.buffers())}
        )  # as they can be, and are large
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"the model cannot be copied ({said}): make what cannot be copied inside the forward"
    return ""
