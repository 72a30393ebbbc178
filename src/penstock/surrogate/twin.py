"""The narrow twin of a model that a task has just made: traced once for each structure, narrowed, and rescaled."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from penstock.errors import TaskError
from penstock.surrogate.flow import Flowed, flowed
from penstock.surrogate.parametrize import Part, compared, parts
from penstock.surrogate.reduce import shallower
from penstock.surrogate.shrink import shrink
from penstock.surrogate.task import Narrowed
from penstock.surrogate.trace import Place, Traced, Unanalysable, trace
from penstock.training.random.generators import own_randomness
from penstock.trial import Config

LAYERS = (nn.Linear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)  # of torch, with matrices
ROWS = 4  # of the batch by which a model is traced


def twin(task: Narrowed, target: nn.Module, config: Config) -> tuple[nn.Module, dict[str, Part]]:
    """A target's narrow twin, and its parameters as the parametrization has them; the target is used up."""
    scale = task.surrogate.scale
    refuse_lazy(target)
    if task.surrogate.depth > 1:
        shallower(target, task.surrogate.depth)
    traced = known(task, target, config)
    found = parts(target, traced, scale)
    queries = "query" in task.surrogate.zeros
    key = f"flow {scale} {queries} {structure(target)}"
    whole = None if key in task._traced else copy.deepcopy(target)
    model = shrink(target, traced, scale)
    if whole is not None:
        batch = first_batch(task.target, config)

        def run(one: nn.Module, rows: Any) -> Any:
            return task.target.loss(one, rows, config)

        task._traced[key] = flowed(whole, model, run, batch, queries=queries)
    found = {name: _with(part, name, task._traced[key], task.surrogate.zeros) for name, part in found.items()}
    _rescale(model, found, {name: part.init for name, part in found.items()})
    return model, found


def _with(part: Part, name: str, flow: Flowed, zeros: Collection[str]) -> Part:
    """A part with what follows from the order of products."""
    return replace(
        part,
        last=name in flow.last and "output" in zeros,
        attention=flow.attention.get(name, 1.0),
        zero=name in flow.biases and "biases" in zeros,
        rows=flow.queries.get(name, part.rows) if "query" in zeros else part.rows,
    )


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model whose parameters have no sizes yet."""
    if any(is_lazy(p) for p in (*model.parameters(), *model.buffers())):
        raise Unanalysable("The model has lazy modules, whose sizes are not known before its first batch: give them.")


def own_twin(task: Narrowed, config: Config) -> tuple[nn.Module, dict[str, Part]]:
    """The narrow twin that the user's own ``narrow`` makes, and its parameters, by comparing their sizes.

    Its initial values are the user's for that width. They are rescaled to what the parametrization makes of the
    target's, as far as the deviations of both show.
    """
    scale = task.surrogate.scale

    def shallow(model: nn.Module) -> nn.Module:
        if task.surrogate.depth > 1:
            shallower(model, task.surrogate.depth)
        return model

    model = shallow(task.target.narrow(config, scale))  # type: ignore[attr-defined]
    key = f"narrow {scale} {structure(model)}"
    if key not in task._traced:
        with own_randomness():
            target = shallow(task.target.model(config))
            other = shallow(task.target.narrow(config, scale))  # type: ignore[attr-defined]
            found = compared(target, other, known(task, target, config))
            own = dict(other.named_parameters())
            by = {name: _deviation(p) / (_deviation(own[name]) or 1.0) for name, p in target.named_parameters()}
        task._traced[key] = found, {name: part.init * (by[name] or 1.0) for name, part in found.items()}
    found, init = task._traced[key]
    _rescale(model, found, init)
    return model, found


def _deviation(p: torch.Tensor) -> float:
    return float(p.detach().double().std(correction=0)) if p.numel() > 1 else 0.0


def _rescale(model: nn.Module, found: dict[str, Part], init: dict[str, float]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if init[name] != 1:
                p.mul_(init[name])
            if rows := found[name].rows[1]:
                p[list(rows)] = 0.0
    for name, part in found.items():
        if part.role == "tied":
            _multiply(model, name, part.multiplier)


def known(task: Narrowed, target: nn.Module, config: Config) -> Traced:
    """What grows with width in a model, found once for each structure.

    For a model that the user narrows it need not be found: which dimensions layers of torch's own sum over is known.
    """
    key = structure(target)
    if key not in task._traced:
        with own_randomness():
            batch = first_batch(task.target, config)
            try:
                task._traced[key] = trace(target, lambda model, one: task.target.loss(model, one, config), batch)
            except Unanalysable:
                if not hasattr(task.target, "narrow"):
                    raise
                task._traced[key] = by_layers(target)
    found: Traced = task._traced[key]
    return found


def by_layers(model: nn.Module) -> Traced:
    """What parameters of torch's own layers sum over; a model with other matrices is refused."""
    names = {id(p): name for name, p in model.named_parameters()}  # of a tied table one name
    summed, tables = set[Place](), set[tuple[str, str]]()
    for path, module in model.named_modules():
        for own, p in module._parameters.items():
            if p is None or p.ndim < 2:
                continue
            at, _, name = names[id(p)].rpartition(".")
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                tables.add((at, name))
            elif isinstance(module, LAYERS):
                summed.add(Place(at, name, 0 if getattr(module, "transposed", False) else 1))
            else:
                raise Unanalysable(
                    f"The model cannot be analysed, and what {path}.{own} sums over is not known: hold it in one of "
                    "torch's own layers, such as nn.Linear."
                )
    return Traced({}, {}, {}, frozenset(), frozenset(summed), frozenset(tables))


def first_batch(task: Any, config: Config) -> Any:
    """A few rows of a task's training data."""
    from penstock.training.data import DataCache

    train = DataCache(task, 0, torch.device("cpu")).get(config).train
    return next(iter(train.batches(0, 0, min(ROWS, train.length))))


def structure(model: nn.Module) -> str:
    """The modules of a model and the sizes of its tensors, as one string."""
    modules = [f"{path} {type(module).__qualname__}" for path, module in model.named_modules()]
    return "\n".join([*modules, *(f"{name} {tuple(one.shape)}" for name, one in model.state_dict().items())])


class Multiplied:
    """A hook that multiplies what a module is given."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * self.by, *args[1:])


def _multiply(model: nn.Module, name: str, by: float) -> None:
    """Multiply what an output layer gives whose weight is a table, by its input."""
    (weight,) = [p for own, p in model.named_parameters() if own == name]
    users = [one for one in model.modules() if any(p is weight for p in one._parameters.values())]
    layers = [one for one in users if isinstance(one, nn.Linear)]
    if not layers:
        raise TaskError(
            f"{name} is a table and the weight of an output layer, whose output is to be multiplied by {by:g}: let an "
            "nn.Linear hold it, as in self.head.weight = self.embedding.weight."
        )
    for layer in layers:
        layer.register_forward_pre_hook(Multiplied(by))
