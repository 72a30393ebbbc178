"""A step that Inductor compiles beside training: what training loses by it, and the pace before, meanwhile and after.

    python bench/beside.py [--trials 1 8] [--width 8] [--batch-size 64] [--precision bf16] [--cold] [--tiny] [--json]

A bundle of the residual networks of whole_study.py trains by captured steps, or by plain ones without a GPU. It goes on
while the step is compiled, and takes it up. The paces are host seconds of steps; ``--cold`` begins with an empty cache
of compiled steps and of Inductor. ``--tiny`` has images of 8x8.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from bench.mnist import ResidualDigits, digits
from penstock.training.data import DataCache
from penstock.training.fused import artifacts
from penstock.training.fused.bundle import Fused
from penstock.training.fused.inductor import inductor
from penstock.training.fused.recipe import Recipe
from penstock.training.loop import Training

STEPS = 200  # of which a pace is taken


class Timed:
    """A bundle that is trained, and the host seconds of its steps."""

    def __init__(self, trials: int, config: dict[str, Any], precision: str, tiny: bool) -> None:
        task = ResidualDigits()
        task.precision = precision  # type: ignore[assignment]
        if tiny:
            (x, y), (v, w) = digits()
            small = (x[:512, :, :8, :8].contiguous(), y[:512]), (v[:8, :, :8, :8].contiguous(), w[:8])
            task.data = lambda config: small  # type: ignore[method-assign]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        data = DataCache(task, 0, self.device).get(config)
        self.fused = Fused(Recipe(size=trials))
        for n in range(trials):
            own = config | {"lr": 0.01 * (n + 1), "dropout": 0.1 + 0.01 * n}
            self.fused.enter(
                Training(task, n, own, data, seed=0, device=self.device, metric="accuracy", mode="max")
            )  # fmt: skip
        self.speeding = self.fused.speeding
        self.steps(3)
        self.speeding.meet(list(self.fused.trials))
        self.speeding.expect(10**6)
        self.steps(3)
        while self.speeding.awaits:  # Penstock's own kernels
            self.steps(5)
            self.speeding.look()
        self.steps(3)
        self.speeding.consider(10**6, 1.0)  # a step of a second, so often, repays everything
        while not inductor().prepared():
            self.steps(1)

    def steps(self, count: int) -> float:
        """Train by some steps; gives the seconds of one."""
        began, left = time.perf_counter(), count
        while left > 0:
            taken = self.fused.leap(left)
            if not taken:
                self.fused.step()
            left -= max(1, taken)
            self.fused.take_ended()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    def once(self) -> float:
        """The seconds of one step, with all that is made for it."""
        return self.steps(1)


def compiled(trials: int, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one bundle."""
    config = {"width": args.width, "batch_size": args.batch_size, "decay": 1e-4}
    timed = Timed(trials, config, args.precision, args.tiny)
    speeding, count = timed.speeding, 20 if timed.device.type == "cpu" else STEPS
    before = timed.steps(count)
    speeding.wanted, began = "compiled", time.perf_counter()
    asked = timed.once() - before
    paces = list[float]()
    while speeding.compiles and inductor().failed is None and speeding.wanted is None:
        paces.append(timed.steps(5))
        speeding.look()
    waited = time.perf_counter() - began
    taken = timed.once() - before if speeding.wanted else 0.0
    refused = list(timed.fused.recipe.refusals)
    return {
        "trials": trials,
        "before_ms": before * 1e3,
        "asking_s": asked,
        "waited_s": waited,
        "meanwhile_ms": sum(paces) / len(paces) * 1e3 if paces else None,
        "taking_s": taken,
        "after_ms": timed.steps(count) * 1e3,
        "compiled": any(step.compiled for step in timed.fused.fast.steps.values()),
        "kept_kb": sum(file.stat().st_size for file in artifacts.folder().glob("*.*")) / 1e3,
        "refused": refused,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.cold:
            os.environ |= {"XDG_CACHE_HOME": f"{folder}/user", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        rows = [compiled(trials, args) for trials in args.trials]
        inductor().close()
    for row in rows:
        if args.json:
            print(json.dumps(row))
            continue
        meanwhile = "" if row["meanwhile_ms"] is None else f", {row['meanwhile_ms']:.2f} meanwhile"
        print(
            f"{row['trials']} trials: {row['before_ms']:.2f} ms a step{meanwhile}, {row['after_ms']:.2f} after; "
            f"asking {row['asking_s']:.2f} s, waited {row['waited_s']:.1f} s, taking {row['taking_s']:.2f} s; "
            f"{'compiled' if row['compiled'] else 'not compiled'}; {row['kept_kb']:.0f} kB kept; {row['refused']}"
        )


if __name__ == "__main__":
    main()
