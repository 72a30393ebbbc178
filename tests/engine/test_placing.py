"""What goes down: what a scheduler is shown, and what the executor is told of its assignments."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import penstock as ps
from penstock import study
from penstock.bundle import Description, Device
from penstock.engine.clocking import Pace
from penstock.engine.placing import Placing
from penstock.executors.base import DeviceLost
from penstock.executors.simulated.executor import SimulatedExecutor
from penstock.log.events import Asked, Failed, Opened, Placed, Reported, read
from penstock.log.history import History
from penstock.scheduling.fifo import fifo
from penstock.settings import SCHEDULERS
from penstock.speed.model import SpeedModel


class Engine:
    """What stands around a ``Placing``: a history, a clock, an executor that remembers, a scheduler that does."""

    def __init__(self, devices=1, memory=8, schedule=fifo, bytes=None, modes=("solo",), growing=None):
        self.views, self.bundles, self.now, self.described, self.requests = [], [], 0.0, 0, []
        self.cards = [Device(f"gpu {i}", "h200", memory) for i in range(devices)]
        self.description = Description(signature="a", bytes=bytes)
        executor = SimpleNamespace(
            devices=lambda: self.cards,
            place=self.bundles.append,
            describe=self.describe,
            modes=frozenset(modes),
            virtual=False,
            flexible=False,
            scales=False,
            provisioning=0.0,
            request=self.requests.append,
        )
        self.history = History.of([Opened({"metric": "loss", "mode": "min"})])

        def watched(view, demands, speed):
            self.views.append((view, list(demands), dict(view.running)))
            return schedule(view, demands, speed)

        self.placing = Placing(
            executor,
            self.history,
            watched,
            self.log,
            lambda: self.now,
            lambda state: True,
            pace=Pace(SpeedModel()),
            growing=growing,
        )
        self.placing.look()

    def describe(self, configs, train):
        self.described += len(configs)
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


# Devices that come and go


def test_without_devices_everybody_waits_and_nothing_is_asked(engine):
    one = engine(devices=1)
    cards, one.cards = one.cards, []
    one.placing.look()
    one.ask(0)
    one.placing.place()
    assert (one.views, one.bundles, one.described) == ([], [], 0), "there may be nobody who could describe it"
    one.cards = cards
    one.placing.look()
    one.placing.place()
    assert [bundle.devices for bundle in one.bundles] == [("gpu 0",)]


def test_who_leaves_a_lost_device_is_not_shown_and_keeps_nobody_from_it(engine):
    one = engine(devices=2)
    one.ask(0)
    one.placing.place()
    assert one.bundles[0].devices == ("gpu 0",)
    one.placing.lose("gpu 0")  # and it is back already
    one.ask(1)
    one.ask(2)
    one.placing.place()
    _, _, running = one.views[-1]
    assert not running
    assert {bundle.devices[0] for bundle in one.bundles[1:]} == {"gpu 0", "gpu 1"}
    one.placing.left(0)
    one.ask(3)
    one.placing.place()
    assert len(one.bundles) == 3, "what has left has given back nothing that others have"


class HandsBack(SimulatedExecutor):
    """Who trains on a device that goes says so at the end of its unit."""

    def _lose(self, name):
        device = self._there.pop(name)
        self._listed = list(self._there.values())
        self._events.append(DeviceLost(device))
        if name in self._on:
            self._dismiss(self._on[name])

    def place(self, bundle):
        assert not bundle.placements or set(bundle.devices) <= self._there.keys(), "placed on a device that is gone"
        super().place(bundle)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_device_that_is_handed_back_costs_nobody_anything(scheduler, monkeypatch):
    monkeypatch.setattr(study, "SimulatedExecutor", HandsBack)
    there = [device.name for device in ps.Simulated(devices=4).cluster()]
    later = Device("later", "A100", 2**36)
    on = ps.Simulated(
        devices=4, losses=[(9.5 + i, name) for i, name in enumerate(there)], arrivals=[(30.0, later)], stop=0.25
    )
    task = ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [config["x"] + 1 / u for u in range(1, 9)]}, 3.0))
    algorithm = ps.Random(budget=8)
    result = ps.Study(
        task, {"x": ps.uniform(0, 1)}, metric="loss", mode="min", algorithm=algorithm, trials=6, name="s"
    ).run(on=on, scheduler=scheduler, progress=False)
    log = list(read(Path(".penstock/s/log.jsonl")))
    assert {trial.state for trial in result.trials} == {"finished"}
    assert all(len(trial.curve) == 8 for trial in result.trials)
    assert not any(isinstance(event, Failed) for event in log), "no death"
    units = [(event.trial, event.unit) for event in log if isinstance(event, Reported)]
    resumed = [event.state.unit for event in log if isinstance(event, Placed) and event.state is not None]
    assert len(units) == len(set(units))
    assert resumed
    assert sum(event.attempt == 1 for event in log if isinstance(event, Placed)) == 6
    assert len(units) == 6 * 8
    steps = sum(event.usage.steps for event in log if isinstance(event, Reported))
    assert steps == 6 * 8, "nothing is trained again"
