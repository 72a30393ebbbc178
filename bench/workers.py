"""How long worker processes take to start: forked from a process with torch imported, against importing it in each.

    python bench/workers.py [--json] [--rounds 5]

first     two workers, from the start of a program's first study with ``workers=2`` to the first report of each
next      the same in the program's next study
replaced  a worker is killed: from then to the first report of the worker in its place

A study waits for the first report of a worker, so the imports that a worker makes while it trains are counted too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.bundle import Bundle, Job, Placement, TrialFailed
from penstock.executors.processes import executor as processes
from penstock.executors.processes import forking
from penstock.executors.processes.executor import ProcessExecutor
from penstock.log.states import States
from penstock.trial import Config, Report

ALONE = """
import sys
from multiprocessing.connection import Connection
from penstock.executors.processes.worker import main
main(Connection(int(sys.argv[1])))
"""
CONFIG = {"lr": 0.1}


class Line(ps.Task):
    """A small task that is pickled by value: a worker imports no module for it."""

    def data(self, config: Config) -> Any:
        x = torch.linspace(-1, 1, 512)[:, None]
        return (x, 2 * x), (x, 2 * x)

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)


class Started(forking.Forked):
    """A worker that runs as a program of its own, with the driver's interface of a forked worker."""

    def __init__(self, program: str) -> None:
        connection: Connection[Any, Any]
        connection, theirs = Pipe()
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", ALONE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            )
        told, self._silent = socket.socketpair()
        super().__init__(connection, told, self._process)
        self._pid = self._process.pid

    def wait(self) -> int | None:
        self.status = self._process.wait()
        return self.status

    def kill(self) -> None:
        self._process.kill()
        self.wait()
        self.close()

    def close(self) -> None:
        self._silent.close()
        super().close()


def until(executor: ProcessExecutor, kind: type[Report] | type[TrialFailed], trials: set[int]) -> None:
    """Wait until an event of a kind has come for each of these trials."""
    while trials:
        trials -= {event.trial for event in executor.wait() if isinstance(event, kind)}


def place(executor: ProcessExecutor, number: int, attempt: int) -> None:
    executor.place(Bundle(f"bundle {attempt}", (f"cpu:{number}",), (Placement(number, attempt, CONFIG, 10**6),)))


def start_and_replace(dir: str) -> tuple[float, float]:
    """Seconds until two workers have reported, and from the death of one until its replacement has reported."""
    began = time.perf_counter()
    executor = ProcessExecutor(Job(Line(), 0, "loss", "min", States.of(Path(dir))), 2)
    try:
        for number in range(2):
            place(executor, number, 1)
        until(executor, Report, {0, 1})
        started = time.perf_counter() - began
        pid, began = executor._workers["cpu:0"].process.pid, time.perf_counter()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(executor, TrialFailed, {0})
        place(executor, 0, 2)
        until(executor, Report, {0})
        return started, time.perf_counter() - began
    finally:
        executor.close()


def two_studies() -> tuple[float, float, float]:
    """The seconds to start a program's first study and its next, and to replace a worker."""
    forking._end()
    forking._servers.clear()
    with tempfile.TemporaryDirectory() as dir:
        first, _ = start_and_replace(dir)
        again, replaced = start_and_replace(dir)
    return first, again, replaced


def in_programs() -> tuple[float, float, float]:
    with mock.patch.object(processes, "fork", Started):
        return two_studies()


def measure(rounds: int) -> list[dict[str, Any]]:
    ways: dict[str, Callable[[], tuple[float, float, float]]] = {"programs": in_programs, "forked": two_studies}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    rows = []
    for i, what in enumerate(("first study, two workers", "next study, two workers", "a killed worker, replaced")):
        programs, forked = (statistics.median(row[i] for row in found[name]) for name in ways)
        rows.append({"what": what, "programs": programs, "forked": forked, "ratio": programs / forked})
    return rows


def main(arguments: list[str]) -> None:
    rounds = int(arguments[arguments.index("--rounds") + 1]) if "--rounds" in arguments else 5
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, median of {rounds} rounds, seconds", file=sys.stderr)
    rows = measure(rounds)
    if "--json" in arguments:
        for row in rows:
            print(json.dumps(row))
        return
    print(f"{'until the first report':28} {'importing in each':>18} {'forked':>10} {'ratio':>8}")
    for row in rows:
        print(f"{row['what']:28} {row['programs']:18.2f} {row['forked']:10.3f} {row['ratio']:8.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
