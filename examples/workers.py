"""Worker processes: trials train side by side, one device each; without accelerators they divide the machine's cores.

    penstock run examples/workers.py --workers 2

Every trial's curve is the same as with one worker and as many threads, except for rounding where trials are fused. The
set of trials that are promoted may differ: ASHA decides by the order in which reports come in. When a worker dies, its
trials train again from their last states, and no report is lost.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import penstock as ps

Config = dict[str, Any]


class Convolutions(ps.Task):
    """A small convolutional network on scikit-learn's digits."""

    def data(self, config: Config) -> Any:
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
        return (x[:1437], y[:1437]), (x[1437:], y[1437:])

    def model(self, config: Config) -> nn.Module:
        channels = config["channels"]
        return nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(channels * 16, 10),
        )

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)


study = ps.Study(
    Convolutions(),
    {"lr": ps.loguniform(1e-3, 1), "channels": ps.choice([8, 16])},
    metric="loss",
    mode="min",
    algorithm=ps.ASHA(max_budget=9),
    trials=16,
)

if __name__ == "__main__":
    result = study.run(workers=2)
    print(result.best)
