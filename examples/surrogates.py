"""Tune a network by twins a quarter as wide, and train the best of their configs at full width.

    penstock run examples/surrogates.py

The best hyperparameters of a narrow network carry over to a wide one, if initial values and learning rates are scaled
as maximal-update parametrization has it. ``penstock surrogate`` shows the twin before anything is spent.
"""

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import penstock as ps

Config = dict[str, Any]


class Digits(ps.Task):
    """Handwritten digits, 8 by 8 pixels; a fifth of them, by other writers, are for validation."""

    def data(self, config: Config) -> Any:
        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32) / 16
        y = torch.tensor(labels)
        return (x[:1437], y[:1437]), (x[1437:], y[1437:])

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=config["lr"], betas=(config["beta"], 0.999))

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        x, y = batch
        logits = model(x)
        return {"accuracy": (logits.argmax(-1) == y).float().mean(), "loss": F.cross_entropy(logits, y)}


study = ps.Study(
    Digits(),
    {"lr": ps.loguniform(1e-5, 1e-1), "beta": ps.uniform(0.8, 0.99)},
    metric="loss",
    mode="min",
    algorithm=ps.ASHA(max_budget=9),
    trials=24,
    surrogate=ps.Surrogate(scale=4),
)

if __name__ == "__main__":
    result = study.run()
    print(f"Best at full width: {result.best.metrics['accuracy']:.3f} with {result.best.config}")
