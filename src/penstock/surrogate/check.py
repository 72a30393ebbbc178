"""The coordinate check: whether the change of every activation in a few steps stays as widths grow.

With the right factors a step changes activations as much in wide models as in narrow ones; the slope of the change over
widths, both as logarithms, is then about 0. In the standard parametrization it is 0.5 to 1 in some layer (Yang et al.,
"Tensor Programs V", appendix D; Hydro §4.1 has such a check and never calls it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log2
from statistics import geometric_mean, linear_regression, mean
from typing import Any

import torch
from torch import Tensor, nn

from penstock.surrogate.internals import tree_leaves
from penstock.surrogate.parametrize import Part
from penstock.surrogate.settings import STEPS, Surrogate
from penstock.surrogate.task import Narrowed, narrowed, parts_of
from penstock.task import Task
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.training.random.generators import own_randomness
from penstock.trial import Config

STEEPEST = 0.45  # right slopes were seen up to 0.4, of narrow layers; wrong factors give a layer of 0.7 and more
SEEDS, MORE = 3, 9  # trials whose changes are averaged; and where a slope is steep, which it may be by chance
SMALLER = 0.1  # what learning rates are multiplied by where the loss rises at a step, or changes are not finite
TRIES = 3
PARAMETRIZED = "parametrizations."  # in the paths of modules that give weights and no activations


@dataclass(frozen=True)
class Slope:
    """How the change of one activation goes with width: its values by scale, and their slope."""

    layer: str
    changes: dict[int, float]
    slope: float

    @property
    def right(self) -> bool:
        return abs(self.slope) <= STEEPEST


def scales(scale: int) -> list[int]:
    """The scales whose widths are compared: the surrogate's, its halves, and the target's.

    >>> scales(8), scales(6)
    ([1, 2, 4, 8], [1, 3, 6])
    """
    found = [scale]
    while found[-1] % 2 == 0 and found[-1] > 2:
        found.append(found[-1] // 2)
    return [1, *reversed(found)]


def coordinates(
    task: Task,
    config: Config,
    widths: Sequence[int],
    traced: dict[str, Any],
    *,
    device: str = "cpu",
    seed: int = 0,
    zeros: tuple[str, ...] = Surrogate.zeros,
) -> list[Slope]:
    """The slope of every activation, by training of a few steps at several widths, whose scales are given."""
    with own_randomness():
        data = DataCache(task, seed, torch.device(device)).get(config)
        tasks = {one: narrowed(task, Surrogate(scale=one, zeros=zeros), traced) if one > 1 else task for one in widths}
        parts = parts_of(tasks[max(widths)].model(dict(config)))

        def found(trials: int) -> list[Slope]:
            at, changes = 1.0, dict[int, dict[str, float]]()
            for _ in range(TRIES):
                made = {
                    scale: _changes(own, config, device, seed, data, at, parts, trials) for scale, own in tasks.items()
                }
                changes = {scale: found for scale, (found, _) in made.items()}
                if all(falls for _, falls in made.values()):
                    break
                at *= SMALLER
            layers = [one for one in changes[widths[0]] if all(found.get(one, 0) != 0 for found in changes.values())]
            return [Slope(one, by := {scale: changes[scale][one] for scale in widths}, slope(by)) for one in layers]

        slopes = found(SEEDS)
        return slopes if all(one.right for one in slopes) else found(MORE)


def slope(changes: dict[int, float]) -> float:
    """The slope of log change over log width.

    >>> slope({1: 0.4, 2: 0.2, 4: 0.1})
    1.0
    """
    if not all(isfinite(one) for one in changes.values()):
        return float("inf")
    return linear_regression([-log2(scale) for scale in changes], [log2(one) for one in changes.values()]).slope


def _changes(
    task: Task,
    config: Config,
    device: str,
    seed: int,
    data: Any,
    at: float,
    zeroed: Mapping[str, Part],
    trials: int,
) -> tuple[dict[str, float], bool]:
    """How much each activation changes, and whether the loss of the batch falls by each step, in most trials.

    What begins with zeros in twins does so in the target, for the comparison.
    """
    found: dict[str, list[float]] = {}
    falls = list[bool]()
    for trial in range(trials):
        training = Training(
            task, trial, config, data, seed=seed, device=torch.device(device), metric="loss", mode="min"
        )
        training.model.train()
        parts = parts_of(training.model) if isinstance(task, Narrowed) else {}
        for name, p in training.model.named_parameters():
            if not parts and zeroed[name].init == 0:
                p.data.zero_()
            elif not parts and (rows := zeroed[name].rows[0]):
                p.data[list(rows)] = 0.0
        for group in training.optimizer.param_groups:
            group["lr"] = group["lr"] * at
        batch = next(iter(data.train.batches(0, 0, training.batch_size)))
        before, *losses = _activations(training, batch)
        for _ in range(STEPS):
            training.train_step(batch)
            later, loss = _activations(training, batch)
            losses.append(loss)
        falls.append(all(one > other for one, other in pairwise(losses)))
        for layer, after in later.items():
            if layer in before and before[layer].shape == after.shape:
                times = parts[f"{layer}.weight"].attention if f"{layer}.weight" in parts else 1.0
                moved = float((after - before[layer])[before[layer].isfinite()].abs().mean())  # masks are infinite
                found.setdefault(layer, []).append(moved / max(times, 1.0))  # queries stand for multiples of themselves
    changes = {layer: _middle(values) for layer, values in found.items()}
    return changes, 2 * sum(falls) > trials and all(map(isfinite, changes.values()))


def _middle(values: Sequence[float]) -> float:
    """Their geometric mean, as slopes are of logarithms: one trial that blows up is one trial."""
    return geometric_mean(values) if min(values) > 0 else mean(values)


def _activations(training: Training, batch: Any) -> tuple[dict[str, Tensor], float]:
    """What every innermost module gives for a batch, and its loss."""
    found: dict[str, Tensor] = {}

    def note(layer: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.is_floating_point()]
            if tensors:
                found[layer] = tensors[0].detach().float().clone()

        return hook

    modules = training.model.named_modules()
    inner = [(path, module) for path, module in modules if _is_innermost(module) and PARAMETRIZED not in path]
    hooks = [module.register_forward_hook(note(path)) for path, module in inner]
    try:
        with torch.no_grad():
            loss = float(training.loss(batch))
    finally:
        for hook in hooks:
            hook.remove()
    return found, loss


def _is_innermost(module: nn.Module) -> bool:
    return all(isinstance(child, nn.ParameterList | nn.ParameterDict) for child in module.children())
