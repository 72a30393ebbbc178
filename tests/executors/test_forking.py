"""Worker processes forked from one that has imported torch: what they have of their driver, and how all of them end."""

import os
import select
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import penstock as ps
from penstock.bundle import Bundle, Job, Placement, TrialFailed, TrialFinished
from penstock.executors.processes import forking
from penstock.executors.processes.executor import ProcessExecutor
from penstock.task import as_task
from penstock.trial import Report

PROGRAM = "penstock.executors.processes.worker"


def tells(trial):
    """What a worker has of its driver."""
    import probe  # in a folder that only the driver's path names
    import torch

    threads = torch.get_num_threads()
    trial.report(1, loss=float(os.environ["PROBE"]), module=probe.NUMBER, folder=Path("here").exists(), threads=threads)


def speaks_and_dies(trial):
    print("last words")
    trial.report(1, loss=1)
    sys.stdout.write("without an end")
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(trial):
    os._exit(3)


def endless(trial):
    for unit in range(1, 10**9):
        trial.report(unit, loss=1)


@contextmanager
def workers(task, count=1):
    executor = ProcessExecutor(Job(as_task(task), 0, "loss", "min", Path("states")), count)
    try:
        yield executor
    finally:
        executor.close()


def train(executor, budget=1, attempt=1, until=(TrialFinished, TrialFailed)):
    """What is told of a trial on the first device, until something of a kind is."""
    executor.place(Bundle(f"bundle {attempt}", ("cpu:0",), (Placement(0, attempt, {}, budget),)))
    told = []
    while not any(isinstance(event, until) for event in told):
        told += executor.wait()
    return told


def server():
    """The process that this one's workers are forked from."""
    return forking._servers[PROGRAM].process


def open_files(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def children(pid):
    """The processes that a process has started, those that ended and were not waited for among them."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def ended(process, seconds=60):
    return bool(select.select([process], [], [], seconds)[0])


def told(number, monkeypatch):
    folder = Path(f"driver {number}").resolve()
    folder.mkdir()
    (folder / "probe.py").write_text(f"NUMBER = {number}")
    (folder / "here").touch()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PROBE", str(number))
    with workers(tells) as executor:
        report = next(event for event in train(executor) if isinstance(event, Report))
    return report.metrics


def test_a_worker_has_the_surroundings_that_its_driver_has_by_then(monkeypatch):
    monkeypatch.delitem(sys.modules, "probe", raising=False)
    first, started = told(1, monkeypatch), server()
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    second = told(2, monkeypatch)
    assert first == {"loss": 1, "module": 1, "folder": True, "threads": 1}
    assert second == {"loss": 2, "module": 2, "folder": True, "threads": 2}
    assert server() is started, "from one process, which was kept"


def test_what_libraries_read_on_import_takes_effect(monkeypatch):
    with workers(endless) as before:
        train(before, 10**9, until=Report)
        old = server()
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with workers(endless) as after:
            train(after)
            assert server() is not old
            assert "OMP_NUM_THREADS=2" in Path(f"/proc/{server().pid}/environ").read_text().split("\0")
        before.place(Bundle("bundle 1", ("cpu:0",), ()))
        told = before.wait()
        assert not any(isinstance(event, TrialFailed) for event in told), "the workers of the old one go on"
    assert ended(os.pidfd_open(old.pid)), "it ends with its last worker"


def test_the_server_has_one_thread_and_its_worker_a_session_of_its_own():
    with workers(endless) as executor:
        train(executor, 10**9, until=Report)
        pid = executor._workers["cpu:0"].process.pid
        assert children(server().pid) == [str(pid)]
        assert len(list(Path(f"/proc/{server().pid}/task").iterdir())) == 1
        assert os.getsid(pid) == pid, "Ctrl-C reaches the driver alone"
        assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")


def test_nothing_is_left_of_workers():
    def left():  # files and children while a worker runs: the server has buried all earlier workers by then
        with workers(endless) as executor:
            train(executor, 10**9, until=Report)
            return open_files("self"), open_files(server().pid), len(children(server().pid))

    before = left()
    for _ in range(5):
        with workers(endless, 2) as executor:
            train(executor, 10**9, until=Report)
            pids = [worker.process.pid for worker in executor._workers.values()]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    ours, theirs, started = left()
    assert ours <= before[0]
    assert theirs <= before[1]
    assert started == 1


def test_what_a_task_prints_is_seen_even_if_its_worker_is_killed(capfd):
    with workers(speaks_and_dies) as executor:
        failed = train(executor, 2)[-1]
        pid = failed.error.split()[2]
    assert failed == TrialFailed(0, 1, f"worker process {pid} was killed by SIGKILL", died=True)
    assert "last words\nwithout an end" in capfd.readouterr().out


def test_how_a_worker_ended_is_told():
    with workers(leaves) as executor:
        *_, failed = train(executor)
    assert failed.error.endswith("exited with status 3")


def test_a_server_that_is_killed_is_started_again():
    with workers(endless, 2) as executor:
        train(executor, 10**9, until=Report)
        old = server()
        old.kill()
        failed = train(executor, 10**9, attempt=2, until=TrialFailed)[-1]
        assert "was lost with the process that it was forked from" in failed.error
        assert failed.died
        assert isinstance(train(executor, 2, attempt=3)[-1], TrialFinished)
        assert server() is not old


def test_a_study_goes_on_where_the_server_is_killed_between_two_reports(tmp_path):
    random = ps.Random(budget=4)
    study = ps.Study(lethal, {"x": ps.uniform(0, 1)}, metric="loss", mode="min", algorithm=random, trials=3)
    result = study.run(workers=2, progress=False)
    assert [len(trial.curve) for trial in result.trials] == [4, 4, 4]


def lethal(trial):
    for unit in range(trial.state or 0, 4):
        trial.report(unit + 1, state=unit + 1, loss=trial.config["x"])
        if not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getppid(), signal.SIGKILL)


def test_a_server_that_cannot_import_is_an_error(monkeypatch, tmp_path, capfd):
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('no such pickle')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # or the server that is there would serve
    with pytest.raises(ps.StudyError, match="could not start: the process that workers"), workers(endless) as executor:
        executor.wait()
    assert "no such pickle" in capfd.readouterr().err


def test_a_driver_that_was_forked_has_a_server_of_its_own():
    with workers(endless) as executor:
        train(executor, 10**9, until=Report)
        child = os.fork()
        if child == 0:
            with workers(endless) as own:
                done = isinstance(train(own, 2)[-1], TrialFinished)
            forking._end()
            os._exit(0 if done else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert train(executor, 10**9, attempt=2, until=Report), "and the first one's is as it was"
