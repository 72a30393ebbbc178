"""Penstock on a Ray cluster, against Ray Tune on the same cluster, and under failures of workers and nodes.

    python bench/cluster.py [--json] [trivial] [study]
    python bench/cluster.py [--json] soak [--minutes 30]

trivial   200 trials that report once: trials a second, against Ray Tune with and without reuse of its actors
study     64 trials of ASHA on digits, against Ray Tune's ASHAScheduler: seconds in all and per epoch, best accuracy
soak      studies one after another while workers, raylets and nodes are killed; each against the same study undisturbed

The cluster is real, on this machine: a head, and two nodes that declare two GPUs each (one each for ``study``). Both
sides place a trial on each declared GPU. The head declares none, so it runs no trial and is not killed. Nothing trains
on a GPU: on both sides a trial is the work of one thread.
"""

from __future__ import annotations

import ctypes
import gc
import io
import json
import logging
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # in every worker too: four workers share the cores
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # Tune's time must not include its logger files

from tests.clusters import Cluster, Node, until  # isort: skip  # before ray
import ray
import torch
import torch.nn.functional as F
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch import nn

import penstock as ps
from penstock.log.events import Reported
from penstock.log.reader import read
from penstock.trial import Config

Row = dict[str, Any]
Tensors = tuple[torch.Tensor, torch.Tensor]
NODES, GPUS = 2, 2


def on(address: str) -> dict[str, Any]:
    """The arguments of ``run`` by which Penstock's studies run on the cluster."""
    return {"on": f"ray://{address}", "progress": False}


@contextmanager
def cluster_of(gpus: int) -> Iterator[Cluster]:
    """A cluster of two nodes with ``gpus`` devices each."""
    with Cluster() as cluster:
        for _ in range(NODES):
            cluster.add_node(cpus=gpus, gpus=gpus)
        yield cluster


@contextmanager
def connected(cluster: Cluster) -> Iterator[None]:
    """Connect as a user of Tune does; Penstock's studies would connect by themselves."""
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


# --- trivial ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The seconds from a run's start to the end of each trial, and to the end of the run."""

    seconds: float
    ends: list[float]

    @property
    def rate(self) -> float:
        """Trials a second in the second half, when all workers are there."""
        half = len(self.ends) // 2
        return (len(self.ends) - half) / (self.ends[-1] - self.ends[half - 1])


def report_once(trial: Any) -> None:
    trial.report(1, loss=trial.config["x"])


def penstock_trivial(cluster: Cluster, trials: int) -> Run:
    space, algorithm = {"x": ps.uniform(0, 1)}, ps.Random(budget=1)
    with tempfile.TemporaryDirectory() as dir:
        study = ps.Study(report_once, space, metric="loss", mode="min", algorithm=algorithm, trials=trials, dir=dir)
        study = study.replace(name="trivial")
        began = time.perf_counter()
        study.run(**on(cluster.address))
        seconds = time.perf_counter() - began
        events = read(Path(dir) / "trivial" / "log.jsonl")
        return Run(seconds, sorted(event.clock for event in events if isinstance(event, Reported)))


def tune_function(config: Config) -> None:
    tune.report({"loss": config["x"]})


class TuneClass(tune.Trainable):
    """The same trial as a class, as in Tune's guide to reusing actors."""

    def setup(self, config: Config) -> None:
        self.x = config["x"]

    def step(self) -> dict[str, Any]:
        return {"loss": self.x, "done": True}

    def reset_config(self, new_config: Config) -> bool:
        self.x = new_config["x"]
        return True


def tuned(trainable: Any, space: Config, settings: dict[str, Any], **run: Any) -> tuple[list[Any], Run]:
    """One run of Ray Tune with a GPU and a CPU for each trial; its folder of results is deleted.

    Gives all reports of its trials: without loggers, Tune itself keeps only the last report of each.
    """
    ends: list[float] = []
    reports: list[Any] = []

    class Watch(tune.Callback):
        def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: object) -> None:
            reports.append({**result, "clock": time.perf_counter() - began})

        def on_trial_complete(self, *args: object, **info: object) -> None:
            ends.append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as dir:
        tuner = tune.Tuner(
            tune.with_resources(trainable, {"cpu": 1, "gpu": 1}),
            param_space=space,
            tune_config=tune.TuneConfig(**settings),
            run_config=tune.RunConfig(storage_path=dir, verbose=0, callbacks=[Watch()], **run),
        )
        began = time.perf_counter()
        with redirect_stdout(io.StringIO()):  # Tune prints what it is about to run, even when it is told to be quiet
            results = tuner.fit()
        seconds = time.perf_counter() - began
        if results.errors or len(ends) != settings["num_samples"]:
            raise RuntimeError(f"Tune ended {len(ends)} trials, of which failed: {results.errors}")
        return reports, Run(seconds, ends)


def tune_trivial(trainable: Any, trials: int, reuse: bool) -> Run:
    settings = {"metric": "loss", "mode": "min", "num_samples": trials, "reuse_actors": reuse}
    saving = tune.CheckpointConfig(checkpoint_at_end=False if trainable is TuneClass else None)
    return tuned(trainable, {"x": tune.uniform(0, 1)}, settings, checkpoint_config=saving)[1]


def trivial() -> list[Row]:
    with cluster_of(GPUS) as cluster:
        ours = sorted((penstock_trivial(cluster, 200) for _ in range(3)), key=lambda run: run.rate)[1]
        with connected(cluster):
            reused = {
                "a class": tune_trivial(TuneClass, 200, reuse=True),
                "a function": tune_trivial(tune_function, 200, reuse=True),
            }
            fresh = tune_trivial(tune_function, 20, reuse=False)
    best = max(reused.values(), key=lambda run: run.rate)
    over_best, over_fresh = ours.rate / best.rate, ours.rate / fresh.rate
    return [
        row("trivial", "Penstock, 200 trials, trials a second", ours.rate, "at least 100", ours.rate >= 100),
        *(row("", f"Tune, 200 of {kind}, actors reused, trials a second", run.rate) for kind, run in reused.items()),
        row("", "Tune, 20 trials (it takes a second for each), its default", fresh.rate),
        row("", "ratio to Tune with actors reused, the faster", over_best, "at least 4", over_best >= 4),
        row("", "ratio to Tune's default", over_fresh, "at least 50", over_fresh >= 50),
        row("", "Penstock, 200 trials from start to end, seconds", ours.seconds),
        *(row("", f"Tune, 200 of {kind}, reused, seconds", run.seconds) for kind, run in reused.items()),
        row("", "Tune's default, 20 trials, seconds", fresh.seconds),
    ]


# --- study -----------------------------------------------------------------------------------------------------------


def digits(dtype: torch.dtype = torch.float32) -> tuple[Tensors, Tensors]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=dtype) / 16, torch.tensor(labels)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Digits(ps.Task):
    eval_batch_size = 360  # all at once, as by hand

    def data(self, config: Config) -> Any:
        return digits()

    def model(self, config: Config) -> nn.Module:
        return mlp()

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=config["momentum"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(-1) == y).float().mean()}


class TuneDigits(tune.Trainable):
    """The same training as a class for Tune; the data stays with the actor when it is reused."""

    def setup(self, config: Config) -> None:
        (self.x, self.y), (self.x_valid, self.y_valid) = digits()
        self.reset_config(config)

    def reset_config(self, new_config: Config) -> bool:
        self.model = mlp()
        lr, momentum = new_config["lr"], new_config["momentum"]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        return True

    def step(self) -> dict[str, Any]:
        self.model.train()
        for rows in torch.split(torch.randperm(len(self.x)), 64):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.x[rows]), self.y[rows]).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        self.model.eval()
        with torch.no_grad():
            return {"accuracy": (self.model(self.x_valid).argmax(-1) == self.y_valid).float().mean().item()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], Path(checkpoint_dir) / "state.pt")

    def load_checkpoint(self, checkpoint: Any) -> None:
        model, optimizer = torch.load(Path(checkpoint) / "state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


@dataclass(frozen=True)
class Outcome:
    seconds: float
    started: float  # the seconds from the first report on, without the start of workers
    epochs: int
    accuracy: float


def penstock_study(seed: int, sharing: str, **where: Any) -> Outcome:
    space = {"lr": ps.loguniform(1e-3, 1), "momentum": ps.uniform(0, 0.99)}
    algorithm = ps.ASHA(max_budget=27, min_budget=1, reduction=3)
    with tempfile.TemporaryDirectory() as dir:
        study = ps.Study(Digits(), space, metric="accuracy", algorithm=algorithm, trials=64, seed=seed, dir=dir)
        began = time.perf_counter()
        result = study.run(sharing=sharing, progress=False, **where)
        seconds = time.perf_counter() - began
        clocks = [event.clock for event in read(result.dir / "log.jsonl") if isinstance(event, Reported)]
    return Outcome(seconds, clocks[-1] - clocks[0], len(clocks), result.best.metrics["accuracy"])


def tune_study(seed: int) -> Outcome:
    space = {"lr": tune.loguniform(1e-3, 1), "momentum": tune.uniform(0, 0.99)}
    settings = {
        "metric": "accuracy",
        "mode": "max",
        "num_samples": 64,
        "reuse_actors": True,
        "scheduler": ASHAScheduler(max_t=27, grace_period=1, reduction_factor=3),
        "search_alg": tune.search.BasicVariantGenerator(random_state=seed),
    }
    reports, run = tuned(TuneDigits, space, settings)
    started = reports[-1]["clock"] - reports[0]["clock"]
    return Outcome(run.seconds, started, len(reports), max(report["accuracy"] for report in reports))


def study(rounds: int = 3) -> list[Row]:
    names = ("Penstock, a program's first study", "Penstock, its next", "Penstock, its next, solo", "Tune")
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    with cluster_of(1) as cluster:  # as many devices as this machine has cores
        for seed in range(rounds):  # the runs alternate, so that a slow machine slows all of them
            with connected(cluster):  # workers rest between two studies of a connection, and end with it
                these = [penstock_study(seed, sharing, on="ray") for sharing in ("auto", "auto", "solo")]
            with connected(cluster):
                these.append(tune_study(seed))
            for name, outcome in zip(names, these, strict=True):
                outcomes[name].append(outcome)
            print(*these, sep="\n", file=sys.stderr)
    rows = []
    for name, those in outcomes.items():
        epochs = statistics.median(one.epochs for one in those)
        rows.append(row("", f"{name}: 64 trials, {epochs:.0f} epochs, seconds", middle(those, "seconds")))
        rows.append(row("", f"{name}: of which from the first report to the last", middle(those, "started")))
        per_epoch = statistics.median(1000 * one.seconds / one.epochs for one in those)
        rows.append(row("", f"{name}: ms an epoch trained", per_epoch))
        rows.append(row("", f"{name}: best accuracy", middle(those, "accuracy")))
    rows[0]["bench"] = "study"
    first, pairs = (list(zip(outcomes[name], outcomes["Tune"], strict=True)) for name in names[:2])
    cold = statistics.median(b.seconds / a.seconds for a, b in first)
    ratio = statistics.median(b.seconds / a.seconds for a, b in pairs)
    each = statistics.median((b.seconds / b.epochs) / (a.seconds / a.epochs) for a, b in pairs)
    started = statistics.median(b.started / a.started for a, b in pairs)
    worse = statistics.median(b.accuracy - a.accuracy for a, b in pairs)
    return [
        *rows,
        row("", "ratio of seconds, Tune to Penstock, first study", cold, "at least 3", cold >= 3),
        row("", "ratio of seconds, Tune to Penstock, next study", ratio, "at least 3", ratio >= 3),
        row("", "ratio of seconds an epoch", each, "at least 3", each >= 3),
        row("", "ratio of seconds from the first report to the last", started),
        row("", "accuracy of Tune's best over Penstock's", worse, "at most 0.01", worse <= 0.01),
    ]


def middle(outcomes: list[Outcome], what: str) -> float:
    return float(statistics.median(getattr(outcome, what) for outcome in outcomes))


# --- soak ------------------------------------------------------------------------------------------------------------

EVERY = 20.0  # seconds between two kills
SPACE = {"lr": ps.loguniform(1e-3, 0.3), "momentum": ps.uniform(0, 0.9)}


class Slow(ps.Task):
    """Digits in float64, where neighbours and mode change no result; ``pause`` makes epochs long enough to be hit."""

    eval_batch_size = 360

    def __init__(self, pause: float) -> None:
        self.pause = pause

    def data(self, config: Config) -> Any:
        return digits(torch.float64)

    def model(self, config: Config) -> nn.Module:
        return mlp().double()

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=config["momentum"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        time.sleep(self.pause)
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y)}


def by_hand(trial: Any, pause: float) -> None:
    """A function with its own loop, which saves its state with each report."""
    (x, y), (x_valid, y_valid) = digits(torch.float64)
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.config["lr"], momentum=trial.config["momentum"])
    done = 0
    if trial.state is not None:
        done, weights, moments = trial.state
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    for unit in range(done + 1, 28):
        time.sleep(pause)
        for xs, ys in zip(torch.split(x, 64), torch.split(y, 64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(xs), ys).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(x_valid), y_valid).item()
        trial.report(unit, loss=loss, state=(unit, model.state_dict(), optimizer.state_dict()))


@dataclass(frozen=True)
class Kind:
    """A study to soak: its task, its algorithm, its sharing mode, and the pause that lengthens each epoch."""

    name: str
    task: Callable[[float], object]
    algorithm: Callable[[], Any]
    trials: int
    sharing: str
    pause: float

    def run(self, dir: Path, seed: int, pause: float, algorithm: Any, **where: Any) -> ps.Result:
        study = ps.Study(
            self.task(pause),
            SPACE,
            metric="loss",
            mode="min",
            algorithm=algorithm,
            trials=self.trials,
            seed=seed,
            name=f"{self.name.replace(' ', '-')}-{seed}",
            dir=dir,
        )
        return study.run(sharing=self.sharing, **where)


HALVING, ASHA = partial(ps.SuccessiveHalving, max_budget=27), partial(ps.ASHA, max_budget=27)
KINDS = {
    kind.name: kind
    for kind in (
        Kind("halving solo", Slow, HALVING, 54, "solo", 0.3),
        Kind("asha solo", Slow, ASHA, 54, "solo", 0.3),
        Kind("halving fused", Slow, HALVING, 54, "fused", 1.0),
        Kind("halving by hand", lambda pause: partial(by_hand, pause=pause), HALVING, 54, "solo", 0.3),
    )
}


def wrong(kind: Kind, result: ps.Result, reference: ps.Result, kept: int) -> list[str]:
    """The differences from the undisturbed study: trials, configs, points of curves, failures, files left over."""
    found = []
    if [trial.number for trial in result.trials] != [trial.number for trial in reference.trials]:
        found.append(f"{len(result.trials)} trials and not {len(reference.trials)}")
    for trial, other in zip(result.trials, reference.trials, strict=False):
        ours, theirs = ([dict(point) for point in one.curve] for one in (trial, other))
        if trial.error is not None:
            found.append(f"trial {trial.number} failed: {trial.error}")
        if trial.config != other.config:
            found.append(f"trial {trial.number} has another config")
        if "asha" in kind.name:
            theirs = theirs[: len(ours)]
        budgets = [point["budget"] for point in ours] == [point["budget"] for point in theirs]
        losses = zip((point["loss"] for point in ours), (point["loss"] for point in theirs), strict=False)
        if not ours or not budgets or any(abs(a - b) > 1e-9 * max(1, abs(b)) for a, b in losses):
            found.append(f"trial {trial.number} has another curve")
    states = sorted(path.name for path in (result.dir / "states").iterdir())
    trials = {name.partition("-")[0] for name in states}
    if any(name.endswith(".partial") for name in states) or len(states) > min(kept, len(trials)):
        found.append(f"states left: {' '.join(states)}")
    return found


class Killer(threading.Thread):
    """Kills a random worker, raylet or node every ``EVERY`` seconds, and starts a node for each one that is lost."""

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self.kills: dict[str, int] = {"worker": 0, "raylet": 0, "node": 0}
        self.error: BaseException | None = None
        self._cluster, self._random, self._over = cluster, random.Random(seed), threading.Event()

    def run(self) -> None:
        try:
            while not self._over.wait(EVERY):
                self._kill(self._random.choice(list(self.kills)), self._random.choice(self._cluster.nodes))
        except BaseException as error:
            self.error = error

    def _kill(self, what: str, node: Node) -> None:
        workers = self._cluster.workers(node)
        if what == "worker" and workers:
            with suppress(ProcessLookupError):  # the process has just ended by itself
                os.kill(self._random.choice(workers), 9)
        elif what != "worker":
            if what == "raylet":
                self._cluster.kill_raylet(node)
                self._cluster.wait_until_dead(node)
            self._cluster.kill_node(node)
            self._cluster.wait_until_dead(node)
            self._cluster.add_node(cpus=GPUS, gpus=GPUS)
        else:
            return
        self.kills[what] += 1

    def stop(self) -> None:
        self._over.set()
        self.join()
        if self.error is not None:
            raise self.error


def undisturbed(dir: Path, kind: Kind, seed: int) -> tuple[ps.Result, int]:
    """The same study in this process, without pauses, and how many states it keeps.

    ASHA's decisions follow the order of reports. Its trials are therefore all trained to the largest budget here, each
    with a state, so that a trial can be compared however far it came.
    """
    if kind.algorithm is ASHA:
        return kind.run(dir, seed, 0, ps.Random(budget=27), on="local", progress=False), kind.trials
    result = kind.run(dir, seed, 0, kind.algorithm(), on="local", progress=False)
    return result, len(list((result.dir / "states").iterdir()))


def disturbed(address: str, dir: str, name: str, seed: str) -> None:
    """A study on the cluster, here or in a process of its own."""
    kind = KINDS[name]
    kind.run(Path(dir), int(seed), kind.pause, kind.algorithm(), **on(address))


def leaked(cluster: Cluster) -> list[str]:
    """The actors and processes left a minute after the last study; Ray takes a moment to forget a driver."""
    with suppress(TimeoutError):
        until(lambda: not cluster.leaks(), "nothing is left")
    return cluster.leaks()


class Soak:
    """Studies one after another, each compared with the same study undisturbed, and the results."""

    def __init__(self, cluster: Cluster, dir: Path) -> None:
        self.cluster, self.dir, self.killer = cluster, dir, Killer(cluster)
        self.studies, self.differing, self.memory = 0, 0, list[float]()
        self.reference = cache(partial(undisturbed, dir / "undisturbed"))

    def turn(self, number: int) -> Row:
        """Run a study, every fourth time with another beside it; gives its row."""
        kind, seed = list(KINDS.values())[number % len(KINDS)], number // len(KINDS) % 2
        seeds = [seed, 1 - seed] if number % 4 == 3 else [seed]
        references = [self.reference(kind, one) for one in seeds]
        here, before, began = self.dir / f"turn-{number}", dict(self.killer.kills), time.perf_counter()
        arguments = (self.cluster.address, str(here), kind.name)
        command = [sys.executable, __file__, "--beside", *arguments]
        others = [subprocess.Popen([*command, str(one)], stdout=subprocess.DEVNULL) for one in seeds[1:]]
        disturbed(*arguments, str(seed))
        found = [f"the study beside it ended with {other.returncode}" for other in others if other.wait(600)]
        seconds = time.perf_counter() - began
        for one, (reference, kept) in zip(seeds, references, strict=True):
            again = kind.run(here, one, kind.pause, kind.algorithm(), on="local", progress=False)  # reads its log
            found += wrong(kind, again, reference, kept)
        found += leaked(self.cluster)
        shutil.rmtree(here)
        self.studies += len(seeds)
        self.differing += bool(found)
        self.memory.append(resident() / 2**20)
        kills = ", ".join(f"{n - before[what]} {what}" for what, n in self.killer.kills.items())
        what = f"{number} {kind.name}{', two at once' if others else ''}, killed {kills}, seconds"
        return {**row("", what, seconds, "; ".join(found[:3]) or "same", not found), "memory": self.memory[-1]}


def soak(minutes: float) -> Iterator[Row]:
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as dir:
        with cluster_of(GPUS) as cluster:
            soaking = Soak(cluster, Path(dir))
            soaking.killer.start()
            try:
                for number in count():
                    if time.monotonic() > deadline:
                        break
                    with redirect_stdout(sys.stderr):  # Ray prints the nodes it has lost
                        line = soaking.turn(number)
                    yield line
            finally:
                soaking.killer.stop()
            left = leaked(cluster)
        left += cluster.leaks()
    later = soaking.memory[2 * len(KINDS) :]  # by then all reference studies are in memory
    yield row("soak", "studies", soaking.studies)
    for what, n in soaking.killer.kills.items():
        yield row("", f"killed: {what}", n)
    yield row("", "studies that differ, or left something", soaking.differing, "none", not soaking.differing)
    yield row("", "actors, groups, processes, folders left", len(left), "none", not left)
    if len(later) >= len(KINDS):
        slope = statistics.linear_regression(range(len(later)), later).slope
        yield row("", "memory of the driver, MiB more with each study", slope, "at most 0.5", slope <= 0.5)


def resident() -> int:
    """Bytes that this process really holds: memory that Python and its allocator can give back is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def row(bench: str, what: str, value: float, goal: str = "", reached: bool | None = None) -> Row:
    return {"bench": bench, "what": what, "value": value, "goal": goal, "reached": reached}


def main(arguments: list[str]) -> None:
    if "--help" in arguments:
        print(__doc__)
        return
    if arguments[:1] == ["--beside"]:
        address, dir, kind, seed = arguments[1:]
        disturbed(address, dir, kind, seed)
        return
    minutes = float(arguments[arguments.index("--minutes") + 1]) if "--minutes" in arguments else 30.0
    benches: dict[str, Callable[[], Iterable[Row]]] = {
        "trivial": trivial,
        "study": study,
        "soak": partial(soak, minutes),
    }
    wanted = [name for name in arguments if name in benches] or ["trivial", "study"]
    print(f"ray {ray.__version__}, torch {torch.__version__}, {os.cpu_count()} cores", file=sys.stderr)
    for name in wanted:
        for line in benches[name]():
            if "--json" in arguments:
                print(json.dumps(line), flush=True)
            else:
                mark = {True: "yes", False: "NO", None: ""}[line["reached"]]
                print(
                    f"{line['bench']:8} {line['what']:60} {line['value']:>10.4g}  {line['goal']:13} {mark}", flush=True
                )


if __name__ == "__main__":
    main(sys.argv[1:])
