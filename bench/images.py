"""The task that bench/elastic.py trains, and the times of its steps."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.trial import Config

Row = dict[str, Any]
Steps = list[tuple[float, float, int]]  # when each step began and ended, and its process
CONFIG: Config = {"lr": 0.01, "momentum": 0.9}


class Images(ps.Task):
    """A small convolutional network on generated images, in batches of 64.

    ``times`` is the folder where the times of its steps are written; ``hidden`` sets the number of parameters.
    """

    batch_size = 64
    eval_batch_size = 64

    def __init__(
        self, times: str | None = None, hidden: int = 32, dtype: torch.dtype = torch.float32, count: int = 512
    ) -> None:
        self.times, self.hidden, self.dtype, self.count = times, hidden, dtype, count

    def data(self, config: Config) -> Any:
        random = torch.Generator().manual_seed(0)
        y = torch.randint(0, 10, (self.count + 64,), generator=random)
        x = torch.randn(self.count + 64, 3, 16, 16, generator=random) + y[:, None, None, None] / 10
        x = x.to(self.dtype)
        return (x[64:], y[64:]), (x[:64], y[:64])

    def model(self, config: Config) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(1024, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10)).to(
            self.dtype
        )

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        if self.times is None:
            return torch.optim.SGD(params, lr=config["lr"], momentum=config["momentum"])
        return Timed(params, config, Path(self.times))

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        Timed.began = time.monotonic()
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y)}


class Timed(torch.optim.SGD):
    """SGD that writes down when each training step began and ended."""

    began = 0.0

    def __init__(self, params: Any, config: Config, folder: Path) -> None:
        super().__init__(params, lr=config["lr"], momentum=config["momentum"])
        self.file = folder / str(os.getpid())

    def step(self, closure: Any = None) -> Any:
        made = super().step(closure)
        with self.file.open("ab") as file:
            file.write(struct.pack("dd", Timed.began, time.monotonic()))
        return made


def taken(folder: Path, since: float = 0.0) -> Steps:
    """The steps that began after the instant ``since``, in the order of their beginnings."""
    steps = []
    for file in folder.iterdir():
        if file.name.isdecimal():
            whole = file.read_bytes()
            steps += [(*one, int(file.name)) for one in struct.iter_unpack("dd", whole[: len(whole) // 16 * 16])]
    return sorted((began, ended, pid) for began, ended, pid in steps if began > since)


def row(bench: str, what: str, value: float, goal: str = "", reached: bool | None = None) -> Row:
    return {"bench": bench, "what": what, "value": value, "goal": goal, "reached": reached}
