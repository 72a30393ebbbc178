"""Studies that follow plans on simulated clouds: time and cost over those predicted, and the deadlines that are kept.

Random jobs (halving of random sizes, times, curves, clouds and deadlines, with trials ±5% and units ±10%) are planned
with 95% confidence, and each plan is followed several times, with other draws each time.

    python bench/following.py [--jobs 50] [--runs 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from statistics import fmean, stdev
from typing import Any

import penstock as ps
from penstock.log.events import Planned
from penstock.log.history import History
from penstock.log.reader import read
from penstock.planning.cloud import Cloud, Instance, Offer
from penstock.planning.draws import Draws
from penstock.planning.planner import plan
from penstock.planning.spec import Job, Times, work_of
from penstock.plans import purpose

TRIALS, UNITS = 0.05, 0.1  # deviations, as parts of the mean


def job(number: int) -> tuple[ps.Study, Job, Cloud]:
    """A random study, as a job on a random cloud."""
    draw = random.Random(number)
    reduction, rungs = draw.choice((2, 3)), draw.randint(2, 4)
    budget, trials = reduction ** (rungs - 1), draw.randint(reduction ** (rungs - 1), 40)
    seconds, widest = draw.uniform(20, 200), draw.choice((4, 8, 16))
    curve = ps.Curve.of(alpha=1.0, most=1, beta=draw.uniform(1.0, 1.15), widest=widest)
    names = [("a", 1.0, draw.uniform(5, 15)), ("b", draw.uniform(0.5, 0.9), draw.uniform(10, 25))]
    names = names[: draw.randint(1, 2)]
    task = ps.TabulatedTask(
        lambda config: ps.Tabulated(
            {"loss": [1 / (u + config["x"]) for u in range(1, budget + 1)]}, seconds, curve=curve
        )
    )
    study = ps.Study(
        task,
        {"x": ps.uniform(1, 2)},
        metric="loss",
        algorithm=ps.SuccessiveHalving(max_budget=budget, reduction=reduction),
        trials=trials,
        name=f"job {number}",
        dir=tempfile.mkdtemp(),
    )
    offers = tuple(Offer(Instance(name, name, 4, 2**34, {"on-demand": price}), "on-demand") for name, _, price in names)
    arrival, preparing = Draws(draw.uniform(1, 20), 3.0), Draws(draw.uniform(10, 60), 5.0)
    cloud = Cloud(offers, arrival=arrival, preparing=preparing, head=draw.choice((0.0, 0.5)), most=10)
    times = {
        name: (Times(Draws(seconds * faster, seconds * faster * UNITS), curve, Draws(1.0, TRIALS)),)
        for name, faster, _ in names
    }
    works, _ = work_of(study.algorithm, trials)
    return study, Job(works, times, Draws(draw.choice((0.0, 2.0, 5.0))), purpose(study)), cloud


def measure(number: int, runs: int) -> dict[str, Any]:
    """One job: each run's time and cost over those predicted, and how many keep the deadline."""
    study, asked, cloud = job(number)
    quick = plan(asked, cloud).frontier[0].seconds
    deadline = quick * random.Random(f"{number} deadline").uniform(1.1, 2.0)
    made = plan(asked, cloud, deadline=deadline)
    times, costs, kept, replanned = [], [], 0, 0
    for run in range(runs):
        one = study.replace(name=f"run {run}")
        result = one.run(ps.Simulated.of(made, seed=1000 * number + run), plan=made, progress=False)
        events = list(read(result.dir / "log.jsonl"))
        history = History.of(events)
        assert history.cost is not None
        times.append(history.clock / made.seconds)
        costs.append(history.cost / made.cost)
        kept += history.clock <= deadline
        replanned += sum(isinstance(event, Planned) for event in events) - 1
    return {
        "job": number, "stages": [stage.nodes for stage in made.stages], "times": times, "costs": costs, "kept": kept,
        "chance": made.chance, "replanned": replanned,
    }  # fmt: skip


def off(values: list[float]) -> float:
    """By how many standard errors a mean is off 1."""
    error = stdev(values) / math.sqrt(len(values))
    return (fmean(values) - 1) / error if error else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [measure(number, given.runs) for number in range(given.first, given.first + given.jobs)]
    if given.json:
        for row in rows:
            print(json.dumps(row))
        return
    print("job  time over predicted   cost over predicted   kept  planned anew  nodes")
    for row in rows:
        time, cost = fmean(row["times"]), fmean(row["costs"])
        errors = off(row["times"]), off(row["costs"])
        parts = f"{time:8.4f} ({errors[0]:+5.1f} s.e.)  {cost:8.4f} ({errors[1]:+5.1f} s.e.)"
        print(f"{row['job']:3}  {parts}  {row['kept']:3}/{given.runs}  {row['replanned']:4}          {row['stages']}")
    times, costs = [fmean(row["times"]) for row in rows], [fmean(row["costs"]) for row in rows]
    kept = sum(row["kept"] for row in rows) / (given.runs * len(rows))
    print(f"all: time {fmean(times):.4f}, cost {fmean(costs):.4f} of those predicted; {kept:.1%} of the deadlines kept")
    print(f"jobs within three standard errors: time {sum(abs(off(row['times'])) <= 3 for row in rows)}, "
          f"cost {sum(abs(off(row['costs'])) <= 3 for row in rows)} of {len(rows)}")  # fmt: skip


if __name__ == "__main__":
    main()
