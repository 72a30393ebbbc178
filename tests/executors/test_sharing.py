"""Trials that share a device in worker processes of their own: real ones on this CPU, and a daemon that is a script."""

import os
import select
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.bundle import Bundle, Device, Job, Placement, TrialFailed, TrialFinished
from penstock.executors.processes import seats, sharing
from penstock.executors.processes.sharing import TrialProcesses
from penstock.executors.processes.worker import teller
from penstock.log.events import Failed, Measured, Placed, Reported
from penstock.log.timeline import timeline
from penstock.task import as_task
from tests.contracts.executors import ExecutorContract
from tests.studies import log, studies
from tests.tasks import Blobs

SPACE = {"lr": ps.loguniform(1e-2, 1), "batch_size": ps.choice([16, 30])}
study = studies(Blobs, SPACE, trials=5, algorithm=ps.Random(budget=2, concurrency=5))


class TestTrialProcesses(ExecutorContract):
    """Whatever the contract places has a process for each trial, bundles that it fuses among them."""

    @classmethod
    def make(cls, job):
        return TrialProcesses(job)

    def place(self, executor, *placements, device=0, name="a", **fused):
        on = (executor.devices()[device].name,)
        parts = tuple(Bundle(f"{name} {one.trial} {one.attempt}", on, (one,)) for one in placements)
        executor.place(Bundle(name, on, placements, "processes", parts=parts))


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """A CPU of four threads, whatever this machine has."""
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)


def functions(function, **settings):
    settings = {"trials": 3, "algorithm": ps.Random(budget=3, concurrency=3), **settings}
    return studies(function, {"x": ps.uniform(0, 1)}, **settings)()


def run(one, **how):
    return one.run(sharing="processes", progress=False, **how)


def curves(result):
    return [trial.curve for trial in result.trials]


def first_time(name):
    """Whether nothing of this name was done before, in any process."""
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def until(name):
    while not Path(name).exists():
        os.sched_yield()


def test_trials_in_processes_find_what_they_find_alone():
    alone = study(name="alone").run(sharing="solo", progress=False)
    assert curves(run(study())) == curves(alone)
    assert [(e.trial, e.mode) for e in log() if isinstance(e, Placed)] == [(n, "processes") for n in range(5)]
    rows = timeline(log())
    assert {row.mode for row in rows} == {"processes"}
    there = [sum(other.start <= row.start < other.end for other in rows) for row in rows]
    assert max(there) == 4, "as many as the CPU has threads, and the fifth waits"


def where(trial):
    Path(f"{trial.number} is here").touch()
    for other in range(3):
        until(f"{other} is here")
    trial.report(1, loss=trial.config["x"], process=os.getpid(), threads=torch.get_num_threads())


def test_each_trial_has_a_process_of_its_own_and_its_part_of_the_threads():
    rows = [curve[0] for curve in curves(run(functions(where, algorithm=ps.Random(budget=1, concurrency=3))))]
    assert len({row["process"] for row in rows}) == 3, "all at once"
    assert {row["threads"] for row in rows} == {1}


def test_workers_are_devices_whose_threads_are_divided_again():
    run(functions(where, algorithm=ps.Random(budget=1, concurrency=3)), workers=2)
    assert Counter(e.devices for e in log() if isinstance(e, Placed)) == {("cpu:0",): 2, ("cpu:1",): 1}


def dying(trial):
    """The first of three dies once, in its second unit; the others wait for it there."""
    for unit in range(trial.state or 0, 3):
        if unit == 1 and trial.number == 0 and first_time("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif unit == 1:
            until("died")
        trial.report(unit + 1, state=unit + 1, loss=trial.config["x"], process=os.getpid())


def test_a_killed_process_is_its_own_trials_death_alone():
    result = run(functions(dying))
    assert [len(curve) for curve in curves(result)] == [3, 3, 3]
    assert [(e.trial, e.own) for e in log() if isinstance(e, Failed)] == [(0, True)]
    assert Counter(e.trial for e in log() if isinstance(e, Placed)) == {0: 2, 1: 1, 2: 1}
    processes = [{row["process"] for row in curve} for curve in curves(result)]
    assert [len(one) for one in processes] == [2, 1, 1], "the others trained on in the processes that they had"


def crowded(trial):
    """The third of three runs out of memory beside the others, which train on once the log tells of it."""
    for unit in range(trial.state or 0, 3):
        if unit == 1 and trial.number == 2:
            until("begun 0")
            until("begun 1")
            if first_time("full"):
                raise MemoryError("no room")
        if unit == 1:
            first_time(f"begun {trial.number}")
            while not any(isinstance(e, Failed) for e in log()):
                os.sched_yield()
        trial.report(unit + 1, state=unit + 1, loss=trial.config["x"])


def test_who_runs_out_of_memory_in_company_is_not_to_blame_and_fewer_come():
    result = run(functions(crowded))
    assert [len(curve) for curve in curves(result)] == [3, 3, 3]
    assert [(e.trial, e.own) for e in log() if isinstance(e, Failed)] == [(2, False)]
    (said,) = [e for e in log() if isinstance(e, Measured)]
    assert (said.size, said.reason) == (2, "memory has no room for more than 2 processes at once")


def test_a_study_of_processes_goes_on_in_another_mode_and_back():
    whole = study(name="whole").run(sharing="solo", progress=False)
    for trials, mode in ((2, "processes"), (3, "packed"), (5, "processes")):
        parts = study(trials=trials).run(sharing=mode, progress=False)
    assert curves(parts) == curves(whole)
    assert Counter(e.mode for e in log() if isinstance(e, Placed)) == {"processes": 4, "packed": 1}


def interrupting(driver):
    def train(trial):
        for unit in range(trial.state or 0, 30):
            if unit == 2 and trial.number == 1 and first_time("interrupted"):
                os.kill(driver, signal.SIGINT)
            trial.report(unit + 1, state=unit + 1, loss=trial.config["x"])

    return train


def test_ctrl_c_stops_every_process_with_its_state():
    one = functions(interrupting(os.getpid()), algorithm=ps.Random(budget=30, concurrency=3))
    with pytest.raises(KeyboardInterrupt):
        run(one)
    last = {e.trial: e.attempt for e in log() if isinstance(e, Placed)}
    assert last == {0: 1, 1: 1, 2: 1}
    result = run(one)
    assert [len(curve) for curve in curves(result)] == [30, 30, 30]
    units = [(e.trial, e.unit) for e in log() if isinstance(e, Reported)]
    assert len(units) == len(set(units)) == 90, "nothing is reported twice"


# On a device that is no CPU


CONTROL = """#!/bin/sh
read -r word
echo "${{1:-$word}} $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> {log}
{does}
"""


@pytest.fixture
def gpus(monkeypatch):
    """Two devices that pass for GPUs and compute on the CPU."""
    there = [Device(f"cpu{'' if i == 0 else ':1'}", "h200", 2**40) for i in range(2)]
    monkeypatch.setattr(seats, "find_devices", lambda: there)
    monkeypatch.setattr(sharing, "most", lambda seats: 4)


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Put a control program of MPS on PATH, and an nvidia-smi; gives the lines that they were called with."""

    def put(does="exit 0"):
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in ("nvidia-cuda-mps-control", "nvidia-smi"):
            script = CONTROL if "mps" in name else "#!/bin/sh\necho nvidia-smi $@ >> {log}\n"
            (folder / name).write_text(script.format(log=tmp_path / "calls", does=does))
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return lambda: [line.split() for line in (tmp_path / "calls").read_text().splitlines()]

    return put


def client(trial):
    pipe, logs = (Path(os.environ[f"CUDA_MPS_{name}_DIRECTORY"]) for name in ("PIPE", "LOG"))
    private = all(one.is_dir() and one.parent.stat().st_mode & 0o77 == 0 for one in (pipe, logs))
    percentage = float(os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
    trial.report(1, loss=trial.config["x"], private=private, percentage=percentage)


def test_processes_are_clients_of_a_daemon_that_ends_with_the_study(gpus, control):
    calls = control()
    result = run(functions(client, algorithm=ps.Random(budget=1, concurrency=3)), active_threads=25)
    rows = [curve[0] for curve in curves(result)]
    assert {(row["private"], row["percentage"]) for row in rows} == {(1, 25)}
    assert [word for word, *_ in calls()] == ["-d", "get_server_list", "quit"], "and nothing sets a compute mode"
    ((pipe, logs),) = {(pipe, logs) for _, pipe, logs in calls()}
    assert not Path(pipe).parent.exists()
    assert pipe != logs
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    (said,) = [e for e in log() if isinstance(e, Measured)]
    assert said.reason == "MPS runs their kernels side by side, each with 25% of the threads"


def test_each_device_has_a_daemon_of_its_own(gpus, control):
    calls = control()
    run(functions(where, algorithm=ps.Random(budget=1, concurrency=3)), workers=2)
    assert Counter(word for word, *_ in calls()) == {"-d": 2, "get_server_list": 2, "quit": 2}
    assert len({pipe for _, pipe, _ in calls()}) == 2


def test_where_mps_refuses_processes_take_turns_which_is_said_once(gpus, control):
    calls = control('echo "no MPS on this GPU" >&2; exit 1')
    with pytest.warns(UserWarning, match="they take turns on cpu") as warned:
        result = run(functions(where, algorithm=ps.Random(budget=1, concurrency=3)), workers=2, active_threads=25)
    assert len(curves(result)) == 3
    (said,) = [one for one in warned if "take turns" in str(one.message)]
    assert str(said.message) == (
        'With sharing="processes" they take turns on cpu, and active_threads= has no effect, because MPS cannot be '
        "used: nvidia-cuda-mps-control refused: no MPS on this GPU."
    )
    assert {word for word, *_ in calls()} == {"-d", "quit"}
    assert [e.way for e in log() if isinstance(e, Measured)] == ["processes"]


class Refused(Blobs):
    """A task that no client of MPS can have: its process raises before it can begin, or dies."""

    def __init__(self, dies):
        self.dies = dies

    def __setstate__(self, state):
        if "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
            self.__dict__.update(state)
        elif state["dies"]:
            os._exit(7)
        else:
            raise RuntimeError("no such client")


@pytest.mark.parametrize(("dies", "said"), [(False, "RuntimeError: no such client"), (True, "exited with status 7")])
def test_where_mps_takes_no_process_they_take_turns(dies, said, gpus, control):
    calls = control()
    with pytest.warns(UserWarning, match=f"a process could not begin: .*{said}"):
        result = run(study(Refused(dies), trials=2))
    assert [len(curve) for curve in curves(result)] == [2, 2]
    assert [word for word, *_ in calls()] == ["-d", "get_server_list", "quit"]


def faulty(trial):
    """A fault of the second of three ends all processes of the device, while MPS runs them."""
    for unit in range(trial.state or 0, 3):
        if unit == 1 and trial.number == 1:
            for other in (0, 2):
                until(f"{other} is here")
            Path("fault").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif unit == 1 and first_time(f"{trial.number} is here"):
            until("fault")
            os.kill(os.getpid(), signal.SIGKILL)
        trial.report(unit + 1, state=unit + 1, loss=trial.config["x"])


def test_trials_that_died_together_under_mps_are_retried_apart(gpus, control, monkeypatch):
    control()
    monkeypatch.setattr("penstock.engine.engine.RETRIES", 1)
    result = run(functions(faulty))
    assert [len(curve) for curve in curves(result)] == [3, 1, 3]
    deaths = [(e.trial, e.own) for e in log() if isinstance(e, Failed)]
    assert sorted(deaths[:3]) == [(0, False), (1, False), (2, False)]
    assert deaths[3:] == [(1, True), (1, True)], "the one that kills, alone"
    again = [row for row in timeline(log())[3:] if row.trial == 1]
    for row in again:
        others = [other for other in timeline(log()) if other.trial != 1]
        assert not any(other.start < row.end and row.start < other.end for other in others)


@pytest.mark.parametrize(("fault", "both"), [(False, False), (True, False), (False, True)])
def test_after_a_fault_idle_processes_go_and_the_next_ones_have_another_daemon(fault, both, gpus, control, tmp_path):
    calls = control()
    executor = TrialProcesses(Job(as_task(endless), 0, "loss", "min", tmp_path / "states"))
    suite = TestTrialProcesses()
    try:
        suite.place(executor, Placement(0, 1, {}, 10**6), Placement(1, 1, {}, 10**6))
        suite.place(executor, Placement(0, 1, {}, 10**6))
        suite.until_left(executor)
        faulty, idle = sorted(executor._workers.values(), key=lambda one: not one.running)
        if fault:
            executor._take_in(faulty, "lost", "an illegal address")
        for one in (idle, faulty) if both else (faulty,):
            os.kill(one.process.pid, signal.SIGKILL)
            select.select([one.process.told], [], [])
        (died,) = [e for e in suite.until_left(executor) if isinstance(e, TrialFailed)]
        assert died.died
        assert not died.alone
        assert not executor._workers
        assert idle.connection.closed
        suite.place(executor, Placement(0, 2, {}, 2))
        assert isinstance(suite.until_left(executor)[-1], TrialFinished)
    finally:
        executor.close()
    assert Counter(word for word, *_ in calls()) == dict.fromkeys(["-d", "get_server_list", "quit"], 1 + fault)


def endless(trial):
    for unit in range(1, 10**9):
        trial.report(unit, loss=1)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_a_process_whose_device_is_broken_for_it_leaves(broken, linked):
    told = []
    tell = teller(told.append, lambda: broken, told.append, linked=linked)
    failed = TrialFailed(0, 1, "an illegal address")
    tell("event", failed)
    said = ("lost", "an illegal address") if broken and linked else ("event", failed)
    assert told == [said, 1] if broken else [said]


def test_a_slice_of_a_gpu_is_shown_to_its_worker_alone(monkeypatch):
    there = [Device(name, "h200 MIG 1g.18gb", 2**34) for name in ("MIG-1", "MIG-2", "MIG-3")]
    monkeypatch.setattr(seats, "find_slices", lambda: there)
    found = seats.find_seats(2)
    assert [(one.device.name, one.torch, one.environment) for one in found] == [
        (name, "cuda:0", {"CUDA_VISIBLE_DEVICES": name}) for name in ("MIG-1", "MIG-2")
    ]
    assert [sharing.uuid(one) for one in found] == ["MIG-1", "MIG-2"]
    with pytest.raises(ps.StudyError, match="workers=4 needs as many devices, and this machine has 3"):
        seats.find_seats(4)


@pytest.mark.parametrize(
    ("memory", "cores", "devices", "processes"), [(140, 16, 1, 16), (140, 96, 1, 47), (8, 16, 1, 4), (1, 1, 2, 1)]
)
def test_processes_on_a_gpu_are_as_many_as_its_cores_and_its_memory_serve(
    memory, cores, devices, processes, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    made = [seats.Seat(Device(f"cuda:{i}", "h200", memory * 2**30), f"cuda:{i}") for i in range(devices)]
    assert sharing.most(made) == processes
    assert {one.threads for one in sharing.divided(made, processes)} == {max(1, cores // devices // processes)}


def test_on_a_gpu_room_is_kept_for_what_a_process_takes_before_its_trial(gpus, control, tmp_path):
    control()
    executor = TrialProcesses(Job(Blobs(), 0, "loss", "min", tmp_path / "states"))
    try:
        (one,) = executor.describe([{"lr": 0.1}], train=False)
    finally:
        executor.close()
    assert one.beside > sharing.CONTEXT
