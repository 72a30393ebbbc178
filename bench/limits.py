"""Power limits on Zeus's traces: what a short search saves of what trying all would, and how far off the model is.

    python bench/limits.py [--trials 16] [--minutes 10]

Each row of the traces (V100, A40: job, batch size, optimizer) is a job with the seconds and the power at each limit.
"all" is the saving of cost (eq. 2) by the best of all limits, against no limit. "search" tries four limits and the
neighbours of the best, as a study that limits power does where little training is certain. "model" is what observing
foresees from the draw without a limit alone: its true saving, and the jobs that it would make costlier. The model's
constants were fitted to these traces.

"overhead" is what a study pays for its profile: --trials of --minutes each on one device, of one signature, share one
search. Its slices of five seconds are training; what they cost beyond the limit that is found counts, in percent of the
study's cost at that limit. "alone" is that of a study of one such trial.

Needs ../shared/data/systems/zeus (or PENSTOCK_DATA).
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from penstock.energy.cost import Draw, Objective
from penstock.energy.power import BELOW, SLICE, Search, estimate, foreseen

FOLDER = Path(os.environ.get("PENSTOCK_DATA") or Path(__file__).parents[2] / "shared" / "data") / "systems" / "zeus"
WHAT = ("dataset", "network", "batch_size", "optimizer")


def jobs() -> list[dict[float, Draw]]:
    found: defaultdict[tuple[str, ...], dict[float, Draw]] = defaultdict(dict)
    for gpu in ("v100", "a40"):
        with open(FOLDER / f"summary_power_{gpu}.csv", newline="") as file:
            for row in csv.DictReader(file):
                draw = Draw(float(row["time_per_epoch"]), float(row["average_power"]))
                found[gpu, *(row[name] for name in WHAT)][float(row["power_limit"])] = draw
    return list(found.values())


def searched(job: dict[float, Draw], objective: Objective) -> Search:
    search = Search(objective, sorted(job, reverse=True), certain=0.0)
    while (limit := search.next()) is not None:
        search.tried[limit] = job[limit]
    return search


def overhead(job: dict[float, Draw], objective: Objective, minutes: float, trials: int) -> float:
    """The cost of the slices beyond the same training at the limit that they find, as a part of the study's cost."""
    search = Search(objective, sorted(job, reverse=True), certain=60 * minutes)
    beyond = 0.0
    spent = list[float]()
    while (limit := search.next()) is not None:
        search.tried[limit] = job[limit]
        spent.append(limit)
    best = objective.unit_cost(job[search.best])
    for limit in spent:
        units = SLICE / job[limit].seconds
        beyond += units * (objective.unit_cost(job[limit]) - best)
    whole = trials * 60 * minutes / job[max(job)].seconds * best
    return beyond / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args()
    known = jobs()
    print(f"{len(known)} jobs; savings of cost in percent")
    print(f"{'eta':>5}{'all':>8}{'search':>8}{'tried':>8}{'model':>8}{'costlier':>10}{'worst':>8}")
    for eta in (0.25, 0.5, 0.75, 1.0):
        best, short, tried, model = list[float](), list[float](), list[float](), list[float]()
        for job in known:
            most = max(job)
            objective, none = Objective(eta, most), job[most]
            cost = objective.unit_cost(none)
            search = searched(job, objective)
            found = foreseen(none.watts, sorted(job), objective)
            best.append(1 - objective.epoch_cost(job) / cost)
            short.append(1 - objective.unit_cost(job[search.best]) / cost)
            tried.append(len(search.tried) / len(job))
            model.append(1 - objective.unit_cost(job[found.limit]) / cost)
        costlier = [one for one in model if one < -1e-4]
        print(
            f"{eta:5}{fmean(best):8.1%}{fmean(short):8.1%}{fmean(tried):8.0%}{fmean(model):8.1%}{len(costlier):10}"
            f"{min(costlier, default=0.0):8.1%}"
        )
    print(f"\noverhead of a profile, {given.trials} trials of {given.minutes:g} minutes; the goal is below 1%")
    print(f"{'eta':>5}{'mean':>8}{'worst':>8}{'alone':>8}{'worst':>8}")
    for eta in (0.0, 0.25, 0.5, 0.75, 1.0):
        each = [
            [overhead(job, Objective(eta, max(job)), given.minutes, trials) for job in known]
            for trials in (given.trials, 1)
        ]
        print(f"{eta:5}" + "".join(f"{fmean(some):8.2%}{max(some):8.2%}" for some in each))
    print("\nthe model's error (root mean square) by the part of the draw that a limit leaves")
    errors: defaultdict[float, list[tuple[float, float]]] = defaultdict(list)
    for job in known:
        most = max(job)
        for limit, draw in job.items():
            if limit < most and (part := limit * BELOW / job[most].watts) < 1:
                one, none = estimate(job[most].watts, limit, most), job[most]
                errors[math.floor(part * 10) / 10].append(
                    (one.seconds * none.seconds / draw.seconds - 1, one.joules * none.joules / draw.joules - 1)
                )
    for part, some in sorted(errors.items()):
        seconds, joules = (math.sqrt(fmean(error[i] ** 2 for error in some)) for i in (0, 1))
        print(f"{part:5.1f}{len(some):6} limits  seconds {seconds:6.1%}  joules {joules:6.1%}")


if __name__ == "__main__":
    main()
