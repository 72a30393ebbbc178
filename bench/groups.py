"""How good the schedulers are: makespans of TrialGroups against each other and against the true optimum.

Sections of bench/scheduling.py; each gives its rows.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ortools.sat.python import cp_model

from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Demand, Holding, Scheduler, View, room
from penstock.scheduling.fifo import fifo
from penstock.scheduling.fluid import dynamic_fluid, static_fluid
from penstock.scheduling.waterfill import waterfill
from penstock.speed.curve import Curve
from penstock.speed.model import Speed

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.scheduling.simulated_groups import SimulatedTrial, simulate

Row = dict[str, Any]
SCHEDULERS: dict[str, Scheduler] = {
    "fifo": fifo,
    "static_fluid": static_fluid,
    "dynamic_fluid": dynamic_fluid,
    "waterfill": waterfill,
}


@dataclass(frozen=True)
class Instance:
    """A group on a cluster; alpha and beta are Fluid's overheads of sharing and of scaling out (§4.2.2)."""

    trials: tuple[SimulatedTrial, ...]
    devices: int
    curve: Curve
    alpha: float
    beta: float


def instance(seed: int) -> Instance:
    """2 to 12 trials of units of about a second, on 2 to 16 devices."""
    rng = random.Random(seed)
    most, widest = rng.randint(2, 4), rng.randint(2, 8)
    alpha, beta = rng.uniform(1, most / (most - 1)), rng.uniform(1, 1 + 1 / widest)
    skewed = rng.random() < 0.5
    runtimes = [
        min(300.0, max(5.0, rng.lognormvariate(math.log(30), 0.9))) if skewed else rng.uniform(10, 100)
        for _ in range(rng.randint(2, 12))
    ]
    trials = tuple(SimulatedTrial(round(t), t / round(t)) for t in runtimes)
    return Instance(trials, rng.randint(2, 16), Curve.of(alpha, most, beta, widest), alpha, beta)


def runtime(trial: SimulatedTrial) -> float:
    return trial.units * trial.seconds


@cache
def bounds(one: Instance, seconds: float = 2.0) -> tuple[float, float]:
    """A lower and an upper bound on the best makespan, where each trial has one share and never moves.

    CP-SAT chooses shares and starts such that the shares never add up to more than the devices. For whole devices that
    is enough: a trial may have any of them, and at its start as many are free as it wants. Fractions must also add up
    on single devices, which the model leaves out. So CP-SAT proves a lower bound, and where its solution can be dealt
    out to devices, that bound is the optimum. Runtimes are rounded down to about 1/3,000 of the makespan.
    """
    n, curve = one.devices, one.curve
    shares = [1 / p for p in range(curve.most, 1, -1)] + [float(w) for w in range(1, min(curve.widest, n) + 1)]
    parts = math.lcm(*range(1, curve.most + 1))
    scale = 3000 / (sum(map(runtime, one.trials)) / n)
    model = cp_model.CpModel()
    horizon = math.ceil(scale * sum(map(runtime, one.trials)))
    end = model.new_int_var(0, horizon, "end")
    intervals, widths, chosen, starts = [], [], [], []
    for i, trial in enumerate(one.trials):
        start = model.new_int_var(0, horizon, f"start {i}")
        literals, areas = [], []
        for share in shares:
            literal = model.new_bool_var(f"{i} at {share}")
            ticks = math.floor(scale * runtime(trial) * curve.at(share))
            intervals.append(model.new_optional_fixed_size_interval_var(start, ticks, literal, f"{i} for {ticks}"))
            widths.append(round(share * parts))
            model.add(end >= start + ticks).only_enforce_if(literal)
            literals.append(literal)
            areas.append(round(share * parts) * ticks)
        model.add_exactly_one(literals)
        chosen.append((literals, areas))
        starts.append(start)
    model.add_cumulative(intervals, widths, n * parts)
    model.add(end * n * parts >= sum(a * x for xs, areas in chosen for a, x in zip(areas, xs, strict=True)))
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = 0
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # the solver ran out of time
        return solver.best_objective_bound / scale, math.inf
    picked = [shares[[solver.value(x) for x in xs].index(1)] for xs, _ in chosen]
    rows = [(solver.value(s), i) for i, s in enumerate(starts)]
    times = [math.floor(scale * runtime(t) * curve.at(w)) for t, w in zip(one.trials, picked, strict=True)]
    return solver.best_objective_bound / scale, solver.objective_value / scale if dealt(
        rows, picked, times, n
    ) else math.inf


def dealt(rows: Sequence[tuple[int, int]], shares: Sequence[float], times: Sequence[int], devices: int) -> bool:
    """Whether trials with these starts can be dealt out to devices, each fraction onto the fullest that has room."""
    held: list[list[tuple[int, float]]] = [[] for _ in range(devices)]  # (end, share) of the trials on each device
    for start, i in sorted(rows, key=lambda row: (row[0], -shares[row[1]])):
        free = [1 - sum(s for end, s in ones if end > start) for ones in held]
        if shares[i] >= 1:
            places = [d for d in range(devices) if free[d] > 1 - 1e-9][: round(shares[i])]
        else:
            fitting = [d for d in range(devices) if free[d] > shares[i] - 1e-9]
            places = [min(fitting, key=lambda d: (free[d], d))] if fitting else []
        if len(places) < max(1, round(shares[i])):
            return False
        for d in places:
            held[d].append((start + times[i], min(1.0, shares[i])))
    return True


def toy() -> list[Row]:
    trials = [SimulatedTrial(units) for units in (4, 4, 12, 30)]
    curve = Curve((1, 2), (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5))
    goals = {"fifo": 30, "static_fluid": 12, "dynamic_fluid": 10, "waterfill": 10}
    rows: list[Row] = []
    for name, scheduler in SCHEDULERS.items():
        took = simulate(scheduler, trials, 5, curve, moving=0.0).makespan
        rows.append(
            row("toy" if not rows else "", f"{name}, seconds", took, f"{goals[name]}", abs(took - goals[name]) < 1e-6)
        )
    took = simulate(waterfill, trials, 5, curve).makespan
    return [*rows, row("", "waterfill that moves nobody, seconds", took, "10", abs(took - 10) < 1e-6)]


def optimum(groups: int) -> list[Row]:
    ratios: dict[str, list[float]] = {name: [] for name in SCHEDULERS}
    proven = worse = 0
    theorem_1, theorem_2 = [], []  # the seeds that break each theorem
    for seed in range(groups):
        one = instance(seed)
        took = {name: makespan(scheduler, one) for name, scheduler in SCHEDULERS.items()}
        least, known = bounds(one)
        for name, seconds in took.items():
            ratios[name].append(seconds / least)
        proven += known <= least * (1 + 1e-3)
        worse += took["waterfill"] > min(took.values()) * (1 + 1e-9)
        if took["static_fluid"] >= promise(one, min(known, *took.values())):
            theorem_2.append(seed)
        ideal = Instance(one.trials, one.devices, without_overhead(one.curve), 1.0, 1.0)
        if makespan(static_fluid, ideal) > 2 * makespan(waterfill, ideal) * (1 + 1e-9):
            theorem_1.append(seed)
    rows = [row("optimum", "groups", groups), row("", "of which with a proven optimum", proven)]
    for name, values in ratios.items():
        ours = name == "waterfill"
        mean, last = statistics.fmean(values), percentile(values, 0.99)
        rows.append(
            row(
                "",
                f"{name} / optimum or bound, mean",
                mean,
                "at most 1.08" if ours else "",
                mean <= 1.08 if ours else None,
            )
        )
        rows.append(row("", "  99th percentile", last, "at most 1.25" if ours else "", last <= 1.25 if ours else None))
        rows.append(row("", "  worst", max(values)))
    rows.append(row("", "waterfill worse than any other, groups", worse, "0", worse == 0))
    beyond_2 = row("", "static_fluid beyond theorem 2, groups", len(theorem_2))
    beyond_1 = row("", "static_fluid beyond theorem 1, without overheads, groups", len(theorem_1))
    return [*rows, {**beyond_2, "seeds": theorem_2}, {**beyond_1, "seeds": theorem_1}]


def promise(one: Instance, best: float) -> float:
    """Fluid's theorem 2: StaticFluid's makespan stays below this, if the best schedule takes at most ``best``."""
    alpha, beta = max(one.alpha, 1 + 1e-9), max(one.beta, 1 + 1e-9)
    longest = max(map(runtime, one.trials))
    return max(2 * best + longest * math.pow(alpha, 1 / (alpha - 1)), 2 * best * math.pow(beta, 1 / (beta - 1) - 1))


def without_overhead(curve: Curve) -> Curve:
    """The ideal curve of theorem 1: a trial takes the same device seconds at every width."""
    return Curve(tuple(range(1, curve.most + 1)), tuple(1 / w for w in range(1, curve.widest + 1)))


def resizing(groups: int) -> list[Row]:
    rows: list[Row] = []
    for part in (0.0, 0.02):
        ratios, gains = [], []
        for seed in range(groups):
            one = instance(seed)
            cost = part * statistics.fmean(map(runtime, one.trials))
            ours, theirs = makespan(waterfill, one, cost), makespan(dynamic_fluid, one, cost)
            ratios.append(ours / theirs)
            gains.append(ours / makespan(waterfill, one))
        worse = sum(ratio > 1 + 1e-9 for ratio in ratios)
        mean = statistics.fmean(ratios)
        what = f"moving costs {part:.0%}: waterfill / dynamic_fluid, mean"
        rows.append(row("resizing" if not rows else "", what, mean, "below 1", mean < 1))
        rows.append(row("", "  worst", max(ratios)))
        rows.append(row("", f"  worse, of {groups} groups", worse, "0", worse == 0))
        rows.append(row("", "  waterfill / waterfill that moves nobody, mean", statistics.fmean(gains)))
    return rows


def decision() -> list[Row]:
    rows: list[Row] = []
    devices = {f"gpu {i}": Device(f"gpu {i}", "simulated", 80, f"node {i // 8}") for i in range(1000)}
    rng = random.Random(0)
    demands = {i: Demand(i, "a", rng.randint(5, 100), i, signature="alike") for i in range(100_000)}
    few = {i: demands[i] for i in range(10_000)}
    idle = View(devices, {}, room(devices, []))
    held = {-i: Holding(Demand(-i, "a", 5), Assignment(-i, (f"gpu {i}",))) for i in range(1, 1000)}
    full = View(devices, held, room(devices, held.values()))
    for most, widest in ((1, 1), (4, 8), (64, 8)):
        curve = Curve.of(1 + 0.5 / max(1, most - 1), most, 1.02, widest)
        speed = Speed(lambda trial: 1.0, lambda trial, curve=curve: curve)  # type: ignore[misc]
        took = quickest(lambda speed=speed: waterfill(idle, few.values(), speed))  # type: ignore[misc]
        what = f"c {most}, d {widest}: 10,000 trials on 1,000 devices, seconds"
        rows.append(row("decision" if not rows else "", what, took, "under 0.1", took < 0.1))
        took = quickest(lambda speed=speed: waterfill(full, demands.values(), speed))  # type: ignore[misc]
        goal = ("under 100", took < 1e-4) if most <= 4 else ("", None)
        rows.append(row("", "  one free device, 100,000 wait, microseconds", took * 1e6, *goal))
    types = {name: replace(device, type="new" if i % 2 else "old") for i, (name, device) in enumerate(devices.items())}
    curve = Curve.of(1.16, 4, 1.02, 8)
    known = {"new": Speed(lambda trial: 1.0, lambda trial: curve), "old": Speed(lambda trial: 2.0, lambda trial: curve)}
    both = Speed(lambda trial: 1.0, lambda trial: Curve(), types=known)
    took = quickest(lambda: waterfill(replace(idle, devices=types), few.values(), both))
    what = "two device types: 10,000 trials on 1,000 devices, seconds"
    rows.append(row("", what, took, "under 0.1", took < 0.1))
    took = quickest(lambda: waterfill(replace(full, devices=types), demands.values(), both))
    rows.append(row("", "  one free device, 100,000 wait, microseconds", took * 1e6))
    for trials, count in ((12, 16), (32, 16), (32, 64)):
        curve = Curve.of(1.16, 4, 1.02, 8)
        cards = dict(list(devices.items())[:count])
        some = list(demands.values())[:trials]
        view = View(cards, {}, room(cards, []))
        took = quickest(lambda a=view, b=some, c=curve: waterfill(a, b, Speed(lambda t: 1.0, lambda t: c)))  # type: ignore[misc]
        rows.append(row("", f"planned to the end: {trials} trials on {count} devices, seconds", took))
    return rows


def makespan(scheduler: Scheduler, one: Instance, moving: float = math.inf) -> float:
    return simulate(scheduler, one.trials, one.devices, one.curve, moving).makespan


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(part * len(values)) - 1)]


def quickest(what: Callable[[], object], times: int = 5) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        what()
        took.append(time.perf_counter() - began)
    return min(took)


def row(bench: str, what: str, value: float, goal: str = "", reached: bool | None = None) -> Row:
    return {"bench": bench, "what": what, "value": value, "goal": goal, "reached": reached}
