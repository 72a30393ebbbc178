"""Whole random studies on simulated clusters: each scheduler against fifo, which stands for doing nothing.

    python bench/held_out.py [--studies N] [--seed S] [--only WORD] [--target] [--each] [--json]

A study is drawn from its number: its algorithm (whose work does not depend on the order of reports), its learning
curves (LCBench), its costs of sharing and spreading (Gavel, AdaptDL, or made up), 1 to 64 devices, its costs of
starting and stopping. Each scheduler runs the same study. --target ends each study at a score that a few of its reports
reach. --only runs the studies whose description has the word; --each prints a row for every study.

Needs ../shared/data (or PENSTOCK_DATA).
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import penstock as ps
from bench.clusters import folder, measure
from bench.workloads import PAIRS, SPREADS, TABLES, costs, missing, tabulated
from penstock import settings as studies
from penstock.log.reader import read
from penstock.trial import Config

SCHEDULERS = ("fifo", "static_fluid", "dynamic_fluid", "waterfill")
ALLOWED = 1.02  # the most that any study's makespan may be, relative to fifo's
ROWS = 24  # rows of a table that a grid goes through
REACHED = 0.03  # the fraction of a study's reports that reach the target
Row = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A study that was drawn from a number."""

    number: int
    table: int
    kinds: int  # how many signatures its trials have
    algorithm: Callable[[], Any]
    trials: int | None
    cluster: ps.Simulated
    what: str

    @property
    def sharing(self) -> bool:
        """Whether trials can share a device or spread over several."""
        return self.cluster.curve.most > 1 or self.cluster.curve.widest > 1


def draw(number: int) -> Drawn:
    """A study of 8 to some 200 trials."""
    rng = random.Random(f"held out {number}")
    name, algorithm, trials = _algorithm(rng)
    curve, shape = _curve(rng)
    devices = round(2 ** rng.uniform(0, 6))
    table = rng.randrange(TABLES)
    unit = float(statistics.median(tabulated(table).seconds))
    start, stop = rng.choice([(0.0, 0.0), (0.0, 0.0), (0.05, 0.02), (0.3, 0.1), (1.0, 0.3)])
    cluster = ps.Simulated(devices, rng.choice([4, 8]), curve=curve, start=start * unit, stop=stop * unit)
    kinds = rng.choice([1, 1, 1, 2, 3])
    what = f"{name}, table {table}, {shape}, {devices} devices, {kinds} kinds, start {start:g} stop {stop:g}"
    return Drawn(number, table, kinds, algorithm, trials, cluster, what)


def _algorithm(rng: random.Random) -> tuple[str, Callable[[], Any], int | None]:
    name = rng.choice(["Random", "Grid", "SuccessiveHalving", "SuccessiveHalving", "Hyperband", "Hyperband", "PBT"])
    budget, trials = rng.choice([9, 16, 27, 50]), rng.randint(8, 100)
    reduction = rng.choice([2, 3, 3, 4])
    if name == "Random":
        return f"Random({budget}) of {trials}", lambda: ps.Random(budget=budget), trials
    if name == "Grid":
        return f"Grid({budget}) of {ROWS}", lambda: ps.Grid(budget=budget), None
    if name == "SuccessiveHalving":
        least = rng.choice([1, 1, 2])
        return (
            f"SuccessiveHalving({budget}, {least}, {reduction}) of {trials}",
            lambda: ps.SuccessiveHalving(max_budget=budget, min_budget=least, reduction=reduction),
            trials,
        )
    if name == "Hyperband":
        what = f"Hyperband({budget}, {reduction})"
        return what, lambda: ps.Hyperband(max_budget=budget, reduction=reduction), None
    population, interval = rng.randint(4, 40), rng.choice([2, 4, 5])
    what = f"PBT({population}, {budget}, {interval})"
    return what, lambda: ps.PBT(population=population, max_budget=budget, interval=interval), None


def _curve(rng: random.Random) -> tuple[ps.Curve, str]:
    shape = rng.choice(["nothing", "traces", "traces", "made up", "made up", "sharing", "spreading"])
    if shape == "nothing":
        return ps.Curve(), shape
    if shape == "traces":
        pair, spread = rng.choice(PAIRS), rng.choice(SPREADS)
        return costs(pair, *spread), f"traces of {pair} and {spread[0]}"
    most, widest = rng.choice([2, 3, 4, 8]), rng.choice([2, 3, 4, 8])
    made = ps.Curve.of(rng.uniform(1, 1 + 1 / most), most, rng.uniform(1, 1 + 0.5 / widest), widest)
    if shape == "sharing":
        return ps.Curve(sharing=made.sharing), f"sharing by {most}"
    if shape == "spreading":
        return ps.Curve(scaling=made.scaling), f"spreading by {widest}"
    return made, f"made up by {most} and {widest}"


@dataclass(frozen=True)
class Ran:
    """The times of a study with a scheduler: seconds of the virtual clock, and real seconds of each decision."""

    seconds: float
    scores: list[float]
    decisions: list[float]


def run(one: Drawn, scheduler: str, target: float | None = None) -> Ran:
    """Run a study, after a short study of the same task in the same folder; the times are of the second."""
    table = tabulated(one.table)

    def look_up(config: Config) -> ps.Tabulated:
        row = config["row"] if "row" in config else table.nearest(config)
        kind = f"kind {row % one.kinds}"
        return ps.Tabulated({"accuracy": table.accuracy[row].tolist()}, float(table.seconds[row]), signature=kind)

    rows = ps.choice(random.Random(one.number).sample(range(len(table.seconds)), ROWS))
    space = {"row": rows} if one.what.startswith("Grid") else table.space
    settings: Row = {} if one.trials is None else {"trials": one.trials}
    decisions: list[float] = []
    with folder() as dir, timed(scheduler, decisions):
        study = ps.Study(
            ps.TabulatedTask(look_up), space, metric="accuracy", algorithm=one.algorithm(), seed=one.number, dir=dir,
            target=target, **settings,
        )  # fmt: skip
        measure(study, one.cluster, one.kinds)
        decisions.clear()
        result = study.run(on=one.cluster, scheduler=scheduler, progress=False)
        events = list(read(result.dir / "log.jsonl"))
    seconds = max(getattr(event, "clock", 0.0) for event in events)
    return Ran(seconds, [row["accuracy"] for trial in result.trials for row in trial.curve], decisions)


class timed:
    """Time each decision of a scheduler while a study runs.

    Python's collector is left out. Now and then it walks all objects of the process, torch's 170,000 among them, and
    that takes 100 ms in whatever code it comes.
    """

    def __init__(self, name: str, took: list[float]) -> None:
        self.name, self.took = name, took
        self.real = studies.SCHEDULERS[name]
        self.collected = 0.0  # seconds of the collector so far

    def __enter__(self) -> None:
        def schedule(*given: Any) -> Any:
            began, before = time.thread_time(), self.collected
            made = self.real(*given)
            self.took.append(time.thread_time() - began - (self.collected - before))
            return made

        schedule.__name__ = self.name
        studies.SCHEDULERS[self.name] = schedule
        gc.callbacks.append(self._collect)

    def __exit__(self, *_: object) -> None:
        studies.SCHEDULERS[self.name] = self.real
        gc.callbacks.remove(self._collect)

    def _collect(self, phase: str, info: object) -> None:
        self.collected += time.thread_time() * (1 if phase == "stop" else -1)


def compare(numbers: Sequence[int], only: str, target: bool) -> Iterator[Row]:
    """A row for each study: seconds by each scheduler."""
    for number in numbers:
        one = draw(number)
        if only not in one.what:
            continue
        ran = {"fifo": run(one, "fifo")}
        goal = None
        if target:
            scores = sorted(ran["fifo"].scores, reverse=True)
            goal = scores[int(REACHED * len(scores))]
            ran["fifo"] = run(one, "fifo", goal)
        for name in SCHEDULERS[1:]:
            ran[name] = run(one, name, goal)
        units = {name: len(done.scores) for name, done in ran.items()}
        yield {
            "study": number,
            "what": one.what,
            "sharing": one.sharing,
            "seconds": {name: done.seconds for name, done in ran.items()},
            "decisions": {name: done.decisions for name, done in ran.items()},
            "same work": len(set(units.values())) == 1,
        }


def summary(rows: Sequence[Row], goal: str) -> Iterator[Row]:
    """Each scheduler against fifo: the mean, the worst, how often it was slower, and the time of its decisions."""
    parts = {"that share or spread": [r for r in rows if r["sharing"]], "others": [r for r in rows if not r["sharing"]]}
    for part, ours in parts.items():
        for name in SCHEDULERS[1:] if ours else ():
            ratios = [row["seconds"][name] / row["seconds"]["fifo"] for row in ours]
            yield {
                "what": f"{goal}, {len(ours)} studies {part}: {name} / fifo",
                "mean": statistics.fmean(ratios),
                "geometric": statistics.geometric_mean(ratios),
                "worst": max(ratios),
                "above": sum(ratio > ALLOWED for ratio in ratios),
            }
    times: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, took in row["decisions"].items():
            times[name] += took
    for name, took in times.items():
        took.sort()
        p50, p99 = (1000 * took[int(part * (len(took) - 1))] for part in (0.5, 0.99))
        yield {"what": f"a decision of {name}, ms", "p50": p50, "p99": p99, "max": 1000 * took[-1]}


def main(arguments: list[str]) -> None:
    if absent := missing():
        raise SystemExit(f"bench/held_out.py needs {', '.join(absent)}")
    given = dict(pairwise(arguments))  # each argument by the option before it
    first, count = int(given.get("--seed", 0)) * 100_000, int(given.get("--studies", 200))
    target = "--target" in arguments
    rows = []
    for row in compare(range(first, first + count), given.get("--only", ""), target):
        rows.append(row)
        if "--each" in arguments:
            took = row["decisions"]["waterfill"] or [0.0]
            ratios = {name: row["seconds"][name] / row["seconds"]["fifo"] for name in SCHEDULERS[1:]}
            each = {key: row[key] for key in ("study", "what", "same work")}
            show({**each, "fifo": row["seconds"]["fifo"], **ratios, "ms": 1000 * max(took)}, "--json" in arguments)
    for line in summary(rows, "time to target" if target else "makespan"):
        show(line, "--json" in arguments)


def show(line: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
        return
    numbers = " ".join(f"{key} {value:.4g}" for key, value in line.items() if isinstance(value, int | float))
    print(f"{line['what']:90} {numbers}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
