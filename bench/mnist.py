"""The study that bench/whole_study.py times: residual networks on MNIST, of several widths and batch sizes.

The images come from ../shared/data (or PENSTOCK_DATA). Without the file, images of noise take their place: their
content does not change the speed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import penstock as ps
from bench.networks import BasicBlock, Split
from penstock.trial import Config

HELD_OUT = 10_000


@cache
def digits() -> Split:
    """MNIST's 60,000 and 10,000 images, with values around 0."""
    folder = Path(os.environ.get("PENSTOCK_DATA") or Path(__file__).parents[2] / "shared" / "data")
    path = folder / "images" / "mnist.npz"
    if path.exists():
        file = np.load(path)
        names = ("x_train", "y_train", "x_test", "y_test")
        x, y, held_x, held_y = (torch.from_numpy(file[name]) for name in names)
    else:
        print(f"No {path}: images of noise instead.", file=sys.stderr)
        generator = torch.Generator().manual_seed(0)
        x, held_x = (torch.randint(256, (n, 28, 28), generator=generator) for n in (60_000, HELD_OUT))
        y, held_y = (torch.randint(10, (n,), generator=generator) for n in (60_000, HELD_OUT))
    return (_scaled(x), y.long()), (_scaled(held_x), held_y.long())


def _scaled(images: Tensor) -> Tensor:
    return (images.reshape(-1, 1, 28, 28).float() / 255 - 0.1307) / 0.3081


class ResidualDigits(ps.Task):
    """A residual network of three blocks in bf16."""

    precision = "bf16"
    eval_batch_size = 1_000

    def data(self, config: Config) -> Split:
        return digits()

    def model(self, config: Config) -> nn.Module:
        first = config["width"]
        widths = [first * 2**stage for stage in range(3)]
        layers: list[nn.Module] = [nn.Conv2d(1, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU()]
        for before, width in zip([first, *widths], widths, strict=False):
            layers.append(BasicBlock(before, width, 1 if width == first else 2))
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(config["dropout"]), nn.Linear(widths[-1], 10)]
        return nn.Sequential(*layers)

    def optimizer(self, params: Iterable[Parameter], config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9, weight_decay=config["decay"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, Tensor]:
        return {"accuracy": (model(batch[0]).argmax(-1) == batch[1]).float().mean()}


SPACE: dict[str, Any] = {
    "width": ps.choice([8, 16]),
    "batch_size": ps.choice([64, 128, 256]),
    "lr": ps.loguniform(1e-3, 0.3),
    "decay": ps.loguniform(1e-6, 1e-2),
    "dropout": ps.uniform(0.0, 0.5),
}
ONE_KIND = SPACE | {"width": 8, "batch_size": 128}
