"""Packs: trials of other networks, optimizers and batch sizes on one device, each with the same curve as alone.

    penstock run examples/packed.py --sharing packed

Trials that are alike are fused inside the pack, and the others train beside them. On a GPU each has a stream of its
own; on a CPU they take turns. By default a study packs only where that is measured to pay.
"""

from typing import Any

import torch
from torch import nn

import penstock as ps

Config = dict[str, Any]


class Waves(ps.Task):
    """Fit a sum of waves; trials differ in the width, the activation, the optimizer and the batch size."""

    def data(self, config: Config) -> Any:
        x = torch.rand(640, 4, generator=torch.Generator().manual_seed(0)) * 3
        y = x.sin().sum(1, keepdim=True)
        return (x[:512], y[:512]), (x[512:], y[512:])

    def model(self, config: Config) -> nn.Module:
        activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[config["activation"]]()
        return nn.Sequential(nn.Linear(4, config["width"]), activation, nn.Linear(config["width"], 1))

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        if config["optimizer"] == "adam":
            return torch.optim.Adam(params, lr=config["lr"])
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, batch, config)}


study = ps.Study(
    Waves(),
    {
        "lr": ps.loguniform(1e-3, 1e-1),
        "width": ps.choice([16, 32, 64]),
        "activation": ps.choice(["tanh", "relu"]),
        "optimizer": ps.choice(["adam", "sgd"]),
        "batch_size": ps.choice([16, 32, 64]),
    },
    metric="loss",
    mode="min",
    algorithm=ps.ASHA(max_budget=9),
    trials=16,
)


if __name__ == "__main__":
    result = study.run(sharing="packed")
    print(result.best.config, result.best.metrics)
