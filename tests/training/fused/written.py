"""A task from a model, a loss and an optimizer that a test writes, and whether its trials fused are those alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.training.fused.ways import Native
from tests.training.together import Alone, Together, Trials

ROWS, WIDTH, CLASSES = 12, 6, 3


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def sgd(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.5)


@dataclass
class Written(ps.Task):
    """Trials that differ in their learning rate, on rows of six numbers with one of three classes."""

    make: Callable[[], nn.Module]
    lost: Callable[[nn.Module, Any], torch.Tensor] = cross_entropy
    optimize: Callable[[Any, float], torch.optim.Optimizer] = sgd
    schedule: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None
    numbers: Callable[[torch.Generator], Any] = lambda g: torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)
    batch_size: int = 4
    clip_grad_norm: float | None = None
    unit_steps: int | None = None
    eval_batch_size: int = field(default=4)

    def data(self, config):
        generator = torch.Generator().manual_seed(3)
        x, y = self.numbers(generator), torch.randint(CLASSES, (ROWS,), generator=generator)
        return (x, y), (x[:4], y[:4])

    def model(self, config):
        return self.make().double()

    def optimizer(self, params, config):
        return self.optimize(params, config["lr"])

    def scheduler(self, optimizer, config):
        return self.schedule(optimizer)

    def loss(self, model, batch, config):
        return self.lost(model, batch)

    def metrics(self, model, batch, config):
        x, _ = batch
        return {"loss": model(x).double().mean()}


def fused_as_alone(task: ps.Task, steps: int = 5, count: int = 3, way: type = Native) -> Together:
    """Train trials together by one way, the last entering late; each is as if it were alone."""
    trials, together = Trials(task), Together(way)
    configs = [{"lr": 0.05 * (n + 1)} for n in range(count)]
    ours = [trials.make(n, config) for n, config in enumerate(configs)]
    together.enter(*ours[:-1]).step(2).enter(ours[-1]).step(steps - 2)
    assert together.recipe.named == way.name
    together.leave(*ours)
    for n, (one, config) in enumerate(zip(ours, configs, strict=True)):
        Alone(trials, n, config, one.step).assert_like(one, together.curve(one))
    return together
