"""Factors of single parameters' learning rates, applied at the step alone.

An optimizer and its scheduler see the groups that the user made: a scheduler may write whatever rate it likes, and a
state is that of a plain run. A parameter's weight decay is divided by its factor, so that rate × decay stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def at_rates(optimizer: torch.optim.Optimizer, model: nn.Module, rates: Mapping[str, float]) -> Iterator[None]:
    """Let an optimizer's step see groups that are split by the factors of their parameters, which have names."""
    if not rates:
        yield
        return
    factors = {id(p): rates.get(name, 1.0) for name, p in model.named_parameters()}
    groups = optimizer.param_groups
    optimizer.param_groups = [part for group in groups for part in _split(group, factors)]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _split(group: dict[str, Any], factors: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    by_factor: dict[float, list[Any]] = {}
    for p in group["params"]:
        by_factor.setdefault(factors.get(id(p), 1.0), []).append(p)
    for factor, params in by_factor.items():
        yield {**group, "params": params, **scaled(group, factor)}


def scaled(numbers: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The numbers of a group that a factor of the learning rate changes.

    >>> scaled({"lr": 0.5, "weight_decay": 1.0, "momentum": 0.9}, 2.0)
    {'lr': 1.0, 'weight_decay': 0.5}
    """
    changed = {"lr": numbers["lr"] * factor}
    return changed | ({"weight_decay": numbers["weight_decay"] / factor} if "weight_decay" in numbers else {})
