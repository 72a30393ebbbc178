"""Stop a study and resume it: nothing is trained twice, and the result is the same as without the stop.

    penstock run examples/resume.py --deterministic

A study with an existing name goes on from its log, whether it was interrupted (try Ctrl-C, or kill -9), reached its
target or deadline, or has more trials now. Run this file twice: the second time there is nothing left to do. Nothing is
decided by measured times here, so the result is the same to the last digit.
From the shell: ``penstock resume resume``, and ``penstock resume resume --trials 36`` for more trials.
"""

from typing import Any

import torch
from torch import nn

import penstock as ps

Config = dict[str, Any]


class Sine(ps.Task):
    """Fit a sine wave."""

    batch_size = 32

    def data(self, config: Config) -> Any:
        x = torch.rand(640, 1, generator=torch.Generator().manual_seed(0)) * 6
        return (x[:512], x[:512].sin()), (x[512:], x[512:].sin())

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=config["lr"], betas=(config["beta"], 0.999))

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)


study = ps.Study(
    Sine(),
    {"lr": ps.loguniform(1e-4, 1e-1), "beta": ps.uniform(0.5, 0.99)},
    metric="loss",
    mode="min",
    algorithm=ps.SuccessiveHalving(max_budget=27),
    trials=27,
    name="resume",
)

if __name__ == "__main__":
    early = study.replace(target=0.1).run(deterministic=True)
    print(f"Stopped, {early.ended}: {sum(len(trial.curve) for trial in early.trials)} units. Best: {early.best}")
    result = study.run(deterministic=True)
    print(f"Went on, {result.ended}: {sum(len(trial.curve) for trial in result.trials)} units. Best: {result.best}")
