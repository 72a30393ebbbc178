"""Small networks for bench/packing.py: six trials of each on one device, whole studies against eager steps.

depthwise    depthwise-separable convolutions over 3×16×16 images
transformer  2 layers of torch's own encoder over 16 tokens, with dropout
gru          torch's GRU over 16 tokens
residual     two residual blocks

A unit is an epoch of 151 batches, 150 of 40 rows and one of 10; a trial trains 4 units and is evaluated after each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import penstock as ps
from bench.networks import BasicBlock, Split, convolution
from bench.whole import Clock, Row, Whole, attempted, by_hand, differs, whole
from penstock.trial import Config

TRIALS, UNITS, BATCH, ROWS = 6, 4, 40, 6_010
GOAL = 8.0  # times the steps of a study that captures nothing
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Tokens(nn.Module):
    """The rows of an image as tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)


class Last(nn.Module):
    """The last of a recurrent network's outputs."""

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0][:, -1]


class First(nn.Module):
    """The first token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def depthwise() -> nn.Module:
    layers, inside = convolution(3, 16, 3), 16
    for outside in (32, 64):
        layers += convolution(inside, inside, 3, 2, groups=inside) + convolution(inside, outside, 1)
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(Tokens(), nn.Linear(48, 32), encoder, First(), nn.Linear(32, 10))


def gru() -> nn.Module:
    return nn.Sequential(Tokens(), nn.GRU(48, 64, batch_first=True), Last(), nn.Linear(64, 10))


def residual() -> nn.Module:
    layers = [*convolution(3, 16, 3), BasicBlock(16, 16, 1), BasicBlock(16, 32, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "depthwise": depthwise,
    "transformer": transformer,
    "gru": gru,
    "residual": residual,
}


@cache
def small_images(dtype: torch.dtype, rows: int) -> Split:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (rows + 600,), generator=generator)
    means = torch.randn(10, 3, 16, 16, generator=generator)
    x = (means[y] / 4 + torch.randn(len(y), 3, 16, 16, generator=generator)).to(dtype)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


class Small(ps.Task):
    batch_size = BATCH

    def __init__(self, network: str, dtype: str, rows: int = ROWS) -> None:
        self.network, self.dtype, self.rows = network, dtype, rows

    def data(self, config: Config) -> Split:
        return small_images(DTYPES[self.dtype], self.rows)

    def model(self, config: Config) -> nn.Module:
        return NETWORKS[self.network]().to(DTYPES[self.dtype])

    def optimizer(self, params: Iterable[Parameter], config: Config) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(model(batch[0]), batch[1])}


class Smoothed(Small):
    """Each trial has a label smoothing of its own."""

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=config["smoothing"])


SPACE = {"lr": ps.loguniform(3e-4, 1e-2)}
SMOOTHING = {"smoothing": ps.uniform(0.0, 0.2)}


def rows(networks: Sequence[str], dtypes: Sequence[str], clock: Clock, deadline: float, tiny: bool) -> Iterator[Row]:
    """Of each case: by hand and eager, one trial that counts as six; then six trials, solo, fused and auto."""
    size, units = (50, 2) if tiny else (ROWS, UNITS)
    for dtype in dtypes:
        for smoothed in (False, True):
            for network in networks:
                if clock.over():
                    continue
                task = (Smoothed if smoothed else Small)(network, dtype, size)
                yield from case(task, {"part": "small", "case": name(task)}, units, deadline)


def name(task: Small) -> str:
    return f"{task.network} {task.dtype}" + (" smoothed" if isinstance(task, Smoothed) else "")


def case(task: Small, row: Row, units: int, deadline: float) -> Iterator[Row]:
    space = {**SPACE, **SMOOTHING} if isinstance(task, Smoothed) else SPACE
    steps = TRIALS * units * -(-task.rows // BATCH)

    def hand() -> Row:
        config = {"lr": 1e-3, "smoothing": 0.1}
        warm = copy.copy(task)
        warm.rows = 2 * BATCH
        by_hand(warm, config, 1)
        seconds = TRIALS * by_hand(task, config, units)
        return {"seconds": seconds, "rate": steps / seconds, "note": f"one trial, times {TRIALS}"}

    yield (found := attempted({**row, "way": "by hand"}, hand))
    reference, solo = found.get("rate"), list[Whole]()

    def study(sharing: str, trials: int = TRIALS, **how: Any) -> Row:
        ran = whole(task, space, ps.Random(budget=units), trials=trials, deadline=deadline, sharing=sharing, **how)
        times = TRIALS / trials
        seconds = ran.seconds + (times - 1) * sum(report.usage.device_seconds for report in ran.reports)
        rate = times * ran.steps / seconds
        figures: Row = {"seconds": seconds, "rate": rate, "note": ran.note, "memory": ran.memory}
        if trials < TRIALS:
            return {**figures, "times": 1.0, "note": f"{ran.note}, times {TRIALS}"}
        solo.append(ran)
        gain = rate / reference if reference else None
        reached = ran.complete and gain is not None and gain >= GOAL
        figures |= {"differs": differs(ran, solo[0]), "times": gain}
        return figures if sharing == "solo" else {**figures, "reached": reached}

    plain = partial(study, "solo", 1, deterministic=True)  # captures and compiles nothing
    yield (found := attempted({**row, "way": "eager"}, plain))
    reference = found.get("rate") or reference
    for sharing in ("solo", "fused", "auto"):
        goal = None if sharing == "solo" else False  # not reached yet
        yield attempted({**row, "way": sharing, "reached": goal}, partial(study, sharing))
