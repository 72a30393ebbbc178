"""A whole study on one device, as users get it: model steps a second by its own log, unit by unit.

    python bench/fused_study.py [--network rn18/8] [--precision bf16] [--trials 128] [--units 20] [--copies 25]

Random search through the engine, sharing fused: trials with learning rates of their own, evaluated after every unit.
A unit is an epoch over the network's training data, repeated --copies times (25 make it as long as CIFAR's). fusion.py
times the steps alone. This bench adds the measuring of the bundle size, the making of the faster step once enough steps
are certain, and all work of the engine. Solo is one trial of one unit, run in the same way.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
import penstock as ps
from bench.networks import TASKS, Images
from penstock.log import events, reader
from penstock.training.fused.speeding import Speeding


def longer(name: str, precision: str, copies: int) -> ps.Task:
    """A network's task whose epoch is ``copies`` times its training data."""
    task = copy.copy(TASKS[name][0])
    (x, y), valid = task.data(TASKS[name][1])
    data = (x.repeat(copies, *[1] * (x.dim() - 1)), y.repeat(copies, *[1] * (y.dim() - 1))), valid
    task.precision, task.data = precision, lambda config: data  # type: ignore[assignment,method-assign]
    return task


def rates(task: ps.Task, name: str, trials: int, units: int, sharing: str) -> list[float]:
    """Model steps a second in each unit, all trials together, by the clock of the log."""
    space = {
        key: ps.loguniform(value / 3, value * 3) if key == "lr" else value for key, value in TASKS[name][1].items()
    }
    aim: Any = {"metric": "accuracy"} if isinstance(task, Images) else {"metric": "loss", "mode": "min"}
    with tempfile.TemporaryDirectory() as dir:
        study = ps.Study(task, space, **aim, algorithm=ps.Random(budget=units), trials=trials, dir=dir, name="s")
        study.run(progress=False, sharing=sharing)
        log = list(reader.read(Path(dir) / "s" / "log.jsonl"))
    began = min(event.clock for event in log if isinstance(event, events.Placed))
    ended, steps = defaultdict[int, float](float), defaultdict[int, int](int)
    for event in log:
        if isinstance(event, events.Reported):
            ended[event.unit] = max(ended[event.unit], event.clock)
            steps[event.unit] += event.usage.steps
    clocks = [began, *(ended[unit] for unit in sorted(ended))]
    return [steps[unit] / (clocks[unit] - clocks[unit - 1]) for unit in sorted(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=sorted(TASKS), default="rn18/8")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--trials", type=int, default=128)
    parser.add_argument("--units", type=int, default=20)
    parser.add_argument("--copies", type=int, default=25)
    args = parser.parse_args()
    task, made = longer(args.network, args.precision, args.copies), []
    make = Speeding.make

    def noted(self: Speeding, *given: Any) -> Any:
        began, wanted = time.perf_counter(), self.wanted
        step = make(self, *given)
        if step is not None and step is given[-1]:  # a compiled one was only asked for
            return step
        why = "" if step is not None else f", refused: {self.recipe.refusals}"
        made.append(f"{wanted} in {time.perf_counter() - began:.0f} s, kernels: {self.recipe.kernels}{why}")
        return step

    [solo] = rates(task, args.network, 1, 1, "solo")
    with mock.patch.object(Speeding, "make", noted):
        fused = rates(task, args.network, args.trials, args.units, "fused")
    print(f"{args.network}, {args.precision}, {args.trials} trials of {args.units} units: model steps a second by unit")
    print(*(f"{rate:,.0f}" for rate in fused))
    last = statistics.median(fused[len(fused) // 2 :])
    whole = len(fused) / sum(1 / rate for rate in fused)
    print(f"last half {last:,.0f}, all {whole:,.0f}, solo {solo:,.0f}: {last / solo:.1f} and {whole / solo:.1f} times")
    print("faster steps:", "; ".join(made) or "none")


if __name__ == "__main__":
    main()
