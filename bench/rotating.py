"""MNIST rotated day by day, really trained on this CPU by ps.Recurring: `zeus`, `staked` and the default."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import penstock as ps
from bench.clusters import row

DATA = Path(os.environ.get("PENSTOCK_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
ROWS, HELD_OUT, DAYS, DEGREES = 6_000, 2_000, 30, 2.0
TARGET, MOST = 0.95, 60


@cache
def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    file = np.load(DATA / "images" / "mnist.npz")
    x, y, held, labels = (torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test"))
    return x[:ROWS].float() / 255, y[:ROWS].long(), held[:HELD_OUT].float() / 255, labels[:HELD_OUT].long()


def turned(x: Tensor, degrees: float) -> Tensor:
    """Images that are rotated about their middle."""
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = F.affine_grid(turn.expand(len(x), 2, 3), [len(x), 1, 28, 28], align_corners=False)
    return F.grid_sample(x[:, None], grid, align_corners=False).flatten(1)


class Rotated(ps.Task):
    """A perceptron on the digits of a day: each day they are rotated a little more."""

    eval_batch_size = 2_000

    def data(self, config: dict[str, Any]) -> Any:
        x, y, held, labels = images()
        degrees = DEGREES * config["recurrence"]
        return (turned(x, degrees), y), (turned(held, degrees), labels)

    def model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def optimizer(self, params: Iterable[Parameter], config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9)

    def loss(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> dict[str, Tensor]:
        return {"accuracy": (model(batch[0]).argmax(-1) == batch[1]).float().mean()}


def days() -> Iterator[dict[str, Any]]:
    """The seconds of all days under each policy, which take turns day by day, so that all see the same machine."""
    with TemporaryDirectory() as dir:
        jobs = {
            name: ps.Recurring(
                Rotated(),
                {"lr": 0.011},
                batch_sizes=[16, 32, 64, 128, 256, 512],
                default=256,
                metric="accuracy",
                target=TARGET,
                max_budget=MOST,
                recurrences=DAYS,
                policy=name,
                risk=0.05 if name == "staked" else 0.0,
                eta=0.0,
                name=name,
                dir=dir,
            )
            for name in ("default", "zeus", "staked")
        }
        for _ in range(DAYS):
            for job in jobs.values():
                job.run(progress=False)
        totals = {name: sum(one.seconds for one in job.recurrences) for name, job in jobs.items()}
        for name, job in jobs.items():
            sizes = [run.size for one in job.recurrences for run in one.runs]
            said = f"MNIST, {DAYS} days of {DEGREES:g}°: `{name}`, seconds; sizes {' '.join(map(str, sizes))}"
            goal, reached = ("", None) if name != "staked" else ("< default", totals[name] < totals["default"])
            yield row("mnist", said, totals[name], goal, reached)
            late = sum(one.seconds for one in job.recurrences[-5:]) / 5
            yield row("mnist", f"MNIST: `{name}`, seconds of each of the last five days", late)


if __name__ == "__main__":
    sys.exit("python bench/energy.py mnist")
