"""Factors of single parameters' learning rates and epsilons, applied at the step alone.

An optimizer and its scheduler see the groups that the user made: a scheduler may write whatever rate it likes, and a
state is that of a plain run. A parameter's weight decay is divided by its factor, so that rate × decay stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


class Factor(NamedTuple):
    """What a parameter's learning rate is multiplied by, and the number that is added to the root of its variance."""

    rate: float = 1.0
    eps: float = 1.0


PLAIN = Factor()


@contextmanager
def at_rates(optimizer: torch.optim.Optimizer, model: nn.Module, rates: Mapping[str, Factor]) -> Iterator[None]:
    """Let an optimizer's step see groups that are split by the factors of their parameters, which have names."""
    if not rates:
        yield
        return
    factors = {id(p): rates.get(name, PLAIN) for name, p in model.named_parameters()}
    groups = optimizer.param_groups
    optimizer.param_groups = [part for group in groups for part in _split(group, factors)]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _split(group: dict[str, Any], factors: Mapping[int, Factor]) -> Iterator[dict[str, Any]]:
    by_factor: dict[Factor, list[Any]] = {}
    for p in group["params"]:
        by_factor.setdefault(factors.get(id(p), PLAIN), []).append(p)
    for factor, params in by_factor.items():
        yield {**group, "params": params, **scaled(group, factor)}


def scaled(numbers: Mapping[str, Any], factor: Factor) -> dict[str, Any]:
    """The numbers of a group that a parameter's factors change.

    >>> scaled({"lr": 0.5, "eps": 0.1, "weight_decay": 1.0, "momentum": 0.9}, Factor(2.0, 4.0))
    {'lr': 1.0, 'weight_decay': 0.5, 'eps': 0.4}
    """
    by = {"lr": factor.rate, "weight_decay": 1 / factor.rate, "eps": factor.eps}
    return {name: numbers[name] * one for name, one in by.items() if name in numbers}
