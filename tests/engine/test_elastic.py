"""Who is tried on several devices, who grows and who shrinks; and whole studies on real worker processes."""

import math

import pytest
import torch

import penstock as ps
from penstock.bundle import Description, Device, Parted
from penstock.log.events import Measured, Placed, Reported
from penstock.log.reader import read
from penstock.scheduling.base import Assignment
from penstock.scheduling.fifo import fifo
from penstock.scheduling.fluid import dynamic_fluid, static_fluid
from penstock.scheduling.growing import Growing
from penstock.scheduling.nodes import together
from penstock.scheduling.waterfill import waterfill
from penstock.speed.model import SpeedModel
from penstock.trial import Usage
from tests.contracts.executors import Exact, alone
from tests.engine.test_placing import Engine

TWO = {1: 1.0, 2: 0.55}


def spread(scaling):
    return Measured("a", "gpu 0", "scaling", scaling, min(scaling, key=scaling.get), "")


class Elastic(Engine):
    """An engine's surroundings with devices that one trial can have several of."""

    def __init__(self, devices=2, batch_size=8, schedule=waterfill, sharing="never", **more):
        modes = ("solo", "fused", "distributed")
        super().__init__(devices, schedule=schedule, modes=modes, sharing=sharing, spreads=True, **more)
        self.description = Description(signature="a", batch_size=batch_size)

    def go_on(self, seconds=1.0):
        self.now += seconds
        self.placing.place()

    def stop(self, trial):
        """A trial does what it was told: it leaves, and waits again."""
        place = self.placing.running[trial]
        self.placing.left(trial)
        self.placing.ask(self.history.trials[trial], moved=place)
        self.placing.place()

    @property
    def moving(self):
        return self.placing.bundling.moving

    def know(self, scaling):
        """Several devices were measured before."""
        self.placing.pace.measured(spread(scaling))

    def measured(self, scaling):
        """Several devices are measured now."""
        self.now += 1.0
        self.placing.measured(spread(scaling))
        self.go_on()

    @property
    def last(self):
        bundle = self.bundles[-1]
        return bundle.mode, bundle.devices, bundle.measure, [p.trial for p in bundle.placements]


@pytest.fixture
def alone_on_one():
    """A trial that has just moved onto both devices, to measure them."""
    one = Elastic()
    one.ask(0, budget=6)
    one.placing.place()
    one.go_on()
    one.stop(0)
    return one


def test_idle_devices_are_tried_by_a_trial_that_is_alone_on_one():
    one = Elastic()
    one.ask(0, budget=6)
    one.placing.place()
    assert one.last == ("solo", ("gpu 0",), False, [0])
    one.go_on()
    assert one.last == ("solo", ("gpu 0",), False, []), "it leaves at its next boundary"
    one.stop(0)
    assert one.last == ("distributed", ("gpu 0", "gpu 1"), True, [0])


def test_not_by_one_that_is_nearly_done_or_not_described():
    one = Elastic()
    one.ask(0, budget=1)
    one.placing.place()
    one.go_on()
    assert len(one.bundles) == 1
    one = Elastic()
    one.description = Description(reason="it cannot be compared")
    one.ask(0, budget=6)
    one.placing.place()
    one.go_on()
    assert len(one.bundles) == 1


def test_a_batch_has_no_more_parts_than_samples():
    one = Elastic(devices=4, batch_size=3)
    one.ask(0, budget=6)
    one.placing.place()
    one.go_on()
    one.stop(0)
    assert one.last == ("distributed", ("gpu 0", "gpu 1", "gpu 2"), True, [0])
    assert one.bundles[-1].reason == "a batch of 3 has no more parts"


def test_where_several_pay_the_trial_keeps_them(alone_on_one):
    before = len(alone_on_one.bundles)
    alone_on_one.measured(TWO)
    assert len(alone_on_one.bundles) == before
    assert not alone_on_one.moving


def test_a_trial_that_has_measured_gives_back_and_grows_like_any_other():
    one = started(3, 4, fifo)
    one.go_on()
    one.stop(2)
    assert one.last == ("distributed", ("gpu 2", "gpu 3"), True, [2])
    one.measured(TWO)
    one.ask(3, budget=20)
    assert settled(one) == {0: 1, 1: 1, 2: 1, 3: 1}
    for trial in (0, 1, 3):
        one.placing.left(trial)
    one.go_on()
    one.stop(2)
    assert one.last == ("distributed", tuple(f"gpu {i}" for i in range(4)), True, [2])


def test_a_trial_whose_measurement_comes_at_once_gives_back_what_does_not_pay(alone_on_one):
    alone_on_one.placing.measured(spread({1: 1.0, 2: 1.2}))
    assert not alone_on_one.moving, "it has come at this instant, and would leave without training"
    alone_on_one.go_on()
    assert alone_on_one.moving == {0}
    alone_on_one.stop(0)
    assert alone_on_one.last == ("solo", ("gpu 0",), False, [0])


def test_a_trial_that_has_moved_is_what_it_was(alone_on_one):
    demand = alone_on_one.placing.view().running[0].demand
    assert (demand.signature, demand.load) == ("a", 8)


def test_where_they_do_not_it_goes_back_to_one(alone_on_one):
    alone_on_one.measured({1: 1.0, 2: 1.2})
    assert alone_on_one.last == ("distributed", ("gpu 0", "gpu 1"), False, [])
    alone_on_one.stop(0)
    assert alone_on_one.last == ("solo", ("gpu 0",), False, [0])
    alone_on_one.go_on()
    assert alone_on_one.last == ("solo", ("gpu 0",), False, [0]), "and does not try again"


def test_a_trial_that_came_meanwhile_has_the_device(alone_on_one):
    one = Elastic()
    one.ask(0, budget=6)
    one.placing.place()
    one.go_on()
    one.ask(1, budget=6)
    one.placing.place()
    assert one.last == ("solo", ("gpu 1",), False, [1])
    one.stop(0)
    assert one.last == ("solo", ("gpu 0",), False, [0])


def test_a_trial_that_is_to_measure_takes_other_devices_where_a_trial_came_meanwhile():
    one = Elastic(devices=4)
    one.ask(0, budget=6)
    one.placing.place()
    one.go_on()
    one.ask(1, budget=6)
    one.placing.place()
    assert one.last == ("solo", ("gpu 1",), False, [1])
    one.stop(0)
    assert one.last == ("distributed", ("gpu 0", "gpu 2", "gpu 3"), True, [0])


def test_a_signature_is_measured_although_trials_of_another_move():
    one = Elastic(devices=6)
    one.descriptions = {1: Description(signature="b", batch_size=8)}
    one.placing.pace.model.started(0.0)
    one.ask(0, budget=20)
    one.ask(1, budget=20)
    one.placing.place()
    one.know({1: 1.0, 2: 0.55, 4: 0.3})
    one.placing.changed = True
    one.go_on()
    assert one.moving == {0, 1}
    one.stop(1)
    assert one.last == ("distributed", tuple(f"gpu {i}" for i in range(1, 6)), True, [1])


def test_a_trial_that_moves_anyway_measures_on_its_way():
    one = Elastic(devices=3, sharing="measured")
    one.placing.pace.model.started(0.0)
    one.placing.pace.measured(Measured("a", "gpu 0", "sharing", {1: 1.0, 2: 1.9}, 2, "", "native"))
    for trial in range(2):
        one.ask(trial, budget=2)
    one.placing.queue.describe(one.cards)
    for trial in range(2):
        one.placing.entering.enter(Assignment(trial, ("gpu 0",), 0.5))
        one.history.apply(Reported(trial, 1, 1, {"loss": 1.0}, None, Usage(), 0.0))
    one.now = 1.0
    assert one.placing.bundling.move(0)
    one.stop(0)
    assert one.last == ("distributed", ("gpu 1", "gpu 2"), True, [0]), "with one unit left it would not move once more"


def test_a_trial_that_ends_before_it_moves_holds_nobody_up():
    one = started(2, 4, fifo, FOUR)
    one.go_on()
    assert one.moving == {0, 1}
    one.placing.left(0)
    assert settled(one) == {1: 4}


def test_devices_whose_workers_do_not_meet_are_not_tried_together_again(alone_on_one):
    with pytest.warns(UserWarning, match="did not meet. It goes on elsewhere"):
        alone_on_one.placing.elastic.parted(Parted(("gpu 0", "gpu 1"), "They did not meet."))
    alone_on_one.stop(0)
    alone_on_one.go_on()
    assert alone_on_one.last == ("solo", ("gpu 0",), False, [0])


def test_a_lost_device_is_not_waited_for():
    one = Elastic()
    one.ask(0, budget=6)
    one.placing.place()
    one.go_on()
    del one.cards[1]
    one.placing.lose("gpu 1")
    one.stop(0)
    assert one.last == ("solo", ("gpu 0",), False, [0])


def test_the_devices_of_a_trial_are_on_as_few_nodes_as_can_be():
    devices = {f"{node}{i}": Device(f"{node}{i}", "h200", 8, node) for node in "ab" for i in range(2)}
    made = [Assignment(1, ("a1", "b0"), 2.0)]
    assert together(made, {0: Assignment(0, ("a0",), 1.0)}, devices) == [Assignment(1, ("b0", "b1"), 2.0)]
    shared = {0: Assignment(0, ("b0",), 0.5)}
    assert together(made, shared, devices) == [Assignment(1, ("a0", "a1"), 2.0)]

    moved = [*made, Assignment(0, ("a0",), 1.0)]
    whole = together(moved, {0: Assignment(0, ("b1",), 0.5)}, devices)
    assert len({name[0] for name in whole[0].devices}) == 1, "its part of b1 is given up"

    held = {0: Assignment(0, ("a0",), 1.0), 2: Assignment(2, ("b1",), 1.0)}
    devices |= {name: Device(name, "b200", 8, "c") for name in ("c0", "c1")}
    assert together(made, held, devices) == made, "and of the type that it was given"


# Who grows onto idle devices


def started(trials, devices, schedule=fifo, scaling=None, moving=0.0, **more):
    """Trials that have a device each, the last of them the best, and that know what several give."""
    one = Elastic(devices, schedule=schedule, **more)
    one.placing.pace.model.started(moving)
    for trial in range(trials):
        one.ask(trial, budget=20)
    one.placing.place()
    if scaling is not None:
        one.know(scaling)
    for trial in range(trials):
        one.history.apply(Reported(trial, 1, 1, {"loss": 9.0 - trial}, None, Usage(), 0.0))
    return one


def settled(one):
    """How many devices each trial has, once nobody moves any more."""
    for _ in range(9):
        one.placing.changed = True
        one.go_on()
        for trial in sorted(one.moving):
            one.stop(trial)
    assert not one.moving
    return {trial: len(place.devices) for trial, place in sorted(one.placing.running.items())}


FOUR = {1: 1.0, 2: 0.55, 4: 0.3}


@pytest.mark.parametrize("schedule", [fifo, static_fluid])
def test_under_schedulers_that_never_resize_idle_devices_go_to_the_best_or_evenly(schedule):
    assert settled(started(3, 6, schedule, FOUR)) == {0: 1, 1: 1, 2: 4}
    assert settled(started(3, 6, schedule, FOUR, growing=Growing("evenly"))) == {0: 2, 1: 2, 2: 2}


def test_under_schedulers_that_do_what_they_leave_is_dealt():
    assert settled(started(3, 8, dynamic_fluid, FOUR)) == {0: 2, 1: 2, 2: 4}


def test_a_trial_does_not_move_for_nothing():
    one = started(2, 4, fifo, {1: 1.0})
    assert settled(one) == {0: 1, 1: 1}
    assert len(one.bundles) == 2, "several do not pay"
    one = started(2, 4, fifo, FOUR, moving=1e6)
    assert settled(one) == {0: 1, 1: 1}
    assert len(one.bundles) == 2, "it costs more than it saves"
    one = started(1, 4, fifo, FOUR)
    one.history.trials[0].reported = 19
    assert settled(one) == {0: 1}, "it is nearly done"
    one = started(1, 4, fifo, FOUR)
    assert settled(one) == {0: 4}
    made = len(one.bundles)
    assert settled(one) == {0: 4}
    assert len(one.bundles) == made


def test_who_comes_is_given_what_was_idle():
    one = started(2, 4, fifo, FOUR)
    assert settled(one) == {0: 2, 1: 2}
    one.ask(2, budget=20)
    one.ask(3, budget=20)
    assert settled(one) == {0: 1, 1: 1, 2: 1, 3: 1}
    one = started(1, 4, waterfill, FOUR)
    assert settled(one) == {0: 4}
    made = len(one.bundles)
    one.ask(1, budget=20)
    assert settled(one) == {0: 4}, "what the scheduler gave it is its own"
    assert len(one.bundles) == made


def test_who_has_measured_keeps_what_it_is_dealt():
    for growing, expected in ((Growing("best"), {0: 1, 1: 1, 2: 4}), (Growing("evenly"), {0: 2, 1: 2, 2: 2})):
        one = started(3, 6, fifo, growing=growing)
        one.go_on()
        (trial,) = one.moving
        assert trial == 2, "the best one measures"
        one.stop(trial)
        assert one.last == ("distributed", ("gpu 2", "gpu 3", "gpu 4", "gpu 5"), True, [2])
        one.measured(FOUR)
        assert settled(one) == expected


def test_more_devices_are_measured_where_the_most_that_were_tried_paid():
    one = started(1, 8, fifo, FOUR)
    one.go_on()
    one.stop(0)
    assert one.last == ("distributed", tuple(f"gpu {i}" for i in range(8)), True, [0])
    one = started(1, 7, fifo, FOUR)
    assert settled(one) == {0: 4}, "not for less than twice as many"
    one = started(1, 8, fifo, {1: 1.0, 2: 0.5, 4: 0.6})
    assert settled(one) == {0: 2}, "nor where they did not pay"


def test_workers_that_did_not_meet_leave_idle_devices_to_others():
    one = started(2, 3, fifo, TWO)
    with pytest.warns(UserWarning, match="did not meet"):
        one.placing.elastic.parted(Parted(("gpu 1", "gpu 2"), "They did not meet."))
    assert settled(one) == {0: 2, 1: 1}


@pytest.mark.parametrize("mixed", [False, True])
def test_a_trial_is_spread_over_several_types_only_where_that_is_asked_for(mixed):
    one = started(1, 4, fifo, growing=Growing(mixed=mixed))
    one.cards[2:] = [Device(card.name, "b200", card.memory, "other") for card in one.cards[2:]]
    one.placing.look()
    one.go_on()
    one.stop(0)
    names = ("gpu 0", "gpu 1", "gpu 2", "gpu 3") if mixed else ("gpu 0", "gpu 1")
    assert one.last == ("distributed", names, True, [0])
    assert one.placing.bundling.assigned[0].lent == len(names) - 1
    one.measured({1: 1.0, 2: 0.5, 4: 0.3} if mixed else TWO)
    assert settled(one) == {0: 4 if mixed else 2}


@pytest.mark.parametrize(("seconds", "splits"), [({1: 1.0, 2: 1.05}, False), ({1: 1.0, 2: 1.6}, True)])
def test_a_fused_bundle_is_split_rather_than_its_neighbour_spread(seconds, splits):
    one = started(0, 3, fifo, sharing="measured")
    one.placing.pace.measured(Measured("a", "gpu 0", "sharing", seconds, 2, "", "native"))
    one.know(TWO)
    for trial in range(3):
        one.ask(trial, budget=20)
    one.placing.queue.describe(one.cards)
    for trial, device, share in ((0, "gpu 0", 0.5), (1, "gpu 0", 0.5), (2, "gpu 1", 1.0)):
        one.placing.entering.enter(Assignment(trial, (device,), share))
    one.go_on()
    assert one.moving == ({1} if splits else {2})
    if splits:
        one.stop(1)
        assert one.last == ("solo", ("gpu 2",), False, [1]), "on the device that was idle"


def test_a_bundle_is_split_over_all_idle_devices_and_its_parts_stay_fused():
    one = started(0, 2, fifo, sharing="measured")
    one.placing.pace.measured(Measured("a", "gpu 0", "sharing", {1: 1.0, 2: 1.1, 4: 2.0}, 4, "", "native"))
    one.know({1: 1.0})
    for trial in range(4):
        one.ask(trial, budget=20)
    one.placing.queue.describe(one.cards)
    for trial in range(4):
        one.placing.entering.enter(Assignment(trial, ("gpu 0",), 0.25))
    one.go_on()
    assert one.moving == {2, 3}
    one.stop(2)
    assert one.last == ("fused", ("gpu 1",), False, [2])
    one.stop(3)
    assert one.last == ("fused", ("gpu 1",), False, [2, 3])
    one.go_on()
    assert not one.moving, "and that is that"


# How many devices are of use


def flexible(devices=2, scales=False, **more):
    one = Elastic(devices, **more)
    one.placing.executor.flexible, one.placing.executor.scales = True, scales
    return one


def test_as_many_devices_are_of_use_as_trials_wait_or_run():
    one = flexible()
    for trial in range(5):
        one.ask(trial, budget=1)
    one.placing.place()
    assert one.requests == [5]
    for trial in range(4):
        one.placing.left(trial) if trial in one.placing.running else one.placing.queue.pop(trial)
        one.placing.changed = True
        one.go_on()
    assert one.requests == [5, 4, 3, 2, 1]


def test_of_many_not_every_change_is_told():
    one = flexible()
    for trial in range(100):
        one.ask(trial, budget=1)
    one.placing.place()
    for trial in range(2, 100):
        one.placing.queue.pop(trial)
        one.placing.changed = True
        one.go_on()
    assert one.requests[:3] == [100, 89, 80]
    assert one.requests[-1] == 2
    assert len(one.requests) < 30


def test_more_are_where_a_trial_is_faster_on_several():
    one = flexible()
    one.ask(0, budget=6)
    one.placing.place()
    one.measured({1: 1.0, 2: 0.5, 4: 0.3, 8: 0.4})
    assert one.requests == [1, 4]


def test_devices_that_come_too_late_to_be_of_use_are_not_asked_for():
    def asked(coming, *, devices=1, moving=0.0, waiting=0):
        one = flexible(devices)
        one.placing.executor.provisioning = coming
        for trial in range(1 + waiting):
            one.ask(trial, budget=6)
        one.placing.place()
        one.placing.pace.model.started(moving)
        one.placing.pace.model.observed(0, "h200", 1.0, 10.0)
        one.measured(FOUR)
        return one.requests[-1]

    assert asked(coming=0.0) == 4
    assert asked(coming=57.0) == 4, "of its six units of ten seconds it has trained two seconds"
    assert asked(coming=60.0) == 1
    assert asked(coming=40.0, moving=20.0) == 1, "nor where it would be there too late"
    assert asked(coming=60.0, devices=3) == 3, "those that are there are of use"
    assert asked(coming=60.0, waiting=2) == 3, "who waits needs one whenever it comes"


def test_nothing_is_given_up_before_a_unit_was_timed():
    one = flexible()
    one.placing.executor.provisioning = 1e6
    one.ask(0, budget=6)
    one.placing.place()
    one.measured(FOUR)
    assert one.requests == [1, 4]


def test_an_algorithm_that_others_follow_keeps_what_it_has():
    one = flexible()
    for trial in range(3):
        one.ask(trial, budget=1, open=True)
    one.placing.place()
    one.placing.queue.pop(2)
    one.placing.changed = True
    one.go_on()
    assert one.requests == [3]


def test_trials_are_packed_before_nodes_go():
    one = flexible(4, scales=True)
    one.cards[:] = [Device(card.name, card.type, card.memory, "ab"[i // 2]) for i, card in enumerate(one.cards)]
    one.placing.look()
    one.know({1: 1.0})
    for trial in range(4):
        one.ask(trial, budget=6)
    one.placing.place()
    for trial in (1, 2):
        one.placing.left(trial)
    one.go_on()
    assert one.requests[-1] == 2
    moved = [b for b in one.bundles if not b.placements]
    assert len(moved) == 1, "one of the two trials leaves its node"
    (trial,) = one.moving
    one.stop(trial)
    bundling = one.placing.bundling
    nodes = {bundling.devices[name].node for place in bundling.bundles() for name in place.devices}
    assert len(nodes) == 1


# Whole studies


class Long(Exact):
    """Few steps a unit, so that it is soon measured."""

    unit_steps = 16


@pytest.fixture(params=["distributed", "auto"])
def elastic(request, monkeypatch, tmp_path):
    """A study on two worker processes that believes two devices to be twice as fast, whatever it measures."""
    plain = SpeedModel.spread

    def believed(self, signature, type, table):
        return plain(self, signature, type, {1: 1.0, 2: 0.5} if len(table) > 1 else table)

    monkeypatch.setattr(SpeedModel, "spread", believed)
    monkeypatch.setattr(SpeedModel, "moving", property(lambda self: 0.0))
    algorithm = ps.SuccessiveHalving(max_budget=16, min_budget=4, reduction=2)
    space = {"lr": ps.loguniform(1e-3, 0.5)}
    study = ps.Study(Long(), space, metric="loss", mode="min", algorithm=algorithm, trials=4, dir=tmp_path, name="s")
    result = study.run(workers=2, sharing=request.param, progress=False)
    return result, list(read(tmp_path / "s" / "log.jsonl"))


@pytest.mark.filterwarnings("ignore::penstock.SoloWarning")
def test_a_study_whose_last_trials_have_all_devices_has_the_curves_of_one_whose_trials_are_alone(elastic):
    result, events = elastic
    spread = [e for e in events if isinstance(e, Placed) and e.mode == "distributed"]
    assert spread, "the best trial had both devices"
    assert {e.share for e in spread} == {2.0}
    assert any(isinstance(e, Measured) and e.kind == "scaling" and set(e.table) == {1, 2} for e in events)
    for trial in result.trials:
        expected = alone(Long(), trial.number, trial.config, len(trial.curve))
        for row, other in zip(trial.curve, expected, strict=True):
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-9)
    assert math.isfinite(result.best.metrics["loss"])
    assert torch.is_tensor(next(result.best.model().parameters()))
