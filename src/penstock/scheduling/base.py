"""The contract of a scheduler: a pure, deterministic function from what is known to who gets what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from penstock.executors.base import Device


@dataclass(frozen=True)
class Demand:
    """A trial that waits for devices: ``units`` more units, asked for as part of ``group``.

    ``asked`` is one more with each asking.
    """

    trial: int
    group: str
    units: int
    asked: int = 0


@dataclass(frozen=True)
class Assignment:
    """Who gets how much, and where."""

    trial: int
    devices: tuple[str, ...]
    share: float = 1.0


@dataclass(frozen=True)
class View:
    """The devices there are, and what runs on them."""

    devices: Sequence[Device]
    running: Sequence[Assignment]


Speed = Callable[[int, float], float]
"""Seconds a unit of a trial takes at a share, h(w) of Fluid §4.2.2; None where nothing is measured."""

Scheduler = Callable[[View, Collection[Demand], Speed | None], list[Assignment]]
"""``schedule(view, demands, speed) -> assignments`` for trials that wait, which come in the order of asking."""
