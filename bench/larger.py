"""The tasks of bench/hydro.py: ResNet-18 on the larger of two digits, and a character transformer.

Needs ../shared/data (or PENSTOCK_DATA): images/mnist.npz and text/tinyshakespeare.txt. Both are in bf16 on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import penstock as ps
from bench.mnist import digits
from bench.networks import Gpt, ResNet18, Split, characters
from penstock.trial import Config

PRECISION: Literal["bf16", "fp32"] = "bf16" if torch.cuda.is_available() else "fp32"
ROWS, HELD_OUT = 20_480, 2_048  # a whole number of batches of every size


@cache
def pairs(rows: int, pixels: int) -> Split:
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
    made = F.avg_pool2d(made, 32 // pixels) if pixels < 32 else made
    return (made[:rows], larger[:rows]), (made[rows:], larger[rows:])


class Larger(ResNet18):
    """ResNet-18 at a width, on the larger of two digits."""

    precision = PRECISION
    eval_batch_size = 1_024

    def __init__(self, width: int = 64, rows: int = ROWS, pixels: int = 32) -> None:
        self.width, self.rows, self.pixels = width, rows, pixels

    def data(self, config: Config) -> Split:
        return pairs(self.rows, self.pixels)


class Decoding(ps.Task):
    """A character transformer of four layers at a width, on windows of 128 characters; the validation loss is told."""

    precision = PRECISION
    eval_batch_size = 256

    def __init__(self, width: int = 256, rows: int = 7_680, layers: int = 4) -> None:
        self.width, self.rows, self.layers = width, rows, layers

    def data(self, config: Config) -> Split:
        (x, y), (held_x, held_y) = characters()
        held = min(self.rows, 512)
        return (x[: self.rows], y[: self.rows]), (held_x[:held], held_y[:held])

    def model(self, config: Config) -> nn.Module:
        return Gpt(65, 128, self.width, heads=4, layers=self.layers)

    def optimizer(self, params: Iterable[Parameter], config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=config["lr"], betas=(config["momentum"], 0.999))

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())
