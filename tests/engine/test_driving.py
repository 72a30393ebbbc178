"""An engine owns neither its loop nor its executor: one driver runs several studies, each as if it were alone."""

import math
import os
import signal
from pathlib import Path

import pytest

import penstock as ps
from penstock.bundle import Bundle, Job, Left, Placement, TrialFailed, TrialFinished
from penstock.engine.clocking import Pace
from penstock.engine.decisions import Decider
from penstock.engine.engine import Engine
from penstock.executors.local import LocalExecutor
from penstock.executors.processes.executor import ProcessExecutor
from penstock.executors.simulated.executor import SimulatedExecutor
from penstock.log.events import Opened, Placed, Reported
from penstock.log.history import History
from penstock.log.reader import read
from penstock.log.states import States
from penstock.log.writer import Log
from penstock.opening import settings_of
from penstock.scheduling.waterfill import waterfill
from penstock.speed.model import SpeedModel
from penstock.trial import Report
from tests.tasks import Blobs

CLUSTER = ps.Simulated(devices=5, curve=ps.Curve(sharing=(1, 1.2)), start=0.5, kept=False)
GOAL = {"metric": "loss", "mode": "min"}


def tabulated(name, algorithm, trials=None):
    """A study whose trials lose x ÷ the number of the unit; each study has a space of its own."""
    task = ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [config["x"] / unit for unit in range(1, 10)]}, 1.0))
    return ps.Study(task, {"x": ps.uniform(0, len(name))}, **GOAL, algorithm=algorithm, trials=trials, name=name)


def descend(trial):
    """Each unit halves the loss."""
    for step in range(trial.state or 0, 4):
        trial.report(step + 1, loss=trial.config["x"] / 2**step, state=step + 1)


def job_of(one, dir):
    return Job(one.task, one.seed, one.metric, one.mode, States.of_study(Path(dir) / one.name, None), one.name)


def opened(one, dir, executor, devices, sharing):
    """The engine of a study, opened on an executor, with a log and a history of its own."""
    log, decider = Log.open(Path(dir) / one.name), Decider(one.algorithm, one._search(one.trials))
    states = States.of_study(log.dir, None)
    pace = Pace(SpeedModel(sharing, spreads=True))
    engine = Engine(
        log, History(), decider, executor, waterfill, states=states, pace=pace, spreads=True, devices=devices
    )
    settings, pending = Opened(settings_of(one, one.name, [])), decider.opened(one.trials)
    engine.check(settings, pending)
    engine.open(settings, pending)
    return engine


def drive(executor, engines):
    """Run studies that share an executor: each is given all events, and asked again once it took some of them."""
    due = dict.fromkeys(engines, 0.0)  # the executor's clock when each engine is to be asked again at the latest
    ready = list(due)
    while due:
        for engine in ready:
            wanted = engine.next()
            if wanted.end is None:
                due[engine] = math.inf if wanted.within is None else executor.now() + wanted.within
            else:
                engine.close(wanted.end)
                engine.log.close()
                del due[engine]
        if due:
            soonest = min(due.values())
            batch = executor.wait(None if soonest == math.inf else max(0.0, soonest - executor.now()))
            ready = [engine for engine in due if engine.take(batch) or due[engine] <= executor.now()]


def run(dir, make, parts, sharing="measured"):
    """Run the studies, each on its part of the devices of one executor, which is made for the first of them."""
    first, *others = [job_of(one, dir) for one, _ in parts]
    executor = make(first)
    try:
        for job in others:
            executor.join(job)
        names = [device.name for device in executor.devices()]
        drive(executor, [opened(one, dir, executor, [names[i] for i in part], sharing) for one, part in parts])
    finally:
        executor.close()


def lines(dir, one):
    """The events of a study's log, without the settings of its first line."""
    return list(read(Path(dir) / one.name / "log.jsonl"))[1:]


def test_studies_on_one_simulated_cluster_are_each_as_if_alone_on_their_part_of_it():
    parts = [
        (tabulated("halving", ps.SuccessiveHalving(max_budget=9), 12), (0, 3)),
        (tabulated("random", ps.Random(budget=5), 7), (1,)),
        (tabulated("asha", ps.ASHA(max_budget=9, concurrency=4), 9), (2, 4)),
    ]
    run("together", lambda job: SimulatedExecutor(job, CLUSTER), parts)
    for one, part in parts:
        run("alone", lambda job: SimulatedExecutor(job, CLUSTER), [(one, part)])
        assert lines("together", one) == lines("alone", one)
        used = {name for event in lines("together", one) if isinstance(event, Placed) for name in event.devices}
        assert used == {CLUSTER.cluster()[i].name for i in part}


def test_a_study_alone_on_an_executor_logs_the_same_as_run_does():
    one = tabulated("halving", ps.SuccessiveHalving(max_budget=9), 12)
    run("driven", lambda job: SimulatedExecutor(job, CLUSTER), [(one, range(5))])
    one.run(on=CLUSTER, progress=False)
    assert lines("driven", one) == lines(".penstock", one)


def test_studies_on_the_same_worker_processes_are_each_as_if_alone():
    """Both have trials 0 to 5, which train solo: each event finds the trial of its own study."""

    def halving(task, space, name):
        algorithm = ps.SuccessiveHalving(max_budget=4, reduction=2)
        return ps.Study(task, space, **GOAL, algorithm=algorithm, trials=6, name=name)

    parts = [
        (halving(Blobs(), {"lr": ps.loguniform(1e-3, 0.5)}, "a"), (1,)),
        (halving(descend, {"x": ps.uniform(1, 9)}, "b"), (0,)),
    ]
    run("together", lambda job: ProcessExecutor(job, 2), parts, "never")
    for one, part in parts:
        run("alone", lambda job: ProcessExecutor(job, 2), [(one, part)], "never")
        assert facts("together", one) == facts("alone", one) != []


def facts(dir, one):
    """Where and how far each trial was trained, and how well: all of a log that does not depend on the real clock."""
    placed = [(e.trial, e.attempt, e.devices) for e in lines(dir, one) if isinstance(e, Placed)]
    reported = [(e.trial, e.attempt, e.unit, e.metrics) for e in lines(dir, one) if isinstance(e, Reported)]
    return placed + reported


@pytest.fixture
def shared():
    """Two worker processes, for the studies a and b of the same task."""
    jobs = [Job(Blobs(), seed, "loss", "min", Path("states") / name, name) for seed, name in enumerate("ab")]
    executor = ProcessExecutor(jobs[0], 2)
    executor.join(jobs[1])
    yield executor
    executor.close()


def bundle(study, executor, device, budget=1, attempt=1):
    placements = (Placement(0, attempt, {"lr": 0.1}, budget),)
    return Bundle("bundle 1", (executor.devices()[device].name,), placements, study=study)


def test_a_worker_that_dies_costs_no_trial_of_that_number_in_another_study(shared):
    for device, study in enumerate("ab"):
        shared.place(bundle(study, shared, device, budget=10**9))
    for device, study in enumerate("ab"):
        told = []
        while not any(isinstance(e, Report) and e.study == "b" for e in told):
            told += shared.wait()
        os.kill(shared._workers[shared.devices()[device].name].process.pid, signal.SIGKILL)
        while not any(isinstance(e, Left) for e in told):
            told += shared.wait()
        assert [(type(e), e.study, e.trial) for e in told if isinstance(e, Left)] == [(TrialFailed, study, 0)]


def test_a_device_is_handed_from_study_to_study_but_not_while_it_trains(shared):
    for attempt, study in enumerate("aba", 1):
        shared.place(bundle(study, shared, 0, attempt=attempt))
        told = []
        while not any(isinstance(e, Left) for e in told):
            told += shared.wait()
        assert [(type(e), e.study) for e in told] == [(Report, study), (TrialFinished, study)]
    shared.place(bundle("a", shared, 0, budget=10**9, attempt=4))
    with pytest.raises(ps.StudyError, match=r"Study 'b' places bundle 1 on cpu:0, where trials of study 'a' train"):
        shared.place(bundle("b", shared, 0, attempt=4))


def test_simulated_devices_refuse_a_second_study_too(tmp_path):
    one, other = (tabulated(name, ps.Random(budget=5), 1) for name in "ab")
    executor = SimulatedExecutor(job_of(one, tmp_path), CLUSTER)
    executor.join(job_of(other, tmp_path))
    place = Placement(0, 1, {"x": 1.0}, 5)
    executor.place(Bundle("1", (executor.devices()[0].name,), (place,), study="a"))
    with pytest.raises(ps.StudyError, match="where trials of study 'a' train"):
        executor.place(Bundle("1", (executor.devices()[0].name,), (place,), study="b"))


def test_a_study_joins_once_and_only_where_several_can_be_served(shared, tmp_path):
    with pytest.raises(ps.StudyError, match="another name than 'b'"):
        shared.join(Job(Blobs(), 0, "loss", "min", tmp_path, "b"))
    local = LocalExecutor(Job(Blobs(), 0, "loss", "min", tmp_path, "a"))
    try:
        with pytest.raises(ps.StudyError, match="LocalExecutor serves one study"):
            local.join(Job(Blobs(), 0, "loss", "min", tmp_path, "b"))
    finally:
        local.close()
