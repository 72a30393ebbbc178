"""The tasks whose narrow twins bench/surrogate.py looks at: a perceptron, a CNN and a character transformer.

Needs ../shared/data (or PENSTOCK_DATA): images/mnist.npz and text/tinyshakespeare.txt. Each trains in seconds.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from bench.mnist import digits
from penstock.trial import Config

ROWS = 6000
CONTEXT = 32  # characters
SHAPES = {"images": (-1, 1, 14, 14), "rows": (-1, 784)}


@cache
def some_digits(shape: str) -> tuple[Tensor, Tensor]:
    """Some of MNIST's digits; the file has them grouped by class, so they are drawn. Images are halved."""
    (x, y), _ = digits()
    some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:ROWS]
    found = x[some] if shape == "rows" else F.avg_pool2d(x[some], 2)
    return found.reshape(SHAPES[shape]), y[some]


@cache
def text() -> tuple[Tensor, int]:
    """Shakespeare's characters as numbers, and how many there are."""
    folder = Path(os.environ.get("PENSTOCK_DATA") or Path(__file__).parents[2] / "shared" / "data")
    said = (folder / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    known = {one: number for number, one in enumerate(sorted(set(said)))}
    return torch.tensor([known[one] for one in said]), len(known)


class Narrowing(ps.Task):
    """A task with a width, which is tuned by learning rate and momentum."""

    batch_size = 64
    shape = "rows"

    def __init__(self, width: int) -> None:
        self.width = width

    def data(self, config: Config) -> Any:
        x, y = some_digits(self.shape)
        return (x[: ROWS * 5 // 6], y[: ROWS * 5 // 6]), (x[ROWS * 5 // 6 :], y[ROWS * 5 // 6 :])

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        momentum = config.get("momentum")
        if config["optimizer"] == "SGD":
            return torch.optim.SGD(params, lr=config["lr"], momentum=0.0 if momentum is None else momentum)
        beta = 0.9 if momentum is None else momentum
        return torch.optim.Adam(params, lr=config["lr"], betas=(beta, 0.999), eps=config.get("eps", 1e-8))

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)


class Digits(Narrowing):
    """Two hidden layers on MNIST's digits."""

    def __init__(self, width: int = 512) -> None:
        super().__init__(width)

    def model(self, config: Config) -> nn.Module:
        width = self.width
        return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class Images(Narrowing):
    """Three convolutions with BatchNorm on MNIST's digits; ``width`` channels first, then twice as many."""

    shape = "images"

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)

    def model(self, config: Config) -> nn.Module:
        layers: list[nn.Module] = []
        before = 1
        for after in (self.width, 2 * self.width, 2 * self.width):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if before != 2 * self.width else []
            before = after
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


class Characters(Narrowing):
    """A transformer of two layers and four heads that foretells the next character of Shakespeare."""

    batch_size = 16

    def __init__(self, width: int = 128) -> None:
        super().__init__(width)

    def data(self, config: Config) -> Any:
        rows = text()[0][: 4000 * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        return (rows[:3600],), (rows[3600:],)

    def model(self, config: Config) -> nn.Module:
        return Decoder(text()[1], self.width)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        (rows,) = batch
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


class Attention(nn.Module):
    """Causal attention, whose heads shrink with the width and stay as many."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.head_size).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return made


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        made: Tensor = x + self.mlp(self.after(x))
        return made


class Decoder(nn.Module):
    def __init__(self, characters: int, width: int, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(characters, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, i: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.table(i) + self.places[: i.shape[1]])))  # type: ignore[no-any-return]
