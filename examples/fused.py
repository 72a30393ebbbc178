"""Fused trials: many configs train as one model on one device, and each gets the same curve as alone.

    python examples/fused.py

The task has no code for fusing. By default a study measures how many trials to train together; here the same study runs
"solo" and then "fused", to compare them. The two differ by rounding only. The study computes in float64, where rounding
is so small that any other difference would show. From the shell: ``penstock run examples/fused.py --sharing fused``.
"""

import time
from typing import Any

import torch
from torch import nn

import penstock as ps

Config = dict[str, Any]


class Waves(ps.Task):
    """Fit a sum of waves; trials differ in the optimizer, its schedule and the dropout."""

    batch_size = 32

    def data(self, config: Config) -> Any:
        x = torch.rand(640, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
        y = x.sin().sum(1, keepdim=True)
        return (x[:512], y[:512]), (x[512:], y[512:])

    def model(self, config: Config) -> nn.Module:
        layers = nn.Linear(4, 32), nn.Tanh(), nn.Dropout(config["dropout"]), nn.Linear(32, 1)
        return nn.Sequential(*layers).double()

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=config["lr"], weight_decay=config["decay"])

    def scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, config["patience"], gamma=0.5)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)


study = ps.Study(
    Waves(),
    {
        "lr": ps.loguniform(1e-4, 1e-1),
        "decay": ps.loguniform(1e-6, 1e-2),
        "dropout": ps.uniform(0, 0.3),
        "patience": ps.randint(1, 6),
    },
    metric="loss",
    mode="min",
    algorithm=ps.SuccessiveHalving(max_budget=9),
    trials=64,
)


def run(sharing: str) -> tuple[float, ps.Result]:
    """The seconds that the study takes, and its result."""
    began = time.perf_counter()
    result = study.run(sharing=sharing)
    return time.perf_counter() - began, result


if __name__ == "__main__":
    (alone, solo), (together, fused) = run("solo"), run("fused")
    print(f"Solo:  {alone:5.2f} s. Best: {solo.best}")
    print(f"Fused: {together:5.2f} s. Best: {fused.best}")
    reports = [
        (row["loss"], other["loss"])
        for one, twin in zip(solo.trials, fused.trials, strict=True)
        for row, other in zip(one.curve, twin.curve, strict=True)
    ]
    farthest = max(abs(loss - other) for loss, other in reports)
    print(f"The curves agree: of {len(reports)} reports, no two losses differ by more than {farthest:.1g}.")
