"""Tune a small network on scikit-learn's digits with ASHA: 64 trials of 1 to 27 epochs.

    penstock run examples/digits.py

``make demo`` runs this file: a ``Task``, a space, and the study that ``penstock run`` looks for.
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
        width = config["width"]
        return nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Dropout(config["dropout"]),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=config["momentum"], nesterov=True)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        x, y = batch
        logits = model(x)
        return {"accuracy": (logits.argmax(-1) == y).float().mean(), "loss": F.cross_entropy(logits, y)}


study = ps.Study(
    Digits(),
    {
        "lr": ps.loguniform(1e-3, 1),
        "momentum": ps.uniform(0.1, 0.99),
        "dropout": ps.uniform(0, 0.5),
        "width": ps.choice([32, 64, 128]),
    },
    metric="accuracy",
    mode="max",
    algorithm=ps.ASHA(max_budget=27),
    trials=64,
    seed=0,
)

if __name__ == "__main__":
    result = study.run()
    print(result.best)
    print(result.best.model())
