"""Drivers and workers that are killed at random points, and everything that a study must be after it.

Drivers are forked from this process, which has imported torch, and so are their workers: a kill costs tenths of a
second. This process adopts every orphan, so a process that is left behind is a child of this one.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast
from unittest import mock

import torch
from torch import nn

import penstock as ps
from penstock.executors.processes import worker
from penstock.executors.processes.server import fork_on_request
from penstock.log.events import Ended
from penstock.log.reader import read
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.trial import Config
from tests.cut import curves, decisions, study

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
NEW_MOUNTS, PRIVATE = 0x20000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SETTLED = 15.0  # seconds that workers have to notice that their driver is gone
IN_ANY_ORDER = ("Random", "Grid", "SuccessiveHalving", "PBT")  # their decisions do not depend on the order of reports


class Small(ps.Task):
    """A small network in float64, with momentum and dropout, of four steps a unit."""

    batch_size = 16

    def data(self, config: Config) -> Any:
        x = torch.randn(80, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        y = x[:, :1] * x[:, 1:2]
        return (x[:64], y[:64]), (x[64:], y[64:])

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"] / 10, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1])}


class Unlike(Small):
    """Networks of two widths, which a pack trains in bundles of their own."""

    def model(self, config: Config) -> nn.Module:
        width = 6 if config["lr"] < 0.03 else 8
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 1)).double()


class InShares(Small):
    """The same, in two shares."""

    shards = 2


def falling(trial: Any) -> None:
    """A function that goes on from its state."""
    for unit in range(trial.state or 0, 100):
        trial.report(unit + 1, state=unit + 1, loss=(trial.config["lr"] - 0.1) ** 2 / (unit + 1))


@dataclass(frozen=True)
class Mode:
    """How trials train: a task or a function, on one worker or two; ``within`` is how far curves may differ.

    The CPU has as many ``threads`` as are said, so that as many trials share it where each has a process of its own.
    """

    task: Callable[[], object]
    how: dict[str, Any]
    within: float = 0.0
    threads: int = 1

    @property
    def processes(self) -> bool:
        """Whether trials train in worker processes, which can be killed too."""
        return "workers" in self.how or self.threads > 1

    @property
    def ordered(self) -> bool:
        """Whether invariant 4 promises equal decisions: bundles of a pack report in the order of their speeds."""
        return not self.processes and self.how["sharing"] != "packed"


MODES = {
    "function": Mode(lambda: falling, {"sharing": "solo"}),
    "solo": Mode(Small, {"sharing": "solo"}),
    "fused": Mode(Small, {"sharing": "fused"}, 1e-6),
    "packed": Mode(Unlike, {"sharing": "packed"}, 1e-6),
    "function, processes": Mode(lambda: falling, {"sharing": "processes"}, threads=3),
    "processes": Mode(Small, {"sharing": "processes"}, threads=3),
    "function, 2 workers": Mode(lambda: falling, {"workers": 2, "sharing": "solo"}),
    "solo, 2 workers": Mode(Small, {"workers": 2, "sharing": "solo"}),
    "fused, 2 workers": Mode(Small, {"workers": 2, "sharing": "fused"}, 1e-6),
    "distributed, 2 workers": Mode(Small, {"workers": 2, "sharing": "distributed"}, 1e-6),
    "in shares, 2 workers": Mode(InShares, {"workers": 2}, 1e-6),
}


@dataclass(frozen=True)
class Case:
    """One study of an algorithm in a mode; its number and the seed decide where it is killed."""

    algorithm: str
    mode: str
    number: int
    seed: int

    def __str__(self) -> str:
        return f"{self.algorithm}/{self.mode}/{self.number}"

    def run(self, dir: Path) -> None:
        """Run the study in a folder to its end."""
        mode = MODES[self.mode]
        with mock.patch.object(torch, "get_num_threads", return_value=mode.threads):
            study(self.algorithm, mode.task(), dir, self.seed).run(progress=False, **mode.how)


@dataclass(frozen=True)
class Kill:
    """One kill: of the driver by a signal, of one of its workers, or of both.

    It comes once the log has so many more ``lines``, and after a pause. ``twice`` sends the signal again at once.
    """

    whom: Literal["driver", "worker", "both"]
    signal: signal.Signals
    lines: int
    pause: float
    twice: bool

    @staticmethod
    def drawn(rng: random.Random, mode: Mode, lines: int) -> Kill:
        whom: Literal["driver", "worker", "both"] = "driver"
        if mode.processes:
            whom = rng.choice(("driver", "worker", "both"))
        early = rng.random() < 0.2  # while the study opens
        pause = rng.uniform(0, 0.2) if early else rng.choice((0.0, rng.uniform(0, 0.02)))
        return Kill(whom, rng.choice(SIGNALS), 0 if early else rng.randint(1, lines), pause, rng.random() < 0.3)


@dataclass
class Outcome:
    """How many kills a study took, and in which ways it differs from the undisturbed one."""

    kills: int = 0
    wrong: list[str] = field(default_factory=list)


class ForkedServer:
    """In place of ``subprocess.Popen``: a fork server that is forked from its driver, without importing torch again."""

    def __init__(self, words: list[str], *, pass_fds: list[int], **others: object) -> None:
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for fd in map(int, os.listdir("/proc/self/fd")):
                    if fd > 2 and fd not in pass_fds:
                        with suppress(OSError):
                            os.close(fd)
                worker.main(fork_on_request(pass_fds[0]))
            finally:
                os._exit(0)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, how: int) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, how)
            self.status = status if pid else None
        return self.status


def prepare() -> None:
    """Import everything that drivers and workers need, and become the parent of every process that loses its own."""
    for name in (*worker.NEEDED, "optuna", "penstock.study"):
        import_module(name)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def own_memory() -> None:
    """Give this process and its children a shared memory of their own, where the machine allows it.

    Elsewhere the files of other programs in /dev/shm are seen too.
    """
    libc = ctypes.CDLL(None)
    if libc.unshare(NEW_MOUNTS) == 0 and libc.mount(b"none", b"/", None, ctypes.c_ulong(PRIVATE), None) == 0:
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), None)


def start(work: Callable[[], None], said: Path) -> int:
    """Fork a driver; gives its pid. Its words go to a file, and it exits with 3 where it raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        mock.patch.object(subprocess, "Popen", ForkedServer).start()
        work()
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def children(pid: int | str = "self") -> list[int]:
    """The processes that a process has started or adopted."""
    try:
        return [int(child) for task in os.listdir(f"/proc/{pid}/task") for child in _children(pid, task)]
    except OSError:
        return []


def _children(pid: int | str, task: str) -> list[str]:
    return Path(f"/proc/{pid}/task/{task}/children").read_text().split()


def lines_of(log: Path) -> int:
    """How many lines a log has."""
    try:
        return log.read_bytes().count(b"\n")
    except OSError:
        return 0


def live(case: Case, dir: Path, kill: Kill | None, rng: random.Random) -> tuple[int, bool]:
    """One life of a driver: its exit code, or minus the signal that ended it; and whether a kill came in time."""
    log, came = dir / "s" / "log.jsonl", False
    before = lines_of(log)
    pid = start(lambda: case.run(dir), dir / "said")
    while True:
        ended, status = os.waitpid(pid, 0 if kill is None else os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), came
        if kill is not None and lines_of(log) - before >= kill.lines:
            time.sleep(kill.pause)
            came = _strike(pid, kill, rng)
            kill = None
        time.sleep(0.002)


def _strike(pid: int, kill: Kill, rng: random.Random) -> bool:
    came = False
    if kill.whom != "driver":
        workers = [one for server in children(pid) for one in children(server)]
        if workers:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGKILL)
                came = True
    if kill.whom == "worker":
        return came
    for _ in range(2 if kill.twice else 1):
        os.kill(pid, kill.signal)  # it is not waited for yet, so its number is its own
    return True


def left_over() -> list[str]:
    """The processes that are still there, once they had time to end; they are killed."""
    until = time.monotonic() + SETTLED
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = children()
        if not left or time.monotonic() > until:
            break
        time.sleep(0.005)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"process {pid} is left" for pid in left]


def undisturbed(case: Case, dir: Path) -> None:
    """Run a study without a kill."""
    dir.mkdir(parents=True)
    code, _ = live(case, dir, None, random.Random(0))
    assert code == 0, (dir / "said").read_text()
    left_over()


def torment(case: Case, dir: Path, whole: Path, most: int) -> Outcome:
    """Run a study with several kills, and compare it with the undisturbed one."""
    rng = random.Random(f"{case} {case.seed}")
    outcome, total = Outcome(), lines_of(whole / "s" / "log.jsonl")
    dir.mkdir(parents=True)
    planned = min(most, rng.randint(2, 6))
    for _ in range(4 * planned):
        kill = Kill.drawn(rng, MODES[case.mode], max(2, total // 2)) if outcome.kills < planned else None
        code, came = live(case, dir, kill, rng)
        outcome.kills += came
        outcome.wrong += left_over()
        if code == 3:
            outcome.wrong.append((dir / "said").read_text().strip().splitlines()[-1])
            return outcome
        if code == 0:
            break
    else:
        code, _ = live(case, dir, None, rng)
        outcome.wrong += left_over() + ([] if code == 0 else [f"it ended with {code}"])
    outcome.wrong += differences(case, dir, whole)
    return outcome


def differences(case: Case, dir: Path, whole: Path) -> list[str]:
    """The ways in which a study is not as the undisturbed one, or as each of its trials alone."""
    mode = MODES[case.mode]
    try:
        ours, theirs = curves(dir), curves(whole)
        last = [event for event in read(dir / "s" / "log.jsonl") if isinstance(event, Ended)][-1]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    wrong = [] if last.reason == "done" else [f"it ended {last.reason}"]
    wrong += [f"{path.name} is left" for path in (dir / "s").rglob("*") if path.suffix in (".partial", ".tmp")]
    if mode.ordered:
        for i, (one, other) in enumerate(zip(decisions(dir), decisions(whole), strict=False)):
            if one != other:
                return [*wrong, f"decision {i} is {one}, undisturbed {other}"]
        states = [len(list((at / "s/states").glob("*.pt"))) for at in (dir, whole)]
        if states[0] > states[1]:
            wrong.append(f"{states[0]} states are left, undisturbed {states[1]}")
    elif case.algorithm not in IN_ANY_ORDER:
        theirs = _alone(case, dir, ours)
    if ours.keys() != theirs.keys():
        return [*wrong, f"other reports: {sorted(ours.keys() ^ theirs.keys())}"]
    for at, metrics in ours.items():
        if not abs(metrics["loss"] - theirs[at]["loss"]) <= mode.within * abs(theirs[at]["loss"]):
            return [*wrong, f"trial {at[0]} reports {metrics} after {at[1]} units, undisturbed {theirs[at]}"]
    return wrong


def _alone(case: Case, dir: Path, ours: dict[tuple[int, int], Any]) -> dict[tuple[int, int], dict[str, float]]:
    """The curve that each trial has alone; its decisions depend on the order in which two workers report."""
    configs = {one[1]: one[2] for one in decisions(dir) if one[0] == "asked"}
    found: dict[tuple[int, int], dict[str, float]] = {}
    for trial, config in configs.items():
        units = max((unit for other, unit in ours if other == trial), default=0)
        if case.mode.startswith("function"):
            losses = [{"loss": (config["lr"] - 0.1) ** 2 / (unit + 1)} for unit in range(units)]
        else:
            losses = _trained(case, trial, config, units)
        found |= {(trial, unit): metrics for unit, metrics in enumerate(losses, 1)}
    return found


def _trained(case: Case, trial: int, config: Config, units: int) -> list[dict[str, float]]:
    task, seed, device = cast(Small, MODES[case.mode].task()), case.seed, torch.device("cpu")
    data = DataCache(task, seed, device).get(config)
    run = Training(task, trial, config, data, seed=seed, device=device, metric="loss", mode="min")
    rows: list[dict[str, float]] = []
    for metrics in run.steps() if units else ():
        if metrics is not None:
            rows.append(dict(metrics))
            if len(rows) == units:
                break
    return rows
