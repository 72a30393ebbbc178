"""A model that is trained again every night: which batch size needs the least time and energy to the same accuracy?

    python examples/recurring.py

Ten nights are looked up here rather than trained, on a simulated device that counts joules and has power limits; a task
of your own that really trains goes the same way, and ``config["recurrence"]`` tells its ``data`` the day. The first
night has the batch size that is used today. Every night the best power limit saves a little, and larger sizes are tried
with no more than that. ``penstock show nightly`` lists every run, its cost and what was staked on it.
"""

from typing import Any

import penstock as ps

EPOCHS = {32: 20, 64: 20, 128: 22, 256: 50}  # that a batch size needs; more rows in a batch are quicker, up to a point
LIMITS = {
    300.0: (280.0, 1.0),
    200.0: (195.0, 1.06),
    100.0: (99.0, 1.8),
}  # watts, and how many times as long, at each limit


def look_up(config: dict[str, Any]) -> ps.Tabulated:
    """A night's accuracy after each epoch, and the seconds of an epoch."""
    epochs = EPOCHS[config["batch_size"]] + config["recurrence"] % 2
    accuracy = [min(0.97, 0.5 + 0.47 * epoch / epochs) for epoch in range(1, 61)]
    return ps.Tabulated({"accuracy": accuracy}, seconds=10 + 2000 / config["batch_size"], limits=LIMITS)


job = ps.Recurring(
    ps.TabulatedTask(look_up),
    {"lr": 0.1},
    batch_sizes=[32, 64, 128, 256],
    default=32,
    metric="accuracy",
    target=0.97,
    max_budget=60,
    recurrences=90,
    eta=0.5,
    name="nightly",
)

if __name__ == "__main__":
    for _ in range(10):
        night = job.run(on=ps.Simulated(devices=1, watts=280.0), power="limit")
        runs = " then ".join(f"{run.size} ({run.verdict})" for run in night.runs)
        print(f"day {night.number} batch size {runs}: {night.seconds:.0f} s, {(night.joules or 0) / 1e3:.1f} kJ")
