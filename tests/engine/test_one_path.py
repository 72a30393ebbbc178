"""Real and simulated runs go one way: with the same measured speeds, they place the same trials in the same order."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import penstock as ps
from penstock.bundle import Device, Gathering, Job
from penstock.engine.clocking import Shelf
from penstock.executors import local
from penstock.executors.local import LocalExecutor
from penstock.executors.processes import executor as processes
from penstock.log.events import Measured, Placed
from penstock.speed.profiles import Profiles
from penstock.task import fingerprint
from penstock.training.worker import Worker
from penstock.trial import Report
from tests.studies import log, studies
from tests.tasks import Blobs

STEPS = 6  # of a unit, each of a second
SIZES = {1: 1.0, 2: 1.0, 4: 1.0}  # a step of a bundle takes a second too, of up to four trials


class Lockstep(LocalExecutor):
    """Real workers in this process, which all take one step a second of a clock that nothing else moves.

    Of two that end a unit in one second, the one that began it first is told first, as on a simulated cluster.
    """

    modes = frozenset({"solo", "fused", "packed"})

    def __init__(self, job, workers):
        super().__init__(job)
        self._devices = [Device(f"cpu {i}", "cpu", 2**40) for i in range(workers)]
        self._workers = {device.name: Worker(job, "cpu") for device in self._devices}
        self._solo, self._ahead = set(), set()  # devices whose trial is alone, and which have taken their next step
        self._time = 0.0

    def place(self, bundle):
        (device,) = bundle.devices
        if self._workers[device].idle:
            self._workers[device] = self._workers.pop(device)
            (self._solo.add if bundle.mode == "solo" else self._solo.discard)(device)
        self._workers[device].place(bundle)

    def wait(self, timeout=None):
        events = []
        self._time += 1.0
        for device, worker in self._workers.items():
            if device in self._ahead:
                self._ahead.remove(device)
                continue
            reported = False
            while not worker.idle and (event := worker.advance()) is not None:
                assert not isinstance(event, Gathering)
                reported |= isinstance(event, Report)
                events.append(replace(event, device=device) if isinstance(event, Measured) else event)
            if device in self._solo and reported and not worker.idle:
                self._ahead.add(device)  # after a report a trial alone comes to no boundary before its next step
        return events

    def now(self):
        return self._time

    def close(self):
        for worker in self._workers.values():
            worker.close()
        super().close()


study = studies(Blobs, {"lr": ps.loguniform(1e-2, 1)})


def signature():
    return Worker(Job(Blobs(), 0, "loss", "min", Path("states")), "cpu").describe({"lr": 0.1}, train=False).signature


def know(dir, seconds):
    device = Device("cpu 0", "cpu", 2**40)
    shelf = Shelf(Profiles.open(f"{dir}/profiles.jsonl"), fingerprint(Blobs()))
    shelf.measured(Measured(signature(), "cpu 0", "sharing", seconds, max(seconds), "known", "native"), device)


def placed(name):
    return [
        (event.trial, event.devices, event.mode, event.share) for event in log(dir=name) if isinstance(event, Placed)
    ]


@pytest.mark.parametrize("scheduler", ["fifo", "static_fluid", "dynamic_fluid", "waterfill"])
@pytest.mark.parametrize(
    ("algorithm", "trials"),
    [
        (ps.SuccessiveHalving(max_budget=4, reduction=2), 9),
        (ps.Hyperband(max_budget=4, reduction=2), None),
        (ps.PBT(population=5, max_budget=4, interval=2), None),
        (ps.Random(budget=2), 11),
        (ps.ASHA(max_budget=4, reduction=2, concurrency=5), 9),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_real_run_and_a_simulated_one_place_the_same_sequence(algorithm, trials, scheduler, monkeypatch):
    monkeypatch.setattr(processes, "ProcessExecutor", Lockstep)
    for dir in ("real", "simulated"):
        know(dir, SIZES)
    real = study(dir="real", algorithm=algorithm, trials=trials).run(workers=2, scheduler=scheduler, progress=False)
    there = ps.Simulated(
        [Device(f"cpu {i}", "cpu", 2**40) for i in range(2)],
        curves={(signature(), "cpu"): ps.Curve(sharing=(1.0,) * 4)},
        unit_seconds=float(STEPS),
    )
    simulated = study(dir="simulated", algorithm=algorithm, trials=trials).run(
        on=there, scheduler=scheduler, progress=False
    )
    assert placed("simulated") == placed("real")
    if not isinstance(algorithm, ps.PBT):
        assert [len(trial.curve) for trial in simulated.trials] == [len(trial.curve) for trial in real.trials]


class Widths(Blobs):
    """Trials of three signatures."""

    def model(self, config):
        return nn.Sequential(nn.Linear(6, config["width"]), nn.ReLU(), nn.Linear(config["width"], 2))


@pytest.mark.parametrize("scheduler", ["static_fluid", "dynamic_fluid", "waterfill"])
@pytest.mark.parametrize("algorithm", [ps.SuccessiveHalving(max_budget=4, reduction=2), ps.Random(budget=2)], ids=repr)
def test_a_real_pack_and_a_simulated_one_hold_the_same_trials(algorithm, scheduler, monkeypatch):
    monkeypatch.setattr(local, "LocalExecutor", lambda job: Lockstep(job, 1))
    space = {"lr": ps.loguniform(1e-2, 1), "width": ps.choice([3, 5, 8])}
    how = dict(sharing="packed", scheduler=scheduler, deterministic=True, progress=False)
    real = study(Widths(), space, dir="real", algorithm=algorithm, trials=9).run(**how)
    device, curve = Device("cpu 0", "cpu", 2**40), ps.Curve(sharing=(1.0,) * 16)
    there = ps.Simulated([device], curve=curve, unit_seconds=float(STEPS))
    simulated = study(Widths(), space, dir="simulated", algorithm=algorithm, trials=9).run(on=there, **how)
    there, here = ([(trial, mode) for trial, _, mode, _ in placed(name)] for name in ("simulated", "real"))
    assert there[:9] == here[:9]
    assert sorted(there) == sorted(here), "the parts of a real pack end their units one after another"
    assert {mode for _, _, mode, _ in placed("real")} == {"packed"}
    assert [len(trial.curve) for trial in simulated.trials] == [len(trial.curve) for trial in real.trials]
