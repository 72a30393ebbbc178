"""Tensors of which several devices each hold a share: how they are made and gathered, and which optimizers take them.

A share is some rows of a tensor, as torch's FSDP2 has it (Zhao et al. 2023; ``fully_shard``): the first device has the
first rows. Every operation computes with the whole tensor, wherever its rows lie.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

STEPS = 4  # that an optimizer is compared in; its state is saved and taken up in the middle
LEAST = 1e-3  # the least learning rate of the comparison: a schedule may begin at 0


def share_out(root: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each device of a mesh its share of a module's parameters; they are gathered a group at a time."""
    for module in groups(root):
        module.register_forward_hook(_given)
        fully_shard(module, mesh=mesh)
    fully_shard(root, mesh=mesh)


def groups(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered together: members of ``Sequential``, ``ModuleList``, ``ModuleDict``.

    As a rule such modules are called one after another, and no other module computes with their parameters. A module
    that shares a parameter with one outside of it is no group; its parameters are gathered with the root's.
    """
    owners = Counter(id(p) for one in model.modules() for p in one.parameters(recurse=False))
    return list(_groups(model, owners))


def _groups(module: nn.Module, owners: Counter[int]) -> Iterator[nn.Module]:
    listed = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    for child in module.children():
        within = Counter(id(p) for one in child.modules() for p in one.parameters(recurse=False))
        several = isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if listed and not several and within and all(owners[one] == times for one, times in within.items()):
            yield child
        elif within:
            yield from _groups(child, owners)


def _given(module: nn.Module, args: Any, output: Any) -> Any:
    """The output of a group, never as a view: if a view is changed in place, torch does not see its backward begin."""
    return tree_map_only(Tensor, lambda one: one.clone() if one._is_view() else one, output)


def whole(tree: Any, *, keep: bool) -> Any:
    """The same tree with whole tensors on the CPU, which all devices gather; None for each without ``keep``."""
    if isinstance(tree, dict):
        made = copy(tree)  # with the attributes that torch adds to a state_dict
        made.update({name: whole(value, keep=keep) for name, value in tree.items()})
        return made
    if isinstance(tree, list | tuple):
        return type(tree)(whole(value, keep=keep) for value in tree)
    if isinstance(tree, DTensor):
        found = tree.full_tensor()
        return found.cpu() if keep else None
    return tree


def share(tensor: Tensor, like: Tensor) -> Tensor:
    """This device's share of a whole tensor like a shared parameter; a tensor of another shape stays whole."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    mesh = like.device_mesh
    rows = tensor.chunk(mesh.size())[mesh.get_local_rank() :]
    own = rows[0] if rows else tensor[:0]
    return DTensor.from_local(
        own.to(like.device, copy=True), mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def take_up(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Let the optimizer of shared parameters go on from a state of whole parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    of = dict(zip(places, parameters, strict=True))
    shared = {
        place: {name: share(value, of[place]) if isinstance(value, Tensor) else value for name, value in own.items()}
        for place, own in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": shared})


def unlike(optimizer: torch.optim.Optimizer, mesh: DeviceMesh, device: torch.device) -> str:
    """Why an optimizer's steps with shares are not those with whole tensors; nothing where they are.

    A twin takes a few steps with small tensors of its parameters' kinds; its state is saved and taken up in between.
    """
    kinds = [[(p.ndim, p.dtype) for p in group["params"]] for group in optimizer.param_groups]
    shapes = [[((2 * mesh.size() + 1, 3, *[2] * n)[:n], dtype) for n, dtype in sorted(set(k), key=str)] for k in kinds]
    start = [[_drawn(shape, device, dtype, i) for i, (shape, dtype) in enumerate(group)] for group in shapes]
    name = type(optimizer).__name__
    found = list[list[Tensor]]()
    for shared in (False, True):
        modules = [nn.ParameterList([nn.Parameter(t.clone()) for t in group]) for group in start]
        if shared:
            for module in modules:
                fully_shard(module, mesh=mesh)
        try:
            found.append(_steps(optimizer, [list(module.parameters()) for module in modules]))
        except Exception as error:
            if "gloo" in str(error):  # another worker has gone
                raise
            return f"{name} cannot take a step with shares of dense tensors ({type(error).__name__}: {error})"
    begun = [t for group in start for t in group]
    if all(torch.equal(one, before) for one, before in zip(found[0], begun, strict=True)):
        return f"{name} does not look at its param_groups, so that its steps cannot be compared"
    for one, other in zip(*found, strict=True):
        if not torch.allclose(one, other, rtol=1e-4 if one.dtype != torch.float64 else 1e-9, atol=1e-7):
            return f"the steps of {name} with shares of tensors are not those with whole ones"
    return ""


def _steps(optimizer: torch.optim.Optimizer, parameters: list[list[Any]]) -> list[Tensor]:
    """The parameters after a few steps of such an optimizer, as whole tensors."""
    one = _twin(optimizer, parameters)
    flat = [p for group in parameters for p in group]
    for step in range(STEPS):
        for i, p in enumerate(flat):
            drawn = _drawn(p.shape, p.device, p.dtype, 100 * (step + 1) + i)
            p.grad = share(drawn, p.detach())
        one.step()
        if step == STEPS // 2:
            state = whole(one.state_dict(), keep=True)
            one = _twin(optimizer, parameters)
            take_up(one, state)
    found: list[Tensor] = whole([p.detach() for p in flat], keep=True)
    return found


def _twin(optimizer: torch.optim.Optimizer, parameters: list[list[Any]]) -> Any:
    """An optimizer with the same settings and other parameters."""
    one: Any = object.__new__(type(optimizer))
    one.__dict__.update(
        {name: value for name, value in vars(optimizer).items() if name != "step"}
    )  # a scheduler wraps step
    one.state = defaultdict(dict)
    one.param_groups = []
    for group, own in zip(optimizer.param_groups, parameters, strict=True):
        rate = group.get("lr")
        least = {"lr": LEAST} if isinstance(rate, float) and rate < LEAST else {}
        one.param_groups.append({**group, **least, "params": own})
    return one


def _drawn(shape: Any, device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(device, dtype)
