"""A function task: a training loop of your own, here of a GAN, whose trials can be paused and continued.

    penstock run examples/function.py

A generator learns to draw from two bell curves against a discriminator; each has an optimizer of its own. The metric is
the distance between the generator's samples and the real ones. After every unit the function reports with a state. When
the engine wants the device, ``report`` raises ``ps.Paused``, and the next call finds that state in ``trial.state``.
"""

from typing import Any

import torch
from torch import nn

import penstock as ps

UNITS, STEPS, ROWS = 27, 50, 256


def real(rows: int) -> torch.Tensor:
    """Samples from two bell curves, around −2 and 2."""
    return torch.randn(rows, 1) * 0.3 + torch.randint(0, 2, (rows, 1)) * 4.0 - 2.0


def network(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def gan(trial: Any) -> None:
    config, device = trial.config, trial.device
    generator, critic = network(4, config["width"]).to(device), network(1, config["width"]).to(device)
    opt_g = torch.optim.Adam(generator.parameters(), lr=config["lr"], betas=(0.5, 0.99))
    opt_c = torch.optim.Adam(critic.parameters(), lr=config["lr"] * config["critic_factor"], betas=(0.5, 0.99))
    judge, yes, no = nn.BCEWithLogitsLoss(), torch.ones(ROWS, 1, device=device), torch.zeros(ROWS, 1, device=device)
    parts: dict[str, Any] = {"generator": generator, "critic": critic, "opt_g": opt_g, "opt_c": opt_c}
    done = 0
    if trial.state is not None:
        done = trial.state["unit"]
        for name, part in parts.items():
            part.load_state_dict(trial.state[name])

    for unit in range(done + 1, UNITS + 1):
        for _ in range(STEPS):
            fake = generator(torch.randn(ROWS, 4).to(device))
            loss_c = judge(critic(real(ROWS).to(device)), yes) + judge(critic(fake.detach()), no)
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
            loss_g = judge(critic(fake), yes)
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
        with torch.no_grad():  # the mean distance of sorted samples is the Wasserstein distance
            drawn, wanted = generator(torch.randn(2000, 4).to(device)).cpu(), real(2000)
            distance = (drawn.sort(0).values - wanted.sort(0).values).abs().mean()
        state = {name: part.state_dict() for name, part in parts.items()}
        trial.report(unit, state={"unit": unit, **state}, distance=distance)


study = ps.Study(
    gan,
    {"lr": ps.loguniform(1e-4, 1e-1), "critic_factor": ps.loguniform(0.2, 5), "width": ps.choice([16, 32])},
    metric="distance",
    mode="min",
    algorithm=ps.ASHA(max_budget=UNITS),
    trials=24,
)

if __name__ == "__main__":
    result = study.run()
    for row in result.best.curve:
        print(f"unit {row['budget']:2}: distance {row['distance']:.3f}")
    print(result.best)
