"""The device's time of one captured step, by its way and number of trials: the study of whole_study.py in pieces.

    python bench/captured.py [--width 8] [--batch 64] [--trials 1 4 16] [--way torch kernels compiled] [--parts]
    python bench/captured.py --together

``torch`` has torch's own kernels, ``kernels`` Penstock's where these are faster, ``compiled`` is made by Inductor.
``--parts`` lists the kernels that the time goes into, and ``--json`` prints a line a row. ``--together`` has bundles of
few trials on streams of their own: how much faster they train side by side than in turn, as packs do.
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
STEPS = 100  # that are said to be certain
ROUNDS = 0.25  # seconds of the steps of each bundle together
PACK = ((16, 64, 3), (8, 64, 1), (8, 128, 1), (16, 128, 1))  # width, batch size and trials of bundles late in ASHA
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
    speeding.expect(STEPS)
    speeding.consider(STEPS, 1.0)  # so slow a step repays compiling, and no timing of block sizes
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


def together() -> None:
    """Bundles alone and side by side."""
    streams: list[torch.cuda.Stream] = []
    steps: list[CapturedStep] = []
    for kind in PACK:
        streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        with torch.cuda.stream(streams[-1]):
            steps.append(made(bundle(*kind), "kernels")[0])
        torch.cuda.synchronize()

    def seconds(order: list[int]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in order:
            with torch.cuda.stream(streams[i]):
                steps[i]._replay()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    alone = [min(seconds([i] * REPLAYS) for _ in range(2)) / REPLAYS for i in range(len(steps))]
    for kind, each in zip(PACK, alone, strict=True):
        print(f"width {kind[0]}, batch {kind[1]}, trials {kind[2]}: {each * 1e3:.3f} ms alone")
    for these in ((0, 1), (1, 2), (1, 2, 3), (0, 1, 2, 3)):
        counts = {i: max(1, int(ROUNDS / alone[i])) for i in these}
        order = [i for _, i in sorted((k / count, i) for i, count in counts.items() for k in range(count))]
        gain = sum(alone[i] * count for i, count in counts.items()) / seconds(order)
        print(f"{[PACK[i] for i in these]}: {gain:.2f} times as fast as in turn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--way", nargs="+", choices=["torch", "kernels", "compiled"], default=["torch", "kernels"])
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--together", action="store_true")
    args = parser.parse_args()
    if args.together:
        together()
        return
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
                    row |= {
                        "compiled": fast.compiled,
                        "refused": fused.recipe.refusals,
                        "launches": sum(count for _, count, _ in kernels),
                    }
                    if args.json:
                        print(json.dumps(row | {"parts": kernels}), flush=True)
                        continue
                    print(*(f"{name} {value}" for name, value in row.items()), sep=", ", flush=True)
                    for name, count, micros in kernels[:20]:
                        print(f"    {micros:8.1f} µs {count:4} × {name[:100]}")


if __name__ == "__main__":
    main()
