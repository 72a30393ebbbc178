"""Any Optuna sampler with any algorithm that draws: here TPE with ASHA, over a define-by-run space.

    penstock run examples/samplers.py

The space is a function of an Optuna trial, so later parameters may depend on earlier ones: a width for each layer, and
a momentum only for SGD. The sampler knows which trials run, and learns from the deepest report of each.
"""

from itertools import pairwise
from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

import penstock as ps

Config = dict[str, Any]


def space(trial: Any) -> Config:
    trial.suggest_float("lr", 1e-4, 1, log=True)
    if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "sgd":
        trial.suggest_float("momentum", 0, 0.99)
    layers = trial.suggest_int("layers", 1, 3)
    return {"widths": [trial.suggest_int(f"width_{i}", 16, 128, log=True) for i in range(layers)]}


class Layers(ps.Task):
    """A network on scikit-learn's digits with as many layers as the config says."""

    def data(self, config: Config) -> Any:
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
        return (x[:1437], y[:1437]), (x[1437:], y[1437:])

    def model(self, config: Config) -> nn.Module:
        sizes = [64, *config["widths"]]
        hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        if config["optimizer"] == "adam":
            return torch.optim.Adam(params, lr=config["lr"])
        return torch.optim.SGD(params, lr=config["lr"], momentum=config["momentum"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)


study = ps.Study(
    Layers(),
    space,
    metric="loss",
    mode="min",
    algorithm=ps.ASHA(max_budget=9),
    sampler=optuna.samplers.TPESampler(),
    trials=40,
)

if __name__ == "__main__":
    result = study.run()
    print(result.best)
