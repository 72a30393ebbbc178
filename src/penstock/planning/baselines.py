"""Plans as they were made before: static, naive and greedy (RubberBand §3.2, §6.3.1, and algorithm 2).

Each has one offer for the whole bracket. They are judged by the same weights as the exact plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.planning.execution import Choice, Execution, Path
from penstock.planning.layout import needed, widths
from penstock.planning.weights import Weights

STARTS = (1, 2, 3)  # the greedy search begins at so many times the best static cluster
DELTA = 1e-6  # a step that saves less than this part of the cost is none


def statics(execution: Execution) -> Iterator[Path]:
    """The plans with the same nodes in all stages."""
    for offer in range(len(execution.cloud.offers)):
        for nodes in range(1, execution.cloud.most + 1):
            yield (Choice(offer, nodes),) * len(execution.works)


def naives(execution: Execution) -> Iterator[Path]:
    """The plans in which a trial has the same devices in all stages: a cluster that shrinks as trials go."""
    for number, offer in enumerate(execution.cloud.offers):
        for width in widths(execution.job.on(offer.instance)):
            sizes = [
                needed(min(work.trials, work.at_once or work.trials), width, offer.instance.devices)
                for work in execution.works
            ]
            if max(sizes) <= execution.cloud.most:
                yield tuple(Choice(number, nodes) for nodes in sizes)


def greedy(execution: Execution, weights: Weights, deadline: float) -> Path | None:
    """RubberBand's plan: from a static cluster, again and again the step down that saves most for its delay.

    The best of the plans from one, two and three times the cheapest static cluster that keeps the deadline; None where
    no static cluster does.
    """
    kept = [path for path in statics(execution) if weights.means(path)[0] <= deadline]
    best: tuple[float, Path] | None = None
    for offer in range(len(execution.cloud.offers)):
        own = [path for path in kept if path[0].offer == offer]
        if not own:
            continue
        static = min(own, key=lambda path: weights.means(path)[1])[0]
        for times in STARTS:
            nodes = min(static.nodes * times, execution.cloud.most)
            path = _descend(execution, weights, (Choice(offer, nodes),) * len(execution.works), deadline)
            seconds, cost = weights.means(path)
            if seconds <= deadline and (best is None or cost < best[0]):
                best = (cost, path)
    return best[1] if best else None


def _descend(execution: Execution, weights: Weights, path: Path, deadline: float) -> Path:
    """Algorithm 2: the step of the most benefit a second of delay (eq. 1), while one saves and keeps the deadline."""
    seconds, cost = weights.means(path)
    while True:
        best: tuple[float, float, float, Path] | None = None
        for stage, choice in enumerate(path):
            nodes = step(execution, stage, choice)
            if nodes:
                lower = (*path[:stage], Choice(choice.offer, nodes), *path[stage + 1 :])
                time, money = weights.means(lower)
                saved, later = cost - money, time - seconds
                if time <= deadline and saved > DELTA * cost:
                    benefit = saved / later if later > 0 else math.inf
                    if best is None or (benefit, saved) > best[:2]:
                        best = (benefit, saved, time, lower)
        if best is None:
            return path
        _, saved, seconds, path = best
        cost -= saved


def step(execution: Execution, stage: int, choice: Choice) -> int:
    """The next lower number of nodes whose devices can be divided evenly: by the trials, or the trials by them.

    A step frees a node at least: by single devices the search stalls where whole nodes are paid. 0 where there is none.
    """
    devices = execution.cloud.offers[choice.offer].instance.devices
    work = execution.works[stage]
    trials = min(work.trials, work.at_once or work.trials)
    for fewer in range((choice.nodes - 1) * devices, 0, -1):
        if fewer % trials == 0 or trials % fewer == 0:
            return -(-fewer // devices)
    return 0
