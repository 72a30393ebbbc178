"""Where a study stands in its plan, and how many nodes that calls for: pure functions, for whatever follows a plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from statistics import NormalDist
from typing import NamedTuple

from penstock.planning.plan import Plan, PlannedStage

SPAN, STEPS = 4.0, 32  # standard deviations beyond which no trial ends, and the parts of that time that are summed

Kind = tuple[str, str]
"""Nodes of one kind: their instance and their market."""


@dataclass(frozen=True)
class Standing:
    """Where a bracket stands: the stage that trains ``now``, and the one ``after`` it.

    ``waits`` says that a trial of the stage waits, or is yet to be drawn. ``busy`` counts the nodes on which the
    bracket's trials train, by kind. ``left`` are the seconds until the stage is expected to end.
    """

    now: PlannedStage
    after: PlannedStage | None = None
    waits: bool = False
    busy: Counter[Kind] = field(default_factory=Counter)
    left: float = 0.0


def kind(stage: PlannedStage) -> Kind:
    """The kind of a stage's nodes."""
    return stage.instance, stage.market


def needs(one: Standing) -> Counter[Kind]:
    """How many nodes of each kind a bracket is to have.

    A stage has its nodes while a trial waits. Then a node goes with its last trial, unless the next stage is to have
    it. The nodes that the next stage has beyond these are asked for ahead of the barrier, by the stage's ``lead``.
    """
    wanted = Counter(one.busy)
    here = kind(one.now)
    if one.waits:
        wanted[here] = max(wanted[here], one.now.nodes)
    if one.after is not None:
        then, soon = kind(one.after), one.left <= one.after.lead
        if then == here:
            wanted[here] = max(wanted[here], one.after.nodes if soon else min(one.now.nodes, one.after.nodes))
        elif soon:
            wanted[then] = max(wanted[then], one.after.nodes)
    return +wanted


class Rest(NamedTuple):
    """What is left of a trial's stage: the mean of its seconds, and their variance."""

    seconds: float
    variance: float = 0.0


def time_left(
    running: Collection[Rest], waiting: Sequence[Rest], idle: int, after: float = 0.0, late: int = 0
) -> float:
    """The mean seconds until the last of these trials ends, by what is left of each.

    The trials that wait begin in turn: on ``idle`` places now, on ``late`` ones ``after`` some seconds, or when a
    running trial ends.

    >>> time_left([Rest(3.0)], [Rest(4.0), Rest(4.0)], idle=1)
    7.0
    >>> time_left([], [Rest(2.0)], idle=0, after=5.0, late=1), round(time_left([Rest(5.0, 1.0)] * 2, [], idle=0), 2)
    (7.0, 5.56)
    """
    free = [*running, *[Rest(0.0)] * idle, *[Rest(after)] * late]
    heapify(free)
    ends = list(running)
    for one in waiting:
        begin = heappop(free) if free else Rest(0.0)
        ends.append(Rest(begin.seconds + one.seconds, begin.variance + one.variance))
        heappush(free, ends[-1])
    return _last(ends)


def _last(ends: Sequence[Rest]) -> float:
    """The mean of the largest of normal variables, and of 0."""
    spans = [(end.seconds, math.sqrt(end.variance)) for end in ends]
    low = max((mean - SPAN * own for mean, own in spans), default=0.0)
    high = max((mean + SPAN * own for mean, own in spans), default=0.0)
    low, high = max(0.0, low), max(0.0, high)
    step, mean_of_last = (high - low) / STEPS, low
    able = [NormalDist(mean, own) for mean, own in spans if own and mean + SPAN * own > low]
    for number in range(STEPS if step > 0 else 0):
        at = low + (number + 0.5) * step
        mean_of_last += step * (1 - math.prod(one.cdf(at) for one in able))
    return mean_of_last


@dataclass(frozen=True)
class Rung:
    """A stage of a plan, and the numbers of the trials that its bracket begins with."""

    bracket: int
    number: int
    budget: int
    first: int
    last: int


class Course:
    """Which stage of a plan each trial is in: the brackets' first stages divide the trials by their numbers.

    Brackets that follow one another are one bracket of the plan, whose budgets begin anew.
    """

    def __init__(self, plan: Plan) -> None:
        self._runs: list[list[Rung]] = []
        before: PlannedStage | None = None
        first, count = 0, 0
        for stage in plan.stages:
            new = before is None or before.bracket != stage.bracket or stage.budget <= before.budget
            if new:
                first, count = count, count + stage.trials
                self._runs.append([])
            self._runs[-1].append(Rung(stage.bracket, stage.number, stage.budget, first, count))
            before = stage

    def of(self, trial: int, budget: int) -> Rung:
        """The stage in which a trial trains to a budget."""
        run = next((rungs for rungs in self._runs if trial < rungs[0].last), self._runs[-1])
        return next((rung for rung in run if budget <= rung.budget), run[-1])

    def undrawn(self, bracket: int, number: int, trials: int) -> int:
        """How many further trials begin in a stage, where there are so many trials so far."""
        first = [run[0] for run in self._runs if (run[0].bracket, run[0].number) == (bracket, number)]
        return max(0, first[0].last - max(trials, first[0].first)) if first else 0
