"""What goes down: what a scheduler is shown, and what the executor is told of its assignments."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import penstock as ps
from penstock.bundle import Description, Device, Measured
from penstock.engine.clocking import Pace
from penstock.engine.placing import Placing
from penstock.executors.simulated.executor import SimulatedExecutor
from penstock.log.events import Asked, Failed, Opened, Placed, Reported
from penstock.log.history import History
from penstock.log.reader import read
from penstock.scheduling.base import Assignment
from penstock.scheduling.capacity import Capacity
from penstock.scheduling.fifo import fifo
from penstock.settings import SCHEDULERS
from penstock.speed.model import SpeedModel
from penstock.speed.sizes import LARGEST
from penstock.trial import Later, Leg, StateRef


class Engine:
    """What stands around a ``Placing``: a history, a clock, an executor that remembers, a scheduler that does."""

    def __init__(
        self,
        devices=1,
        memory=8,
        schedule=fifo,
        bytes=None,
        modes=("solo",),
        growing=None,
        sharing="measured",
        spreads=False,
    ):
        self.views, self.bundles, self.now, self.described, self.requests = [], [], 0.0, 0, []
        self.cards = [Device(f"gpu {i}", "h200", memory) for i in range(devices)]
        self.description = Description(signature="a", bytes=bytes)
        self.descriptions = {}  # of trials that are unlike this one
        self.lines = []
        executor = SimpleNamespace(
            nodes=tuple,
            devices=lambda: self.cards,
            place=self.bundles.append,
            describe=self.describe,
            modes=frozenset(modes),
            virtual=False,
            flexible=False,
            scales=False,
            provisioning=0.0,
            request=self.request,
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
            SimpleNamespace(intact=lambda state: True, tell=None),
            pace=Pace(SpeedModel(sharing)),
            spreads=spreads,
            growing=growing,
            later=lambda group: (Later(2, 5),) if group == "g" else (),
        )
        self.placing.look()

    def request(self, wanted):
        (one,) = wanted
        self.requests.append(one.count)

    def describe(self, configs, train, trials=(), study=""):
        self.described += len(configs)
        return [self.descriptions.get(config["x"], self.description) for config in configs]

    def log(self, event):
        self.lines.append(event)
        self.history.apply(event)

    def ask(self, trial, budget=3, **asked):
        self.history.apply(Asked(trial, {"x": trial}, budget, "g", **asked))
        self.placing.ask(self.history.trials[trial])


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


def test_a_view_is_one_instant_however_long_a_scheduler_looks_at_it(engine):
    one = engine(devices=2)
    one.ask(0, budget=4)
    one.placing.place()
    for one.now in (10.0, 20.0):
        one.history.trials[0].reported += 1
        one.placing.pace.reported(0, 1.0, one.now)
    one.now = 22.5
    view = one.placing.view()
    one.now = 25.0
    holding = view.running[0]
    one.now = 27.5
    assert view.running[0] is holding, "it is made once"
    assert holding.done == pytest.approx(0.25), "by the clock when the view was made"
    assert one.placing.view().running[0].done == pytest.approx(0.75)


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


def test_a_scheduler_is_asked_only_while_a_device_has_room(engine):
    one = engine()
    one.ask(0)
    one.placing.place()
    one.ask(1)
    one.placing.place()
    assert (len(one.views), one.described) == (1, 2), "a trial that has to wait is described all the same"
    one.placing.left(0)
    one.placing.place()
    assert [[demand.trial for demand in demands] for _, demands, _ in one.views] == [[0], [1]]


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
    _, demands, _ = one.views[-1]
    assert [demand.weight for demand in demands] == [2.5, 2.5], "they are of one group"
    assert [(demand.priority, demand.open) for demand in demands] == [(3.0, True), (0.0, False)]


def test_a_scheduler_is_shown_what_trials_are_like_and_what_follows_them(engine):
    one = engine()
    one.descriptions[1] = Description(signature=None, batch_size=4)
    one.description = Description(signature="a", batch_size=32)
    one.ask(0)
    one.history.trials[0].state = StateRef("000000-1-1.pt", 1, 70, 9)
    one.ask(1)
    one.placing.place()
    _, demands, _ = one.views[-1]
    assert [(d.signature, d.position, d.load) for d in demands] == [("a", (1, 70), 32), ("", (0, 0), 4)]
    assert {d.later for d in demands} == {(Later(2, 5),)}
    assert {d.width for d in demands} == {0}
    assert [d.asked for d in demands] == [1, 2]


def test_a_trial_is_described_once_and_again_only_with_another_config(engine):
    one = engine(devices=2)
    one.ask(0)
    one.placing.place()
    one.placing.left(0)
    one.ask(0, budget=5)
    one.placing.place()
    assert one.described == 1
    one.placing.left(0)
    one.history.apply(Asked(0, {"x": 7}, 6, "g"))
    one.placing.ask(one.history.trials[0])
    one.placing.place()
    assert one.described == 2


# Trials that share a device


def thirds(view, demands, speed):
    """A third of a device for each, the emptiest first, beside trials of its signature alone."""
    space, made = Capacity(view.devices, view.room, view.kinds, view.unlike), []
    for demand in demands:
        devices = space.fit(1 / 3, demand.bytes, signature=demand.signature)
        if devices is not None:
            space.take(devices, 1 / 3, demand.bytes, demand.signature)
            made.append(Assignment(demand.trial, devices, 1 / 3))
    return made


@pytest.fixture
def sharing(engine):
    return lambda devices=1, **more: engine(devices, schedule=thirds, modes=("solo", "fused"), **more)


def bundled(one):
    return [(b.mode, b.devices, [p.trial for p in b.placements]) for b in one.bundles]


def test_trials_that_are_given_parts_of_a_device_are_fused_there(sharing):
    one = sharing()
    for trial in range(4):
        one.ask(trial)
    one.placing.place()
    assert bundled(one) == [("fused", ("gpu 0",), [0, 1, 2])]
    (bundle,) = one.bundles
    assert (bundle.signature, bundle.size, bundle.reason) == ("a", None, ""), "it is to measure itself"
    assert [event.share for event in one.lines if isinstance(event, Placed)] == [1 / 3] * 3
    assert list(one.placing.queue.waiting) == [3]
    view = one.placing.view()
    assert (view.room, view.kinds, view.unlike) == ({}, {"gpu 0": "a"}, False)
    assert [(trial, holding.at) for trial, holding in view.running.items()] == [(t, 1 / 3) for t in range(3)]


def test_a_trial_enters_the_bundle_that_runs_where_it_is_assigned(sharing):
    one = sharing()
    for trial in (0, 1):
        one.ask(trial)
    one.placing.place()
    assert one.placing.view().room["gpu 0"].share == pytest.approx(1 / 3)
    one.ask(2)
    one.placing.place()
    assert bundled(one) == [("fused", ("gpu 0",), [0, 1]), ("fused", ("gpu 0",), [0, 1, 2])]
    assert len({bundle.name for bundle in one.bundles}) == 1


def test_a_lone_trial_that_would_measure_fusing_has_its_device_to_itself(sharing):
    one = sharing(devices=2)
    one.ask(0)
    one.placing.place()
    assert bundled(one) == [("solo", ("gpu 0",), [0])]
    assert list(one.placing.view().room) == ["gpu 1"]
    one.ask(1)
    one.ask(2)
    one.placing.place()
    assert bundled(one)[1:] == [("fused", ("gpu 1",), [1, 2])]


def test_trials_of_two_signatures_are_on_devices_of_their_own(sharing):
    one = sharing(devices=2)
    one.descriptions[1] = Description(signature="b")
    one.ask(0)
    one.ask(1)
    one.placing.place()
    one.ask(2)
    one.ask(3)
    one.placing.place()
    assert one.placing.view().kinds == {"gpu 0": "a", "gpu 1": "b"}
    assert list(one.placing.queue.waiting) == [2, 3], "each of the first two has its device to itself"


def test_unlike_trials_on_a_device_are_processes_of_their_own(engine):
    one = engine(schedule=thirds, modes=("solo", "fused", "processes"))
    one.descriptions[1] = Description(signature="b")
    for trial in (0, 1, 2):
        one.ask(trial)
    one.placing.place()
    assert bundled(one) == [("processes", ("gpu 0",), [0, 1, 2])]


def test_what_a_bundle_measured_is_what_bundles_of_its_signature_hold_from_then_on(sharing):
    one = sharing(devices=2)
    one.descriptions[9] = Description(signature="b")
    for trial in range(6):
        one.ask(trial)
    one.placing.place()
    assert [trials for _, _, trials in bundled(one)] == [[0, 2, 4], [1, 3, 5]]
    one.placing.measured(Measured("a", "gpu 0", "sharing", {1: 1.0, 2: 1.1, 4: 4.0}, 2, "so", "native"))
    assert [(b.size, [p.trial for p in b.placements]) for b in one.bundles[2:]] == [(2, [0, 2]), (2, [1, 3])]
    assert {holding.assignment.share for holding in one.placing.view().running.values()} == {1 / 2}
    assert one.placing.changed
    one.placing.measured(Measured("a", "gpu 0", "sharing", {1: 1.0, 2: 3.0}, 1, "so", "native"))
    assert [[p.trial for p in b.placements] for b in one.bundles[4:]] == [[], []], "fused they would be slower"


def test_a_bundle_of_a_known_size_says_where_that_comes_from(sharing):
    one = sharing(sharing="forced")
    one.ask(0)
    one.placing.place()
    (bundle,) = one.bundles
    assert (bundle.mode, bundle.size) == ("fused", LARGEST), "which is nothing to measure, so that it may be alone"
    assert bundle.reason == 'asked for by sharing="fused"'


def test_trials_that_died_together_are_shown_as_two_kinds(sharing):
    one = sharing(devices=2)
    for trial in range(3):
        one.ask(trial)
    one.placing.place()
    assert bundled(one) == [("fused", ("gpu 0",), [0, 2]), ("solo", ("gpu 1",), [1])]
    for trial in (0, 2):
        assert not one.placing.blames(trial, died=True), "either may have killed the other"
        one.placing.left(trial)
        one.log(Failed(trial, 1, "died", False, 0.0))
        one.placing.ask(one.history.trials[trial])
    one.placing.place()
    _, demands, _ = one.views[-1]
    assert [(d.trial, d.signature) for d in demands] == [(0, "a half 1"), (2, "a half 2")]
    assert one.placing.blames(1, died=True), "it was alone"


def test_a_scheduler_that_gives_nothing_although_nothing_runs_is_an_error(engine):
    def nothing(view, demands, speed):
        return []

    one = engine(schedule=nothing)
    one.ask(0)
    with pytest.raises(ps.StudyError, match="gives nothing that fits to any of the 1 trials that wait, although"):
        one.placing.place()


def test_a_trial_that_was_moved_waits_for_devices_of_the_type_that_it_had(engine):
    one = engine()
    one.ask(0, open=True)
    one.placing.place()
    place = one.placing.running[0]
    one.placing.left(0)
    one.placing.ask(one.history.trials[0], moved=place)
    demand = one.placing.queue.waiting[0]
    assert (demand.type, demand.open) == ("h200", False)


# Devices that come and go


def test_without_devices_everybody_waits_and_nothing_is_asked(engine):
    one = engine(devices=1)
    cards, one.cards = one.cards, []
    one.placing.look()
    one.ask(0)
    one.placing.place()
    assert (one.views, one.bundles, one.described) == ([], [], 0), "there may be no worker that could describe it"
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
    """A trial on a device that goes leaves at the end of its unit, with its state."""

    def abandon(self, device):
        if device in self._on:
            self._dismiss(self._on[device])

    def place(self, bundle):
        there = {device.name for device in self.devices()}
        assert not bundle.placements or set(bundle.devices) <= there, "placed on a device that is gone"
        super().place(bundle)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_device_that_is_handed_back_costs_nobody_anything(scheduler, monkeypatch):
    monkeypatch.setattr("penstock.executors.simulated.executor.SimulatedExecutor", HandsBack)
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


def bereft(one):
    """Trial 1 has taken over trial 0's state, and that state is lost; gives what is said of it."""
    said = []
    one.placing.keeper.intact = lambda state: False
    one.placing.keeper.tell = lambda record, lost, begins: said.append((record.number, lost.trial, begins))
    for trial in (0, 1, 2):
        one.history.apply(Asked(trial, {"x": trial}, 1, "g"))
    one.history.trials[0].state = StateRef("000000-1-1.pt", 1, 70, 9)
    one.history.apply(Asked(1, {"x": 7}, 3, "g", start_from=(0, 1)))
    one.placing.ask(one.history.trials[1])
    return said


def test_a_trial_whose_donor_is_trained_again_begins_on_one_device(engine):
    def widely(view, demands, speed):
        return [Assignment(demand.trial, ("gpu 0", "gpu 1"), 2.0, measure=True) for demand in demands]

    one = engine(devices=2, schedule=widely, modes=("solo", "distributed"))
    said = bereft(one)
    one.placing.place()
    (bundle,) = one.bundles
    (placement,) = bundle.placements
    assert (bundle.mode, bundle.devices, bundle.measure) == ("solo", ("gpu 0",), False)
    assert (placement.state, placement.inherited, placement.unit) == (None, True, 1)
    assert placement.legs == (Leg(0, {"x": 0}, 1),)
    assert [(number, donor) for number, donor, _ in said] == [(1, 0)]
