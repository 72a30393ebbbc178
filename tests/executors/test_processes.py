"""Worker processes: real ones, killed with SIGKILL."""

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import penstock as ps
from penstock.bundle import Job, Placement, StateSaved, TrialFailed, TrialFinished, TrialStopped
from penstock.executors.processes.executor import ProcessExecutor
from penstock.trial import Report
from tests.contracts.executors import CONFIG, Exact, Shared, SharesContract, SpreadContract, alone
from tests.tasks import Blobs


class Two:
    @classmethod
    def make(cls, job):
        return ProcessExecutor(job, 2)  # with one thread each, like the tests


class TestProcessExecutor(Two, SpreadContract):
    pass


class TestShares(Two, SharesContract):
    pass


@pytest.fixture
def two(tmp_path):
    executor = ProcessExecutor(Job(Blobs(), 0, "loss", "min", tmp_path / "states"), 2)
    yield executor
    executor.close()


def test_a_killed_worker_loses_no_report_and_not_the_other_trial(two):
    suite = TestProcessExecutor()
    suite.place(two, Placement(0, 1, CONFIG, 10**6), device=0, name="a")
    suite.place(two, Placement(1, 1, CONFIG, 6), device=1, name="b")
    events = []
    while not any(isinstance(e, Report) and e.trial == 0 and e.unit == 2 for e in events):
        events += two.wait()
    os.kill(two._workers["cpu:0"].process.pid, signal.SIGKILL)
    while not any(isinstance(e, TrialFailed) for e in events):
        events += two.wait()
    (failed,) = [e for e in events if isinstance(e, TrialFailed)]
    assert (failed.trial, failed.attempt, failed.died) == (0, 1, True)
    assert "SIGKILL" in failed.error
    units = [e.unit for e in events if isinstance(e, Report) and e.trial == 0]
    assert units == list(range(1, len(units) + 1))
    suite.place(two, Placement(0, 2, CONFIG, 2), device=0, name="a")  # its device has a new worker
    while sum(isinstance(e, TrialFinished) for e in events) < 2:
        events += two.wait()
    assert suite.curve([e for e in events if e.trial == 1]) == alone(Blobs(), 1, CONFIG, 6)
    assert suite.curve([e for e in events if e.trial == 0 and e.attempt == 2]) == alone(Blobs(), 0, CONFIG, 2)


def test_nothing_is_left_of_a_state_that_a_killed_worker_was_writing(tmp_path):
    states = tmp_path / "s" / "states"

    def train(trial):
        for unit in (1, 2):
            trial.report(unit, state=unit, loss=1.0)
            if trial.number == 0 and not (states / "000000-1-9.pt").exists():
                (states / "000000-1-9.pt").write_text("whole, and no event tells of it")
                (states / "000000-1-10.pt.partial").write_text("cut sh")
                os.kill(os.getpid(), signal.SIGKILL)

    space = {"x": ps.grid([1, 2])}
    study = ps.Study(train, space, metric="loss", algorithm=ps.Grid(budget=2), dir=tmp_path, name="s")
    result = study.run(workers=2, progress=False)
    assert [len(trial.curve) for trial in result.trials] == [2, 2]
    assert not [path.name for path in states.iterdir() if path.name in ("000000-1-9.pt", "000000-1-10.pt.partial")]


DRIVER = """
import sys
import threading
from pathlib import Path
from penstock.bundle import Bundle, Job, Placement
from penstock.executors.processes import forking
from penstock.executors.processes.executor import ProcessExecutor
from tests.tasks import Blobs
executor = ProcessExecutor(Job(Blobs(), 0, "loss", "min", Path(sys.argv[1])), 1)
executor.describe([{"lr": 0.1}], train=True)
if sys.argv[2] == "busy":
    executor.place(Bundle("a", ("cpu:0",), (Placement(0, 1, {"lr": 0.1}, 10**6),)))
    executor.wait()
print(executor._workers["cpu:0"].process.pid, next(iter(forking._servers.values())).process.pid, flush=True)
while True:
    executor.wait()
"""


@pytest.mark.parametrize("doing", ["busy", "idle"])
def test_workers_exit_when_their_driver_is_killed(doing, tmp_path):
    repo = Path(__file__).parents[2]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, tmp_path, doing], stdout=subprocess.PIPE, text=True, cwd=repo
    )
    watched = [os.pidfd_open(int(pid)) for pid in driver.stdout.readline().split()]
    driver.kill()
    driver.wait()
    driver.stdout.close()
    for process in watched:  # the worker, and the one that it was forked from
        assert select.select([process], [], [], 60)[0], "it outlived its driver"
        os.close(process)


def test_a_task_that_cannot_be_sent_is_refused_with_the_reason(tmp_path):
    task = Blobs()
    task.lock = threading.Lock()
    with pytest.raises(ps.StudyError, match="cannot be sent to worker processes"):
        ProcessExecutor(Job(task, 0, "loss", "min", tmp_path), 2)


def test_cores_are_divided_among_cpu_workers(two):
    assert {device.threads for device in two.devices()} == {max(1, torch.get_num_threads() // 2)}
    assert [device.name for device in two.devices()] == ["cpu:0", "cpu:1"]


# A trial on both


@pytest.fixture
def spread(tmp_path):
    def make(task):
        executors.append(ProcessExecutor(Job(task, 0, "loss", "min", tmp_path / "states"), 2))
        return executors[-1], TestProcessExecutor()

    executors = []
    yield make
    for executor in executors:
        executor.close()


def test_each_of_its_workers_is_killed(spread):
    executor, suite = spread(Exact())
    attempt = 0
    for killed in (0, 1):
        attempt = lose_a_worker(executor, suite, killed, attempt + 1)


def lose_a_worker(executor, suite, killed, attempt):
    suite.spread(executor, Placement(4, attempt, CONFIG, 10**6))
    events = []
    while sum(isinstance(e, Report) for e in events) < 3:
        events += executor.wait()
    os.kill(executor._workers[f"cpu:{killed}"].process.pid, signal.SIGKILL)
    events += suite.until_left(executor)
    failed = next(e for e in events if isinstance(e, TrialFailed))
    assert failed.died
    assert "was killed by SIGKILL" in failed.error or "workers died" in failed.error
    states = [e.state for e in events if isinstance(e, Report | StateSaved) and e.state is not None]
    state = states[-1] if states else None
    done = 0 if state is None else state.unit
    attempt += 1
    suite.spread(executor, Placement(4, attempt, CONFIG, done + 3, state))
    again = []
    while not any(isinstance(e, TrialFinished) and e.attempt == attempt for e in again):
        for event in executor.wait():
            if isinstance(event, TrialFailed) and event.attempt == attempt:
                assert event.died, "the worker beside it told first: of the death the driver had not heard"
                attempt += 1
                suite.spread(executor, Placement(4, attempt, CONFIG, done + 3, state), name=f"again {attempt}")
            elif not isinstance(event, TrialFailed | TrialStopped):
                again.append(event)
    kept = [e for e in events if isinstance(e, Report) and e.unit <= done]
    suite.assert_as_alone(kept + again, 4, CONFIG, done + 3)
    return attempt


class HalfShared(Shared):
    """Raises or dies where the second worker, or the first, has come to its twelfth batch."""

    calls = 0

    def loss(self, model, batch, config):
        self.calls += 1
        if self.calls > 12 and dist.get_rank() == config["rank"]:
            if config["dies"]:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("only here")
        return super().loss(model, batch, config)


@pytest.mark.parametrize(("rank", "dies"), [(0, False), (1, True)])
def test_one_of_the_workers_of_a_trial_in_shares_fails_inside_a_step(spread, rank, dies):
    executor, suite = spread(HalfShared())
    suite.spread(executor, Placement(4, 1, {**CONFIG, "rank": rank, "dies": dies}, 10**6))
    failed = suite.until_left(executor)[-1]
    assert failed.died == dies
    assert ("SIGKILL" in failed.error or "workers died" in failed.error) if dies else "only here" in failed.error
    suite.spread(executor, Placement(4, 2, {**CONFIG, "rank": None}, 2), devices=(1, 0), name="b")
    events = []
    while not any(isinstance(e, TrialFinished | TrialFailed) for e in events):
        events += [e for e in executor.wait() if e.attempt == 2]
    suite.assert_as_alone(events, 4, CONFIG, 2)


class Half(Exact):
    """Fails where the second worker of a trial has come to its twelfth batch; or in any part of a batch."""

    calls = 0

    def loss(self, model, batch, config):
        self.calls += 1
        if config["fails"] == "later" and self.calls > 12 and dist.is_initialized() and dist.get_rank() == 1:
            raise KeyError("only here")
        if config["fails"] == "parts" and len(batch[0]) < 10:
            raise KeyError("too few")
        return super().loss(model, batch, config)


def test_an_error_of_one_worker_is_told_as_it_was(spread):
    executor, suite = spread(Half())
    suite.spread(executor, Placement(4, 1, {**CONFIG, "fails": "later"}, 10**6))
    failed = suite.until_left(executor)[-1]
    assert "KeyError: 'only here'" in failed.error
    assert "in loss" in failed.error, "with its traceback"
    assert not failed.died


def test_a_trial_that_cannot_be_in_parts_stays_as_it_was_and_says_why(spread):
    executor, suite = spread(Half())
    suite.place(executor, Placement(4, 1, {**CONFIG, "fails": "parts"}, 1), name="alone")
    state = [e for e in suite.until_left(executor) if isinstance(e, Report)][-1].state
    suite.spread(executor, Placement(4, 2, {**CONFIG, "fails": "parts"}, 3, state))
    measured, stopped = suite.until_left(executor)
    assert measured.table == {1: 1.0}
    assert measured.reason == "never on several devices: a part of a batch fails: KeyError: 'too few'"
    assert stopped == TrialStopped(4, 2, state)


def test_workers_that_do_not_meet_give_up_in_time(spread, monkeypatch):
    monkeypatch.setenv("PENSTOCK_MEETING", "1")
    executor, suite = spread(Exact())
    monkeypatch.setattr(executor, "_gather", lambda bundle: None)
    suite.spread(executor, Placement(4, 1, CONFIG, 3))
    parted, stopped = suite.until_left(executor)
    assert parted.error == "The 2 workers of a trial did not meet within 1 seconds."
    assert parted.devices == ("cpu:0", "cpu:1")
    assert stopped == TrialStopped(4, 1, None)


def test_each_of_its_workers_is_killed_while_it_grows(spread):
    executor, suite = spread(Exact())
    attempt = 0
    for killed in (0, 1):
        attempt += 1
        suite.place(executor, Placement(4, attempt, CONFIG, 2), name="alone")
        events = suite.until_left(executor)
        state, attempt = [e for e in events if isinstance(e, Report)][-1].state, attempt + 1
        os.kill(executor._workers[f"cpu:{killed}"].process.pid, signal.SIGKILL)
        suite.spread(executor, Placement(4, attempt, CONFIG, 4, state))  # the driver has not heard of it
        while not any(isinstance(e, TrialFinished) and e.attempt == attempt for e in events):
            for event in executor.wait():
                if isinstance(event, TrialFailed) and event.attempt == attempt:
                    assert event.died
                    attempt += 1
                    suite.spread(executor, Placement(4, attempt, CONFIG, 4, state), name=f"again {attempt}")
                elif not isinstance(event, TrialFailed | TrialStopped):  # what an older attempt says is discarded
                    events.append(event)
        reported = [e for e in events if isinstance(e, Report)]
        assert [e.unit for e in reported] == [1, 2, 3, 4], "nothing twice: the one that died had begun nothing"
        suite.assert_as_alone(events, 4, CONFIG, 4)
