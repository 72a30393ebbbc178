"""Does what is best for a narrow twin carry over, and what does that save? One part a claim.

    python bench/surrogate.py [PART …] [--json]

On one core of a CPU, in minutes each; output, characters and wide take up to half an hour beside other work:
  rates        the best learning rate by width, in the standard parametrization and in this one: MLP, SGD and Adam
  wide         likewise for a target of 2,048 and a twin of 256, by Adam
  output       the same with last layers by the table, natural, or of zeros; and slopes of the coordinate check
  seeds        what of the move at S=8 is noise, by eight seeds
  epsilon      the same with an epsilon of 0.01, with its factor and without
  ranks        Spearman's correlation of configs at S=4 and 8 with full width, beside that of another seed: MLP
  images       likewise for a CNN with BatchNorm, and its best learning rate by width
  characters   likewise for a character transformer, with scores of attention as 1/d and as the user has them
  size         figure 3: the operations and bytes of a step of ResNet-18, by scale
  cost         seconds of tracing and of the check, and their part of a study
  transfer     makespan of a study on 8 simulated devices: eager transfer, transfer at the end, and no surrogates
  shards       makespan on 8 simulated devices, of which a target takes all and a surrogate one
  models       models of torchvision and of Hugging Face: their roles, and whether the coordinate check passes

What needs a GPU is in bench/hydro.py. Needs ../shared/data (or PENSTOCK_DATA). The part models needs torchvision and
transformers, as bench/coverage.py says. It is run where it is named.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

import penstock as ps
from bench.networks import FullResNet18
from bench.twins import Characters, Digits, Images
from penstock.algorithms.spearman import spearman
from penstock.errors import PenstockError
from penstock.seeds import key
from penstock.space import Space
from penstock.surrogate import twin
from penstock.surrogate.check import coordinates, scales
from penstock.surrogate.parametrize import Part
from penstock.surrogate.task import narrowed
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.training.rates import Factor
from penstock.trial import Config

STEPS = 150
Row = dict[str, Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRIDS = {"SGD": (-4.0, 0.0), "Adam": (-11.0, -6.5)}  # powers of 2 between which learning rates are tried
CNN = (-9.5, -3.5)  # the same of the CNN, by Adam


def trained(task: ps.Task, config: Config, seed: int, cache: DataCache) -> float:
    """The mean training loss of the last steps of a trial; infinite where it diverges."""
    training = Training(task, 0, config, cache.get(config), seed=seed, device=DEVICE, metric="loss", mode="min")
    steps, losses = 0, list[float]()
    while steps < STEPS:
        for batch in training.batches():
            steps += 1
            if steps > STEPS:
                break
            losses.append(float(training.backward(batch).detach()))
            training.step_optimizer()
            training.count_step()
            if not math.isfinite(losses[-1]):
                return math.inf
    return sum(losses[-STEPS // 5 :]) / (STEPS // 5)


def best_rate(losses: Mapping[float, float]) -> float:
    """The power of 2 whose loss is least, between the tried ones by a parabola through the least three."""
    tried = sorted(losses)
    at = min(range(len(tried)), key=lambda i: losses[tried[i]])
    near = [math.log(losses[one]) if 0 < losses[one] < math.inf else math.nan for one in tried[max(0, at - 1) : at + 2]]
    if len(near) < 3 or any(map(math.isnan, near)) or near[0] - 2 * near[1] + near[2] <= 0:
        return tried[at]
    return tried[at] + 0.5 * (near[0] - near[2]) / (near[0] - 2 * near[1] + near[2]) * (tried[1] - tried[0])


def best_rates(task: ps.Task, optimizer: str, seeds: int, cache: DataCache, **more: float) -> tuple[float, list[float]]:
    """The best learning rate of a task as a power of 2: by the mean of all seeds, and by each."""
    low, high = GRIDS[optimizer]
    tried = [low + 0.5 * i for i in range(int(2 * (high - low)) + 1)]
    found = [
        {one: trained(task, {"lr": 2.0**one, "optimizer": optimizer, **more}, seed, cache) for one in tried}
        for seed in range(seeds)
    ]
    return best_rate({one: sum(by[one] for by in found) / seeds for one in tried}), [best_rate(one) for one in found]


def moves(
    make: Callable[[int], ps.Task], widths: Sequence[int], optimizer: str, what: str, seeds: int = 3, **more: float
) -> Iterator[Row]:
    """How far the best learning rate moves between the narrowest width and the widest, which is the target."""
    target = max(widths)
    cache = DataCache(make(target), 0, DEVICE)
    known = best_rates(make(target), optimizer, seeds, cache, **more)
    for ours in (False, True):
        best, each = {target: known[0]}, {target: known[1]}
        for width in sorted({*widths} - {target}, reverse=True):
            task = narrowed(make(target), ps.Surrogate(scale=target // width)) if ours else make(width)
            best[width], each[width] = best_rates(task, optimizer, seeds, cache, **more)
        told = " ".join(
            f"{width}: {one:.2f} ({min(each[width]):.2f}…{max(each[width]):.2f})" for width, one in best.items()
        )
        kind = "this one" if ours else "standard"
        yield {
            "what": f"{what}, {optimizer}, {kind}: powers of 2 {told}",
            "moves by": 2 ** abs(best[target] - best[min(widths)]),
        }


def rates(widths: Sequence[int] = (64, 128, 256, 512), seeds: int = 3) -> Iterator[Row]:
    """The learning rate whose loss is least, by width, parametrization and optimizer; the widest is the target."""
    for optimizer in ("SGD", "Adam"):
        yield from moves(Digits, widths, optimizer, "MLP", seeds)


def wide() -> Iterator[Row]:
    """The same of a wider target, by Adam: what is left of a move at 64 units is of their fewness."""
    yield from moves(Digits, (256, 2048), "Adam", "MLP")


@contextmanager
def last_layers(kind: str) -> Iterator[None]:
    """Let last layers begin with zeros, by the table, or natural: as the standard parametrization has them."""
    patched: Any = Part
    found = patched.init
    by = {"by the table": -1.0, "natural": -0.5}

    def init(part: Part) -> float:
        if kind in by and part.role == "output":
            return float(part.summed ** by[kind])
        return float(found.fget(part))

    patched.init = property(init)
    try:
        yield
    finally:
        patched.init = found


def output() -> Iterator[Row]:
    """Last layers by the table, natural and of zeros: moves at S=8, orders of configs, slopes of the check."""
    cache = DataCache(Digits(), 0, DEVICE)
    for optimizer, lr in (("SGD", 0.1), ("Adam", 1e-3)):
        target, _ = best_rates(Digits(), optimizer, 3, cache)
        tried = configs(optimizer, 40)
        full = [[trained(Digits(), one, seed, cache) for one in tried] for seed in range(3)]
        for kind in ("zeros", "by the table", "natural"):
            with last_layers(kind):
                task = narrowed(Digits(), ps.Surrogate(scale=8))
                best, _ = best_rates(task, optimizer, 3, cache)
                found = [[trained(task, one, seed, cache) for one in tried] for seed in range(3)]
                slopes = coordinates(Digits(), {"optimizer": optimizer, "lr": lr}, [1, 2, 4, 8], {})
            yield {
                "what": f"{optimizer}, last layer {kind}",
                "moves by": 2 ** abs(best - target),
                **agreement(full, found),
                "steepest slope": max(abs(one.slope) for one in slopes),
            }


@contextmanager
def tried_between(powers: tuple[float, float]) -> Iterator[None]:
    """Let Adam's learning rates lie between other powers of 2."""
    before, GRIDS["Adam"] = GRIDS["Adam"], powers
    try:
        yield
    finally:
        GRIDS["Adam"] = before


def epsilon() -> Iterator[Row]:
    """The best learning rate with an epsilon of 0.01, with its factor and without."""
    patched: Any = Part
    factor = Part.factor
    try:
        for kind in ("with its factor", "without"):
            if kind == "without":
                patched.factor = lambda part, family: Factor(factor(part, family).rate)
            with tried_between((-11.0, -4.5)):
                *_, ours = moves(Digits, (64, 512), "Adam", f"MLP, epsilon {kind}", eps=0.01)
            yield ours
    finally:
        patched.factor = factor


def seeds(count: int = 8) -> Iterator[Row]:
    """How far the best rate moves at S=8 in the mean of many seeds' own fits, and its standard error as a factor."""
    cache = DataCache(Digits(), 0, DEVICE)
    for optimizer in ("SGD", "Adam"):
        tasks = Digits(), narrowed(Digits(), ps.Surrogate(scale=8))
        full, narrow = (np.array(best_rates(task, optimizer, count, cache)[1]) for task in tasks)
        error = math.sqrt((full.var(ddof=1) + narrow.var(ddof=1)) / count)
        moved = 2 ** abs(float(full.mean() - narrow.mean()))
        yield {"what": f"MLP, {optimizer}, {count} seeds", "moves by": moved, "give or take": 2**error}


def configs(optimizer: str, count: int) -> list[Config]:
    """Configs drawn around the good ones."""
    low, high = (1e-3, 1.0) if optimizer == "SGD" else (1e-5, 1e-2)
    rng = np.random.default_rng(key(0, optimizer))
    return [
        {
            "optimizer": optimizer,
            "lr": float(np.exp(rng.uniform(math.log(low), math.log(high)))),
            "momentum": float(rng.uniform(0.5, 0.95)),
        }
        for _ in range(count)
    ]


def agreement(full: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> Row:
    """Spearman's correlation of each order with those of other seeds at full width, and each best's regret: means.

    So an order of twins is compared as one of full width is, and shares neither weights nor batches with the other.
    """
    pairs = [(one, other) for i, one in enumerate(found) for j, other in enumerate(full) if i != j]
    return {
        "spearman": float(np.mean([spearman(one, other) for one, other in pairs])),
        "regret": float(np.mean([other[int(np.argmin(one))] - min(other) for one, other in pairs])),
    }


@cache
def at_full_width(
    make: Callable[[int], ps.Task], width: int, optimizer: str, count: int, seeds: int
) -> list[list[float]]:
    """The losses of configs at full width, by each seed."""
    known = DataCache(make(width), 0, DEVICE)
    return [[trained(make(width), one, seed, known) for one in configs(optimizer, count)] for seed in range(seeds)]


def orders(
    make: Callable[[int], ps.Task], width: int, optimizer: str, count: int, seeds: int, what: str, **more: Any
) -> Iterator[Row]:
    """How well the order of configs carries over from twins at S=4 and 8; regrets are in units of the loss."""
    cache = DataCache(make(width), 0, DEVICE)
    tried = configs(optimizer, count)
    full = at_full_width(make, width, optimizer, count, seeds)
    yield {"what": f"{what}, {optimizer}: seed against seed at full width", **agreement(full, full)}
    for scale in (4, 8):
        for name, task in {
            "surrogates": narrowed(make(width), ps.Surrogate(scale=scale, **more)),
            "narrow, standard": make(width // scale),
        }.items():
            found = [[trained(task, one, seed, cache) for one in tried] for seed in range(seeds)]
            yield {"what": f"{what}, {optimizer}: {name} at S={scale}", **agreement(full, found)}


def ranks() -> Iterator[Row]:
    """The order of 40 configs of the MLP."""
    for optimizer in ("SGD", "Adam"):
        yield from orders(Digits, 512, optimizer, 40, 3, "MLP")


def images() -> Iterator[Row]:
    """The order of 24 configs of the CNN, and its best learning rate."""
    for optimizer in ("SGD", "Adam"):
        yield from orders(Images, 32, optimizer, 24, 2, "CNN")
    with tried_between(CNN):
        yield from moves(Images, (4, 8, 32), "Adam", "CNN", seeds=2)


def characters() -> Iterator[Row]:
    """The order of 24 configs of the transformer, also with other attention; and its best learning rate."""
    yield from orders(Characters, 128, "Adam", 24, 2, "transformer")
    with usual_attention():
        yield from surrogates_alone(orders(Characters, 128, "Adam", 24, 2, "transformer, scores by the root of d"))
    zeros = ("output", "query")
    yield from surrogates_alone(orders(Characters, 128, "Adam", 24, 2, "transformer, queries of zeros", zeros=zeros))
    yield from moves(Characters, (16, 32, 128), "Adam", "transformer", seeds=2)


def surrogates_alone(rows: Iterator[Row]) -> Iterator[Row]:
    return (row for row in rows if "surrogates" in row["what"])


@contextmanager
def usual_attention() -> Iterator[None]:
    """Let scores of attention be as the user has them."""
    patched: Any = twin
    found = patched.flowed
    patched.flowed = lambda *about, **how: replace(found(*about, **how), attention={})
    try:
        yield
    finally:
        patched.flowed = found


def size() -> Iterator[Row]:
    """What a step of ResNet-18 takes, of one image of 32×32; activations are what is kept for the backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    target, config = FullResNet18(), {"lr": 0.1, "momentum": 0.9}
    whole: Row = {}
    for scale in (1, 2, 4, 8, 16):
        model = (target if scale == 1 else narrowed(target, ps.Surrogate(scale=scale))).model(config)
        kept: dict[int, int] = {}
        own = {p.data_ptr() for p in model.parameters()}

        def keep(one: torch.Tensor, kept: dict[int, int] = kept, own: set[int] = own) -> torch.Tensor:
            if one.data_ptr() not in own:
                kept[one.data_ptr()] = one.nbytes
            return one

        count = FlopCounterMode(display=False)
        with count, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            loss = target.loss(model, (torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)), config)
            loss.backward()  # type: ignore[no-untyped-call]
        numbers = {
            "GFLOP": count.get_total_flops() / 2e9,
            "MB of parameters": sum(p.nbytes for p in model.parameters()) / 1e6,
            "MB of activations": sum(kept.values()) / 2e6,
        }
        whole = whole or numbers
        yield {"what": f"S={scale}", **numbers, "times fewer operations": whole["GFLOP"] / numbers["GFLOP"]}


def cost() -> Iterator[Row]:
    """Seconds of tracing and of the check, and their part of a study of 100 trials of ten minutes' worth of steps."""
    for task, lr in ((Digits(), 1e-3), (Images(), 1e-3), (Characters(), 1e-3)):
        config = {"optimizer": "Adam", "lr": lr}
        began = time.perf_counter()
        narrow = narrowed(task, ps.Surrogate(scale=8 if task.width >= 128 else 4))
        narrow.model(config)
        traced = time.perf_counter() - began
        coordinates(task, config, scales(narrow.surrogate.scale), narrow._traced)
        checked = time.perf_counter() - began - traced
        cache = DataCache(task, 0, DEVICE)
        began = time.perf_counter()
        trained(narrow, config, 0, cache)
        step = (time.perf_counter() - began) / STEPS
        study = 100 * 3000 * step
        yield {
            "what": f"{type(task).__name__}: of 100 surrogates of 3,000 steps, one after another",
            "tracing s": traced,
            "check s": checked,
            "study s": study,
            "part": (traced + checked) / study,
        }


def transfer() -> Iterator[Row]:
    """Makespan on 8 simulated devices, on which a unit at full width takes eight times a surrogate's."""

    def seconds(task: ps.Task) -> dict[str, float]:
        made = {1: task, 8: narrowed(task, ps.Surrogate(scale=8))}
        found = {}
        for scale, own in made.items():
            signature = _signature(own)
            found[signature] = 80.0 if scale == 1 else 10.0
        return found

    task = Digits(128)
    units = seconds(task)
    for name, surrogate in {
        "eager transfer": ps.Surrogate(scale=8, best=4, eager=0.5),
        "transfer at the end": ps.Surrogate(scale=8, best=4, eager=1.0),
        "no surrogates": None,
    }.items():
        with tempfile.TemporaryDirectory() as scratch:
            result = ps.Study(
                task,
                {"lr": ps.loguniform(1e-3, 1), "optimizer": "SGD"},
                metric="loss",
                mode="min",
                algorithm=ps.Random(budget=9),
                trials=27,
                surrogate=surrogate,
                dir=scratch,
            ).run(on=ps.Simulated(devices=8, unit_seconds=units, kept=False), sharing="solo", progress=False)
            yield {"what": name, "seconds": result.seconds, "best loss": result.best.metrics["loss"]}


class Sharded(Digits):
    """A target that eight devices hold together."""

    shards = 8
    unit_steps = 4  # the simulated clock does not count them


def shards() -> Iterator[Row]:
    """What surrogates save where a target takes all of 8 devices: table 2 of Hydro has 78.5 times for GPT-3 XL at S=16.

    A unit takes a target 40 s on its 8 devices. It takes a surrogate alone 5 s on one device, and 16 that are fused
    12.5 s. That is 64 times fewer device seconds, and matrices have 256 times fewer numbers: they do not fill a device.
    """
    curve = ps.Curve(sharing=tuple(1 + 0.1 * n for n in range(16)))
    target = Sharded(512)
    twin = _signature(narrowed(target, ps.Surrogate(scale=16)))
    units = {"": 40.0, twin: 5.0}  # trials in shares are not described, so they have no signature
    spent: dict[str, float] = {}
    for name, surrogate in {
        "every trial in shares": None,
        "surrogates on one device each, solo": ps.Surrogate(scale=16, best=4),
        "surrogates on one device each, fused": ps.Surrogate(scale=16, best=4),
    }.items():
        with tempfile.TemporaryDirectory() as scratch:
            result = ps.Study(
                target,
                {"lr": ps.loguniform(1e-3, 1), "optimizer": "SGD"},
                metric="loss",
                mode="min",
                algorithm=ps.Random(budget=9),
                trials=100,
                surrogate=surrogate,
                dir=scratch,
            ).run(
                on=ps.Simulated(devices=8, unit_seconds=units, curve=curve, kept=False),
                sharing="auto" if surrogate is None else name.rpartition(" ")[2],
                progress=False,
            )
        spent[name] = result.seconds
        yield {"what": name, "seconds": result.seconds, "times as fast": next(iter(spent.values())) / result.seconds}


def models() -> Iterator[Row]:
    """What becomes of models that users have at S=4, or at S=2 where that makes a layer too narrow."""
    from bench.zoo.model import Zoo
    from bench.zoo.wide import models as wide
    from penstock.surrogate.examine import examine

    for model in wide():
        space = Space.of({"lr": ps.loguniform(model.lr / 4, model.lr * 4), "decay": 0.0})
        for scale in (4, 2):
            began = time.perf_counter()
            try:
                found = examine(Zoo(model, dtype=torch.float32), space, ps.Surrogate(scale=scale))
                roles = Counter(part.role for part in found.parts.values())
                steepest = max(found.slopes, key=lambda one: abs(one.slope))
                said = f"{'failed' if found.wrong else 'passed'} at S={scale}, steepest {steepest.layer}"
                numbers: Row = {"slope": steepest.slope, **dict(roles.items())}
            except PenstockError as error:
                said, numbers = f"refused at S={scale}: {error}", {}
                if scale == 4 and "narrower than" in said:
                    continue
            took = time.perf_counter() - began
            yield {"what": f"{model.family} {model.name}: {said}", "seconds": took, **numbers}
            break


def _signature(task: ps.Task) -> str:
    from penstock.bundle import Job
    from penstock.training.worker import Worker

    with tempfile.TemporaryDirectory() as scratch:
        worker = Worker(Job(task, 0, "loss", "min", Path(scratch)), "cpu")  # type: ignore[arg-type]
        return worker.describe({"lr": 0.1, "optimizer": "SGD"}, train=False).signature or ""


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "rates": rates,
    "wide": wide,
    "output": output,
    "seeds": seeds,
    "epsilon": epsilon,
    "ranks": ranks,
    "images": images,
    "characters": characters,
    "size": size,
    "cost": cost,
    "transfer": transfer,
    "shards": shards,
    "models": models,
}
BY_HAND = ("models",)


def main(arguments: list[str]) -> None:
    wanted = [one for one in arguments if not one.startswith("--")] or [one for one in PARTS if one not in BY_HAND]
    if unknown := [one for one in wanted if one not in PARTS]:
        raise SystemExit(f"The parts are {', '.join(PARTS)}, got {', '.join(unknown)}.")
    for part in wanted:
        began = time.process_time()
        for row in PARTS[part]():
            show({"part": part, **row}, "--json" in arguments)
        show({"part": part, "what": "CPU time", "seconds": time.process_time() - began}, "--json" in arguments)


def show(row: Row, as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    numbers = "  ".join(f"{name} {one:.4g}" for name, one in row.items() if isinstance(one, int | float))
    print(f"{row['part']:9} {row['what']:70} {numbers}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
