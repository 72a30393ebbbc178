"""SIGKILL of the driver at fifty points, then resume: nothing is lost, nothing is done twice, every curve is right.

Children forked from this process, which has torch and the data warm, kill themselves before, in the middle of and after
the n-th durable write, n drawn by seed. A durable write is a line of the log or a state.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.log.events import Asked, Placed, Reported
from penstock.log.reader import read
from tests.contracts.executors import alone
from tests.tasks import Blobs, Noisy, trivial

HOW = {"progress": False, "sharing": "solo", "deterministic": True}  # or the clock decides how often states are written


def asha(dir):
    space = {"lr": ps.loguniform(1e-3, 1), "momentum": ps.uniform(0, 0.9)}
    algorithm = ps.ASHA(max_budget=4, reduction=2, concurrency=3)
    return ps.Study(Noisy(), space, metric="loss", mode="min", algorithm=algorithm, trials=7, name="s", dir=dir)


def pbt(dir):
    space = {"lr": ps.loguniform(1e-3, 1), "momentum": ps.uniform(0, 0.9)}
    algorithm = ps.PBT(population=4, max_budget=4, interval=1)
    return ps.Study(Blobs(), space, metric="loss", mode="min", algorithm=algorithm, name="s", dir=dir)


def tpe(dir):
    import optuna

    sampler = optuna.samplers.TPESampler(n_startup_trials=3)
    algorithm = ps.ASHA(max_budget=9, concurrency=2)
    space = {"x": ps.uniform(0, 4)}
    return ps.Study(
        trivial, space, metric="loss", mode="min", algorithm=algorithm, sampler=sampler, trials=12, name="s", dir=dir
    )


def hyperband(dir):
    algorithm = ps.Hyperband(max_budget=9)
    return ps.Study(trivial, {"x": ps.uniform(0, 4)}, metric="loss", mode="min", algorithm=algorithm, name="s", dir=dir)


def found(result):
    """What a study found, but for times and for how often it was taken up."""
    return [(t.number, t.state, t.config, list(t.curve), t.error) for t in result.trials], result.best.number


class KilledAt:
    """Counts durable writes and kills the process at one of them."""

    def __init__(self, point, moment):
        self.left, self.moment = point, moment
        self.write, self.replace = os.write, pathlib.Path.replace
        os.write = self.line
        pathlib.Path.replace = self.state

    def due(self):
        self.left -= 1
        return self.left == 0

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def line(self, fd, data):
        due = self.due()
        if due and self.moment == "before":
            self.die()
        if due and self.moment == "middle":
            self.write(fd, data[: len(data) // 2])
            self.die()
        written = self.write(fd, data)
        if due:
            self.die()
        return written

    @property
    def state(self):
        def replace(path, target):
            due = self.due()
            if due and self.moment == "middle":
                os.truncate(path, path.stat().st_size // 2)
            if due and self.moment != "after":
                self.die()
            self.replace(path, target)
            if due:
                self.die()

        return replace


def in_a_child(work):
    """Run ``work`` in a forked child; gives its exit status, and what it returned as JSON in ``result``."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(3)
    return os.waitpid(pid, 0)[1]


def durable_writes(make, dir):
    """How many durable writes an uninterrupted run makes, and what it finds."""
    count = 0
    counter = KilledAt(10**9, "after")
    try:
        result = make(dir).run(**HOW)
    finally:
        os.write, pathlib.Path.replace = counter.write, counter.replace
    count = 10**9 - counter.left
    return count, found(result)


@pytest.mark.parametrize("make", [asha, pbt, tpe, hyperband])
def test_killed_at_any_write_and_resumed_finds_the_same(make, tmp_path):
    writes, whole = durable_writes(make, tmp_path / "whole")
    rng = random.Random(f"{make.__name__} 0")
    points = 13 if make in (asha, pbt) else 12  # fifty in all
    for point in range(points):
        dir = tmp_path / str(point)
        n, moment = rng.randint(1, writes), rng.choice(["before", "middle", "after"])

        def killed(n=n, moment=moment, dir=dir):
            KilledAt(n, moment)
            make(dir).run(**HOW)

        assert os.WIFSIGNALED(in_a_child(killed)), (n, moment)
        result = make(dir).run(**HOW)
        assert found(result) == whole, (n, moment)
        assert not list((dir / "s" / "states").glob("*.partial"))


def test_killed_again_and_again(tmp_path):
    _, whole = durable_writes(asha, tmp_path / "whole")
    dir = tmp_path / "often"
    for n in range(5, 60, 7):  # a few more writes each time: every life gets further, or dies on the way

        def killed(n=n):
            KilledAt(n, "middle")
            asha(dir).run(**HOW)

        in_a_child(killed)
    assert found(asha(dir).run(**HOW)) == whole


def test_a_fused_study_that_is_killed_loses_nothing_and_does_nothing_twice(tmp_path):
    def make(dir):
        space = {"lr": ps.loguniform(1e-3, 0.1)}
        algorithm = ps.ASHA(max_budget=4, reduction=2)
        return ps.Study(Blobs(), space, metric="loss", mode="min", algorithm=algorithm, trials=6, name="s", dir=dir)

    rng = random.Random(0)
    for point in range(8):
        n, moment, dir = rng.randint(8, 40), rng.choice(["before", "middle", "after"]), tmp_path / str(point)

        def killed(n=n, moment=moment, dir=dir):
            KilledAt(n, moment)
            make(dir).run(progress=False, sharing="fused")

        assert os.WIFSIGNALED(in_a_child(killed)), (n, moment)
        before = [e for e in read(dir / "s" / "log.jsonl") if isinstance(e, Reported)]
        result = make(dir).run(progress=False, sharing="fused")
        reports = [e for e in read(dir / "s" / "log.jsonl") if isinstance(e, Reported)]
        assert reports[: len(before)] == before, "a report was lost"
        assert len({(e.trial, e.unit) for e in reports}) == len(reports), "a report came twice"
        for trial in result.trials:
            for row, expected in zip(trial.curve, alone(Blobs(), trial.number, trial.config, 4), strict=False):
                assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)


DRIVER = """
import sys
from tests.test_crash import KilledAt, several
KilledAt(int(sys.argv[2]), "after")
several(sys.argv[1]).run(workers=2, progress=False, sharing="solo")
"""


def several(dir):
    algorithm = ps.SuccessiveHalving(max_budget=4, reduction=2)
    space = {"lr": ps.loguniform(1e-3, 1)}
    return ps.Study(Blobs(), space, metric="loss", mode="min", algorithm=algorithm, trials=6, name="s", dir=dir)


def test_with_several_workers_nothing_is_lost_and_nothing_done_twice(tmp_path):
    repo = Path(__file__).parents[1]
    driver = subprocess.run([sys.executable, "-c", DRIVER, tmp_path, "30"], cwd=repo, stderr=subprocess.DEVNULL)
    assert driver.returncode == -signal.SIGKILL
    before = [e for e in read(tmp_path / "s" / "log.jsonl") if isinstance(e, Reported)]
    result = several(tmp_path).run(workers=2, progress=False, sharing="solo")
    events = list(read(tmp_path / "s" / "log.jsonl"))
    reports = [e for e in events if isinstance(e, Reported)]
    assert reports[: len(before)] == before, "a report was lost"
    assert len({(e.trial, e.unit) for e in reports}) == len(reports), "a report came twice"
    assert len({(e.trial, e.attempt) for e in events if isinstance(e, Placed)}) == sum(
        isinstance(e, Placed) for e in events
    )
    assert sorted((e.trial, e.budget) for e in events if isinstance(e, Asked)) == sorted(
        (t.number, b) for t in result.trials for b in (1, 2, 4) if b <= t.curve[-1]["budget"]
    )
    for trial in result.trials:
        expected = alone(Blobs(), trial.number, trial.config, len(trial.curve))
        assert [{k: v for k, v in row.items() if k != "budget"} for row in trial.curve] == expected
    assert json.dumps([t.state for t in result.trials].count("finished")) == "1"
