"""What comes of a scheduler's decisions, if every trial runs as predicted."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from penstock.scheduling.base import Assignment, Demand, Holding, View, room
from penstock.scheduling.fifo import fifo
from penstock.speed.curve import Curve
from penstock.speed.model import Speed
from tests.scheduling.course import course
from tests.scheduling.simulated_groups import cluster, empty

SECONDS = Speed(lambda trial: 2.0, lambda trial: Curve(), moving=1.0)


def test_a_trial_that_runs_has_the_rest_of_its_unit_before_it() -> None:
    cards = cluster(1)
    running = Holding(Demand(0, "a", 3), Assignment(0, ("gpu 0",)), done=0.25)
    made = course(fifo, View(cards, {0: running}, room(cards, [running])), [Demand(1, "a", 1)], SECONDS)
    assert [(one.trial, one.start, one.end) for one in made.stretches] == [(0, 0.0, 5.5), (1, 5.5, 7.5)]


def test_a_trial_moves_at_the_end_of_a_unit_and_not_before_its_first() -> None:
    def restless(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
        return [*fifo(view, demands, speed), *(holding.assignment for holding in view.running.values())]

    def short(trial: int, end: float) -> Holding:
        return Holding(Demand(trial, "a", 2), Assignment(trial, (f"gpu {trial}",)), done=2 - end / 2)

    cards, others = cluster(3), {1: short(1, 2.0), 2: short(2, 2.5)}
    made = course(restless, View(cards, others, room(cards, others.values())), [Demand(0, "a", 4)], SECONDS)
    own = [(one.start, one.end) for one in made.stretches if one.trial == 0]
    assert own[:2] == [(0.0, 2.0), (2.0, 5.0)], "moving takes 1, and then it trains, though at 2.5 it is to move again"


@pytest.mark.parametrize(("share", "bytes"), [(1.0, 0), (0.5, 50)])
def test_who_does_not_fit_waits(share: float, bytes: int) -> None:
    def generous(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
        return [Assignment(demand.trial, ("gpu 0",), share) for demand in demands]

    speed = Speed(lambda trial: 2.0, lambda trial: Curve((1.0, 1.0)))
    made = course(generous, empty(cluster(1)), [Demand(i, "a", 1, bytes=bytes) for i in range(2)], speed)
    assert [(one.trial, one.start, one.end) for one in made.stretches] == [(0, 0.0, 2.0), (1, 2.0, 4.0)]
