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

import penstock as ps
from penstock.bundle import Failed, Finished, Job, Placement
from penstock.executors.processes import ProcessExecutor
from penstock.trial import Report
from tests.contracts.executors import CONFIG, ExecutorContract, alone
from tests.tasks import Blobs


class TestProcessExecutor(ExecutorContract):
    @classmethod
    def make(cls, job):
        return ProcessExecutor(job, 2)  # with one thread each, like the tests


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
    while not any(isinstance(e, Failed) for e in events):
        events += two.wait()
    (failed,) = [e for e in events if isinstance(e, Failed)]
    assert (failed.trial, failed.attempt, failed.died) == (0, 1, True)
    assert "SIGKILL" in failed.error
    units = [e.unit for e in events if isinstance(e, Report) and e.trial == 0]
    assert units == list(range(1, len(units) + 1))
    suite.place(two, Placement(0, 2, CONFIG, 2), device=0, name="a")  # its device has a new worker
    while sum(isinstance(e, Finished) for e in events) < 2:
        events += two.wait()
    assert suite.curve([e for e in events if e.trial == 1]) == alone(Blobs(), 1, CONFIG, 6)
    assert suite.curve([e for e in events if e.trial == 0 and e.attempt == 2]) == alone(Blobs(), 0, CONFIG, 2)


DRIVER = """
import sys
import threading
from pathlib import Path
from penstock.bundle import Bundle, Job, Placement
from penstock.executors.processes import ProcessExecutor
from tests.tasks import Blobs
executor = ProcessExecutor(Job(Blobs(), 0, "loss", "min", Path(sys.argv[1])), 1)
executor.describe([{"lr": 0.1}], train=True)
if sys.argv[2] == "busy":
    executor.place(Bundle("a", ("cpu:0",), (Placement(0, 1, {"lr": 0.1}, 10**6),)))
    executor.wait()
print(executor._workers["cpu:0"].process.pid, flush=True)
while True:
    executor.wait()
"""


@pytest.mark.parametrize("doing", ["busy", "idle"])
def test_workers_exit_when_their_driver_is_killed(doing, tmp_path):
    repo = Path(__file__).parents[2]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, tmp_path, doing], stdout=subprocess.PIPE, text=True, cwd=repo
    )
    worker = int(driver.stdout.readline())
    watch = os.pidfd_open(worker)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert select.select([watch], [], [], 60)[0], "the worker outlived its driver"
    os.close(watch)


def test_a_task_that_cannot_be_sent_is_refused_with_the_reason(tmp_path):
    task = Blobs()
    task.lock = threading.Lock()
    with pytest.raises(ps.StudyError, match="cannot be sent to worker processes"):
        ProcessExecutor(Job(task, 0, "loss", "min", tmp_path), 2)


def test_cores_are_divided_among_cpu_workers(two):
    assert two._threads == max(1, torch.get_num_threads() // 2)
    assert [device.name for device in two.devices()] == ["cpu:0", "cpu:1"]
