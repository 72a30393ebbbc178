"""The exact frontier of time and cost: all plans that no other plan beats in both, by a constrained shortest path.

The plans on the convex hull come first, each by an ordinary shortest path of cost + λ·seconds. Plans between two of
them are found by labels. A label is dropped where another reaches its state as soon and as cheaply, or where not even
the best way on, by the λ of the two, ends below them.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.planning.draws import Array
from penstock.planning.execution import Path
from penstock.planning.weights import Weights

CORNERS = 32  # of the hull: with more of them each triangle has fewer plans, and there are more triangles
COARSE = 512  # slices of time
EVEN = 1e-9  # two sums of the same numbers in another order differ by less than this part of them


@dataclass(frozen=True)
class Labelled:
    """A plan with its mean seconds and cost."""

    seconds: float
    cost: float
    path: Path


def frontier(weights: Weights) -> list[Labelled]:
    """All plans that no other plan beats in both, the quickest first."""
    hull = _hull(weights)
    found = list(hull)
    if len(hull) > 1:
        found += _labels(weights, [_Bound(weights, a, b) for a, b in pairwise(hull)])
    found.sort(key=lambda one: (one.seconds, one.cost))
    chosen = _undominated(np.array([one.seconds for one in found]), np.array([one.cost for one in found]))
    return [Labelled(found[i].seconds, found[i].cost, weights.path(found[i].states)) for i in chosen]


class _Label(NamedTuple):
    seconds: float
    cost: float
    states: tuple[int, ...]


class _Bound:
    """What two plans of the hull say: a plan that neither of them beats lies in their triangle.

    ``rest`` is for each stage and state the least cost + slope·seconds from there on, and ``able`` tells which changes
    of nodes at each barrier can be part of a plan in the triangle.
    """

    def __init__(self, weights: Weights, quick: _Label, cheap: _Label) -> None:
        self.slope = (quick.cost - cheap.cost) / (cheap.seconds - quick.seconds)
        self.most = (quick.cost + self.slope * cheap.seconds) * (1 + EVEN)
        both = [cost + self.slope * seconds for seconds, cost in zip(weights.seconds, weights.cost, strict=True)]
        self.rest = [weights.last]
        for weight in both[:0:-1]:
            self.rest.insert(0, (weight + self.rest[0]).min(axis=1))
        self.able, reached = [], np.zeros(1)
        for weight, rest in zip(both, self.rest, strict=True):
            there = reached[:, None] + weight
            self.able.append(there + rest < self.most)
            reached = there.min(axis=0)


def _least(weights: Weights, slope: float) -> _Label:
    """The plan of least cost + slope·seconds; of least seconds where the slope is infinite."""
    quickest = slope == math.inf
    rest, way = np.zeros(len(weights.choices)) if quickest else weights.last, list[Array]()
    for seconds, cost in zip(weights.seconds[::-1], weights.cost[::-1], strict=True):
        whole = (seconds if quickest else cost + slope * seconds) + rest
        way.append(whole.argmin(axis=1))
        rest = whole.min(axis=1)
    states, at, time, money = list[int](), 0, 0.0, 0.0
    for step, seconds, cost in zip(way[::-1], weights.seconds, weights.cost, strict=True):
        to = int(step[at])
        time, money = time + float(seconds[at, to]), money + float(cost[at, to])
        states.append(to)
        at = to
    return _Label(time, money + float(weights.last[at]), tuple(states))


def _hull(weights: Weights) -> list[_Label]:
    """Plans on the convex hull, the quickest first: the two ends, and corners between them."""
    first, last = _least(weights, math.inf), _least(weights, 0.0)
    # Of the plans that are as quick, the cheapest: by a slope at which no saving pays for a second.
    steep = max(1.0, first.cost) / max(EVEN, 1e-7 * last.seconds)
    first = min(first, _least(weights, steep), key=lambda one: (one.seconds * (1 + EVEN), one.cost))
    last = min(last, _least(weights, 1 / steep), key=lambda one: (one.cost * (1 + EVEN), one.seconds))
    found, pairs = [first, last], [(0.0, first, last)]
    while pairs and len(found) < CORNERS:
        _, a, b = heapq.heappop(pairs)
        if not _apart(a, b):
            continue
        slope = (a.cost - b.cost) / (b.seconds - a.seconds)
        between = _least(weights, slope)
        if between.cost + slope * between.seconds < (a.cost + slope * a.seconds) * (1 - EVEN):
            found.append(between)
            for c, d in ((a, between), (between, b)):
                heapq.heappush(pairs, ((c.seconds - d.seconds) * (c.cost - d.cost), c, d))  # the largest first
    found.sort(key=lambda one: (one.seconds, one.cost))
    kept = found[:1]
    for one in found[1:]:
        if _apart(kept[-1], one):
            kept.append(one)
    return kept


def _apart(quick: _Label, cheap: _Label) -> bool:
    return cheap.seconds - quick.seconds > EVEN * cheap.seconds and quick.cost - cheap.cost > EVEN * quick.cost


def _labels(weights: Weights, bounds: list[_Bound]) -> list[_Label]:
    """The undominated plans in the triangles of the bounds."""
    slopes, most = np.array([bound.slope for bound in bounds]), np.array([bound.most for bound in bounds])
    time, money, at = np.zeros(1), np.zeros(1), np.zeros(1, dtype=int)
    trail = list[tuple[Array, Array]]()  # by stage: the state of each label, and the label before it
    for stage, (seconds, cost) in enumerate(zip(weights.seconds, weights.cost, strict=True)):
        rests = np.stack([bound.rest[stage] for bound in bounds])
        able = np.any([bound.able[stage] for bound in bounds], axis=0)
        made = []
        for state in np.flatnonzero(able.any(axis=0)):
            from_ = np.flatnonzero(able[at, state])
            t = time[from_] + seconds[:, state][at[from_]]
            c = money[from_] + cost[:, state][at[from_]]
            keep = _undominated(t, c)
            t, c = t[keep], c[keep]
            below = (c[:, None] + slopes * t[:, None] + rests[:, state] < most).any(axis=1)
            made.append((t[below], c[below], np.full(int(below.sum()), state), from_[keep[below]]))
        time, money, at, before = (np.concatenate(part) for part in zip(*made, strict=True))
        trail.append((at, before))
    money = money + weights.last[at]
    return [_traced(trail, time, money, label) for label in _undominated(time, money)]


def _undominated(seconds: Array, cost: Array) -> NDArray[np.intp]:
    """The numbers of the points that no other is below in both, the quickest first."""
    left = np.arange(len(seconds))
    if len(seconds) > COARSE:
        # Most points are costlier than a point of an earlier slice of time: these need not be sorted.
        span = float(seconds.max() - seconds.min()) or 1.0
        slices = ((seconds - seconds.min()) * (COARSE / span)).astype(int)
        least = np.full(COARSE + 2, np.inf)
        np.minimum.at(least, slices + 1, cost)
        left = np.flatnonzero(cost < np.minimum.accumulate(least)[slices])
    left = left[np.lexsort((cost[left], seconds[left]))]
    ranked = cost[left]
    least = np.minimum.accumulate(ranked)
    below = np.flatnonzero(np.concatenate([[True], ranked[1:] < least[:-1] - EVEN * np.abs(least[:-1])]))
    return np.take(left, below)


def _traced(trail: list[tuple[Array, Array]], seconds: Array, cost: Array, label: int) -> _Label:
    states, step = list[int](), label
    for at, before in reversed(trail):
        states.append(int(at[step]))
        step = int(before[step])
    return _Label(float(seconds[label]), float(cost[label]), tuple(reversed(states)))
