"""Figure 10 of Hydro for bench/hydro.py: how well the order of configs carries over, beside that of another seed.

Trials of one batch size are a study of their own, as they fuse: so a part is cut into pieces of about a minute. The
order is that of the metric after all steps; a trial that diverged is last, and counted as "lost". Twins have a seed of
their own, so they share neither initial weights nor batches with the targets that they are compared with, and each
order is compared with single seeds at full width, as these are with each other. Regret is the mean of both seeds at
full width of the config that an order has first, less the best such mean. The deviation of a seed is that of one run of
the ten best configs at full width.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna

import penstock as ps
from bench.known import Known
from bench.larger import Decoding, Larger
from penstock.algorithms.spearman import spearman
from penstock.log import reader
from penstock.log.events import Reported
from penstock.seeds import key
from penstock.surrogate.task import narrowed
from penstock.trial import Config

Row = dict[str, Any]
UNITS = 4
STEPS, CONFIGS = 1_000, 50
OWN = 2  # the seed of twins
SEEDS = ("seed 0", "seed 1")
BEST = 10  # configs at full width, of which a seed's deviation is taken
LEAST, LESS = 0.9, 0.03  # goals of Spearman's correlation: at least, and at most so far below seed against seed


class Given(optuna.samplers.BaseSampler):
    """Gives each trial a config that was drawn before."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self.configs = configs

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self.configs[trial.number][param_name]


def drawn(space: Mapping[str, Any], count: int) -> list[Config]:
    """Configs of a space, the same in each run."""
    rng = np.random.default_rng(key(0, "configs"))
    low, high = (math.log(end) for end in space["lr"])
    return [
        {
            "lr": float(np.exp(rng.uniform(low, high))),
            "momentum": float(rng.uniform(*space["momentum"])),
            "batch_size": int(rng.choice(space["batch_size"])),
        }
        for _ in range(count)
    ]


def trained(
    task: ps.Task, space: Mapping[str, Any], configs: Sequence[Config], metric: str, seed: int, options: Any
) -> Row:
    """The last metric of each config of one batch size, as losses, and how their study went."""
    domains = {
        "lr": ps.loguniform(*space["lr"]),
        "momentum": ps.uniform(*space["momentum"]),
        "batch_size": configs[0]["batch_size"],
    }
    with tempfile.TemporaryDirectory() as dir:
        began = time.perf_counter()
        result = ps.Study(
            task,
            domains,
            metric=metric,
            mode="max" if metric == "accuracy" else "min",
            algorithm=ps.Random(budget=UNITS),
            trials=len(configs),
            sampler=Given(configs),
            seed=seed,
            deadline=options.deadline,
            dir=dir,
            name="s",
        ).run(progress=False, sharing=options.sharing)
        seconds = time.perf_counter() - began
        log = reader.read(Path(dir) / "s" / "log.jsonl")
        steps = sum(event.usage.steps for event in log if isinstance(event, Reported))
    if result.ended != "done":
        raise RuntimeError(f"cut off by its {result.ended} after {seconds:.0f} s and {steps} steps")
    found = [math.inf] * len(configs)
    for trial in result.trials:
        value = trial.curve[-1].get(metric, math.nan) if len(trial.curve) == UNITS else math.nan
        if math.isfinite(value):
            found[trial.number] = -value if metric == "accuracy" else value
    return {"losses": found, "seconds": seconds, "steps": steps}


def figure10(
    target: Any, space: Mapping[str, Any], metric: str, options: argparse.Namespace, known: Known
) -> Iterator[Row]:
    """The order of configs at the first scale, at full width by two seeds, and at the other scales."""
    configs = drawn(space, options.trials or CONFIGS)
    steps = options.steps or STEPS
    target.unit_steps = max(1, steps // UNITS)
    traced = dict[str, Any]()
    full: list[list[float]] = []
    twins: list[float] = []  # at the first scale
    first, *others = options.scales
    for scale, seed in ((first, OWN), (1, 0), (1, 1), *((scale, OWN) for scale in others)):
        task = target if scale == 1 else narrowed(target, ps.Surrogate(scale=scale), traced)
        label = f"S={scale}" if scale > 1 else f"full width, seed {seed}"
        order = [math.inf] * len(configs)
        for size in space["batch_size"]:
            places = [i for i, config in enumerate(configs) if config["batch_size"] == size]
            if not places:
                continue
            own = [configs[i] for i in places]
            name = f"figure 10 {type(target).__name__} {target.width} {label} {steps} steps of {size}, {len(configs)}"
            row = known.get(name, partial(trained, task, space, own, metric, seed, options))
            for place, loss in zip(places, row["losses"], strict=True):
                order[place] = loss
            what = f"{label}, {len(own)} configs of batch size {size}"
            told: Row = {"steps/s": row["steps"] / row["seconds"], "best": abs(min(row["losses"]))}
            yield {"what": what, "seconds": row["seconds"], **told, "lost": sum(map(math.isinf, row["losses"]))}
        if scale == 1:
            full.append(order)
        elif scale == first:
            twins = order
        if len(full) > 1 and scale == 1:
            yield {"what": "full width, seed against seed", **between(full)}
        if full:
            known_as, of = (f"S={first}", twins) if scale == 1 else (label, order)
            yield {
                "what": f"{known_as} against {' and '.join(SEEDS[: len(full)])} at full width",
                **agreement(of, full),
            }


def between(full: Sequence[Sequence[float]]) -> Row:
    """How well one seed's order at full width foretells the other's, and how far the best configs are apart."""
    means = np.mean(full, 0)
    best = [i for i in np.argsort(means)[:BEST] if math.isfinite(means[i])]
    apart = [full[0][i] - full[1][i] for i in best]
    regrets = [other[int(np.argmin(one))] - min(other) for one, other in (full, full[::-1])]
    deviation = math.sqrt(sum(one**2 for one in apart) / (2 * len(apart))) if apart else math.nan
    return {"spearman": spearman(*full), "regret": float(np.mean(regrets)), "deviation of a seed": deviation}


def agreement(found: Sequence[float], full: Sequence[Sequence[float]]) -> Row:
    """Spearman's correlation with each seed at full width, in the mean, and the regret of the best by the order."""
    means = np.mean(full, 0)
    regret = float(means[int(np.argmin(found))] - means.min())
    row: Row = {"spearman": float(np.mean([spearman(found, one) for one in full])), "regret": regret}
    if len(full) > 1:
        seeds = between(full)
        row["reached"] = (
            row["spearman"] >= max(LEAST, seeds["spearman"] - LESS) and regret <= seeds["deviation of a seed"]
        )
    return row


def resnet(options: argparse.Namespace, known: Known) -> Iterator[Row]:
    space = {"lr": (1e-3, 1.0), "momentum": (0.5, 0.99), "batch_size": [8, 16] if options.tiny else [64, 128, 256]}
    yield from figure10(Larger(32, 32, 8) if options.tiny else Larger(), space, "accuracy", options, known)


def decoder(options: argparse.Namespace, known: Known) -> Iterator[Row]:
    space = {"lr": (1e-4, 3e-2), "momentum": (0.5, 0.97), "batch_size": [4] if options.tiny else [32, 64]}
    yield from figure10(Decoding(64, 16, 1) if options.tiny else Decoding(), space, "loss", options, known)
