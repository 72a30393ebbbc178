"""A study on 16 simulated devices: how long would it take, and which trial would have which device when?

    python examples/simulated.py

Trials are looked up here rather than trained, so that half an hour passes in a second. The engine, the algorithms and
the schedulers are those that run on real devices. ``penstock report waterfill`` then draws the trials on each device.
"""

import math
from typing import Any

import penstock as ps


def look_up(config: dict[str, Any]) -> ps.Tabulated:
    """A trial's accuracy after each unit, and the seconds of a unit alone: wider models are better and slower."""
    ceiling = 0.95 - 0.1 * abs(math.log10(config["lr"]) + 2) - 0.2 / math.sqrt(config["width"])
    accuracy = [ceiling * (1 - math.exp(-unit / 8)) for unit in range(1, 28)]
    return ps.Tabulated({"accuracy": accuracy}, seconds=10 + config["width"] / 8)


cluster = ps.Simulated(
    devices=16,
    curve=ps.Curve(sharing=(1, 1.25), scaling=(1, 0.55, 0.4, 0.32)),  # two trials on a device take 1.25 times as long
    start=2.0,
    stop=1.0,
)
space = {"lr": ps.loguniform(1e-4, 1), "width": ps.choice([64, 128, 256, 512])}
study = ps.Study(ps.TabulatedTask(look_up), space, metric="accuracy", algorithm=ps.Hyperband(max_budget=27))

if __name__ == "__main__":
    for scheduler in ("fifo", "waterfill"):
        run = study.replace(name=scheduler)
        result = run.run(on=cluster, scheduler=scheduler, progress=False)
        end = max(row.end for row in run.timeline())
        print(f"{scheduler:10} {end / 60:5.1f} minutes, best accuracy {result.best.metrics['accuracy']:.3f}")
