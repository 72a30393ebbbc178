"""Function tasks in a file that imports no torch: each worker on a cluster imports the file that its task is in."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import penstock as ps
from tests.studies import studies

SPACE = {"lr": ps.loguniform(1e-3, 1.0)}
LONG = 10**6


def descend(trial):
    """Gradient descent with momentum, on what a worker is busy with for a while."""
    done, x, velocity = trial.state or (0, 0.0, 0.0)
    for unit in range(done + 1, 28):
        velocity = 0.5 * velocity - trial.config["lr"] * 2 * (x - 3)
        x += velocity + 0 * sum(range(300_000))
        trial.report(unit, state=(unit, x, velocity), loss=(x - 3) ** 2)


def afresh(trial):
    """The same, for which no worker rests yet."""
    descend(trial)


class Cursed:
    """Kills whoever runs it on one node."""

    def __init__(self, node):
        self.node = node

    def __call__(self, trial):
        import ray

        if ray.get_runtime_context().get_node_id() == self.node:
            os.kill(os.getpid(), signal.SIGKILL)
        descend(trial)


class Drawing:
    """The same, on workers whose devices a fake one meters: these variables are theirs."""

    def __init__(self, environment):
        self.environment = environment

    def __setstate__(self, state):
        from penstock.executors.ray import meters

        self.environment = state["environment"]
        os.environ.update(self.environment)
        meters.EVERY = 0.01

    def __call__(self, trial):
        descend(trial)


def needs_a_module(trial):
    import nowhere_but_there

    trial.report(1, loss=nowhere_but_there.LOSS)


def pulse(trial):
    """Reports until it is stopped, and leaves the cores to workers that start."""
    for unit in range(1, LONG):
        time.sleep(0.02)
        trial.report(unit, loss=1 / unit)


def held(trial):
    """Reports until it is let go, and leaves the cores to workers that start."""
    for step in range((trial.state or 0) + 1, LONG):
        time.sleep(0.02)
        trial.report(step, state=step, loss=(1 + trial.config["number"]) / step)
        if (Path(trial.config["dir"]) / f"go {trial.config['number']}").exists():
            return


HALVING = ps.SuccessiveHalving(max_budget=27, min_budget=9)
usual = studies(descend, SPACE, trials=6)


def study(dir, name, algorithm=HALVING, task=descend, **settings):
    return usual(task, dir=dir, name=name, algorithm=algorithm, **settings)
