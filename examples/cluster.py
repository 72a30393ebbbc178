"""A Ray cluster: the same study, with a worker on each of the cluster's devices; needs the `ray` extra.

    penstock run examples/cluster.py --on ray --workers 2

Without a cluster on this machine one is started for the study; `--on ray://host:port` joins another. Workers and whole
nodes may die: a trial then continues elsewhere from its last state, which the function saved with a report.
"""

from typing import Any

import penstock as ps


def descend(trial: Any) -> None:
    """Gradient descent on (x - 3)² + (y + 1)², with a loop of its own."""
    done, x, y, vx, vy = trial.state or (0, 0.0, 0.0, 0.0, 0.0)
    step, momentum = trial.config["step"], trial.config["momentum"]
    for epoch in range(done + 1, 28):
        vx, vy = momentum * vx - step * 2 * (x - 3), momentum * vy - step * 2 * (y + 1)
        x, y = x + vx, y + vy
        trial.report(epoch, state=(epoch, x, y, vx, vy), loss=(x - 3) ** 2 + (y + 1) ** 2)


study = ps.Study(
    descend,
    {"step": ps.loguniform(1e-3, 1), "momentum": ps.uniform(0, 0.9)},
    metric="loss",
    mode="min",
    algorithm=ps.ASHA(max_budget=27),
    trials=27,
)

if __name__ == "__main__":
    result = study.run(on="ray")
    print(result.best)
