"""What goes down: what a scheduler is shown, and what the executor is told of its assignments."""

from types import SimpleNamespace

import pytest

from penstock.bundle import Description
from penstock.events import Asked, Opened
from penstock.executors.base import Device
from penstock.history import History
from penstock.pace import Pace
from penstock.placing import Placing
from penstock.scheduling.fifo import fifo
from penstock.scheduling.speed import SpeedModel


class Engine:
    """What stands around a ``Placing``: a history, a clock, an executor that remembers, a scheduler that does."""

    def __init__(self, devices=1, memory=8, schedule=fifo, bytes=None):
        self.views, self.bundles, self.now = [], [], 0.0
        self.cards = [Device(f"gpu {i}", "h200", memory) for i in range(devices)]
        self.description = Description(signature="a", bytes=bytes)
        executor = SimpleNamespace(devices=lambda: self.cards, place=self.bundles.append, describe=self.describe)
        self.history = History.of([Opened({"metric": "loss", "mode": "min"})])

        def watched(view, demands, speed):
            self.views.append((view, list(demands), dict(view.running)))
            return schedule(view, demands, speed)

        self.placing = Placing(
            executor, self.history, watched, self.log, lambda: self.now, lambda state: True, pace=Pace(SpeedModel())
        )
        self.placing.look()

    def describe(self, configs, train):
        return [self.description] * len(configs)

    def log(self, event):
        self.history.apply(event)

    def ask(self, trial, budget=3, **asked):
        self.history.apply(Asked(trial, {"x": trial}, budget, "g", **asked))
        self.placing.queue(self.history.trials[trial])


@pytest.fixture
def engine():
    return Engine


def test_a_trial_that_has_reported_its_budget_and_not_left_is_about_to(engine):
    one = engine(devices=2)
    one.ask(0)
    one.placing.place()
    one.history.trials[0].reported = 3
    one.ask(1)
    one.placing.place()
    holding = one.views[-1][2][0]
    assert (holding.demand.units, holding.done) == (1, 0.99)


def test_a_scheduler_is_shown_what_is_left_to_do(engine):
    one = engine(devices=2, bytes=5)
    one.ask(0, budget=7)
    one.placing.place()
    one.history.trials[0].reported = 3
    one.ask(1)
    one.placing.place()
    view, demands, running = one.views[-1]
    assert running[0].demand.units == 4
    assert [(demand.trial, demand.units, demand.bytes) for demand in demands] == [(1, 3, 5)]
    assert view.devices.keys() == {"gpu 0", "gpu 1"}


def test_nothing_is_decided_where_nothing_changed(engine):
    one = engine()
    one.placing.place()
    assert not one.views, "nobody waits or runs"
    one.ask(0)
    one.placing.place()
    one.placing.place()
    assert len(one.views) == 1
    one.placing.left(0)
    one.ask(1)
    one.placing.place()
    assert len(one.views) == 2


def test_a_trial_enters_a_bundle_that_the_executor_is_told_of(engine):
    one = engine()
    one.ask(0)
    one.placing.place()
    (bundle,) = one.bundles
    assert (bundle.devices, bundle.mode) == (("gpu 0",), "solo")
    assert [(placement.trial, placement.budget) for placement in bundle.placements] == [(0, 3)]
    assert one.history.trials[0].status == "running"


def test_a_scheduler_is_shown_the_weights_and_priorities_that_were_asked_for(engine):
    one = engine()
    one.ask(0, weight=2.5, priority=3.0, open=True)
    one.ask(1)
    one.placing.place()
    view, demands, _ = one.views[-1]
    assert view.weights == {"g": 2.5}
    assert [(demand.priority, demand.open) for demand in demands] == [(3.0, True), (0.0, False)]
