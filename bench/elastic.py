"""The gain from trials and clusters that change in size (RubberBand §4, Fluid §4.3).

    python bench/elastic.py [--json] [resize] [placement] [halving] [cluster]

resize     one trial on 1 → 2 → 4 → 2 workers: how long it pauses; against workers that are started anew, and against
           Ray Tune's ResourceChangingScheduler, whose trial has more threads rather than more workers
placement  2 and 4 workers of a trial, together and scattered over two nodes with a slow link: samples a second; and the
           number of nodes that a trial is on, where many trials come and go
halving    successive halving with trials on several devices ("distributed") and on one each ("solo"): seconds, with two
           workers on this machine; then the same 16 trials on simulated clusters, where a unit on w devices takes
           βʷ⁻¹ / w, with the β of two real devices in this run: beyond two devices, that is a guess
cluster    an autoscaler's cluster that follows a study: node-seconds against a cluster that keeps its largest size

Workers have a thread each. Rows that are not measured on real workers begin with "simulated" or "counted". The bench
takes six minutes on two cores.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = sys.path[0]  # Tune's actors import the bench from there
os.environ["RAY_SCHEDULER_EVENTS"] = "0"  # without this the autoscaler prints lines between the rows
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"

from tests.autoscaling import AutoscalingCluster, NodeType  # isort: skip  # before ray
from tests.clusters import Cluster, until  # isort: skip
import ray
import torch

import penstock as ps
from bench.images import Images, Row, row
from bench.nodes import placement
from bench.resizing import resize
from penstock.executors.ray import executor as rays
from penstock.executors.ray.executor import RayExecutor
from penstock.log.events import Measured, Placed, Reported
from penstock.log.reader import read
from penstock.speed.curve import Curve
from penstock.trial import Config

HALVING = partial(ps.SuccessiveHalving, max_budget=16, reduction=4)
TRIALS = 16
NODES, UNIT, IDLE = 4, 1.5, 1.0  # nodes of the cluster, seconds of a unit there, seconds that an idle worker is kept
START = 0.1  # seconds that a simulated trial needs to start: the goal for a resize
SPACE = {"lr": ps.loguniform(1e-2, 0.3), "momentum": ps.uniform(0.0, 0.9)}


# --- halving ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The figures of a study on two real workers."""

    seconds: float  # from the first report to the last
    curves: list[list[float]]
    best: int
    unit: float  # seconds of a unit on one device
    scaling: dict[int, float]  # seconds of a step, by the number of devices
    spread: int  # units in which a trial had both devices


def halved(dir: str, sharing: str) -> Outcome:
    """16 trials for 1 unit, 4 for 4 and 1 for 16, in float64, where the number of devices changes no result."""
    task, algorithm = Images(dtype=torch.float64, count=384), HALVING()
    study = ps.Study(task, SPACE, metric="loss", mode="min", algorithm=algorithm, trials=TRIALS, name=sharing, dir=dir)
    result = study.run(workers=2, sharing=sharing, progress=False)
    events = list(read(result.dir / "log.jsonl"))
    reports = [event for event in events if isinstance(event, Reported)]
    spread = {(e.trial, e.attempt) for e in events if isinstance(e, Placed) and len(e.devices) > 1}
    return Outcome(
        reports[-1].clock - reports[0].clock,  # without the start of the workers
        [[point["loss"] for point in trial.curve] for trial in result.trials],
        result.best.number,
        median(event.usage.device_seconds for event in reports[:TRIALS]),
        next((event.table for event in events if isinstance(event, Measured) and event.kind == "scaling"), {}),
        sum((event.trial, event.attempt) in spread for event in reports),
    )


def difference(one: Outcome, other: Outcome) -> float:
    """The largest relative difference between two runs of the same trials to the same budgets."""
    if [len(curve) for curve in one.curves] != [len(curve) for curve in other.curves] or one.best != other.best:
        raise AssertionError(f"Other trials were promoted: {one.curves} and {other.curves}")
    pairs = zip(chain(*one.curves), chain(*other.curves), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def simulated(devices: int, unit: float, curve: Curve, **how: Any) -> float:
    """Seconds of the study of 16 trials on a simulated cluster; a trial takes ``START`` to begin or to continue."""

    def look_up(config: Config) -> ps.Tabulated:
        return ps.Tabulated({"loss": [config["lr"] / n for n in range(1, 17)]}, seconds=unit)

    with tempfile.TemporaryDirectory() as dir:
        task = ps.TabulatedTask(look_up)
        study = ps.Study(task, SPACE, metric="loss", mode="min", algorithm=HALVING(), trials=TRIALS, dir=dir)
        result = study.run(on=ps.Simulated(devices=devices, curve=curve, start=START), progress=False, **how)
        return max(getattr(event, "clock", 0.0) for event in read(result.dir / "log.jsonl"))


def halving(rounds: int = 2) -> Iterator[Row]:
    pairs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as dir:  # a new folder has no profiles of an earlier study
            pairs.append((halved(dir, "solo"), halved(dir, "distributed")))
    ratio = median(fixed.seconds / elastic.seconds for fixed, elastic in pairs)
    far = max(difference(elastic, fixed) for fixed, elastic in pairs)
    yield row("halving", "16 trials on 2 workers, one device each, seconds", median(one.seconds for one, _ in pairs))
    yield row("halving", "16 trials on 2 workers, elastic, seconds", median(one.seconds for _, one in pairs))
    yield row("halving", "ratio", ratio, "at least 1", ratio >= 1)
    spread = min(one.spread for _, one in pairs)
    yield row("halving", "units that the elastic one had both devices for, of 40", spread, "above 0", spread > 0)
    yield row("halving", "largest relative difference of their curves", far, "at most 1e-9", far <= 1e-9)
    measured = [one.scaling for _, one in pairs if one.scaling]
    if not measured:
        print("halving: no trial was tried on two workers, so nothing is simulated", file=sys.stderr)
        return
    two, unit = median(one[2] / one[1] for one in measured), median(one.unit for one, _ in pairs)
    beta = Curve(scaling=(1.0, two)).beta
    widest = min(range(1, 65), key=lambda w: beta ** (w - 1) / w)  # beyond, more devices only cost
    curve = Curve.of(beta=beta, widest=widest)
    yield row("halving", "a step on 2 devices, relative to one", two)
    yield row("halving", f"simulated: the most devices that pay for a trial, with β = {beta:.3g}", widest)
    for devices in (4, 8, 16, 32, 64):
        fixed = simulated(devices, unit, curve, scheduler="fifo")
        elastic = simulated(devices, unit, curve, sharing="distributed")
        said = f"simulated: 16 trials on {devices} devices, {fixed:.1f} to {elastic:.1f} seconds, ratio"
        yield row("halving", said, fixed / elastic, "at least 1", fixed >= elastic)


# --- cluster ---------------------------------------------------------------------------------------------------------


def sleeper(trial: Any) -> None:
    """A trial that holds a device, but uses none of this machine's cores."""
    for unit in range((trial.state or 0) + 1, 17):
        time.sleep(UNIT)
        trial.report(unit, loss=trial.config["lr"] / unit, state=unit)


def followed(cluster: Cluster, nodes: Callable[[], int]) -> tuple[float, list[tuple[float, int]]]:
    """The seconds that the study takes on a cluster, and its number of nodes over time, in seconds from its start."""
    samples: list[tuple[float, int]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.1):
            samples.append((time.monotonic() - began, nodes()))

    with tempfile.TemporaryDirectory() as dir:
        study = ps.Study(sleeper, SPACE, metric="loss", mode="min", algorithm=HALVING(), trials=TRIALS, dir=dir)
        watch = threading.Thread(target=sample, daemon=True)
        began = time.monotonic()
        watch.start()
        try:
            study.run(on=f"ray://{cluster.address}", workers=NODES, sharing="solo", progress=False)
            return time.monotonic() - began, samples
        finally:
            over.set()
            watch.join()


def cluster() -> Iterator[Row]:
    autoscaled = AutoscalingCluster({"one": NodeType(most=NODES)}, v2=True, most=NODES)
    with autoscaled:
        with patch.object(rays, "RayExecutor", partial(RayExecutor, idle=IDLE)):
            seconds, samples = followed(autoscaled, lambda: len(autoscaled.made()))
        ended = time.monotonic()
        until(lambda: not autoscaled.made(), "all nodes are released")
        released = time.monotonic() - ended
    with Cluster() as whole:
        for _ in range(NODES):
            whole.add_node(cpus=1, gpus=1)
        fixed, _ = followed(whole, lambda: NODES)
    used = sum(count * (later - now) for (now, count), (later, _) in pairwise(samples))
    yield row("cluster", f"nodes that stay, {NODES}: seconds of the study", fixed)
    yield row("cluster", f"nodes that follow it, from 0 to {max(count for _, count in samples)}: seconds", seconds)
    changes = [samples[0], *(later for one, later in pairwise(samples) if one[1] != later[1])]
    for at, count in changes:
        yield row("cluster", f"nodes from {at:.1f} seconds on", count)
    yield row("cluster", "seconds from its end until the last node is gone", released)
    yield row("cluster", "node-seconds of those that stay", NODES * fixed)
    yield row("cluster", "node-seconds of those that follow", used)
    ratio = NODES * fixed / used
    yield row("cluster", "ratio", ratio, "above 1", ratio > 1)


def main(arguments: list[str]) -> None:
    benches: dict[str, Callable[[], Iterable[Row]]] = {
        "resize": resize,
        "placement": placement,
        "halving": halving,
        "cluster": cluster,
    }
    print(f"ray {ray.__version__}, torch {torch.__version__}, {os.cpu_count()} cores", file=sys.stderr)
    for name in [name for name in arguments if name in benches] or list(benches):
        for line in benches[name]():
            if "--json" in arguments:
                print(json.dumps(line), flush=True)
            else:
                mark = {True: "yes", False: "NO", None: ""}[line["reached"]]
                print(
                    f"{line['bench']:9} {line['what']:88} {line['value']:>9.4g}  {line['goal']:12} {mark}", flush=True
                )


if __name__ == "__main__":
    main(sys.argv[1:])
