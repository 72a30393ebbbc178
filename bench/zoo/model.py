"""A model of the zoo with everything that a study of it needs: data, loss, and what differs from trial to trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

import penstock as ps
from penstock.trial import Config

TRIALS = 4
ROWS, BATCH = 16, 6  # a unit has two whole batches and a short one
Loss = Callable[[Any, Any, Config], torch.Tensor]
Data = Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...]


def classified(model: Any, batch: Any, config: Config) -> torch.Tensor:
    """The cross entropy of a model of images or vectors; some models give several outputs."""
    x, y = batch
    made = model(x)
    if isinstance(made, Mapping):
        made = made["out"]
    return F.cross_entropy(made if isinstance(made, torch.Tensor) else made[0], y)


def own_loss(model: Any, batch: Any, config: Config) -> torch.Tensor:
    """The loss that a model of transformers gives by itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def fitted(model: Any, batch: Any, config: Config) -> torch.Tensor:
    """The mean squared error of a model's output."""
    x, y = batch
    return F.mse_loss(model(x), y)


@dataclass(frozen=True)
class Model:
    """One row of the table. ``space`` has a value for each trial, beside the learning rate and the weight decay."""

    family: str
    name: str
    make: Callable[[Config], nn.Module]
    data: Callable[[], Data]
    loss: Loss = classified
    optimizer: str = "SGD"
    lr: float = 0.02
    space: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def configs(self) -> list[Config]:
        """The config of each trial."""
        made = []
        for number in range(TRIALS):
            own = {name: values[number % len(values)] for name, values in self.space.items()}
            made.append({"lr": self.lr * (1 + number / 4), "decay": 1e-4 * number, **own})
        return made


class Zoo(ps.Task):
    """The task of a model, in float64 unless another ``dtype`` is given.

    ``change`` is applied to each batch, or to each validation batch where ``nudge`` changes initial weights instead.
    """

    batch_size = BATCH
    eval_batch_size = BATCH

    def __init__(
        self,
        model: Model,
        change: Callable[[Any], Any] | None = None,
        *,
        nudge: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.of, self.change, self.nudge, self.dtype = model, change, nudge, dtype

    def data(self, config: Config) -> tuple[Any, Any]:
        torch.manual_seed(0)
        made = self.of.data()
        if isinstance(made, Mapping):
            return {k: self._wide(v) for k, v in made.items()}, {k: self._wide(v[:BATCH]) for k, v in made.items()}
        return tuple(map(self._wide, made)), tuple(self._wide(v[:BATCH]) for v in made)

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x

    def model(self, config: Config) -> nn.Module:
        made = self.of.make(config).to(self.dtype)
        if self.nudge:
            with torch.no_grad():
                for p in filter(lambda p: not is_lazy(p), made.parameters()):
                    p.mul_(1 + torch.finfo(p.dtype).eps)  # zeros stay: an activation may begin exactly there
        return made

    def optimizer(self, params: Iterable[nn.Parameter], config: Config) -> torch.optim.Optimizer:
        lr, decay = config["lr"], config["decay"]
        if self.of.optimizer == "SGD":
            return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=decay)
        return torch.optim.AdamW(params, lr=lr, weight_decay=decay)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        if self.change is not None and not (self.nudge and model.training):
            batch = self.change(batch)
        return self.of.loss(model, batch, config)


# Data


def images(size: int = 32, classes: int = 5, channels: int = 3) -> Callable[[], Data]:
    """Random images and classes."""
    return lambda: (torch.randn(ROWS, channels, size, size), torch.randint(classes, (ROWS,)))


def vectors(width: int = 12, classes: int = 5) -> Callable[[], Data]:
    """Random vectors and classes."""
    return lambda: (torch.randn(ROWS, width), torch.randint(classes, (ROWS,)))


def sequences(length: int = 8, width: int = 6, classes: int = 5) -> Callable[[], Data]:
    """Random sequences of vectors, and classes."""
    return lambda: (torch.randn(ROWS, length, width), torch.randint(classes, (ROWS,)))


def symbols(length: int = 8, vocabulary: int = 20, classes: int = 5) -> Callable[[], Data]:
    """Random sequences of symbols, and classes."""
    return lambda: (torch.randint(1, vocabulary, (ROWS, length)), torch.randint(classes, (ROWS,)))
