"""Trials that kill their worker: found by halving the bundles they die in, and nobody else pays for them."""

import math
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.bundle import Description, Device, TrialFailed, TrialFinished
from penstock.executors.base import DeviceAdded, DeviceLost, Executor
from penstock.log.events import Asked, Failed, Opened, Placed, Reported, decode
from penstock.log.history import History
from penstock.log.reader import read
from penstock.speed.model import SIZES
from penstock.trial import Report
from tests.contracts.executors import Exact, alone
from tests.tasks import Blobs

BUDGET = 3


class Fragile(Executor):
    """Not a place to train: a worker dies when a trial that is ``fatal`` begins the unit that is named for it.

    ``losses`` of the device come between units, without progress; it is back one ``wait`` later. With ``pieces``
    each ``wait`` tells one event. A ``large`` trial runs out of memory in company, which kills nobody else.
    """

    def __init__(self, devices=1, fatal=None, losses=0, pieces=False, large=(), late=()):
        self.fatal, self.losses, self.pieces, self.large, self.late = fatal or {}, losses, pieces, large, late
        self.all = [Device(f"d{i}", "fragile", 2**40) for i in range(devices)]
        self.on = {device.name: {} for device in self.all}  # [placement, unit] by trial
        self.ended, self.untold, self.deaths, self.placed, self.time, self.study = set(), [], [], [], 0.0, ""

    def devices(self):
        return [device for device in self.all if device.name in self.on]

    def place(self, bundle):
        (device,), self.study = bundle.devices, bundle.study
        self.placed.append(tuple(p.trial for p in bundle.placements))
        there = self.on[device]
        for p in bundle.placements:
            if (p.trial, p.attempt) not in self.ended and p.trial not in there:
                there[p.trial] = [p, 0]

    def wait(self, timeout=None):
        self.time += 1.0
        if not self.untold:
            self.advance()
        assert self.untold, "nothing can happen any more"
        assert self.time < 1000, "it goes on for ever"
        told = self.untold[:1] if self.pieces else list(self.untold)
        del self.untold[: len(told)]
        return [one if isinstance(one, DeviceAdded | DeviceLost) else replace(one, study=self.study) for one in told]

    def advance(self):
        for device in self.all:
            if device.name not in self.on:
                self.on[device.name] = {}
                self.untold.append(DeviceAdded(device))
                return
        for device in self.all:
            there = self.on[device.name]
            if there and self.losses:
                self.losses -= 1
                del self.on[device.name]
                self.untold.append(DeviceLost(device))
                self.fail(there, "lost")
                return
            if any(self.fatal.get(trial) == unit + 1 for trial, (_, unit) in there.items()):
                self.deaths.append(tuple(there))
                self.fail(there, f"worker process {len(self.deaths)} was killed by SIGKILL")
            for trial in [trial for trial in there if trial in self.large and len(there) > 1]:
                self.fail({trial: there.pop(trial)}, "no memory")
            for trial, one in list(there.items()):
                self.train(trial, one)
                if one[1] >= one[0].budget:
                    del there[trial]

    def train(self, trial, one):
        p, _ = one
        one[1] += 1
        self.untold.append(Report(trial, one[1], {"loss": loss(trial, one[1])}, p.attempt))
        if one[1] >= p.budget:
            self.ended.add((trial, p.attempt))
            if trial in self.late:  # its worker dies with the last report still in the pipe
                self.untold.append(TrialFailed(trial, p.attempt, "late", died=True))
            else:
                self.untold.append(TrialFinished(trial, p.attempt))

    def fail(self, there, how):
        for trial, (p, _) in there.items():
            self.ended.add((trial, p.attempt))
            self.untold.append(TrialFailed(trial, p.attempt, how, died=True))
        there.clear()

    def wake(self):
        pass

    def describe(self, configs, *, train, trials=(), study=""):
        return [Description(("loss",), 1, "alike") for _ in configs]

    def now(self):
        return self.time

    def close(self):
        pass


def loss(trial, unit):
    return trial + 1 / unit


def run(executor, trials, dir=".penstock"):
    study = ps.Study(
        Blobs(),
        {"lr": ps.uniform(0, 1)},
        metric="loss",
        mode="min",
        algorithm=ps.Random(budget=BUDGET),
        trials=trials,
        name="s",
        dir=dir,
    )
    with patch("penstock.running.executor_of", return_value=executor):
        result = study.run(progress=False, sharing="fused")
    return result, list(read(Path(dir) / "s" / "log.jsonl"))


def deaths(events):
    """Trial and whether it was its own, of every death."""
    return [(event.trial, event.own) for event in events if isinstance(event, Failed)]


@settings(deadline=None, max_examples=60)
@given(
    trials=st.integers(1, 9),
    fatal=st.dictionaries(st.integers(0, 8), st.integers(1, BUDGET), max_size=9),
    devices=st.integers(1, 3),
    pieces=st.booleans(),
)
def test_exactly_the_culprits_fail_and_everybody_has_its_own_curve(trials, fatal, devices, pieces):
    fatal = {trial: unit for trial, unit in fatal.items() if trial < trials}
    executor = Fragile(devices, fatal, pieces=pieces)
    with tempfile.TemporaryDirectory() as dir:
        result, events = run(executor, trials, dir)
    assert [t.number for t in result.trials if t.state == "failed"] == sorted(fatal)
    assert {t.state for t in result.trials if t.number not in fatal} <= {"finished"}
    for trial in result.trials:
        units = range(1, fatal.get(trial.number, BUDGET + 1))
        assert list(trial.curve) == [{"budget": unit, "loss": loss(trial.number, unit)} for unit in units]
        if trial.number in fatal:
            assert trial.error.startswith("worker process")
            assert trial.error.endswith("was killed by SIGKILL, and so did 3 retries")
    assert len(executor.deaths) <= len(fatal) * (math.ceil(math.log2(trials)) + 4)
    own = [trial for trial, own in deaths(events) if own]
    assert sorted(own) == sorted([*fatal] * 4), "nobody else was blamed, and nobody more often"


def test_a_bundle_is_halved_until_the_culprit_is_alone():
    executor = Fragile(fatal={2: 1})
    run(executor, 8)
    assert executor.deaths == [(0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3), (2, 3), *[(2,)] * 4]


def test_a_trial_that_came_further_is_free_of_suspicion_and_may_be_with_anybody(monkeypatch):
    monkeypatch.setitem(SIZES, "forced", 2)
    executor = Fragile(devices=2, fatal={0: 1})
    run(executor, 7)
    assert executor.deaths[:2] == [(0, 1), (0,)]
    assert executor.placed[:4] == [(0, 1), (2, 3), (0,), (1,)]
    assert (1, 6) in executor.placed, "6 waited, but joined 1 only after its report"


def test_others_do_not_join_suspects_and_suspects_do_not_join_others(monkeypatch):
    monkeypatch.setitem(SIZES, "forced", 4)
    executor = Fragile(fatal={0: 1})
    run(executor, 7)  # four die together while three wait, which have room for one of the four, but not for a suspect
    assert executor.deaths == [(0, 1, 2, 3), (0, 1), *[(0,)] * 4]
    assert {frozenset(one) for one in executor.placed} == {
        frozenset(one) for one in ((0, 1, 2, 3), (4, 5, 6), (0, 1), (2, 3), (0,), (1,))
    }


def test_a_suspect_that_only_repeats_what_it_reported_is_still_one(monkeypatch):
    monkeypatch.setitem(SIZES, "forced", 2)
    executor = Fragile(devices=2, fatal={0: 2})
    run(executor, 7)  # 0 trains its first unit again and again, while others wait and there is room
    assert [one for one in executor.placed if 0 in one] == [(0, 1), *[(0,)] * 4]
    assert executor.deaths == [(0, 1), *[(0,)] * 4]


def test_who_runs_out_of_memory_in_company_is_tried_alone():
    executor = Fragile(large=(1,))
    result, events = run(executor, 3)
    assert {t.state for t in result.trials} == {"finished"}
    assert deaths(events) == [(1, False)]
    assert (1,) in executor.placed


@pytest.mark.parametrize("pieces", [False, True])
def test_a_device_that_is_lost_is_nobodys_fault(pieces):
    executor = Fragile(losses=6, pieces=pieces)
    result, events = run(executor, 4)
    assert {t.state for t in result.trials} == {"finished"}
    assert deaths(events) == [(trial, False) for _ in range(6) for trial in range(4)]
    assert executor.placed == [(0, 1, 2, 3)] * 7, "they stay together, and wait while there is no device"


def test_losses_of_devices_leave_a_trial_its_retries():
    executor = Fragile(losses=6, fatal={0: 1})
    _, events = run(executor, 1)
    assert deaths(events) == [(0, False)] * 6 + [(0, True)] * 4


def test_a_trial_that_dies_after_its_last_report_is_not_trained_again():
    executor = Fragile(late=(1,))
    result, events = run(executor, 3)
    assert {t.state for t in result.trials} == {"finished"}
    assert not deaths(events)
    assert [e.attempt for e in events if isinstance(e, Placed)] == [1, 1, 1]


def test_deaths_in_company_do_not_count_and_those_of_older_logs_do():
    begin = [Opened({"metric": "loss", "mode": "min"}), Asked(0, {}, 2, "g")]
    old = decode('{"n":2,"event":"failed","trial":0,"attempt":1,"error":"died","final":false,"clock":1.0}', 2)
    assert History.of([*begin, old]).trials[0].deaths == 1
    assert History.of([*begin, Failed(0, 1, "died", False, 1.0, own=False)]).trials[0].deaths == 0


# Real worker processes


class Kills(torch.optim.SGD):
    """Kills its process at a step of the second unit, where a trial says so."""

    def step(self, closure=None):
        (group,) = self.param_groups
        group["steps"] = group.get("steps", 0) + 1
        if group["kills"] and group["steps"] == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


class Killing(Exact):
    def __init__(self, culprit):
        self.culprit = culprit

    def optimizer(self, params, config):
        group = {"params": list(params), "kills": config["lr"] == self.culprit}
        return Kills([group], lr=config["lr"], momentum=0.9)


@pytest.mark.filterwarnings("ignore::penstock.SoloWarning")
def test_only_the_trial_that_kills_its_worker_process_fails(monkeypatch):
    monkeypatch.setattr("penstock.engine.engine.RETRIES", 1)
    space, algorithm = {"lr": ps.grid([0.01, 0.02, 0.03, 0.04, 0.05])}, ps.Grid(budget=3)
    study = ps.Study(Killing(0.03), space, metric="loss", mode="min", algorithm=algorithm, name="s")
    result = study.run(progress=False, sharing="fused", workers=2)
    events = list(read(Path(".penstock/s/log.jsonl")))
    assert {e.mode for e in events if isinstance(e, Placed)} == {"fused"}
    assert [t.state for t in result.trials] == ["finished", "finished", "failed", "finished", "finished"]
    assert result.trials[2].error.endswith("was killed by SIGKILL, and so did 1 retries")
    assert [trial for trial, own in deaths(events) if own] == [2, 2]
    assert 2 in [trial for trial, own in deaths(events) if not own], "it died in company first"
    reported = [(e.trial, e.unit) for e in events if isinstance(e, Reported)]
    assert len(reported) == len(set(reported)), "nothing is reported twice"
    for trial in result.trials:
        units = 1 if trial.number == 2 else 3
        expected = alone(Killing(None), trial.number, trial.config, units)
        assert len(trial.curve) == units
        for row, one in zip(trial.curve, expected, strict=True):
            assert {k: v for k, v in row.items() if k != "budget"} == pytest.approx(one, abs=1e-9)
