"""Population based training: eight networks train side by side, and the worst go on from copies of the best.

    penstock run examples/pbt.py

Every two epochs the bottom quarter takes over the weights and optimizer state of a trial of the top quarter, with a
perturbed config. So a trial's config may change as it trains; every change is a line of the study's log.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import penstock as ps

Config = dict[str, Any]


class Population(ps.Task):
    """A network on scikit-learn's digits whose learning rate, momentum and weight decay are PBT's to change."""

    def data(self, config: Config) -> Any:
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
        return (x[:1437], y[:1437]), (x[1437:], y[1437:])

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params, lr=config["lr"], momentum=config["momentum"], weight_decay=config["weight_decay"]
        )

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)


study = ps.Study(
    Population(),
    {
        "lr": ps.loguniform(1e-4, 1),
        "momentum": ps.uniform(0, 0.99),
        "weight_decay": ps.loguniform(1e-6, 1e-2),
    },
    metric="loss",
    mode="min",
    algorithm=ps.PBT(population=8, max_budget=20, interval=2),
)

if __name__ == "__main__":
    result = study.run()
    for trial in result.trials:
        print(trial)
    print("best:", result.best)
