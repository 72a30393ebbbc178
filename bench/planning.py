"""How much a plan saves: exact plans against static, naive and greedy ones, on AdaptDL's step times (RubberBand §6).

    python bench/planning.py [--json] [--jobs N] [saving] [sharing] [deadlines] [schedule] [models] [sure] [stragglers]
                             [data] [trials] [coming] [random] [speed] [following]

saving      ResNets under deadlines: the cost of the best static plan over that of the exact and of the greedy one;
            SHA(32, 1, 50, η=3), up to 40 nodes of 4 devices, 15 s to come, 60 s paid at least
sharing     the same where two trials may share a device, at the cost that Gavel's pairs have
deadlines   what a static, a naive and the exact plan cost and take under 20, 30 and 40 minutes (table 2)
schedule    the exact plan for 20 minutes, stage by stage (table 3)
models      two ResNets and a BERT, whose step hardly gets quicker with devices, under 20 minutes and others (table 4)
sure        units ±10%, trials ±5%: what the plan by mean times holds, and what 95% cost
stragglers  SHA(64, 4, 508) with units that vary, paid by the node and by the function (figure 9)
data        the same with data that each node reads (figure 10)
trials      more and more trials (figure 11)
coming      SHA(512, 4, 4096) with nodes that take 1, 10 and 100 s to come (figure 12)
random      random jobs: greedy over exact (--jobs of them, 500 unless told)
speed       processor seconds of a plan and of the whole frontier: SHA(512, 4, 4096), three types, spot too
following   50 random jobs, each followed 20 times on a simulated cloud: bench/following.py has them one by one

Costs are computed, not paid: rows say what the model of an execution says.
Needs ../shared/data (or PENSTOCK_DATA).
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import penstock as ps
from bench import following as followed
from bench.clusters import row
from bench.profiles import curve
from bench.scheduling import show
from bench.workloads import costs
from penstock.planning.catalogue import Catalogue
from penstock.planning.choosing import Choosing, Judged
from penstock.planning.cloud import Cloud, Instance, Offer
from penstock.planning.draws import Draws
from penstock.planning.planner import plan
from penstock.planning.spec import Job, Times, work_of
from penstock.speed.curve import Curve

Row = dict[str, Any]
P3 = Instance("p3.8xlarge", "v100", 4, 16 * 10**9, {"on-demand": 12.24})
PROTOTYPE = {  # the savings that a prototype had: at 1.1 × the shortest time, at 20 minutes and at 40 minutes
    ("cifar10", 1024, 85): (2.30, 2.02, 1.41),
    ("imagenet", 1024, 180): (2.42, 1.69, 1.07),
    ("imagenet", 512, 100): (3.03, 1.85, 1.30),
}
SHORT = ps.SuccessiveHalving(max_budget=50, reduction=3, additive=True)
LONG = ps.SuccessiveHalving(max_budget=508, min_budget=4, reduction=2, additive=True)
LONGEST = ps.SuccessiveHalving(max_budget=4096, min_budget=4, reduction=2, additive=True)


def cloud(most: int = 40, arrival: float = 15.0, **settings: Any) -> Cloud:
    return Cloud((Offer(P3, "on-demand"),), arrival=Draws(arrival), most=most, **settings)


def job(algorithm: ps.SuccessiveHalving, trials: int, times: Times) -> Job:
    return Job(work_of(algorithm, trials)[0], {"v100": (times,)})


def money(judged: Judged | None) -> float:
    return float("nan") if judged is None else float(judged.cost.mean())


def chosen(made: Job, on: Cloud) -> Choosing:
    return Choosing(made, on, {}, ahead=True, seed=0)


def saving() -> Iterator[Row]:
    for (model, batch, unit), goals in PROTOTYPE.items():
        yield from _savings("saving", model, batch, Times(Draws(unit), curve(model, batch)), goals)


def sharing() -> Iterator[Row]:
    for (model, batch, unit), goals in PROTOTYPE.items():
        pair = "ResNet-18 (batch size 128)" if model == "cifar10" else "ResNet-50 (batch size 64)"
        spread = curve(model, batch)
        both = Curve(costs(pair, "imagenet", 200).sharing, spread.scaling, spread.tried)
        apart, together = (chosen(job(SHORT, 32, Times(Draws(unit), one)), cloud()) for one in (spread, both))
        for name, deadline, goal in zip(("20 min", "40 min"), (1200.0, 2400.0), goals[1:], strict=True):
            ratio = money(apart.static(deadline, 1.0)) / money(together.cheapest(deadline, 1.0))
            what = f"{model} {batch:,}, {name}: static without sharing over exact with pairs"
            yield row("sharing", what, ratio, f">= {goal:.2f}", round(ratio, 2) >= goal)


def deadlines() -> Iterator[Row]:
    choosing = chosen(job(SHORT, 32, Times(Draws(85.0), curve("cifar10", 1024))), cloud())
    for minutes in (20, 30, 40):
        for kind in ("static", "naive", "cheapest"):
            judged = getattr(choosing, kind)(60 * minutes, 1.0)
            if judged is None:
                continue
            taken = float(judged.seconds.mean())
            yield row("deadlines", f"{minutes} minutes, {kind}: USD, in {taken / 60:.1f} minutes", money(judged))


def schedule() -> Iterator[Row]:
    made = plan(job(SHORT, 32, Times(Draws(85.0), curve("cifar10", 1024))), cloud(), deadline=1200, confidence=1.0)
    for one in made.stages:
        what = f"units {one.budget - one.units:g} to {one.budget}: {one.trials} trials of {one.devices:g} devices"
        yield row("schedule", f"{what}, {one.seconds:.0f} s and {one.cost:.2f} USD: nodes", one.nodes)
    static = made.baseline("static")
    assert static is not None
    yield row("schedule", f"the best static plan, {static.cost / made.cost:.2f} times as much: nodes", static.nodes[0])


def models() -> Iterator[Row]:
    for model, batch, unit in (("cifar10", 1024, 85.0), ("imagenet", 1024, 180.0), ("bert", 48, 60.0)):
        yield from _savings("models", model, batch, Times(Draws(unit), curve(model, batch)), None)


def sure() -> Iterator[Row]:
    for model, batch, unit in PROTOTYPE:
        times = Times(Draws(unit, 0.1 * unit), curve(model, batch), Draws(1.0, 0.05))
        choosing, plain = (
            chosen(job(SHORT, 32, one), cloud()) for one in (times, Times(Draws(unit), curve(model, batch)))
        )
        by_means, held = plain.cheapest(1200.0, 1.0), choosing.cheapest(1200.0, 0.95)
        if by_means is None or held is None:
            continue
        what, mean = f"{model} {batch:,}, 20 min", choosing.judge(by_means.candidate)
        yield row("sure", f"{what}: part of samples that the plan by mean times holds", mean.chance(1200.0), "low")
        yield row(
            "sure",
            f"{what}: part of samples that the plan for 95% holds",
            held.chance(1200.0),
            ">= 0.95",
            held.chance(1200.0) >= 0.95,
        )
        yield row("sure", f"{what}: cost of 95% over the plan by mean times", money(held) / money(mean))
        ratio = money(held) / money(choosing.static(1200.0, 0.95))
        yield row("sure", f"{what}: cost of 95% over an equally sure static cluster", ratio, "about 0.5")


def _savings(bench: str, model: str, batch: int, times: Times, goals: tuple[float, ...] | None) -> Iterator[Row]:
    choosing = chosen(job(SHORT, 32, times), cloud())
    least = float(choosing.ends()[0].seconds.mean())
    for at, (name, deadline) in enumerate((("1.1 × shortest", 1.1 * least), ("20 min", 1200.0), ("40 min", 2400.0))):
        exact, static, greedy = (
            money(kind(deadline, 1.0)) for kind in (choosing.cheapest, choosing.static, choosing.greedy)
        )
        goal = f">= {goals[at]:.2f}" if goals else ">= 1"
        best = static / exact
        reached = round(best, 2) >= (goals[at] if goals else 1)
        yield row(bench, f"{model} {batch:,}, {name} ({deadline / 60:.1f} min): static over exact", best, goal, reached)
        yield row(bench, f"{model} {batch:,}, {name}: static over greedy", static / greedy)


def stragglers() -> Iterator[Row]:
    spread = curve("imagenet", 512)
    for kind in ("unit", "trial"):
        for std in (1.0, 4.0, 10.0):
            drawn = Draws(4.0, std, "normal")
            times = Times(drawn, spread) if kind == "unit" else Times(Draws(drawn.expected), spread, drawn)
            made = job(LONG, 64, times)
            nodes, functions = (chosen(made, cloud(arrival=0.0, billing=how)) for how in ("instance", "function"))
            least = float(nodes.ends()[0].seconds.mean())
            for part in PARTS:
                what = f"SHA(64, 4, 508), σ = {std:g}, a draw a {kind}, {part} × the shortest time"
                for one in KINDS:
                    paid, free = (getattr(how, one)(part * least, 0.5) for how in (nodes, functions))
                    yield row(
                        "stragglers", f"{what}: {one}, by the node over by the function", money(paid) / money(free)
                    )


KINDS = ("static", "cheapest")
PARTS = (1.05, 1.25, 1.5, 2.0)  # deadlines, by the shortest time


def data() -> Iterator[Row]:
    made = job(LONG, 64, Times(Draws(4.0), curve("imagenet", 512)))
    for name, size in (("CIFAR-10, 0.15 GB", 0.15), ("ImageNet, 150 GB", 150.0)):
        for price in (0.0, 0.01, 0.16):
            choosing = chosen(made, cloud(arrival=0.0, data=size, data_price=price))
            least = float(choosing.ends()[0].seconds.mean())
            for part in PARTS:
                ratio = money(choosing.static(part * least, 1.0)) / money(choosing.cheapest(part * least, 1.0))
                what = f"{name} at {price:g} a GB, {part} × shortest: static over exact"
                yield row("data", what, ratio, ">= 1", ratio >= 1)


def trials() -> Iterator[Row]:
    for how in ("instance", "function"):
        for count in (64, 128, 256, 512):
            made = job(LONG, count, Times(Draws(4.0), curve("imagenet", 512)))
            choosing = chosen(made, cloud(most=64, arrival=0.0, billing=how))
            least = float(choosing.ends()[0].seconds.mean())
            limits = {"20 minutes": 1200.0} | {f"{part} × the shortest time": part * least for part in PARTS}
            for name, deadline in limits.items():
                ratio = money(choosing.static(deadline, 1.0)) / money(choosing.cheapest(deadline, 1.0))
                yield row("trials", f"{count} trials in {name}, by the {how}: static over exact", ratio)


def coming() -> Iterator[Row]:
    made = job(LONGEST, 512, Times(Draws(12.0), curve("imagenet", 2048)))
    for seconds in (1.0, 10.0, 100.0):
        choosing = chosen(made, cloud(most=160, arrival=0.0, preparing=Draws(seconds)))
        least = float(choosing.ends()[0].seconds.mean())
        limits = {f"{minutes} minutes": 60.0 * minutes for minutes in (60, 90, 120, 160)}
        limits |= {f"{part} × the shortest time ({part * least / 60:.0f} min)": part * least for part in PARTS}
        for name, deadline in limits.items():
            ratio = money(choosing.static(deadline, 1.0)) / money(choosing.cheapest(deadline, 1.0))
            goal = "about 3.2" if name == "60 minutes" else ""
            yield row("coming", f"{seconds:g} s to come, {name}: static over exact", ratio, goal)


def randomly(count: int) -> Iterator[Row]:
    ratios, alone = list[float](), 0
    for seed in range(count):
        draw = random.Random(seed)
        n, reduction, devices = draw.randint(8, 64), draw.choice((2, 3, 4)), draw.choice((1, 2, 4, 8))
        algorithm = ps.SuccessiveHalving(
            max_budget=draw.randint(16, 64), reduction=reduction, additive=draw.random() < 0.5
        )
        scaling = Curve.of(beta=draw.uniform(1.02, 1.25), widest=16)
        widest = min(range(16), key=lambda w: scaling.scaling[w])
        node = Instance("node", "v100", devices, 1, {"on-demand": 3.0 * devices})
        on = Cloud((Offer(node, "on-demand"),), arrival=Draws(draw.choice((0.0, 15.0, 60.0))), most=24)
        times = Times(Draws(draw.uniform(10, 200)), Curve(scaling=scaling.scaling[: widest + 1]))
        choosing = chosen(job(algorithm, n, times), on)
        deadline = draw.uniform(1.05, 3) * float(choosing.ends()[0].seconds.mean())
        exact, other = choosing.cheapest(deadline, 1.0), choosing.greedy(deadline, 1.0)
        if exact is not None and other is not None:
            ratios.append(max(1.0, money(other) / money(exact)))  # a plan is the greedy one where that is cheaper
            alone += money(other) < money(exact) * (1 - 1e-9)
    yield row("random", f"{len(ratios)} jobs: greedy over exact, the mean", statistics.mean(ratios))
    what = "the part of jobs in which greedy is below the frontier, where short-lived nodes are paid for the minimum"
    yield row("random", what, alone / len(ratios))
    for part in (1.01, 1.05):
        yield row(
            "random", f"the part of jobs with greedy over {part} × exact", sum(r > part for r in ratios) / len(ratios)
        )
    yield row("random", "greedy over exact, the worst", max(ratios))


def speed() -> Iterator[Row]:
    names = ("p3.2xlarge", "p3.8xlarge", "g5.12xlarge")
    on = Catalogue.read().cloud(names, spot=True, most=64)
    works, _ = work_of(LONGEST, 512)
    spread = curve("imagenet", 2048)
    times = {"v100": (Times(Draws(12.0, 1.2), spread),), "a10g": (Times(Draws(20.0, 2.0), spread),)}
    made = Job(works, times)
    plan(Job(works[-2:], times), on, deadline=10**6)  # numpy warms up
    began = time.process_time()
    choosing = chosen(made, on)
    took = time.process_time() - began
    yield row("speed", f"the whole frontier, {len(choosing.frontier)} plans: seconds", took, "<= 10", took <= 10)
    began = time.process_time()
    plan(made, on, deadline=3 * 3600)
    took = time.process_time() - began
    yield row("speed", "a plan: seconds", took, "<= 2", took <= 2)


def following() -> Iterator[Row]:
    rows = [followed.measure(number, 20) for number in range(50)]
    for what in ("times", "costs"):
        mean = statistics.mean(statistics.mean(one[what]) for one in rows)
        near = sum(abs(followed.off(one[what])) <= 3 for one in rows)
        yield row("following", f"{what} over those planned, the mean", mean, "1 ± 0.01", abs(mean - 1) <= 0.01)
        yield row("following", f"jobs whose {what} are within three standard errors", near, "50", near == 50)
    kept = sum(one["kept"] for one in rows) / (20 * len(rows))
    yield row("following", "the part of 95% deadlines that was kept", kept, ">= 0.93", kept >= 0.93)


def main(arguments: list[str]) -> None:
    given = dict(pairwise(arguments))
    count = int(given.get("--jobs", 500))
    benches: dict[str, Callable[[], Iterable[Row]]] = {
        "saving": saving,
        "sharing": sharing,
        "deadlines": deadlines,
        "schedule": schedule,
        "models": models,
        "sure": sure,
        "stragglers": stragglers,
        "data": data,
        "trials": trials,
        "coming": coming,
        "random": lambda: randomly(count),
        "speed": speed,
        "following": following,
    }
    for name in [name for name in arguments if name in benches] or list(benches):
        for line in benches[name]():
            show(line, "--json" in arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
