"""The cheapest plan for a deadline, and the whole frontier: a constrained shortest path over (stage, type, nodes)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.planning.cloud import Cloud
from penstock.planning.plan import Plan
from penstock.planning.spec import Job

Late = Literal["finish", "pay"]


@dataclass(frozen=True)
class Held:
    """Nodes that a bracket has now."""

    instance: str
    market: str
    nodes: int


@dataclass(frozen=True)
class Used:
    """What a study has used so far: seconds since its start, and money."""

    seconds: float
    cost: float


def plan(
    job: Job,
    cloud: Cloud,
    *,
    deadline: float | None = None,
    max_cost: float | None = None,
    confidence: float = 0.95,
    ahead: bool = True,
    seed: int = 0,
) -> Plan:
    """The cheapest plan that keeps the ``deadline`` with the ``confidence``; with ``max_cost``, the quickest for it."""
    raise NotImplementedError


def replan(
    job: Job,
    cloud: Cloud,
    *,
    held: Mapping[int, Held],
    used: Used,
    deadline: float | None = None,
    max_cost: float | None = None,
    confidence: float = 0.95,
    ahead: bool = True,
    late: Late = "finish",
    seed: int = 0,
) -> Plan:
    """The cheapest plan for the rest of a study (``Job.rest``) that has nodes already, and has used time and money."""
    raise NotImplementedError
