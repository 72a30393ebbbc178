"""Studies whose targets no single device holds: surrogates train on one device each, and targets in shares."""

import pytest

import penstock as ps
from penstock.bundle import Device
from penstock.log.events import Measured, Placed
from penstock.scheduling.base import Assignment, Demand, Holding, View, kinds, room
from penstock.scheduling.fifo import fifo
from penstock.scheduling.sharded import beside
from penstock.scheduling.waterfill import waterfill
from penstock.space import Space
from penstock.speed.model import UNKNOWN
from penstock.surrogate.examine import examine
from penstock.surrogate.task import narrowed
from tests.studies import log, studies
from tests.surrogate.models import Doubles, perceptron
from tests.training.together import Trials


class Small(Doubles):
    def __init__(self):
        super().__init__(lambda: perceptron(64))


class Halved(Small):
    shards = 2


study = studies(
    Halved,
    {"lr": ps.loguniform(1e-3, 0.3)},
    algorithm=ps.Random(budget=2),
    trials=6,
    surrogate=ps.Surrogate(scale=4, best=2),
)


def placed(variant):
    return [event for event in log() if isinstance(event, Placed) and event.variant == variant]


def test_surrogates_are_fused_on_one_device_each_and_targets_train_in_shares(long_enough):
    made = study(algorithm=ps.Random(budget=1), trials=4, surrogate=ps.Surrogate(scale=4, best=1))
    result = made.run(workers=2, sharing="fused", progress=False)
    assert {(event.mode, len(event.devices)) for event in placed("surrogate 4")} == {("fused", 1)}
    assert {(event.mode, len(event.devices)) for event in placed("")} == {("distributed", 2)}
    assert max(e.size for e in log() if isinstance(e, Measured) and e.kind == "sharing") > 1
    assert len(result.surrogate.trials) == 4
    tasks = {1: Small(), 4: narrowed(Small(), ps.Surrogate(scale=4))}
    for trial in [*result.trials, *result.surrogate.trials]:
        _, curve = Trials(tasks[trial.scale]).alone(trial.number, trial.config, 3 * len(trial.curve))
        assert [row["loss"] for row in trial.curve] == pytest.approx([row["loss"] for row in curve], abs=1e-9)
    assert [tuple(p.shape) for p in result.best.model().parameters()] == [
        tuple(p.shape) for p in perceptron(64).parameters()
    ]


def test_on_a_cluster_targets_get_the_devices_that_surrogates_leave_idle():
    result = study().run(on=ps.Simulated(devices=4, unit_seconds=10), sharing="solo", progress=False)
    assert {(event.mode, len(event.devices)) for event in placed("surrogate 4")} == {("solo", 1)}
    assert {(event.mode, len(event.devices)) for event in placed("")} == {("distributed", 2)}
    assert [event.clock for event in placed("surrogate 4")] == [0, 0, 0, 0, 20, 20]
    assert placed("")[0].clock == 20, "two devices are idle then"
    assert result.best.state == "finished"


def test_devices_that_can_never_hold_a_target_are_refused_before_a_surrogate_trains():
    with pytest.raises(ps.StudyError, match="shards = 2 need as many devices of one type"):
        study().run(on=ps.Simulated(devices=1, unit_seconds=10), progress=False)
    assert not placed("surrogate 4")
    with pytest.raises(ps.StudyError, match="got sharing='processes': leave it out"):
        study().run(on=ps.Simulated(devices=2, unit_seconds=10, processes=True), sharing="processes")
    growing = ps.Simulated(devices=1, most=2, provision=300.0, unit_seconds=10)
    with pytest.warns(UserWarning, match="Trials wait for 2 devices of one type, and there are 1 of type simulated"):
        study(name="t").run(on=growing, sharing="solo", progress=False)


def test_a_target_that_no_device_holds_is_not_trained_by_the_look_at_its_surrogates(monkeypatch):
    space = Space.of({"lr": ps.loguniform(0.01, 0.1)})
    whole = examine(Small(), space, ps.Surrogate(scale=8))
    from penstock.surrogate import examine as module

    trained = []
    before = module._train
    monkeypatch.setattr(module, "_train", lambda task, *more: trained.append(task) or before(task, *more))
    found = examine(Halved(), space, ps.Surrogate(scale=8))
    assert {type(task).__mro__[1].__name__ for task in trained} == {"Narrowed"}
    assert found.seconds[0] is None
    assert found.bytes == whole.bytes
    assert [sorted(one.changes) for one in found.slopes] == [[2, 4, 8]] * len(found.slopes)


# The stage of scheduling


def seen(devices, running, memory=8):
    cards = {f"gpu {i}": Device(f"gpu {i}", "h200", memory) for i in range(devices)}
    cards["gpu 0"] = Device("gpu 0", "h200", 80)
    return View(cards, running, room(cards, running.values()), kinds(running.values()))


def test_trials_of_one_device_go_first_and_sharded_trials_get_what_they_leave():
    narrow, wide = [Demand(n, "g", 9, asked=n) for n in (2, 3)], [Demand(n, "t", 9, width=2) for n in (0, 1)]
    made = beside(waterfill)(seen(4, {}), [*wide, *narrow], UNKNOWN)
    assert {one.trial: len(one.devices) for one in made} == {2: 1, 3: 1, 0: 2}
    assert [one.trial for one in beside(waterfill)(seen(3, {}), [*wide, *narrow], UNKNOWN)] == [2, 3]
    assert [one.trial for one in beside(waterfill)(seen(2, {}), wide, UNKNOWN)] == [0]


def test_a_scheduler_is_shown_no_device_of_a_sharded_trial():
    shown = []

    def watching(view, demands, speed):
        shown.append((sorted(view.devices), sorted(view.running), [demand.trial for demand in demands]))
        return fifo(view, demands, speed)

    held = Holding(Demand(0, "t", 9, width=2), Assignment(0, ("gpu 0", "gpu 1"), 2.0))
    large = Demand(2, "g", 9, bytes=50)  # for gpu 0 alone, once it is free
    made = beside(watching)(seen(3, {0: held}), [Demand(1, "g", 9), large], UNKNOWN)
    assert shown == [(["gpu 2"], [], [1])]
    assert [(one.trial, one.devices) for one in made] == [(1, ("gpu 2",))]
