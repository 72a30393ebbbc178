"""Tables 2 to 4 and figure 12 of Hydro for bench/hydro.py: whole studies, and the loops that they are compared with.

A study is timed from ``study.run`` to its return; its clock begins with an empty profile store, and has the look at the
surrogates, the rank check, compiling and the race in it. "times eager" is how long the same steps of search would take
at full width one trial after another, in a plain loop, by the study's own time; "times MPS" the same in 16 processes.
Both rates come from the parts eager and mps. The steps of the race and of the rank check count for nothing there. A
study that its deadline cut off has no such figures.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from bench.known import Known
from bench.larger import Larger
from bench.whole import by_hand
from penstock.log import reader
from penstock.log.events import Asked, Placed, Reported
from penstock.space import Space
from penstock.surrogate.examine import examine
from penstock.trial import scale_of

Row = dict[str, Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPACE = {"lr": ps.loguniform(1e-3, 1.0), "momentum": ps.uniform(0.5, 0.99)}
STEPS, TRIALS, TIMED = 3_000, 100, 8
GOALS = {"times eager": 20.0, "times MPS": 7.0}
UNITS: dict[str, tuple[Callable[[], Any], int]] = {  # of each algorithm, the units of a whole trial beside it
    "random": (lambda: ps.Random(budget=9), 9),
    "asha": (lambda: ps.ASHA(max_budget=27, min_budget=3, reduction=3), 27),
}


def task(options: argparse.Namespace) -> Larger:
    made = Larger(32, 64, 8) if options.tiny else Larger()
    made.batch_size = 16 if options.tiny else 256
    made.precision = options.precision or made.precision
    return made


def rates(options: argparse.Namespace) -> str:
    """The name under which the rates of both baselines are known."""
    made = task(options)
    return f"width {made.width}, {made.pixels} pixels, batches of {made.batch_size}, {made.precision}"


def eager(options: argparse.Namespace, known: Known) -> Iterator[Row]:
    made, config = task(options), {"lr": 0.05, "momentum": 0.9}
    epoch = math.ceil(made.rows / made.batch_size)

    def measured() -> list[float]:
        """Seconds of a step, and of what a trial has besides: trials of one epoch and of three, four of each."""
        by_hand(made, config, 1)  # the first one loads libraries
        short, long = (sum(by_hand(made, config, units) for _ in range(TIMED // 2)) for units in (1, 3))
        step = (long - short) / (TIMED // 2 * 2 * epoch)
        return [step, max(0.0, short / (TIMED // 2) - epoch * step)]

    step, besides = known.get(f"eager, {rates(options)}", measured)
    what = f"one by one, eager, {TIMED} trials of {epoch} and {3 * epoch} steps, {made.precision}"
    yield {"what": what, "steps/s": 1 / step, "besides s": besides}


def mps(options: argparse.Namespace, known: Known) -> Iterator[Row]:
    from bench.mps import PROCESSES, mps, pools
    from bench.networks import Network

    made = task(options)
    count = 2 if options.tiny else PROCESSES
    network = Network("rn18", DEVICE, None, 0.1 if options.tiny else 1.0)
    if options.tiny:
        network = Network("mlp512", DEVICE, 8, 0.1)
    try:
        row = known.get(f"mps, {rates(options)}", partial(mps, network, count, made.precision))
        what = f"{network.name}, {count} processes under MPS, {made.precision}: {row['note']}"
        yield {"what": what, "steps/s": row["rate"]}
    finally:
        for pool in pools:
            pool.close()
        pools.clear()


def studied(made: Larger, name: str, surrogate: ps.Surrogate | None, options: argparse.Namespace, **run: Any) -> Row:
    """A whole study, timed from `study.run` to its return, and where its time went by its log."""
    algorithm, units = UNITS[name]
    made.unit_steps = max(1, (options.steps or STEPS) // units)
    with tempfile.TemporaryDirectory() as dir:
        study = ps.Study(
            made,
            SPACE,
            metric="accuracy",
            algorithm=algorithm(),
            trials=options.trials or TRIALS,
            surrogate=surrogate,
            deadline=options.deadline,
            dir=dir,
            name="s",
        )
        began = time.perf_counter()
        result = study.run(progress=False, **run)
        seconds = time.perf_counter() - began
        log = list(reader.read(Path(dir) / "s" / "log.jsonl"))
    row: Row = {"seconds": seconds, "ended": result.ended}
    scored = [one.metrics["accuracy"] for one in result.trials if one.metrics]
    if scored:
        row["best"] = max(scored)
    variants = {event.trial: event.variant for event in log if isinstance(event, Asked)}
    clocks = [event.clock for event in log if isinstance(event, Placed)]
    row["first placed s"] = min(clocks, default=math.nan)
    for scale in sorted({scale_of(one) for one in variants.values()}, reverse=True):
        reports = [e for e in log if isinstance(e, Reported) and scale_of(variants[e.trial]) == scale]
        if reports:
            told = f"S={scale}" if scale > 1 else "target"
            row[f"{told} steps"] = sum(event.usage.steps for event in reports)
            row[f"{told} s"] = sum(event.usage.device_seconds for event in reports)
            row[f"{told} until s"] = max(event.clock for event in reports)
    row["compared"] = "" if result.surrogate is None else result.surrogate.rank or result.surrogate.fallback
    return row


def _named(what: str, name: str, options: argparse.Namespace) -> str:
    trials, steps = options.trials or TRIALS, options.steps or STEPS
    return f"{name}, {trials} trials of {steps} steps, {what}, {task(options).precision}"


def whole(options: argparse.Namespace, known: Known) -> Iterator[Row]:
    """Studies by narrow twins, for each scale and algorithm."""
    for scale in options.scales:
        found = known.get(f"look S={scale}, {rates(options)}", partial(_looked, scale, options))
        yield {"what": f"a look at S={scale}: tracing and the coordinate check", "seconds": found}
        for name in options.algorithms:
            what = _named(f"S={scale}", name, options)
            row = known.get(what, partial(studied, task(options), name, ps.Surrogate(scale=scale), options))
            yield {"what": what, **row, **_faster(row, scale, options, known), "look, of all": found / row["seconds"]}


def _looked(scale: int, options: argparse.Namespace) -> float:
    began = time.perf_counter()
    examine(task(options), Space.of(SPACE), ps.Surrogate(scale=scale), device=DEVICE.type)
    return time.perf_counter() - began


def _faster(row: Row, scale: int, options: argparse.Namespace, known: Known) -> Row:
    """How much longer the steps of the search would take at full width by each baseline, as far as that is known."""
    made: Row = {}
    if row["ended"] != "done" or f"S={scale} steps" not in row:
        return made
    steps, trials = row[f"S={scale} steps"], options.trials or TRIALS
    if (name := f"eager, {rates(options)}") in known:
        step, besides = known.get(name, lambda: None)
        made["times eager"] = (steps * step + trials * besides) / row["seconds"]
    if (name := f"mps, {rates(options)}") in known:
        made["times MPS"] = steps / known.get(name, lambda: None)["rate"] / row["seconds"]
    if len(made) == len(GOALS):
        made["reached"] = all(made[one] >= goal for one, goal in GOALS.items())
    return made


def solo(options: argparse.Namespace, known: Known) -> Iterator[Row]:
    """Narrow twins without fusion: figure 12 a."""
    scale = options.scales[0]
    for name in options.algorithms:
        what = _named(f"S={scale}, solo", name, options)
        surrogate = ps.Surrogate(scale=scale)
        row = known.get(what, partial(studied, task(options), name, surrogate, options, sharing="solo"))
        yield {"what": what, **_rated(row, f"S={scale} steps", name, options)}


def fused(options: argparse.Namespace, known: Known) -> Iterator[Row]:
    """Fusion without narrow twins."""
    for name in options.algorithms:
        what = _named("full width", name, options)
        row = known.get(what, partial(studied, task(options), name, None, options))
        yield {"what": what, **_rated(row, "target steps", name, options)}


def _rated(row: Row, steps: str, name: str, options: argparse.Namespace) -> Row:
    """The steps a second of a study, and what all of Random would take at that rate."""
    rate = row.get(steps, 0) / row["seconds"]
    whole = (options.trials or TRIALS) * (options.steps or STEPS)
    return {**row, "steps/s": rate, **({"all would take s": whole / rate} if name == "random" and rate else {})}


def deadline(options: argparse.Namespace, known: Known) -> Iterator[Row]:
    """The best that 60 s find by ASHA with more trials than they can train: table 4."""
    given = argparse.Namespace(**vars(options))
    given.deadline, given.trials = 2.0 if options.tiny else 60.0, options.trials or 1_000
    for kind, surrogate in ((f"S={options.scales[0]}", ps.Surrogate(scale=options.scales[0])), ("full width", None)):
        what = _named(f"{kind}, a deadline of {given.deadline:g} s", "asha", given)
        yield {"what": what, **known.get(what, partial(studied, task(options), "asha", surrogate, given))}
