"""Which batch size and power limit cost least: Zeus's traces replayed with the policies that users' jobs run.

    python bench/energy.py [--json] [--seeds N] [--jobs N] [--potential] [reference] [staked] [unseen] [drift]
                           [misjudged] [translated] [search] [sweeps] [ablation] [overlap] [job] [mnist]

potential   how much the best size, the best limit, and both save; the front of time and energy (figures 1, 2, 15–18)
reference   the total cost of `zeus` at η = ½ beside that of Zeus's public simulator on the same traces
staked      `staked` and `zeus` against the default at every η, with risk 0 and 0.01; regret and last five at η = ½
unseen      the same on jobs and devices drawn by a seed (--jobs of them, 40 unless told)
drift       from halfway on sizes below, or above, the middle need three times the epochs; windows of 10
misjudged   `recurrences` believed to be twice, or half, as many as they are
translated  what was learned on the other device, with the costs of this one (§7)
search      energy and time of the last five, regret, and the path of the search (figures 6–8, 19–21)
sweeps      η from 0 to 1 and β from 1.5 to 5: energy and time against the default (figures 11, 14, 22, 23)
ablation    `zeus` without early stopping, without pruning, without profiling in time (figures 12, 13), and `staked`
            without slopes
overlap     recurrences that are submitted at random times, whatever still runs (§4.4, §6.3)
job         the trace of DeepSpeech2 through ps.Recurring on a simulated device
mnist       MNIST, rotated by two degrees a day, really trained on this CPU: `zeus`, `staked` and the default (minutes)

All but mnist run unless some are named. Costs are eq. 2's. "Points" are parts in a hundred of what the default costs at
the greatest limit in all, as exact means of the traces have it; "above the default" is beside its own replay, seed by
seed. Every recurrence count is 2·|B|·|P|, β is 2, and 20 seeds make a mean. Needs ../shared/data (or PENSTOCK_DATA).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, inf, log
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

os.environ["PENSTOCK_OBSERVE_ONLY"] = "1"  # before anything can set a device's limit
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import penstock as ps
from bench.clusters import row
from bench.recurring import GPUS, JOBS, PLAIN, Outcome, Setting, Trace, drawn_job, pairs, simulate, trace
from bench.scheduling import show
from penstock.energy import epochs
from penstock.energy.batch_size import Choice, Default, Grid, Past, Policy, Run, Terms
from penstock.energy.cost import Draw, front
from penstock.energy.staked import Staked
from penstock.energy.zeus import Zeus

Row = dict[str, Any]
ETAS = (0.0, 0.25, 0.5, 0.75, 1.0)
REFERENCE = {  # the total cost of Zeus's public simulator, in points above the default's
    "v100": (-53.7, 0.5, -6.3, -26.3, -61.1, -3.1),
    "a40": (-57.1, -0.8, -1.6, -58.8, -57.8, 4.5),
}
SLACK = 0.02  # points of profiling


def points(made: Trace, done: Outcome, eta: float) -> float:
    return 100 * (done.total / (made.default_mean(eta) * len(done.costs)) - 1)


def regret(made: Trace, done: Outcome, eta: float) -> float:
    """The cost beyond the best size's (eq. 8), in runs of the best size."""
    return done.total / made.best(eta) - len(done.costs)


def last_five(made: Trace, done: Outcome, eta: float) -> float:
    """The cost of the last five recurrences beyond the best size's, in points; a size's cost is its mean."""
    late = [run for run in done.runs if run.recurrence >= len(done.costs) - 5]
    cost = sum(made.mean(run.size, eta) if run.reached else run.cost for run in late)
    return 100 * (cost / 5 - made.best(eta)) / made.default_mean(eta)


def deviation(values: Sequence[float]) -> float:
    """The standard error of a mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Seen:
    """A policy on a job, over the seeds: points, their standard error, regret and last five.

    ``above`` are the points above the default's own replay with the same seed, which draws as many epochs until a
    policy tries another size.
    """

    points: float
    error: float
    regret: float
    last: float
    above: float
    above_error: float


def seen(made: Trace, policy: Policy, eta: float, seeds: int, how: Setting = PLAIN) -> Seen:
    done = [simulate(made, policy, eta, seed, how) for seed in range(seeds)]
    costs = [points(made, one, eta) for one in done]
    usual = made.terms(eta).default_cost / made.unit_cost(made.default, eta)  # the replay has the best limit
    plain = [points(made, simulate(made, Default(), eta, seed, how), eta) for seed in range(seeds)]
    beyond = [one - (usual * (100 + other) - 100) for one, other in zip(costs, plain, strict=True)]
    return Seen(
        fmean(costs),
        deviation(costs),
        fmean(regret(made, one, eta) for one in done),
        fmean(last_five(made, one, eta) for one in done),
        fmean(beyond),
        deviation(beyond),
    )


def _seen(task: tuple[Trace, Policy, float, int, Setting]) -> Seen:
    return seen(*task)


class Bench:
    """The parts of the bench; each gives rows."""

    def __init__(self, seeds: int, jobs: int) -> None:
        self.seeds, self.jobs = seeds, jobs
        self._pool = ProcessPoolExecutor(os.cpu_count())

    def all(self, jobs: Sequence[Trace], policy: Policy, eta: float, how: Setting = PLAIN) -> list[Seen]:
        return list(self._pool.map(_seen, [(one, policy, eta, self.seeds, how) for one in jobs]))

    def potential(self) -> Iterator[Row]:
        for made in pairs():
            energy: dict[tuple[int, float], Draw] = {}
            for size, draws in made.draws.items():
                reached = [e for e in made.epochs[size] if e is not None and e <= made.max_budget]
                if 2 * len(reached) > len(made.epochs[size]):
                    for limit, draw in draws.items():
                        energy[size, limit] = Draw(fmean(reached) * draw.seconds, draw.watts)
            top = max(made.limits)
            default = energy[made.default, top].joules
            ways = {
                "size": min(d.joules for (_, limit), d in energy.items() if limit == top),
                "limit": min(d.joules for (size, _), d in energy.items() if size == made.default),
                "both": min(d.joules for d in energy.values()),
            }
            for way, joules in ways.items():
                yield row(
                    "potential", f"{made.name}: energy of the best {way}, % of the default's", 100 * joules / default
                )
            best = front(energy.values())
            names = [next(f"{size}@{limit:g}W" for (size, limit), d in energy.items() if d == one) for one in best]
            yield row("potential", f"{made.name}: configs on the front: {' '.join(names)}"[:96], len(best))

    def reference(self) -> Iterator[Row]:
        for gpu in GPUS:
            jobs = [trace(job, gpu) for job in JOBS]
            for made, found, told in zip(jobs, self.all(jobs, Zeus(), 0.5), REFERENCE[gpu], strict=True):
                said = f"{made.name}: total of `zeus`, points, ±{found.error:.2f}; the reference has {told}"
                yield row("reference", said, found.points, "±1 of it", abs(found.points - told) <= 1)

    def staked(self) -> Iterator[Row]:
        jobs, best = pairs(), None
        for eta in ETAS:
            zeus, found = self.all(jobs, Zeus(), eta), self.all(jobs, Staked(), eta)
            risky = self.all(jobs, Staked(risk=0.01), eta)
            optimum = fmean(100 * (one.best(eta) / one.default_mean(eta) - 1) for one in jobs)
            yield row("staked", f"η={eta}: the best sizes and limits, mean of 12 pairs, points", optimum)
            yield row("staked", f"η={eta}: `zeus`, mean", fmean(one.points for one in zeus))
            yield row("staked", f"η={eta}: `zeus`, pairs above the default", sum(one.points > 0 for one in zeus))
            yield row("staked", f"η={eta}: `staked`, mean", fmean(one.points for one in found))
            beyond = [one.above - 2 * one.above_error - SLACK for one in found]
            worst = max(range(len(jobs)), key=lambda i: beyond[i])
            shown = f"{found[worst].above:.2f} ±{found[worst].above_error:.2f}"
            said = f"η={eta}: `staked`, worst beyond two errors: {jobs[worst].name}, {shown}"
            yield row("staked", said, beyond[worst], "≤ 0", beyond[worst] <= 0)
            mean = fmean(one.points for one in risky)
            goal = fmean(one.points for one in zeus)
            yield row("staked", f"η={eta}: `staked`, risk 0.01, mean", mean, f"< {goal:.2f}", mean < goal)
            worst = max(range(len(jobs)), key=lambda i: risky[i].above)
            said = f"η={eta}: `staked`, risk 0.01, worst: {jobs[worst].name} ±{risky[worst].above_error:.2f}"
            most = risky[worst].above
            yield row("staked", said, most, "≤ 1", most - 2 * risky[worst].above_error - SLACK <= 1)
            best = (zeus, found) if eta == 0.5 else best
        assert best is not None
        zeus, found = best
        for made, theirs, ours in zip(jobs, zeus, found, strict=True):
            more = f"regret {ours.regret:.1f}, {theirs.regret:.1f}; last five {ours.last:.1f}, {theirs.last:.1f}"
            said = f"{made.name}: `staked` ±{ours.error:.2f}, `zeus` {theirs.points:.1f}; {more}"
            yield row("staked", said, ours.points)
        lost, goal = fmean(one.regret for one in found), fmean(one.regret for one in zeus)
        said = f"η=0.5: regret of `staked`, {lost:.2f} runs, over that of `zeus`, {goal:.2f}"
        yield row("staked", said, lost / goal, "≤ 0.6", lost / goal <= 0.6)
        near = sum(one.last <= 1 for one in found)
        yield row("staked", "η=0.5: pairs whose last five are within a point of the best cost", near, "≥ 9", near >= 9)
        yield row("staked", "η=0.5: the same of `zeus`", sum(one.last <= 1 for one in zeus))

    def unseen(self) -> Iterator[Row]:
        jobs = [drawn_job(seed) for seed in range(self.jobs)]
        for eta in ETAS:
            zeus, found = self.all(jobs, Zeus(), eta), self.all(jobs, Staked(), eta)
            risky = self.all(jobs, Staked(risk=0.01), eta)
            mean, goal = fmean(one.points for one in risky), fmean(one.points for one in zeus)
            yield row("unseen", f"η={eta}: `zeus`, mean; regret {fmean(o.regret for o in zeus):.1f}", goal)
            yield row("unseen", f"η={eta}: `zeus`, the most above the default", max(one.points for one in zeus))
            said = f"η={eta}: `staked`, mean; regret {fmean(o.regret for o in found):.1f}"
            yield row("unseen", said, fmean(one.points for one in found))
            above = [one for one in found if one.above - 2 * one.above_error > SLACK]
            yield row(
                "unseen",
                f"η={eta}: `staked`, jobs above the default beyond two errors",
                len(above),
                "≤ 1 in 40",
                len(above) <= self.jobs / 40,
            )
            yield row("unseen", f"η={eta}: `staked`, the most above the default", max(one.above for one in found))
            said = f"η={eta}: `staked`, risk 0.01, mean; regret {fmean(o.regret for o in risky):.1f}"
            yield row("unseen", said, mean, f"< {goal:.2f}", mean < goal)
            above = [one for one in risky if one.above - 2 * one.above_error > 1 + SLACK]
            yield row(
                "unseen",
                f"η={eta}: `staked`, risk 0.01, jobs more than a point above beyond two errors",
                len(above),
                "≤ 1 in 40",
                len(above) <= self.jobs / 40,
            )
            yield row(
                "unseen", f"η={eta}: `staked`, risk 0.01, the most above the default", max(one.above for one in risky)
            )

    def drift(self) -> Iterator[Row]:
        for side in ("below", "above"):
            gone: dict[str, list[float]] = {"zeus": [], "staked": []}
            for made in pairs():
                changed = _drifted(made, side)
                best = changed.best(0.5)
                for name, policy in (("zeus", Zeus(window=10)), ("staked", Staked())):
                    done = [self._drift(made, changed, policy, seed) for seed in range(self.seeds)]
                    gone[name].append(median(sum(late) / best - len(late) for late in done))
            ours, theirs = median(gone["staked"]), median(gone["zeus"])
            said = f"sizes {side} the middle need 3×: regret after it, runs, median of the pairs; `zeus` {theirs:.2f}"
            yield row("drift", said, ours, f"≤ {theirs:.2f}", ours <= theirs)
            said = f"sizes {side} the middle need 3×: pairs in which `staked` has at most the regret of `zeus`"
            yield row("drift", said, sum(a <= b for a, b in zip(gone["staked"], gone["zeus"], strict=True)))

    def _drift(self, made: Trace, changed: Trace, policy: Policy, seed: int) -> Sequence[float]:
        half = made.recurrences // 2

        def drawn(size: int, at: int, luck: np.random.Generator) -> int | None:
            some = (changed if at >= half else made).epochs[size]
            return some[int(luck.integers(len(some)))]

        longer = replace(made, max_budget=changed.max_budget)
        return simulate(longer, policy, 0.5, seed, Setting(drawn=drawn)).costs[half:]

    def misjudged(self) -> Iterator[Row]:
        jobs = pairs()
        for risk in (0.0, 0.01):
            for name, factor in (("as many as there are", 1.0), ("twice as many", 2.0), ("half as many", 0.5)):
                found = list(
                    self._pool.map(
                        _seen,
                        [
                            (one, Staked(risk), 0.5, self.seeds, Setting(told=round(factor * one.recurrences)))
                            for one in jobs
                        ],
                    )
                )
                worst = max(found, key=lambda one: one.above - 2 * one.above_error)
                lost = fmean(one.regret for one in found)
                said = f"η=0.5, risk {risk}, {name} believed: mean of `staked`; regret {lost:.2f}"
                yield row("misjudged", said, fmean(one.points for one in found))
                said = f"η=0.5, risk {risk}, {name} believed: the most above the default, ±{worst.above_error:.2f}"
                yield row("misjudged", said, worst.above)

    def translated(self) -> Iterator[Row]:
        cold, warm = list[float](), list[float]()
        for gpu, other in zip(GPUS, reversed(GPUS), strict=True):
            for job in JOBS:
                made, theirs = trace(job, gpu), trace(job, other)
                for seed in range(self.seeds):
                    before = simulate(theirs, Staked(), 0.5, seed + 1000).runs
                    known = tuple(replace(run, elsewhere=True) for run in before if run.size in made.draws)
                    cold.append(regret(made, simulate(made, Staked(), 0.5, seed), 0.5))
                    warm.append(regret(made, simulate(made, Staked(), 0.5, seed, Setting(known=known)), 0.5))
        ours, without = fmean(warm), fmean(cold)
        said = f"η=0.5: regret with the other device's epochs, {ours:.2f} runs, over that without, {without:.2f}"
        yield row("translated", said, ours / without, "≤ 0.6", ours / without <= 0.6)

    def search(self) -> Iterator[Row]:
        for made in pairs():
            top = max(made.limits)
            for name, policy in (("zeus", Zeus()), ("grid", Grid(made.limits)), ("staked", Staked())):
                done = [simulate(made, policy, 0.5, seed) for seed in range(self.seeds)]
                gone = {"energy": list[float](), "time": list[float]()}
                for one in done:
                    late = [run for run in one.runs if run.reached and run.recurrence >= len(one.costs) - 5]
                    used = [_use(made, run.size, run.choice.limit) for run in late]
                    default = _use(made, made.default, top)
                    gone["time"].append(fmean(use.seconds for use in used) / default.seconds)
                    gone["energy"].append(fmean(use.joules for use in used) / default.joules)
                lost = fmean(regret(made, one, 0.5) for one in done)
                slow = 100 * fmean(gone["time"])
                said = (
                    f"{made.name}: `{name}`, last five, energy % of the default's; time {slow:.1f}%; regret {lost:.1f}"
                )
                yield row("search", said, 100 * fmean(gone["energy"]))
        made = trace("DeepSpeech2", "v100")
        for name, policy in (("zeus", Zeus()), ("staked", Staked())):
            tried = [run.size for run in simulate(made, policy, 0.5, 0).runs]
            path = [str(tried[0]), *(str(b) for a, b in pairwise(tried) if a != b)]
            yield row("search", f"DeepSpeech2 v100: `{name}`, sizes in turn: {' '.join(path)}"[:96], len(path))

    def sweeps(self) -> Iterator[Row]:
        for gpu in GPUS:
            jobs = [trace(job, gpu) for job in JOBS]
            for eta in ETAS:
                for name, policy in (("zeus", Zeus()), ("staked", Staked(risk=0.01))):
                    logs = {"energy": list[float](), "time": list[float]()}
                    for made in jobs:
                        done = [simulate(made, policy, eta, seed) for seed in range(self.seeds)]
                        late = [r for one in done for r in one.runs if r.reached and r.recurrence >= len(one.costs) - 5]
                        default = _use(made, made.default, max(made.limits))
                        used = [_use(made, run.size, None, eta) for run in late]
                        logs["time"].append(log(fmean(use.seconds for use in used) / default.seconds))
                        logs["energy"].append(log(fmean(use.joules for use in used) / default.joules))
                    slow = 100 * exp(fmean(logs["time"]))
                    said = f"{gpu} η={eta}: `{name}`, last five: energy, geometric mean, % of default; time {slow:.1f}%"
                    yield row("sweeps", said, 100 * exp(fmean(logs["energy"])))
        for beta in (1.5, 2.0, 3.0, 4.0, 5.0):
            for name, policy in (("zeus", Zeus(beta)), ("staked", Staked(beta=beta))):
                yield row(
                    "sweeps", f"η=0.5 β={beta}: `{name}`, mean", fmean(o.points for o in self.all(pairs(), policy, 0.5))
                )

    def ablation(self) -> Iterator[Row]:
        jobs = pairs()
        ways: list[tuple[str, Policy, Setting]] = [
            ("`zeus`", Zeus(), PLAIN),
            ("`zeus` without early stopping", Zeus(beta=inf), PLAIN),
            ("`zeus` without pruning", _Unpruned(), PLAIN),
            ("`zeus` without profiling in time", Zeus(), Setting(jit=False)),
            ("`staked`", Staked(), PLAIN),
        ]
        for name, policy, how in ways:
            found = self.all(jobs, policy, 0.5, how)
            said = f"η=0.5: {name}, mean; regret {fmean(o.regret for o in found):.1f}"
            yield row("ablation", said, fmean(one.points for one in found))
        slopes, epochs.SLOPES = epochs.SLOPES, np.array([0.0])  # here and not in the pool's processes
        found = [seen(made, Staked(), 0.5, self.seeds) for made in jobs]
        epochs.SLOPES = slopes
        said = f"η=0.5: `staked` without slopes, mean; regret {fmean(o.regret for o in found):.1f}"
        yield row("ablation", said, fmean(one.points for one in found))

    def overlap(self) -> Iterator[Row]:
        jobs = pairs()
        for gap in (1.0, 0.5, 0.25):
            zeus = self.all(jobs, Zeus(), 0.5, Setting(gap=gap))
            found = self.all(jobs, Staked(), 0.5, Setting(gap=gap))
            goal, mean = fmean(one.points for one in zeus), fmean(one.points for one in found)
            yield row("overlap", f"a submission every {gap} runs: `zeus`, mean", goal)
            lost = f"regret {fmean(o.regret for o in found):.1f}, `zeus` {fmean(o.regret for o in zeus):.1f}"
            said = f"a submission every {gap} runs: `staked`, mean; {lost}"
            yield row("overlap", said, mean, f"< {goal:.2f}", mean < goal)
            worst = max(found, key=lambda one: one.points - 2 * one.error)
            said = f"a submission every {gap} runs: `staked`, the most above the default, ±{worst.error:.2f}"
            yield row("overlap", said, worst.points, "≤ 0.02", worst.points - 2 * worst.error <= SLACK)

    def job(self) -> Iterator[Row]:
        made, many = trace("DeepSpeech2", "a40"), 40
        for name in ("zeus", "staked"):
            with TemporaryDirectory() as dir:
                began = time.process_time()
                done = _recurring(made, name, dir).run(many, on=_device(made), power="limit")
                took = time.process_time() - began
            cost = sum(one.cost for one in done) / (many * made.default_mean(0.5))
            said = f"DeepSpeech2 a40, {many} recurrences by ps.Recurring, `{name}`, points; {took:.0f} s of a processor"
            yield row("job", said, 100 * (cost - 1), "< 0", cost < 1)

    def mnist(self) -> Iterator[Row]:
        from bench.rotating import days

        yield from days()


def _drifted(made: Trace, side: str) -> Trace:
    """The job after the drift: sizes below, or above, the middle need three times the epochs."""
    middle = float(np.median(made.sizes))
    worse = {size for size in made.sizes if (size < middle if side == "below" else size > middle)}
    later = {size: [e if e is None or size not in worse else 3 * e for e in some] for size, some in made.epochs.items()}
    return replace(made, epochs=later, max_budget=3 * made.max_budget)


def _use(made: Trace, size: int, limit: float | None, eta: float = 0.5) -> Draw:
    """A run of a size in the mean: its seconds, and its power."""
    draws = made.draws[size]
    draw = draws[made.objective(eta).best_limit(draws) if limit is None else limit]
    reached = [e for e in made.epochs[size] if e is not None and e <= made.max_budget]
    return Draw(fmean(reached) * draw.seconds, draw.watts)


@dataclass(frozen=True)
class _Unpruned:
    """Zeus with every size tried twice, in place of pruning."""

    learns: bool = False

    def choose(self, terms: Terms, past: Past, stopped: Sequence[Run], draw: np.random.Generator) -> Choice:
        sizes = sorted(terms.sizes, key=lambda size: (size != terms.default, size))
        stake = 2 * min((run.cost for run in past.runs if run.reached), default=inf)
        for times in (1, 2):
            for size in sizes:
                if sum(run.size == size for run in past.runs) < times:
                    return Choice(size, stake)
        return Choice(Zeus().predict(sorted(sizes), past.runs, draw), stake)


def _recurring(made: Trace, policy: Any, dir: str) -> ps.Recurring:
    def look_up(config: dict[str, Any]) -> ps.Tabulated:
        size, draws = config["batch_size"], made.draws[config["batch_size"]]
        some, full = made.epochs[size], draws[max(draws)]
        needed = some[config["recurrence"] % len(some)] or inf
        reached = [float(unit >= needed) for unit in range(1, made.max_budget + 1)]
        limits = {limit: (draw.watts, draw.seconds / full.seconds) for limit, draw in draws.items()}
        return ps.Tabulated({"reached": reached}, seconds=full.seconds, limits=limits)

    return ps.Recurring(
        ps.TabulatedTask(look_up),
        {},
        batch_sizes=made.sizes,
        default=made.default,
        metric="reached",
        mode="max",
        target=1.0,
        max_budget=made.max_budget,
        recurrences=made.recurrences,
        policy=policy,
        name=policy,
        dir=dir,
    )


def _device(made: Trace) -> ps.Simulated:
    return ps.Simulated(devices=1, watts=max(made.limits), kept=False)


PARTS = (
    "reference",
    "staked",
    "unseen",
    "drift",
    "misjudged",
    "translated",
    "search",
    "sweeps",
    "ablation",
    "overlap",
    "job",
)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--potential", action="store_true")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=40)
    given = parser.parse_args(argv)
    bench = Bench(given.seeds, given.jobs)
    names = ["potential"] * given.potential + (given.parts or [] if given.potential else given.parts or list(PARTS))
    for name in names:
        if name not in (*PARTS, "potential", "mnist"):
            parser.error(f"there is no part {name!r}: choose of {', '.join((*PARTS, 'mnist'))}")
        part: Callable[[], Iterator[Row]] = getattr(bench, name)
        for line in part():
            show(line, given.json)


if __name__ == "__main__":
    main(sys.argv[1:])
