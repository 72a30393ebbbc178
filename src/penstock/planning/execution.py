"""What a plan takes and costs, by samples of its execution (RubberBand §4.2, figure 7 and algorithm 1).

A stage is a small graph: SCALE and INIT_INSTANCE of the nodes that are to come, a TRAIN of each trial, with an edge
between two where one waits for the other's devices, and a SYNC that waits for all. Samples of it are arrays of numpy,
with a row for each sample.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.planning.cloud import Cloud, Offer
from penstock.planning.draws import Array
from penstock.planning.layout import Layout, lay
from penstock.planning.spec import Job, Work
from penstock.speed.curve import Curve

HOUR = 3600.0
WAVES = 12  # of trials, beyond which a heap finds the device that is free first more quickly


@dataclass(frozen=True)
class Choice:
    """The nodes of a stage: so many of the cloud's offer of that number."""

    offer: int
    nodes: int


Path = tuple[Choice, ...]


@dataclass(frozen=True)
class Trained:
    """Samples of a stage from the moment its nodes are ready: its seconds, each node's, and its device seconds.

    ``ends`` has for each sample when each of the nodes has no more trials, the earliest first; a
    node without trials is held to the end.
    """

    layout: Layout
    seconds: Array
    ends: Array
    device_seconds: Array

    @cached_property
    def early(self) -> Array:
        """The mean seconds of node time that are saved where the first 0, 1, 2, … nodes go as soon as they can."""
        idle = (self.seconds[:, None] - self.ends).mean(axis=0)
        return np.concatenate([[0.0], np.cumsum(idle)])

    def short(self, least: float) -> Array:
        """The mean seconds that are paid beyond those used, where the first 0, 1, 2, … nodes had this stage alone."""
        return np.concatenate([[0.0], np.cumsum(np.maximum(0.0, least - self.ends).mean(axis=0))])


@dataclass(frozen=True)
class Coming:
    """Samples of nodes that come: the seconds until each is there, and until the first 1, 2, … are ready."""

    there: Array
    ready: Array


@dataclass(frozen=True)
class Outcome:
    """Samples of a whole plan: its seconds and cost, and by stage the cost and when its barrier opens."""

    seconds: Array
    cost: Array
    starts: Array
    costs: Array


class Execution:
    """Samples of a bracket's stages on every offer and number of nodes; equal questions have equal samples.

    ``held`` is the choice that the bracket has already where it begins.
    """

    def __init__(
        self, job: Job, works: Sequence[Work], cloud: Cloud, *, samples: int, seed: int = 0, held: Choice | None = None
    ) -> None:
        self.job, self.works, self.cloud, self.held = job, tuple(works), cloud, held
        self.samples = samples if self._uncertain() else 1
        self._seed = seed
        self._alone: dict[tuple[int, int], tuple[Array, NDArray[np.intp]]] = {}
        self._signs: NDArray[np.intp] | None = None
        self._seconds: dict[tuple[int, int, int, int, int], Array] = {}
        self._trained: dict[tuple[int, int, Layout], Trained] = {}
        self._coming: dict[int, Coming] = {}
        self._factors: dict[int, Array] = {}

    def trained(self, stage: int, choice: Choice) -> Trained:
        """The samples of a stage on a choice of nodes."""
        offer, work = self.cloud.offers[choice.offer], self.works[stage]
        layout = lay(work, self.job.on(offer.instance), offer.instance.devices, choice.nodes)
        key = (stage, self._alike(choice.offer), layout)
        if key not in self._trained:
            self._trained[key] = self._train(stage, choice.offer, layout)
        made = self._trained[key]
        if (spare := choice.nodes - layout.nodes) > 0:
            idle = np.repeat(made.seconds[:, None], spare, axis=1)  # held for a stage to come
            return Trained(layout, made.seconds, np.hstack([made.ends, idle]), made.device_seconds)
        return made

    def coming(self, stage: int) -> Coming:
        """The nodes that come before a stage, in the order in which they were asked for."""
        if stage not in self._coming:
            random = self._random(1, stage)
            there = self.cloud.arrival.draw(random, self.samples, self.cloud.most)
            ready = there + self.cloud.preparing.draw(random, self.samples, self.cloud.most)
            self._coming[stage] = Coming(there, np.maximum.accumulate(ready, axis=1))
        return self._coming[stage]

    def lead(self, stage: int, new: int) -> float:
        """How many seconds before a stage its new nodes are asked for: so many as they take in the mean."""
        return float(self.coming(stage).ready[:, new - 1].mean()) if new else 0.0

    def asked(self, stage: int, before: Trained, new: int, *, ahead: bool) -> float:
        """The second of the stage before, counted from when its nodes were ready, at which new nodes are asked for."""
        return max(0.0, float(before.seconds.mean()) - self.lead(stage, new)) if ahead else np.inf

    def run(self, path: Path, *, ahead: bool = True) -> Outcome:
        """The samples of a whole plan: each node is paid from its coming to its going, for the minimum at least."""
        cloud, rows, last = self.cloud, self.samples, self.held
        now, before = np.zeros(rows), self.nothing
        begun = np.zeros((rows, last.nodes if last else 0))  # when each node that is there came, the oldest first
        least = np.zeros(begun.shape[1])  # the seconds that are paid for it at least
        starts, costs = list[Array](), list[Array]()
        for stage, choice in enumerate((*path, None)):
            kept = keeps(last, choice)
            if last is not None and costs:
                gone, price = last.nodes - kept, self.price(last)
                went = now[:, None] + before.ends[:, :gone]
                short = np.maximum(0.0, least[:gone] - (went - begun[:, :gone])).sum(axis=1)
                costs[-1] += price * (before.ends[:, :gone].sum(axis=1) + kept * before.seconds + short)
            if choice is None:
                break
            begun, least = begun[:, begun.shape[1] - kept :], least[len(least) - kept :]
            new, ends, wait = choice.nodes - kept, now + before.seconds, np.zeros(rows)
            costs.append(np.zeros(rows))
            if new:
                coming = self.coming(stage)
                since = now + np.minimum(self.asked(stage, before, new, ahead=ahead), before.seconds)
                wait = np.maximum(0.0, since + coming.ready[:, new - 1] - ends)
                begun = np.hstack([begun, since[:, None] + coming.there[:, :new]])
                least = np.append(least, np.full(new, cloud.minimum))
                paid = (ends + wait)[:, None] - begun[:, kept:]
                costs[-1] += self.price(choice) * paid.sum(axis=1) + new * cloud.data * cloud.data_price
            now, before, last = ends + wait, self.trained(stage, choice), choice
            costs[-1] += self.price(choice) * kept * wait + cloud.head / HOUR * (wait + before.seconds)
            costs[-1] += self.function_price(choice) * before.device_seconds
            starts.append(ends)
        return Outcome(now + before.seconds, np.sum(costs, axis=0), np.stack(starts, axis=1), np.stack(costs, axis=1))

    def new(self, before: Choice | None, choice: Choice) -> int:
        """How many nodes have to come for a choice."""
        return choice.nodes - keeps(before, choice)

    @property
    def nothing(self) -> Trained:
        """The stage before the first: it takes no time, on the nodes that are held."""
        zero = np.zeros(self.samples)
        return Trained(Layout(0, 1, 1, 0, 1), zero, np.zeros((self.samples, self.held.nodes if self.held else 0)), zero)

    def price(self, choice: Choice) -> float:
        """The price of a second of a node; 0 where it is not nodes that are paid."""
        return self.cloud.offers[choice.offer].price / HOUR if self.cloud.billing == "instance" else 0.0

    def function_price(self, choice: Choice) -> float:
        """The price of a second of a device that trains, where that is paid."""
        offer = self.cloud.offers[choice.offer]
        return offer.price / offer.instance.devices / HOUR if self.cloud.billing == "function" else 0.0

    def _uncertain(self) -> bool:
        cloud, job = self.cloud, self.job
        draws = [cloud.arrival, cloud.preparing, job.start]
        mixed = False
        for offer in cloud.offers:
            times = job.on(offer.instance)
            mixed = mixed or len(times) > 1 or offer.losses > 0
            draws += [draw for one in times for draw in (one.unit, one.factor)]
        return mixed or any(draw.std > 0 for draw in draws)

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *key])

    def _alike(self, offer: int) -> int:
        """The first offer on which trials take as long: another market is another only by its losses."""
        mine = self.cloud.offers[offer]
        alike = (mine.instance.name, mine.losses)
        return next(at for at, one in enumerate(self.cloud.offers) if (one.instance.name, one.losses) == alike)

    def _signatures(self) -> NDArray[np.intp]:
        """Each trial's signature, by its number among the times; the trials that go on are as good as any."""
        if self._signs is None:
            trials = max(work.trials for work in self.works)
            weights = np.array([one.weight for one in self.job.on(self.cloud.offers[0].instance)])
            bounds = np.cumsum(weights / weights.sum())[:-1]
            self._signs = np.searchsorted(bounds, self._random(2).random((self.samples, trials)), side="right")
        return self._signs

    def _alone_on(self, stage: int, offer: int) -> tuple[Array, NDArray[np.intp]]:
        """The seconds of each trial's units alone on a device, and its signature."""
        if (stage, offer) not in self._alone:
            work, times = self.works[stage], self.job.on(self.cloud.offers[offer].instance)
            signs = self._signatures()[:, : work.trials] % len(times)
            units = np.broadcast_to(np.array(work.left or [work.units] * work.trials), signs.shape)
            random, seconds = self._random(3, stage, offer), np.zeros(signs.shape)
            if offer not in self._factors:
                shape, own = self._signatures().shape, self._random(4, offer)
                drawn = [one.factor.draw(own, *shape) / one.factor.expected for one in times]
                self._factors[offer] = np.choose(self._signatures() % len(times), drawn)
            for sign, one in enumerate(times):
                seconds = np.where(signs == sign, one.unit.totals(random, units), seconds)
            self._alone[stage, offer] = (seconds * self._factors[offer][:, : work.trials], signs)
        return self._alone[stage, offer]

    def _train(self, stage: int, number: int, layout: Layout) -> Trained:
        seconds = self._bundles(stage, number, layout)
        ends = queue(seconds, layout.slots)
        nodes = layout.by_node(ends)
        nodes.sort(axis=1)
        return Trained(layout, ends.max(axis=1), nodes, seconds.sum(axis=1) * layout.width)

    def _bundles(self, stage: int, number: int, layout: Layout) -> Array:
        """The seconds of each bundle of a stage, the same whatever the number of nodes."""
        offer, work = self.cloud.offers[number], self.works[stage]
        key = (stage, self._alike(number), layout.width, layout.share, layout.slots if layout.share > 1 else 0)
        if key not in self._seconds:
            curves = [one.curve for one in self.job.on(offer.instance)]
            alone, signs = self._alone_on(stage, self._first(offer))
            if layout.share == 1:
                seconds = alone * np.array([curve.at(layout.width) for curve in curves])[signs]
            else:
                seconds = shared(alone, signs, curves, layout)
            random = self._random(5, *key)
            seconds = seconds + self.job.start.draw(random, *seconds.shape)
            if offer.losses:
                again = self.cloud.arrival.expected + self.cloud.preparing.expected
                units = np.full(seconds.shape, max(1.0, work.units))
                seconds = seconds + lost(random, seconds, units, offer.losses * layout.span / HOUR, again)
            self._seconds[key] = seconds
        return self._seconds[key]

    def _first(self, offer: Offer) -> int:
        """The first offer of the same instance type: both markets have the same draws of a trial's time."""
        return next(at for at, one in enumerate(self.cloud.offers) if one.instance.name == offer.instance.name)


def lost(random: np.random.Generator, seconds: Array, units: Array, rate: float, again: float) -> Array:
    """The extra seconds of trials whose nodes are lost at a ``rate`` a second: a loss costs the unit under way.

    The mean of a trial of one unit of T seconds is (e^(rate·T) − 1)·(1/rate + again) − T.
    """
    unit = seconds / units
    whole = np.exp(-rate * unit)  # the chance that a unit is not lost
    losses = random.negative_binomial(units, np.clip(whole, 1e-12, 1.0)).ravel()
    each = np.repeat(np.arange(losses.size), losses)
    part = random.random(each.size) * (1 - whole.ravel()[each])
    wasted = -np.log1p(-part) / rate + again
    extra: Array = np.bincount(each, wasted, losses.size).astype(float)
    return extra.reshape(seconds.shape)


def shared(alone: Array, signs: NDArray[np.intp], curves: Sequence[Curve], layout: Layout) -> Array:
    """The seconds of bundles of trials that share a device: a bundle trains in step, at its trials' mean pace."""
    trials = alone.shape[1]
    waves = -(-trials // (layout.share * layout.slots))
    bounds = np.linspace(0, trials, min(trials, waves * layout.slots) + 1).round().astype(int)
    sizes = np.diff(bounds)
    factors = np.array([[curve.at(1 / count) for count in range(1, sizes.max() + 1)] for curve in curves])
    seconds = alone * factors[signs, np.repeat(sizes - 1, sizes)[None, :]]
    return np.add.reduceat(seconds, bounds[:-1], axis=1) / sizes


def queue(seconds: Array, slots: int) -> Array:
    """When each slot is free for good: the trials begin in order, each on the slot that is free first.

    >>> queue(np.array([[3.0, 1.0, 1.0, 4.0]]), 2).tolist()
    [[3.0, 6.0]]
    """
    rows, trials = seconds.shape
    ends = np.zeros((rows, slots))
    ends[:, : min(slots, trials)] = seconds[:, :slots]
    unlike = np.zeros(rows, dtype=bool)
    few = trials > slots * WAVES  # many waves of few trials each: a heap is quicker
    unlike |= few
    for at in range(slots, trials if not few else 0, slots):
        # A wave of trials goes to the slots in the order in which these are free. That is right unless a trial of the
        # wave has ended before a later one begins.
        wave = seconds[:, at : at + slots]
        order = np.argsort(ends, axis=1, kind="stable")[:, : wave.shape[1]]
        free = np.take_along_axis(ends, order, axis=1)
        after = free + wave
        unlike |= (np.minimum.accumulate(after, axis=1)[:, :-1] < free[:, 1:]).any(axis=1)
        np.put_along_axis(ends, order, after, axis=1)
    replace = heapq.heapreplace
    for row in np.flatnonzero(unlike):
        heap = [(end, slot) for slot, end in enumerate(seconds[row, :slots].tolist())]
        heapq.heapify(heap)
        for length in seconds[row, slots:].tolist():
            end, slot = heap[0]
            replace(heap, (end + length, slot))
        for end, slot in heap:
            ends[row, slot] = end
    return ends


def keeps(before: Choice | None, after: Choice | None) -> int:
    """How many nodes stay from one stage to the next: none where these are of another offer."""
    if before is None or after is None or before.offer != after.offer:
        return 0
    return min(before.nodes, after.nodes)
