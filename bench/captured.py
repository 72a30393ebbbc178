"""The device's time of one captured step, by its way and number of trials: the study of whole_study.py in pieces.

    python bench/captured.py [--width 8] [--batch 64] [--trials 1 4 16] [--way torch kernels compiled] [--parts]

``torch`` has torch's own kernels, ``kernels`` Penstock's where these are faster, ``compiled`` is made by Inductor.
``--parts`` lists the kernels that the time goes into, and ``--json`` prints a line a row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.mnist import ResidualDigits
from penstock.training.data import DataCache
from penstock.training.fused.bundle import Fused
from penstock.training.fused.compiled import CapturedStep
from penstock.training.fused.recipe import Recipe
from penstock.training.loop import Training

REPLAYS = 50
MOST = 60.0  # seconds that kernels are waited for


def bundle(width: int, batch: int, trials: int) -> Fused:
    """Trials of the study that have found their way."""
    task, device = ResidualDigits(), torch.device("cuda")
    cache, fused = DataCache(task, 0, device), Fused(Recipe(), trials)
    for number in range(trials):
        config = {"width": width, "batch_size": batch, "lr": 0.05, "decay": 1e-4, "dropout": 0.1 + number / 100}
        data = cache.get(config)
        fused.enter(Training(task, number, config, data, seed=0, device=device, metric="accuracy", mode="max"))
    for _ in range(3):
        fused.step()
    return fused


def made(fused: Fused, way: str) -> tuple[CapturedStep, float]:
    """The captured step of a way, and the seconds until it was there."""
    began, speeding = time.perf_counter(), fused.speeding
    speeding.meet(list(fused.trials))
    speeding.expect(10**9)
    if way == "compiled":
        speeding.consider(10**9, 0.0)
    speeding.wanted = "compiled" if way == "compiled" else "captured"
    fused.step()
    while time.perf_counter() - began < MOST and (speeding.compiles or (way == "kernels" and speeding.awaits)):
        time.sleep(0.1)
        speeding.look()
        fused.step()
    fast = next(iter(fused.fast.steps.values()), None)
    assert isinstance(fast, CapturedStep), fused.recipe.refusals
    return fast, time.perf_counter() - began


def parts(fast: CapturedStep) -> list[tuple[str, int, float]]:
    """The kernels of a step: name, how many, and the microseconds of all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        fast.timed()
    found = [(e.key, e.count, e.device_time_total) for e in seen.key_averages() if e.device_time_total]
    return sorted(found, key=lambda one: -one[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--way", nargs="+", choices=["torch", "kernels", "compiled"], default=["torch", "kernels"])
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for width in args.width:
        for batch in args.batch:
            for trials in args.trials:
                fused = bundle(width, batch, trials)
                for way in args.way:
                    fast, seconds = made(fused, way)
                    took = min(fast.timed() for _ in range(REPLAYS))
                    kernels: list[tuple[str, int, float]] = parts(fast) if args.parts else []
                    row: dict[str, Any] = {"width": width, "batch": batch, "trials": trials, "way": way}
                    row |= {"ms": took, "steps": 1e3 * trials / took, "made": seconds, "used": fused.recipe.kernels}
                    row |= {"refused": fused.recipe.refusals, "launches": sum(count for _, count, _ in kernels)}
                    if args.json:
                        print(json.dumps(row | {"parts": kernels}), flush=True)
                        continue
                    print(*(f"{name} {value}" for name, value in row.items()), sep=", ", flush=True)
                    for name, count, micros in kernels[:20]:
                        print(f"    {micros:8.1f} µs {count:4} × {name[:100]}")


if __name__ == "__main__":
    main()
