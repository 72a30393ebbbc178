"""Kernels compiled beside training: what a step needs, the side process, and training's view of it.

Kernels run in the interpreter in this process, so the jobs come from a program where Triton compiles (``steps.py``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

import pytest

pytest.importorskip("triton")

from penstock.executors.processes.forking import fork
from penstock.training.kernels import needed
from penstock.training.kernels.compiling import Compiling
from penstock.training.kernels.needed import Job
from tests.programs import run

HELD = """
import os, signal
from penstock.training.kernels.compiling import compiling

compiling().start()
side = compiling()._process.pid
reads, writes = os.pipe()
if (child := os.fork()) == 0:
    os.write(writes, str(int(compiling()._process is None)).encode())
else:
    print(side, child, os.read(reads, 1).decode(), flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The kernels of a step, their names in Triton's cache, and the names that Triton would look up."""
    file = tmp_path_factory.mktemp("jobs") / "jobs.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        run(f"python {Path(__file__).with_name('steps.py')} {file}")
    found = json.loads(file.read_text())
    return found | {"jobs": [Job(*job) for job in found["jobs"]]}


@pytest.fixture
def cache(found, tmp_path, monkeypatch):
    """Triton's cache, which is empty; there is something to link launchers with."""
    subprocess.run(["gcc", "-shared", "-o", tmp_path / "libcuda.so.1", "-x", "c", os.devnull], check=True)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(needed, "digest", dict(zip(found["jobs"], found["digests"], strict=True)).__getitem__)
    return tmp_path / "cache"


@pytest.fixture
def beside():
    made = Compiling()
    yield made
    made.close()


def test_every_kernel_of_a_step_is_noted_and_none_is_compiled_or_timed(found):
    assert {job.name for job in found["jobs"]} == {
        "_attend", "_attend_back", "_collect", "_collect_all", "_combine", "_convolve", "_moments", "_normalize",
        "_reduce", "_spread", "_spread_all", "_total", "_weigh",
    }  # fmt: skip
    assert len(set(found["jobs"])) == len(found["jobs"]) == 18
    assert {job.capability for job in found["jobs"]} == {90}


def test_more_trials_and_larger_batches_need_hardly_any_other_kernels(found):
    """More parts are added up four times as many at a time."""
    assert found["others"] == ["_collect"]


def test_gradients_of_all_layers_are_added_up_in_the_order_of_each_layer_alone(found):
    assert found["together"] == found["alone"]
    assert len(found["together"]) == 5


def test_kernels_that_lie_in_the_cache_are_loaded_and_the_others_are_noted(found):
    """The process has forgotten one kernel, which lies in the cache or not."""
    assert found["lying"] == [[[], 1], [["_weigh"], 0]]


def test_a_hook_that_was_there_before_sees_the_kernels_of_others_alone(found):
    assert found["asked"] == ["_other"]


def test_a_kernel_has_the_name_that_triton_looks_up(found):
    assert found["digests"] == found["looked_up"]


def test_kernels_are_compiled_beside_training_and_known_to_a_later_process(found, cache, beside, caplog, monkeypatch):
    jobs = [job for job in found["jobs"] if job.name in ("_total", "_combine")]
    tuples = [job for job in found["jobs"] if job.name == "_convolve" and job.module.endswith("depthwise")][:1]
    wrong = Job(jobs[0].module, "_nothing", *jobs[0][2:])
    needed.digest.__self__[wrong] = "00"
    beside.start()
    cache = cache / "moved"  # as Inductor moves it when it is first used
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    assert not beside.ready([wrong, *jobs, *tuples])
    while not (beside.ready(jobs + tuples) and beside.failed):
        wait([beside._process.stdout])
    for job in jobs + tuples:
        assert needed.lies_there(job)
    assert list(cache.glob("*/*.cubin"))
    assert list(cache.glob("*/__triton_launcher*"))
    assert not beside.ready([wrong])
    assert "_nothing" in beside.failed
    beside._hear(0, "again")
    assert len(caplog.records) == 1, "the first failure is said, and no other"
    later = Compiling()
    assert later.ready(jobs + tuples)
    assert later._process is None


def test_a_kernel_is_asked_for_anew_where_the_cache_has_moved(found, cache, beside, monkeypatch, tmp_path):
    beside._there.add((str(cache), found["jobs"][0]))
    assert beside.ready(found["jobs"][:1])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert not beside.ready(found["jobs"][:1])
    assert list(beside._asked) == [(str(tmp_path / "elsewhere"), found["jobs"][0])]


def test_a_side_process_that_dies_is_said_once_and_training_goes_on(found, cache, beside, caplog):
    beside.start()
    beside._process.kill()
    beside._process.wait()
    for _ in range(2):
        assert not beside.ready(found["jobs"])
    assert [record.message for record in caplog.records] == [
        "The process that compiles kernels beside training ended with -9. Training goes on without it."
    ]


def test_a_side_process_that_cannot_start_is_said_once(found, cache, beside, caplog, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for _ in range(2):
        assert not beside.ready(found["jobs"])
    assert "/nowhere/python" in beside.failed
    assert len(caplog.records) == 1


def test_a_side_process_ends_with_its_driver_though_a_fork_of_the_driver_lives(tmp_path):
    (tmp_path / "held.py").write_text(HELD)
    os.mkfifo(tmp_path / "said")
    driver = fork("tests.programs")
    driver.connection.send((["python", str(tmp_path / "held.py")], str(tmp_path / "said"), os.devnull))
    with (tmp_path / "said").open() as said:
        side, child, forgotten = map(int, said.readline().split())
    ended = os.pidfd_open(side)
    try:
        driver.kill()
        assert forgotten
        wait([ended])
    finally:
        os.close(ended)
        os.kill(child, signal.SIGKILL)
