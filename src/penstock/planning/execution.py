"""What a plan takes and costs, by samples of its execution (RubberBand §4.2, figure 7 and algorithm 1).

A stage is a small graph: SCALE and INIT_INSTANCE of the nodes that are to come, a TRAIN of each trial, with an edge
between two where one waits for the other's devices, and a SYNC that waits for all. Samples of it are arrays of numpy,
with a row for each sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.planning.cloud import Cloud, Offer
from penstock.planning.draws import Array
from penstock.planning.layout import Layout, lay
from penstock.planning.queueing import lost, queue, shared
from penstock.planning.spec import Job, Work

HOUR = 3600.0


@dataclass(frozen=True)
class Choice:
    """The nodes of a stage: so many of the cloud's offer of that number."""

    offer: int
    nodes: int


Path = tuple[Choice, ...]


@dataclass(frozen=True)
class Trained:
    """Samples of a stage from the barrier before it: its seconds, each node's, and its device seconds.

    ``ends`` has for each sample when each of the nodes has no more trials; a node without trials is held to the end.
    ``begun`` is when the last trial begins.
    """

    layout: Layout
    seconds: Array
    begun: Array
    ends: Array
    device_seconds: Array

    @cached_property
    def early(self) -> Array:
        """The mean seconds of node time that are saved where the first 0, 1, 2, … nodes go as soon as they can."""
        idle = (self.seconds[:, None] - self._going).mean(axis=0)
        return np.concatenate([[0.0], np.cumsum(idle)])

    def released(self, late: Coming | None) -> Trained:
        """The same where nodes without trials go once the last trial has begun, unless the next stage needs them."""
        used = self.layout.nodes
        if not (spare := self.ends.shape[1] - used):
            return self
        there = np.zeros((len(self.ends), spare)) if late is None else late.there[:, -spare:]
        idle = np.maximum(there, self.begun[:, None])
        return replace(self, ends=np.hstack([self.ends[:, :used], idle]))

    def held(self) -> Trained:
        """The same where all nodes are held to the end."""
        return replace(self, ends=np.repeat(self.seconds[:, None], self.ends.shape[1], axis=1))

    def short(self, least: float) -> Array:
        """The mean seconds that are paid beyond those used, where the first 0, 1, 2, … nodes had this stage alone."""
        return np.concatenate([[0.0], np.cumsum(np.maximum(0.0, least - self._going).mean(axis=0))])

    @cached_property
    def _going(self) -> Array:
        """When the first 1, 2, … nodes have no more trials."""
        return np.sort(self.ends, axis=1)


@dataclass(frozen=True)
class Coming:
    """Samples of nodes that come: the seconds until each is there, and until each is ready."""

    there: Array
    ready: Array

    @cached_property
    def all(self) -> Array:
        """The seconds until the first 1, 2, … are all ready."""
        return np.maximum.accumulate(self.ready, axis=1)

    def after(self, since: Array, new: int, kept: int) -> Coming | None:
        """The first ``new`` nodes, asked for at ``since`` after a barrier (before it where that is below 0), beside
        those that are kept, which are ready. The nodes that come first are first. None where all are ready."""
        if not ((ready := since[:, None] + self.ready[:, :new]) > 0).any():
            return None
        both = [np.sort(one, axis=1) for one in (since[:, None] + self.there[:, :new], ready)]
        there, ready = (np.hstack([np.zeros((len(one), kept)), np.maximum(0.0, one)]) for one in both)
        return Coming(there, ready)


@dataclass(frozen=True)
class Outcome:
    """Samples of a whole plan: its seconds and cost, and by stage the cost and when its barrier opens.

    ``leads`` has for each stage how long before that its new nodes are asked for, in the mean.
    """

    seconds: Array
    cost: Array
    starts: Array
    costs: Array
    leads: tuple[float, ...]


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
        self._first: dict[Choice, tuple[Trained, Coming | None]] = {}

    def trained(self, stage: int, choice: Choice, late: Coming | None = None) -> Trained:
        """The samples of a stage on a choice of nodes, which are ready at the barrier or as ``late`` as that says."""
        offer, work = self.cloud.offers[choice.offer], self.works[stage]
        layout = lay(work, self.job.on(offer.instance), offer.instance.devices, choice.nodes)
        if late is None:
            key = (stage, self._alike(choice.offer), layout)
            if key not in self._trained:
                self._trained[key] = self._train(stage, choice.offer, layout)
            made = self._trained[key]
        else:
            made = self._train(stage, choice.offer, layout, late)
        if (spare := choice.nodes - layout.nodes) > 0:
            idle = np.repeat(made.seconds[:, None], spare, axis=1)  # held for a stage to come
            return replace(made, ends=np.hstack([made.ends, idle]))
        return made

    def coming(self, stage: int) -> Coming:
        """The nodes that come before a stage, in the order in which they were asked for."""
        if stage not in self._coming:
            random = self._random(1, stage)
            there = self.cloud.arrival.draw(random, self.samples, self.cloud.most)
            ready = there + self.cloud.preparing.draw(random, self.samples, self.cloud.most)
            self._coming[stage] = Coming(there, ready)
        return self._coming[stage]

    def lead(self, stage: int, new: int) -> float:
        """How many seconds before a stage its new nodes are asked for: so many as they take in the mean."""
        return float(self.coming(stage).all[:, new - 1].mean()) if new else 0.0

    def asked(self, stage: int, before: Trained, new: int, *, ahead: bool) -> float:
        """The second of the stage before, counted from its barrier, at which new nodes are asked for."""
        return max(0.0, float(before.seconds.mean()) - self.lead(stage, new)) if ahead else np.inf

    def first(self, choice: Choice) -> tuple[Trained, Coming | None]:
        """The samples of the first stage, and the nodes that it has to wait for."""
        if choice not in self._first:
            kept = keeps(self.held, choice)
            late = self.coming(0).after(np.zeros(self.samples), choice.nodes - kept, kept)
            self._first[choice] = self.trained(0, choice, late), late
        return self._first[choice]

    def run(self, path: Path, *, ahead: bool = True, hold: bool = False) -> Outcome:
        """The samples of a whole plan: each node is paid from its coming to its going, for the minimum at least.

        Nodes go as soon as they can, or with ``hold`` when their stage ends.
        """
        cloud, rows, last = self.cloud, self.samples, self.held
        now, before = np.zeros(rows), self.nothing
        begun = np.zeros((rows, last.nodes if last else 0))  # when each node that is there came, the oldest first
        least = np.zeros(begun.shape)  # the seconds that are paid for it at least
        starts, costs, leads = list[Array](), list[Array](), list[float]()
        for stage, choice in enumerate((*path, None)):
            kept = keeps(last, choice)
            if last is not None and costs:
                gone, price = last.nodes - kept, self.price(last)
                order = np.argsort(before.ends, axis=1, kind="stable")
                ends, begun, least = (np.take_along_axis(one, order, axis=1) for one in (before.ends, begun, least))
                short = np.maximum(0.0, least - (now[:, None] + ends - begun))[:, :gone].sum(axis=1)
                costs[-1] += price * (ends[:, :gone].sum(axis=1) + kept * before.seconds + short)
            if choice is None:
                break
            begun, least = begun[:, begun.shape[1] - kept :], least[:, begun.shape[1] - kept :]
            new, barrier, late = choice.nodes - kept, now + before.seconds, None
            costs.append(np.zeros(rows))
            leads.append(0.0)
            if new:
                coming, asked = self.coming(stage), self.asked(stage, before, new, ahead=ahead)
                since = now + np.minimum(asked, before.seconds)
                begun = np.hstack([begun, since[:, None] + coming.there[:, :new]])
                least = np.hstack([least, np.full((rows, new), cloud.minimum)])
                paid = barrier[:, None] - begun[:, kept:]
                costs[-1] += self.price(choice) * paid.sum(axis=1) + new * cloud.data * cloud.data_price
                late = coming.after(since - barrier, new, kept) if stage else None
                leads[-1] = max(0.0, float(before.seconds.mean()) - asked)
            trained, late = (self.trained(stage, choice, late), late) if stage else self.first(choice)
            now, before, last = barrier, trained.held() if hold else trained.released(late), choice
            costs[-1] += cloud.head / HOUR * before.seconds + self.function_price(choice) * before.device_seconds
            starts.append(barrier)
        return Outcome(
            now + before.seconds, np.sum(costs, axis=0), np.stack(starts, axis=1), np.stack(costs, axis=1), tuple(leads)
        )

    def new(self, before: Choice | None, choice: Choice) -> int:
        """How many nodes have to come for a choice."""
        return choice.nodes - keeps(before, choice)

    @property
    def nothing(self) -> Trained:
        """The stage before the first: it takes no time, on the nodes that are held."""
        zero = np.zeros(self.samples)
        nodes = self.held.nodes if self.held else 0
        return Trained(Layout(0, 1, 1, 0, 1), zero, zero, np.zeros((self.samples, nodes)), zero)

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

    def _train(self, stage: int, number: int, layout: Layout, late: Coming | None = None) -> Trained:
        seconds = self._bundles(stage, number, layout)
        ends, begun = queue(seconds, layout.slots, None if late is None else late.ready[:, layout.last])
        return Trained(layout, ends.max(axis=1), begun, layout.by_node(ends), seconds.sum(axis=1) * layout.width)

    def _bundles(self, stage: int, number: int, layout: Layout) -> Array:
        """The seconds of each bundle of a stage, the same whatever the number of nodes."""
        offer, work = self.cloud.offers[number], self.works[stage]
        key = (stage, self._alike(number), layout.width, layout.share, layout.slots if layout.share > 1 else 0)
        if key not in self._seconds:
            curves = [one.curve for one in self.job.on(offer.instance)]
            alone, signs = self._alone_on(stage, self._same(offer))
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

    def _same(self, offer: Offer) -> int:
        """The first offer of the same instance type: both markets have the same draws of a trial's time."""
        return next(at for at, one in enumerate(self.cloud.offers) if one.instance.name == offer.instance.name)


def keeps(before: Choice | None, after: Choice | None) -> int:
    """How many nodes stay from one stage to the next: none where these are of another offer."""
    if before is None or after is None or before.offer != after.offer:
        return 0
    return min(before.nodes, after.nodes)
