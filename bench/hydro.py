"""Hydro's figures and tables that need a GPU, one part each; a row is printed as soon as it is known.

    python bench/hydro.py PART … [--steps N] [--trials N] [--seeds N] [--scales 8,4] [--widths 128,4096]
                                 [--deadline SECONDS] [--sharing fused] [--tiny] [--json]

mlp          figure 1 a, b: the best learning rate by width, SGD, in the standard parametrization and in this one
transformer  figure 1 c, d: the same of two layers of attention, by Adam, on tinyshakespeare
resnet       figure 10: how well the order of configs of ResNet-18 carries over, beside that of another seed
decoder      the same of a character transformer
whole        tables 2 and 3: 100 trials of ResNet-18 from end to end, Random and ASHA, against eager loops
fused        the same trials fused at full width, which is what narrow twins are to beat; cut off at --deadline
mps          the same model in 16 processes under MPS: model steps a second
deadline     table 4: the best that 60 s find, by narrow twins and fused at full width

Losses and learning rates of figure 1 are as in bench/surrogate.py: single steps, and means of the last fifth. The
orders of ``resnet`` and ``decoder`` are those of the metric after all steps; regret is the mean of both seeds at full
width of the config that twins say is best, less the best such mean. "lost" is how many diverged.

The images are of 3×32×32: two of MNIST's digits, shifted, in two channels, and the larger one is to be told. bf16.
Needs ../shared/data (or PENSTOCK_DATA): images/mnist.npz and text/tinyshakespeare.txt. A part that fails says why, and
the others go on. ``--tiny`` is a smoke test of all parts on a CPU. Figures 8 and 13 are `python bench/fusion.py` with
the networks rn18, rn18/2, rn18/4, rn18/8 and rn18/16.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import optuna
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import penstock as ps
from bench.mnist import digits
from bench.networks import Gpt, ResNet18, Split, characters
from bench.surrogate import best_rate
from bench.twins import Characters, Digits, Narrowing
from bench.whole import by_hand
from penstock.algorithms.spearman import spearman
from penstock.log import reader
from penstock.log.events import Asked, Placed, Reported
from penstock.seeds import key
from penstock.surrogate import task as surrogates
from penstock.surrogate.task import Narrowed, narrowed
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.trial import Config, scale_of

Row = dict[str, Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, HELD_OUT = 20_480, 2_048  # a whole number of batches of every size
UNITS = 4  # of a trial whose order counts
RATES = {"SGD": (-6, 2), "Adam": (-15, -6)}  # powers of 2 between which the learning rates of figure 1 lie


# The tasks


@cache
def pairs(rows: int) -> Split:
    """Two of MNIST's digits in two channels of an image, each shifted by up to four pixels, and the larger digit."""
    generator = torch.Generator().manual_seed(0)
    (x, y), _ = digits()
    count = rows + min(rows, HELD_OUT)
    made, larger = torch.zeros(count, 3, 32, 32), torch.zeros(count, dtype=torch.long)
    for channel in range(2):
        chosen = torch.randperm(len(x), generator=generator)[:count]
        down, right = torch.randint(5, (2, count), generator=generator)
        padded = F.pad(x[chosen, 0], (4, 4, 4, 4), value=float(x.min()))
        rows_of, columns_of = (4 - at[:, None] + torch.arange(32) for at in (down, right))
        made[:, channel] = padded[torch.arange(count)[:, None, None], rows_of[:, :, None], columns_of[:, None]]
        larger = torch.maximum(larger, y[chosen])
    return (made[:rows], larger[:rows]), (made[rows:], larger[rows:])


class Larger(ResNet18):
    """ResNet-18 at a width, on the larger of two digits."""

    precision = "bf16" if DEVICE.type == "cuda" else "fp32"
    eval_batch_size = 1_024

    def __init__(self, width: int = 64, rows: int = ROWS, unit_steps: int | None = None) -> None:
        self.width, self.rows, self.unit_steps = width, rows, unit_steps

    def data(self, config: Config) -> Split:
        return pairs(self.rows)


class Decoding(ps.Task):
    """A character transformer of four layers at a width, on windows of 128 characters."""

    precision = "bf16" if DEVICE.type == "cuda" else "fp32"
    eval_batch_size = 256

    def __init__(self, width: int = 128, rows: int = 7_680, unit_steps: int | None = None) -> None:
        self.width, self.rows, self.unit_steps = width, rows, unit_steps

    def data(self, config: Config) -> Split:
        (x, y), (held_x, held_y) = characters()
        held = min(self.rows, 512)
        return (x[: self.rows], y[: self.rows]), (held_x[:held], held_y[:held])

    def model(self, config: Config) -> nn.Module:
        return Gpt(65, 128, self.width, heads=4, layers=4)

    def optimizer(self, params: Iterable[Parameter], config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=config["lr"], betas=(config["momentum"], 0.999))

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# Figure 1: single trials


class Once:
    """A task whose model is made once for a seed, and copied for each trial: wide ones take seconds to draw."""

    def __init__(self, task: ps.Task) -> None:
        self.task, self._made = copy.copy(task), dict[int, nn.Module]()
        self._make = task.model

    def losses(self, config: Config, seed: int, steps: int, cache: DataCache) -> float:
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


def figure1(make: Callable[[int], Narrowing], optimizer: str, options: argparse.Namespace) -> Iterator[Row]:
    """The best learning rate of each width, and how far the narrowest width's is from the widest one's."""
    widths: list[int] = options.widths
    steps: int = options.steps or 150
    target = make(max(widths))
    low, high = RATES[optimizer]
    tried = range(low, high + 1, 4 if options.tiny else 1)
    caches, traced = [DataCache(target, seed, DEVICE) for seed in range(options.seeds)], dict[str, Any]()
    best: dict[tuple[int, str], float] = {}
    for width in sorted(widths, reverse=True):
        for kind in ("this one", "standard"):
            if width == target.width:
                task: ps.Task = target
            elif kind == "standard":
                task = make(width)
            else:
                task = narrowed(target, ps.Surrogate(scale=target.width // width), traced)
            if width == target.width and kind == "standard":
                best[width, kind] = best[width, "this one"]
                continue
            began, once = time.perf_counter(), Once(task)
            found = dict[float, float]()
            for rate in tried:
                config = {"lr": 2.0**rate, "optimizer": optimizer}
                losses = [once.losses(config, seed, steps, caches[seed]) for seed in range(options.seeds)]
                found[rate] = sum(losses) / len(losses)
            best[width, kind] = best_rate(found)
            taken = (time.perf_counter() - began) / (len(found) * steps * options.seeds)
            moved = 2 ** abs(best[width, kind] - best[target.width, "this one"])
            yield {
                "what": f"width {width}, {'target' if task is target else kind}",
                "best rate, power of 2": best[width, kind],
                "moves by": moved,
                "its loss": min(found.values()),
                "ms a step": 1000 * taken,
                "losses": " ".join(f"{rate}: {loss:.3f}" for rate, loss in found.items()),
            }


def mlp(options: argparse.Namespace) -> Iterator[Row]:
    yield from figure1(Digits, "SGD", options)


def transformer(options: argparse.Namespace) -> Iterator[Row]:
    yield from figure1(Characters, "Adam", options)


# Figure 10: the order of configs


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
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=key(0, "configs") % 2**31))
    found = []
    for _ in range(count):
        trial = study.ask()
        rate = trial.suggest_float("lr", *space["lr"], log=True)
        momentum = trial.suggest_float("momentum", *space["momentum"])
        sizes = trial.suggest_categorical("batch_size", space["batch_size"])
        found.append({"lr": rate, "momentum": momentum, "batch_size": sizes})
    return found


def ordered(
    task: ps.Task, space: Mapping[str, Any], configs: Sequence[Config], metric: str, seed: int, options: Any
) -> tuple[list[float], Row]:
    """The last metric of each config, as losses; and how the study went."""
    domains = {
        "lr": ps.loguniform(*space["lr"]),
        "momentum": ps.uniform(*space["momentum"]),
        "batch_size": ps.choice(space["batch_size"]),
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
    found = [math.inf] * len(configs)
    for trial in result.trials:
        value = trial.curve[-1].get(metric, math.nan) if len(trial.curve) == UNITS else math.nan
        if math.isfinite(value):
            found[trial.number] = -value if metric == "accuracy" else value
    lost = sum(math.isinf(one) for one in found)
    return found, {"seconds": seconds, "steps/s": steps / seconds, "best": abs(min(found)), "lost": lost}


def agreement(one: Sequence[float], means: Sequence[float]) -> Row:
    """Spearman's correlation with the means, and the regret of the best by one order."""
    best = int(np.argmin(one))
    return {"spearman": spearman(one, means), "regret": float(means[best] - min(means))}


def figure10(
    make: Callable[[], Any], space: Mapping[str, Any], metric: str, options: argparse.Namespace
) -> Iterator[Row]:
    """The order of configs at each scale, the target's by two seeds."""
    configs = drawn(space, options.trials or 50)
    target, traced, orders = make(), dict[str, Any](), dict[int, list[float]]()
    target.unit_steps = max(1, (options.steps or 1_000) // UNITS)
    first, *others = options.scales
    full: list[list[float]] = []

    def twins(scale: int) -> Row:
        own = narrowed(target, ps.Surrogate(scale=scale), traced)
        orders[scale], row = ordered(own, space, configs, metric, 0, options)
        return {"what": f"S={scale}", **row}

    def means() -> list[float]:
        return [sum(both) / len(both) for both in zip(*full, strict=True)]

    yield twins(first)
    for seed in range(2):
        found, row = ordered(target, space, configs, metric, seed, options)
        full.append(found)
        if seed:
            row |= {"spearman": spearman(*full), "regret": float(np.mean([_regret(*full), _regret(*full[::-1])]))}
            best = int(np.argmin(means()))
            row["deviation of the best"] = abs(full[0][best] - full[1][best]) / math.sqrt(2)
        yield {"what": f"full width, seed {seed}" + (" against seed 0" if seed else ""), **row}
        yield {"what": f"S={first} against {'both seeds' if seed else 'seed 0'}", **agreement(orders[first], means())}
    for scale in others:
        row = twins(scale)
        yield {**row, "what": f"S={scale} against both seeds", **agreement(orders[scale], means())}


def _regret(one: Sequence[float], other: Sequence[float]) -> float:
    return other[int(np.argmin(one))] - min(other)


def resnet(options: argparse.Namespace) -> Iterator[Row]:
    sizes = [16, 32] if options.tiny else [64, 128, 256]
    space = {"lr": (1e-3, 1.0), "momentum": (0.5, 0.99), "batch_size": sizes}
    make = (lambda: Larger(32, 128)) if options.tiny else Larger
    yield from figure10(make, space, "accuracy", options)


def decoder(options: argparse.Namespace) -> Iterator[Row]:
    space = {"lr": (1e-4, 3e-2), "momentum": (0.5, 0.97), "batch_size": [16] if options.tiny else [32, 64]}
    make = (lambda: Decoding(32, 64)) if options.tiny else Decoding
    yield from figure10(make, space, "loss", options)


# Tables 2 to 4: whole studies


SPACE = {"lr": ps.loguniform(1e-3, 1.0), "momentum": ps.uniform(0.5, 0.99)}


def algorithms(steps: int) -> dict[str, tuple[Any, int]]:
    """Random and ASHA, each with the steps of a unit."""
    return {
        "random": (ps.Random(budget=9), max(1, steps // 9)),
        "asha": (ps.ASHA(max_budget=27, min_budget=3, reduction=3), max(1, steps // 27)),
    }


def studied(task: ps.Task, algorithm: Any, surrogate: ps.Surrogate | None, trials: int, deadline: float) -> Row:
    """A whole study, timed from `study.run` to its return, and where its time went by its log."""
    with tempfile.TemporaryDirectory() as dir:
        study = ps.Study(
            task,
            SPACE,
            metric="accuracy",
            algorithm=algorithm,
            trials=trials,
            surrogate=surrogate,
            deadline=deadline,
            dir=dir,
            name="s",
        )
        began = time.perf_counter()
        result = study.run(progress=False)
        seconds = time.perf_counter() - began
        log = list(reader.read(Path(dir) / "s" / "log.jsonl"))
        row: Row = {"seconds": seconds, "ended": result.ended}
        scored = [one for one in result.trials if one.metrics]
        if scored:
            row["best"] = max(one.metrics["accuracy"] for one in scored)
    variants = {event.trial: event.variant for event in log if isinstance(event, Asked)}
    clocks = [event.clock for event in log if isinstance(event, Placed | Reported)]
    row["tracing, check and ends s"] = seconds - max(clocks, default=0.0)
    row["opening s"] = min(clocks, default=math.nan)
    for scale in sorted({scale_of(one) for one in variants.values()}, reverse=True):
        reports = [e for e in log if isinstance(e, Reported) and scale_of(variants[e.trial]) == scale]
        if reports:
            name = f"S={scale}" if scale > 1 else "target"
            row[f"{name} steps"] = sum(event.usage.steps for event in reports)
            row[f"{name} s"] = sum(event.usage.device_seconds for event in reports)
            row[f"{name} until s"] = max(event.clock for event in reports)
    row["compared"] = "" if result.surrogate is None else result.surrogate.rank or result.surrogate.fallback
    return row


def whole(options: argparse.Namespace) -> Iterator[Row]:
    steps, trials = options.steps or 3_000, options.trials or 100
    task = Larger(32, 128) if options.tiny else Larger()
    task.batch_size = 32 if options.tiny else 256
    epoch = math.ceil(task.rows / task.batch_size)
    config = {"lr": 0.05, "momentum": 0.9}
    by_hand(task, config, 1)  # the first one loads libraries
    count = 2 if options.tiny else 8
    eager = sum(by_hand(task, config, 1) for _ in range(count)) / (count * epoch)
    yield {"what": f"one by one, eager, {count} trials of {epoch} steps", "steps/s": 1 / eager}
    for name, (algorithm, unit) in algorithms(steps).items():
        task.unit_steps = unit
        scale = options.scales[0]
        row = studied(task, algorithm, ps.Surrogate(scale=scale), trials, options.deadline)
        alone = eager * trials * unit * 9 if name == "random" else math.nan
        row["times as fast"] = alone / row["seconds"]
        yield {"what": f"{name}, {trials} trials of {steps} steps, S={scale}", **row}


def fused(options: argparse.Namespace) -> Iterator[Row]:
    steps, trials = options.steps or 3_000, options.trials or 100
    task = Larger(32, 128) if options.tiny else Larger()
    task.batch_size = 32 if options.tiny else 256
    for name, (algorithm, task.unit_steps) in algorithms(steps).items():
        row = studied(task, algorithm, None, trials, options.deadline)
        row["steps/s"] = rate = row.get("target steps", 0) / row["seconds"]
        if name == "random" and rate:
            row["all trials would take s"] = trials * steps / rate
        yield {"what": f"{name}, {trials} trials of {steps} steps, at full width", **row}


def mps(options: argparse.Namespace) -> Iterator[Row]:
    from bench.mps import PROCESSES, mps, pools
    from bench.networks import Network

    try:
        name, rows, precision = ("mlp512", 8, "fp32") if options.tiny else ("rn18", None, "bf16")
        row = mps(Network(name, DEVICE, rows, 1.0), PROCESSES, precision)
        yield {"what": f"{name}, 16 processes under MPS: {row['note']}", "steps/s": row["rate"]}
    finally:
        for pool in pools:
            pool.close()


def deadline(options: argparse.Namespace) -> Iterator[Row]:
    task = Larger(32, 128) if options.tiny else Larger()
    task.batch_size = 32 if options.tiny else 256
    algorithm, task.unit_steps = algorithms(options.steps or 3_000)["asha"]
    seconds = min(options.deadline, 60.0)
    for name, surrogate in (("narrow twins", ps.Surrogate(scale=options.scales[0])), ("full width", None)):
        row = studied(task, algorithm, surrogate, options.trials or 1_000, seconds)
        yield {"what": f"{name}, a deadline of {seconds:g} s", **row}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "mlp": mlp,
    "transformer": transformer,
    "resnet": resnet,
    "decoder": decoder,
    "whole": whole,
    "fused": fused,
    "mps": mps,
    "deadline": deadline,
}


def whole_numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="+", choices=PARTS)
    parser.add_argument(
        "--steps", type=int, help="of a trial: 150 in figure 1, 1,000 for orders, 3,000 from end to end"
    )
    parser.add_argument("--trials", type=int, help="50 for orders, 100 from end to end")
    parser.add_argument("--seeds", type=int, default=1, help="of figure 1")
    parser.add_argument("--scales", type=whole_numbers, default=[8, 4, 16, 2])
    parser.add_argument("--widths", type=whole_numbers, default=[128, 512, 1024, 4096], help="of figure 1")
    parser.add_argument("--deadline", type=float, default=240.0, help="the most seconds of a study")
    parser.add_argument("--sharing", default="fused", help="of the studies of orders")
    parser.add_argument("--tiny", action="store_true", help="few steps of small models")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.trials = options.steps or 8, options.trials or 6
        options.scales, options.widths, options.deadline = [4, 2], [32, 64], 30.0
    elif DEVICE.type != "cuda":
        parser.error("no GPU here; --tiny runs a smoke test")
    torch.set_float32_matmul_precision("high")  # TF32, as in the convolutions
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", ps.SoloWarning)
    for part in options.part:
        began = time.perf_counter()

        def show(row: Row, part: str = part, began: float = began) -> None:
            row = {"part": part, "at": time.perf_counter() - began, **row}
            finite = {name: one for name, one in row.items() if not isinstance(one, float) or math.isfinite(one)}
            if options.json:
                print(json.dumps(finite), flush=True)
                return
            told = (f"{name} {one:.4g}" if isinstance(one, float) else f"{name} {one}" for name, one in finite.items())
            print("  ".join(one for one in told if not one.startswith(("part ", "what "))), end="  ")
            print(f"| {part}: {row['what']}", flush=True)

        try:
            for row in PARTS[part](options):
                show(row)
        except Exception as error:  # the row says why it failed, and the other parts go on
            said = str(error).strip().splitlines() or [""]
            show({"what": f"fails: {type(error).__name__}: {said[0]}"})
        show({"what": "done"})


if __name__ == "__main__":
    main()
