"""Every socket that listens while studies run and are looked at: none of them is beyond this machine.

One program starts everything, Ray's own cluster included, which takes it some seconds.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.listening import Listener
from tests.programs import run

PROGRAM = """
import json, os
from dataclasses import asdict

for name in list(os.environ):
    if name.startswith("RAY_"):  # as a user has it: tests of clusters set more
        del os.environ[name]

from pathlib import Path

import penstock as ps
from penstock.report.dashboard import make_dashboard
from tests.listening import descendants, listeners
from tests.tasks import Blobs


def look(kind, driver):
    with open("seen.jsonl", "a") as file:
        file.writelines(json.dumps([kind, asdict(one)]) + "\\n" for one in listeners(descendants(driver)))


class Looking(Blobs):
    def __init__(self, kind, shards):
        self.kind, self.driver, self.shards = kind, os.getpid(), shards

    def metrics(self, model, batch, config):
        look(self.kind, self.driver)
        return super().metrics(model, batch, config)


def tune(kind, shards=1, **how):
    task, space, algorithm = Looking(kind, shards), {"lr": ps.loguniform(1e-3, 1e-1)}, ps.Random(budget=1)
    ps.Study(task, space, metric="loss", mode="min", algorithm=algorithm, trials=1, name=kind).run(**how)


tune("local", sharing="solo")
tune("processes", sharing="solo", workers=2)
tune("distributed", workers=2, shards=2)
tune("ray", on="ray", workers=2, shards=2)

with make_dashboard(Path(".penstock/local"), 0):
    look("dashboard", os.getpid())
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The listeners of each kind of run."""
    folder = tmp_path_factory.mktemp("ports")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("program.py").write_text(PROGRAM)
        run("python program.py")
        lines = [json.loads(line) for line in Path("seen.jsonl").read_text().splitlines()]
    found = defaultdict[str, set[Listener]](set)
    for kind, listener in lines:
        found[kind].add(Listener(**listener))
    return found


@pytest.mark.parametrize("kind", ["local", "processes"])
def test_a_study_on_this_machine_listens_nowhere(seen, kind):
    assert not seen[kind]


@pytest.mark.parametrize("kind", ["distributed", "ray", "dashboard"])
def test_nothing_listens_beyond_loopback(seen, kind):
    assert seen[kind]
    assert not [one for one in seen[kind] if not one.loopback]


def test_all_of_rays_processes_were_looked_at(seen):
    commands = " ".join(one.command for one in seen["ray"])
    assert all(name in commands for name in ("gcs_server", "raylet", "ray::RayWorker", "ray::RuntimeEnvAgent"))


@pytest.mark.parametrize(("kind", "command", "each"), [("distributed", "processes.worker", 1), ("ray", "RayWorker", 2)])
def test_the_workers_of_one_trial_were_looked_at_while_they_were_connected(seen, kind, command, each):
    """Each worker listens for the other one; the first has the store besides, and Ray's own have Ray's port.

    A worker that meets the other one again listens at another port, so there may be more.
    """
    first, second = sorted(Counter(one.pid for one in seen[kind] if command in one.command).values(), reverse=True)
    assert second >= each
    assert first >= each + 1
