"""Figure 1 of Hydro for bench/hydro.py: the best learning rate of each width, by single trials.

Losses and learning rates are as in bench/surrogate.py: means of the last fifth of 150 steps, and a parabola through the
least three. A best rate at an end of what was tried is said to be there: how far it moves is then not known.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from bench.known import Known
from bench.surrogate import best_rate
from bench.twins import Characters, Digits, Narrowing
from penstock.surrogate import task as surrogates
from penstock.surrogate.task import Narrowed, narrowed
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.trial import Config

Row = dict[str, Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRIED = {"SGD": (-7, 2), "Adam": (-15, -6)}  # powers of 2 between which the learning rates lie
STEPS, GOAL = 150, 2.0


class Once:
    """A task whose model is made once for a seed, and copied for each trial: wide ones take seconds to draw."""

    def __init__(self, task: ps.Task) -> None:
        self.task, self._made = copy.copy(task), dict[int, nn.Module]()
        self._make = task.model

    def loss(self, config: Config, seed: int, steps: int, cache: DataCache) -> float:
        """The mean training loss of the last fifth of the steps of a trial; infinite where it diverges."""
        self.task.model = lambda config: self._copy(config, seed)  # type: ignore[method-assign]
        data = cache.get(config)
        training = Training(self.task, seed, config, data, seed=seed, device=DEVICE, metric="loss", mode="min")
        found, epoch = list[Tensor](), iter(training.batches())
        training.model.train()
        while len(found) < steps:
            if (batch := next(epoch, None)) is None:
                epoch = iter(training.batches())
                continue
            found.append(training.backward(batch).detach())
            training.step_optimizer()
            training.count_step()
        last = float(torch.stack(found[-max(1, steps // 5) :]).mean())  # the one wait for the device
        return last if math.isfinite(last) else math.inf

    def _copy(self, config: Config, seed: int) -> nn.Module:
        if seed not in self._made:
            self._made[seed] = self._make(config).to(DEVICE)
        made = copy.deepcopy(self._made[seed])
        if isinstance(self.task, Narrowed):
            surrogates._PARTS[made] = surrogates._PARTS[self._made[seed]]
        return made


def figure1(
    make: Callable[[int], Narrowing], optimizer: str, options: argparse.Namespace, known: Known
) -> Iterator[Row]:
    """The best learning rate of each width, and how far it is from the widest one's; at last the farthest of both."""
    widths = sorted(options.widths, reverse=True)
    steps: int = options.steps or STEPS
    target = make(widths[0])
    low, high = TRIED[optimizer]
    tried = range(low, high + 1, 3 if options.tiny else 1)
    seeds = range(options.seeds)
    caches, traced = [DataCache(target, seed, DEVICE) for seed in seeds], dict[str, Any]()
    farthest = {"this one": 1.0, "standard": 1.0}
    best, ends = math.nan, False
    for width in widths:
        for kind in ("target",) if width == target.width else ("this one", "standard"):
            own = make(width) if kind == "standard" else target
            task = narrowed(target, ps.Surrogate(scale=target.width // width), traced) if kind == "this one" else own
            began, once = time.perf_counter(), Once(task)
            found = dict[float, float]()
            for rate in tried:
                config = {"lr": 2.0**rate, "optimizer": optimizer}
                name = f"figure 1 {type(target).__name__} {target.width} {width} {kind} {steps} steps 2^{rate} seed "
                losses = [
                    known.get(f"{name}{seed}", partial(once.loss, config, seed, steps, caches[seed])) for seed in seeds
                ]
                found[rate] = sum(losses) / len(losses)
            power = best_rate(found)
            best = power if kind == "target" else best
            moved = 2 ** abs(power - best)
            row: Row = {"what": f"width {width}, {kind}", "best rate, power of 2": power, "moves by": moved}
            row |= {"its loss": min(found.values()), "seconds": time.perf_counter() - began}
            if min(found, key=lambda rate: found[rate]) in (tried[0], tried[-1]):
                row["note"] = "at an end of what was tried"
                ends = ends or kind != "standard"
            yield {**row, "losses": " ".join(f"{rate}: {loss:.3f}" for rate, loss in found.items())}
            if kind != "target":
                farthest[kind] = max(farthest[kind], moved)
    told = {f"{kind} moves by at most": moved for kind, moved in farthest.items()}
    reached = farthest["this one"] <= GOAL and not ends
    yield {"what": f"widths {widths[-1]} to {widths[0]}, goal {GOAL:g}", **told, "reached": reached}


def mlp(options: argparse.Namespace, known: Known) -> Iterator[Row]:
    yield from figure1(Digits, "SGD", options, known)


def transformer(options: argparse.Namespace, known: Known) -> Iterator[Row]:
    yield from figure1(Characters, "Adam", options, known)
