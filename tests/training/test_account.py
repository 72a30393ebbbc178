"""Usage is counted in one place: by whom the device was used, and since when."""

import time
from itertools import count

import pytest

from penstock.bundle import Bundle, Job, Placement, TrialFailed, TrialStopped
from penstock.training.account import Account
from penstock.training.runs.fused import FusedRun
from penstock.training.runs.solo import SoloRun
from penstock.training.worker import Worker
from penstock.trial import Report, Usage
from tests.tasks import Blobs, Fails


def test_seconds_are_divided_equally_among_the_trials_that_were_together():
    account = Account("cpu")
    one, other, third = (account.open(step) for step in (0, 4, 0))
    account.charge([one, other], 3.0)
    account.charge([other], 1.0)
    account.charge([], 7.0)
    assert account.usage(one, 2, 100) == Usage(1.5, 2, 100)
    assert account.usage(other, 6, None) == Usage(2.5, 2, None)
    assert account.usage(third, 0, None) == Usage(0.0, 0, None)


def test_a_report_tells_of_the_time_since_the_last_one_alone():
    account = Account("cpu")
    entry = account.open(3)
    account.charge([entry], 1.0)
    assert account.usage(entry, 5, None) == Usage(1.0, 2, None)
    account.charge([entry], 4.0)
    assert account.usage(entry, 6, None) == Usage(4.0, 1, None)


def test_memory_is_counted_on_an_accelerator_alone():
    assert Account("cpu").peak_bytes(10) is None


@pytest.mark.parametrize(("mode", "kind"), [("solo", SoloRun), ("processes", SoloRun), ("fused", FusedRun)])
def test_every_run_tells_its_steps_and_all_of_its_seconds(mode, kind, tmp_path, monkeypatch):
    """The clock goes on by one whenever it is looked at."""
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    worker = Worker(Job(Blobs(), 0, "loss", "min", tmp_path), "cpu")
    worker.place(Bundle("one", ("cpu",), (Placement(0, 0, {"lr": 0.1}, 3),), mode, "signature", size=2))
    assert isinstance(worker.training, kind)
    events = []
    while not worker.idle:
        events.append(worker.advance())
    used = [event.usage for event in events if isinstance(event, Report)]
    assert [usage.steps for usage in used] == [6, 6, 6]
    assert all(usage.device_seconds > 0 for usage in used)
    assert sum(usage.device_seconds for usage in used) <= next(ticks)


@pytest.mark.parametrize("mode", ["solo", "fused"])
def test_a_trial_that_leaves_between_two_reports_tells_what_it_used(mode, tmp_path, monkeypatch):
    """The clock goes on by one whenever it is looked at; the trials leave in the middle of a unit, or fail there."""
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    lrs = [0.1] if mode == "solo" else [0.1, 0.2]
    placements = tuple(Placement(trial, 0, {"lr": lr}, 3) for trial, lr in enumerate(lrs))
    worker = Worker(Job(Blobs(), 0, "loss", "min", tmp_path), "cpu")
    worker.place(Bundle("one", ("cpu",), placements, mode, "signature", size=2))
    events = [worker.advance() for _ in range(4)]
    worker.place(Bundle("one", ("cpu",), (), mode, "signature", size=2))
    while not worker.idle:
        events.append(worker.advance())
    left = [event for event in events if isinstance(event, TrialStopped)]
    assert len(left) == len(lrs)
    assert all(event.usage.device_seconds > 0 and event.usage.steps > 0 for event in left)


def test_a_trial_that_fails_tells_what_it_used(tmp_path, monkeypatch):
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    worker = Worker(Job(Fails(), 0, "loss", "min", tmp_path), "cpu")
    worker.place(Bundle("one", ("cpu",), (Placement(0, 0, {"lr": 0.1, "fail": True}, 3),), "solo"))
    events = []
    while not worker.idle:
        events.append(worker.advance())
    (failed,) = [event for event in events if isinstance(event, TrialFailed)]
    assert failed.usage.device_seconds > 0
