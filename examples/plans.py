"""A study that follows a plan: the cheapest nodes that keep a deadline, rehearsed on a simulated cloud.

    python examples/plans.py

Trials are looked up, so that the hour passes in a second. The second run meets units that take half as long again as
planned: the rest is planned anew, and the deadline is kept. On an autoscaler's cluster, ``on="ray"`` does the same.
"""

import math
from typing import Any

import penstock as ps

CURVE = ps.Curve(scaling=(1, 0.55, 0.4, 0.32))  # the time of a unit on 1, 2, 3, 4 devices


def task(seconds: float) -> ps.TabulatedTask:
    """Trials whose units take so many seconds on one device."""

    def look_up(config: dict[str, Any]) -> ps.Tabulated:
        ceiling = 0.95 - 0.1 * abs(math.log10(config["lr"]) + 2)
        return ps.Tabulated(
            {"accuracy": [ceiling * (1 - math.exp(-u / 8)) for u in range(1, 28)]}, seconds, curve=CURVE
        )

    return ps.TabulatedTask(look_up)


study = ps.Study(
    task(90),
    {"lr": ps.loguniform(1e-4, 1)},
    metric="accuracy",
    algorithm=ps.SuccessiveHalving(max_budget=27),
    trials=27,
    name="planned",
)

if __name__ == "__main__":
    plan = study.plan(deadline="45m", instances=["p3.8xlarge"])
    for stage in plan.stages:
        print(
            f"{stage.trials:3} trials to {stage.budget:2} units on {stage.nodes} nodes, {stage.devices:g} devices each"
        )
    print(f"planned:    {plan.seconds / 60:4.1f} minutes, {plan.cost:5.2f} {plan.currency}")
    for name, seconds in (("as planned", 90), ("slower", 135)):
        cloud = ps.Simulated.of(plan, speeds={"v100": 90 / seconds})
        result = study.replace(name=name).run(on=cloud, plan=plan, progress=False)
        print(f"{name + ':':11} {result.seconds / 60:4.1f} minutes, {result.cost:5.2f} {plan.currency}")
