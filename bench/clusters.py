"""Whole studies on simulated clusters: Fluid's evaluation (§6) with Penstock's engine, algorithms and schedulers.

Sections of bench/scheduling.py; each gives its rows. Times are of the virtual clock, so they repeat exactly.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import penstock as ps
from bench.workloads import UNITS, Workload, workloads
from penstock.algorithms.base import Algorithm
from penstock.log.reader import read
from penstock.log.timeline import timeline, utilisation
from penstock.speed.curve import Curve
from penstock.study import Study
from penstock.trial import Config

Row = dict[str, Any]
SEEDS = (0, 1, 2)
FLUID = {"SyncBOHB": 2.0, "BOHB": 1.3, "ASHA": 1.3, "Hyperband": 1.1, "PBT": 1.1}  # speedups that the paper reports


@dataclass(frozen=True)
class Outcome:
    """The figures of one simulated study."""

    seconds: float
    busy: float  # the fraction of the devices' time that a trial was on them
    device_seconds: float
    reached: bool
    trials: int
    units: int
    best: float


@contextmanager
def folder() -> Iterator[str]:
    memory = Path("/dev/shm")  # used where it exists, so that the disk's speed is not measured
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as dir:
        yield dir


def measure(study: Study, cluster: ps.Simulated, kinds: int = 1) -> None:
    """Measure what sharing and spreading cost by two short studies: on one device of each type, and of one trial."""
    alone = list({device.type: device for device in cluster.cluster()}.values())
    for trials, budget, where in (
        (8 * kinds, 1, replace(cluster, devices=alone, losses=(), arrivals=())),
        (1, 8, cluster),
    ):
        before = study.replace(algorithm=ps.Random(budget=budget), trials=trials, name=f"profile {trials}", target=None)
        before.run(on=where, progress=False)


def simulate(
    look_up: Callable[[Config], ps.Tabulated],
    space: Mapping[str, Any],
    algorithm: Algorithm,
    cluster: ps.Simulated,
    scheduler: str,
    dir: str,
    **settings: Any,
) -> Outcome:
    """Run one study, after a short one in the same folder that measures; the figures are of the second."""
    task = ps.TabulatedTask(look_up)
    study = ps.Study(task, space, metric="accuracy", dir=dir, algorithm=algorithm, **settings)
    measure(study, cluster)
    result = study.run(on=cluster, scheduler=scheduler, progress=False)
    events = list(read(result.dir / "log.jsonl"))
    used = utilisation(timeline(events), events)
    seconds = max(getattr(event, "clock", 0.0) for event in events)
    curves = [row["accuracy"] for trial in result.trials for row in trial.curve]
    return Outcome(
        seconds,
        used.fraction,
        sum(trial.device_seconds for trial in result.trials),
        result.ended == "target",
        len(result.trials),
        len(curves),
        max(curves),
    )


def ratio(slow: Sequence[Outcome], fast: Sequence[Outcome]) -> float:
    """How many times as fast the second is, as the geometric mean over equal seeds."""
    return statistics.geometric_mean([a.seconds / b.seconds for a, b in zip(slow, fast, strict=True)])


# Fluid's macrobenchmark (figures 7 and 8)


def algorithms(devices: int) -> dict[str, tuple[Algorithm, int | None]]:
    """The algorithms, each with its number of trials. Twice as many trials as devices are under way in every run."""
    at_once = 2 * devices
    return {
        "PBT": (ps.PBT(population=at_once, max_budget=24, interval=4), None),
        "Hyperband": (ps.Hyperband(max_budget=UNITS), None),
        "ASHA": (ps.ASHA(max_budget=UNITS, concurrency=at_once), 128),
        "SyncBOHB": (ps.SyncBOHB(max_budget=UNITS), None),
        "BOHB": (ps.BOHB(max_budget=UNITS, concurrency=at_once), 128),
    }


def macro(sizes: Sequence[int] = (4, 8, 16), *, seeds: Sequence[int], names: Sequence[str]) -> list[Row]:
    """Time to the same target against FIFO with the same seed, and how busy the devices were."""
    rows = []
    for name in names:
        gains: dict[str, list[float]] = {"dynamic_fluid": [], "waterfill": []}
        by_seed: dict[int, list[float]] = {seed: [] for seed in seeds}
        for work in workloads():
            for devices in sizes:
                ran = {
                    scheduler: [to_target(work, name, devices, scheduler, seed) for seed in seeds]
                    for scheduler in ("fifo", *gains)
                }
                for scheduler, all_gains in gains.items():
                    all_gains.append(ratio(ran["fifo"], ran[scheduler]))
                for seed, slow, fast in zip(seeds, ran["fifo"], ran["waterfill"], strict=True):
                    by_seed[seed].append(ratio([slow], [fast]))
                busy = [statistics.mean(one.busy for one in ran[s]) for s in ("fifo", "waterfill")]
                reached = sum(one.reached for ones in ran.values() for one in ones)
                rows.append(
                    row(
                        "macro",
                        f"{name}, {work.name}, {devices} devices: busy {busy[0]:.0%} → {busy[1]:.0%}, "
                        f"target {reached} of {3 * len(seeds)}",
                        gains["waterfill"][-1],
                    )
                )
        each = [statistics.geometric_mean(ones) for ones in by_seed.values()]
        rows.append(row("macro", f"{name}: the least of {len(each)} seeds, each over all tasks and devices", min(each)))
        rows.append(row("macro", "  the greatest", max(each)))
        for scheduler, all_gains in gains.items():
            mean, goal = statistics.geometric_mean(all_gains), FLUID[name]
            mine = scheduler == "waterfill"
            rows.append(
                row(
                    "macro",
                    f"{name}: {scheduler} against fifo, mean of all",
                    mean,
                    f"at least {goal:g}" if mine else "",
                    mean >= goal if mine else None,
                )
            )
    return rows


def to_target(work: Workload, name: str, devices: int, scheduler: str, seed: int) -> Outcome:
    algorithm, trials = algorithms(devices)[name]
    settings = {"trials": trials} if trials else {}
    with folder() as dir:
        cluster = ps.Simulated(devices=devices, per_node=4, curve=work.curve, start=START, stop=STOP)
        return simulate(
            work.look_up, work.space, algorithm, cluster, scheduler, dir, seed=seed, target=work.target, **settings
        )


START, STOP = 0.2, 0.1  # seconds; a unit takes about 3


# Concurrency (figures 3 and 10), successive halving (table 2)


def concurrency(seeds: Sequence[int] = SEEDS) -> list[Row]:
    """ASHA with 8 trials at a time whatever the devices (figure 10); with as many as devices (figure 3)."""
    rows, work = [], workloads()[0]

    def asha(devices: int, at_once: int, scheduler: str) -> list[Outcome]:
        outcomes = []
        for seed in seeds:
            with folder() as dir:
                cluster = ps.Simulated(devices=devices, per_node=4, curve=work.curve, start=START, stop=STOP)
                algorithm = ps.ASHA(max_budget=UNITS, concurrency=at_once)
                settings = {"seed": seed, "target": work.target, "trials": 256}
                outcomes.append(simulate(work.look_up, work.space, algorithm, cluster, scheduler, dir, **settings))
        return outcomes

    for devices in (4, 8, 16):
        fifo, ours = asha(devices, devices, "fifo"), asha(devices, 8, "waterfill")
        what = f"ASHA to its target on {devices} devices: fifo with {devices} at once / waterfill with 8 at once"
        rows.append(row("figure 10", what, ratio(fifo, ours)))
    for at_once in (2, 4, 8, 16, 32):
        outcomes = asha(at_once, at_once, "fifo")
        used = statistics.geometric_mean([one.device_seconds for one in outcomes])
        rows.append(row("figure 3", f"ASHA, {at_once} at once, fifo: device seconds to its target", used))
    return rows


def halving() -> list[Row]:
    """Utilisation and runtime of successive halving on more and more devices (table 2)."""
    rows, work = [], workloads()[0]
    for devices in (2, 4, 8, 16, 32):
        ran = {}
        for scheduler in ("fifo", "waterfill"):
            with folder() as dir:
                cluster = ps.Simulated(devices=devices, per_node=4, curve=work.curve, start=START, stop=STOP)
                algorithm = ps.SuccessiveHalving(max_budget=UNITS)
                ran[scheduler] = simulate(work.look_up, work.space, algorithm, cluster, scheduler, dir, trials=81)
        fifo, ours = ran["fifo"], ran["waterfill"]
        what = f"successive halving, {devices} devices: busy {fifo.busy:.0%} in {fifo.seconds:.0f} s → {ours.busy:.0%}"
        rows.append(row("table 2", f"{what} in {ours.seconds:.0f} s, times as fast", fifo.seconds / ours.seconds))
    return rows


# One mechanism at a time (figures 11 to 13)


def grid(
    trials: int, devices: int, curve: Curve, scheduler: str, *, spread: float = 0.0, units: int = 20, seed: int = 0
) -> Outcome:
    """A grid of trials of equal budgets whose units take lognormal times."""
    rng = random.Random(f"{seed} {trials} {spread}")
    seconds = [rng.lognormvariate(0, spread) for _ in range(trials)]

    def look_up(config: Config) -> ps.Tabulated:
        return ps.Tabulated({"accuracy": [0.5] * units}, seconds[config["x"]])

    with folder() as dir:
        space = {"x": ps.grid(list(range(trials)))}
        return simulate(
            look_up, space, ps.Grid(budget=units), ps.Simulated(devices=devices, curve=curve), scheduler, dir
        )


def gain(trials: int, devices: int, curve: Curve, spread: float = 0.0) -> float:
    seeds = range(5 if spread else 1)
    fifo, ours = (
        [grid(trials, devices, curve, scheduler, spread=spread, seed=seed) for seed in seeds]
        for scheduler in ("fifo", "waterfill")
    )
    return ratio(fifo, ours)


def mechanisms() -> list[Row]:
    rows = []
    sharing = workloads()[0].curve.sharing
    scaling = workloads()[0].curve.scaling
    for trials in (9, 27, 81):
        value = gain(trials, 8, Curve(sharing=sharing))
        rows.append(row("figure 11a", f"packing alone, {trials} trials on 8 devices, times as fast as fifo", value))
    for trials in (1, 2, 4, 6):
        value = gain(trials, 8, Curve(scaling=scaling))
        rows.append(row("figure 11b", f"scaling alone, {trials} trials on 8 devices, times as fast as fifo", value))
    for spread in (0.0, 0.25, 0.5, 1.0):
        value = gain(9, 8, Curve(sharing, scaling), spread)
        rows.append(row("figure 12", f"9 trials on 8 devices, runtimes spread by {spread:g} (log)", value))
    for overhead in (1.0, 1.5, 2.0, 10.0):
        value = gain(27, 8, Curve(sharing=(1.0, 1.0 * overhead, 1.0 * overhead)))
        goal, reached = ("exactly 1", value == 1) if overhead == 10 else ("at least 1", value >= 1)
        rows.append(
            row("figure 13a", f"27 trials on 8 devices, {overhead:g}× as long where shared", value, goal, reached)
        )
    for beta in (1.0, 1.1, 1.3, 2.0):
        for devices in (4, 8, 16):
            value = gain(3, devices, Curve.of(beta=beta, widest=devices))
            rows.append(
                row("figure 13b", f"3 trials on {devices} devices, β = {beta:g}", value, "at least 1", value >= 1)
            )
    return rows


# Scale


def scale() -> list[Row]:
    """A Hyperband study of 113,736 trials on 1,000 devices."""
    budget = 100_000

    @cache
    def table(kind: int) -> ps.Tabulated:
        return ps.Tabulated({"accuracy": [0.5 + kind / 100] * budget}, 1 + kind / 16)

    def look_up(config: Config) -> ps.Tabulated:
        return table(int(16 * config["x"]))

    began = time.perf_counter()
    with folder() as dir:
        outcome = simulate(
            look_up,
            {"x": ps.uniform(0, 1)},
            ps.Hyperband(max_budget=budget, reduction=10),
            ps.Simulated(devices=1000, curve=Curve.of(1.1, 4, 1.05, 4)),
            "waterfill",
            dir,
        )
        seconds = time.perf_counter() - began
    what = f"Hyperband, {outcome.trials:,} trials, {outcome.units:,} units, 1,000 devices: real seconds"
    return [
        row("scale", what, seconds, "below 300", seconds < 300),
        row("scale", "microseconds a unit", 1e6 * seconds / outcome.units),
    ]


def row(bench: str, what: str, value: float, goal: str = "", reached: bool | None = None) -> Row:
    return {"bench": bench, "what": what, "value": value, "goal": goal, "reached": reached}
