"""How a study's part of a Ray cluster grows and shrinks with its requests.

Placement groups do all of this: a group that waits makes the autoscaler start a node, a group that is placed holds its
node, and a node without groups is released. ``ray.autoscaler.sdk.request_resources`` is not used: it sets one number
for the whole cluster, so that two studies would overwrite each other, and it holds nodes after its program has died.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

from penstock.bundle import Request
from penstock.errors import StudyError
from penstock.executors.ray.autoscaler import Growth, question, read, reported
from penstock.executors.ray.cluster import require
from penstock.executors.ray.nodes import ACCELERATOR, INSTANCE, MARKET, NodeFacts, Offer, nodes_now, offer

if TYPE_CHECKING:
    from penstock.executors.ray.slot import Slot

MARKETS = ("spot", "on-demand")
ANSWER = 30.0  # seconds that the head has to give the autoscaler's settings
Labels = Mapping[str, str]


class Requesting:
    """The workers that a study asks for, at most ``workers``. Before its first request it asks for all present devices.

    It asks for at least ``least`` then. A request's ``type`` is the label of an accelerator, or the type of a device
    that this study has had. Idle workers beyond the requests are kept for ``idle`` seconds, so that a short pause costs
    no node.
    """

    def __init__(
        self, workers: int | None, market: str | None, idle: float, least: int = 1, first: Sequence[Request] = ()
    ) -> None:
        if market is not None and market not in MARKETS:
            raise StudyError(f'Expected market="spot", "on-demand" or None for any, got {market!r}.')
        self.anywhere: Labels = {} if market is None else {MARKET: market}  # the labels of all nodes of this study
        self._workers, self._market, self._idle, self._least = workers, market, idle, least
        self._requested: tuple[Request, ...] | None = None
        self._nodes: list[NodeFacts] = []
        self._resource: str | None = None
        self._growth: Growth | None = None
        self._asked: Any = None  # the question to the head, which nodes its autoscaler can make
        self._accelerators: dict[str, str] = {}  # the label of each device type that was seen
        self._waits: list[float] = []
        if first:
            self.request(first)

    def request(self, wanted: Sequence[Request]) -> None:
        """Ask for these devices from now on; requests for another market than the study's own are left out."""
        ours = [one for one in wanted if self._market is None or one.market in (None, self._market)]
        self._requested = tuple(one for one in ours if one.count > 0)

    @property
    def provisioning(self) -> float | None:
        """Seconds from asking for a worker that had no node until it was ready: the median of all such workers."""
        return median(self._waits) if self._waits else None

    @property
    def grows(self) -> bool:
        """Whether the cluster is known to have an autoscaler."""
        return self._growth is not None

    def begin(self) -> Offer:
        """The devices that a study begins with; a StudyError where they are too few and too few can come."""
        needed = self._workers or self._least
        found = self.find()
        if found.devices < needed:
            growth = self._ask(ANSWER)
            if growth is not None and any(one.devices("GPU") for one in growth.of(self.anywhere).types or growth.types):
                self._resource = "GPU"
            found = self.find()
            if found.devices + found.room < needed:
                raise StudyError(_too_few(needed, found, self._market, growth))
        self._resource = found.resource  # a study on cores stays there, even if a node with a GPU comes
        return found

    def find(self, avoid: Collection[str] = ()) -> Offer:
        """The devices that are there and, where more are wanted and the autoscaler is known, how many could come."""
        nodes = self._nodes = nodes_now()
        found = offer(nodes, avoid, where=self.anywhere, resource=self._resource)
        if self._requested is not None or self.target(found) > found.devices:
            self._ask()
        growth = self._growth
        if growth is None:
            return found
        coming = {
            one.name: int(one.resources.get("CPU", 0)) // devices
            for one in growth.of(self.anywhere).types
            if (devices := one.devices(found.resource))
        }
        return replace(
            found,
            cores={**found.cores, **coming},
            room=growth.room(found.resource, nodes, self.anywhere),
            made=frozenset(node.id for node in nodes if growth.made(node) is not None),
        )

    def target(self, found: Offer) -> int:
        """How many workers the study asks for, whether it can get them or not."""
        return sum(one.count for one in self._wanted(found))

    def _wanted(self, found: Offer) -> list[Request]:
        """The requests, with a device type replaced by its label where that is known, and cut to ``workers`` in all."""
        asked = self._requested
        if asked is None:
            asked = (Request(self._workers or max(self._least, found.devices)),)
        left, wanted = inf if self._workers is None else self._workers, list[Request]()
        for one in asked:
            cores = found.resource == "CPU" and one.type == "cpu"  # then all devices are of type "cpu"
            type = None if cores or one.type is None else self._accelerators.get(one.type, one.type)
            count = int(min(one.count, left))
            left -= count
            wanted.append(Request(count, type, one.market, one.instance))
        return wanted

    def instances(self) -> set[str]:
        """The instances that the autoscaler can make, or that present nodes have by a label."""
        made = () if self._ask(ANSWER) is None or self._growth is None else self._growth.types
        return {one.instance for one in made} | {one.labels[INSTANCE] for one in nodes_now() if INSTANCE in one.labels}

    def instance(self, labels: Labels) -> str | None:
        """The instance of a node with these labels, if that is known."""
        return labels.get(INSTANCE) or (None if self._growth is None else self._growth.instance(labels))

    def _where(self, one: Request) -> Labels:
        """The labels of the nodes that a request is for."""
        named = {MARKET: one.market, ACCELERATOR: one.type}
        where = {label: value for label, value in named.items() if value is not None}
        if one.instance is None:
            return where
        if self._growth is None:
            return {**where, INSTANCE: one.instance}
        return self._growth.labels(one.instance, one.market)

    def at_least_one(self) -> None:
        """Ask for one worker if none is asked for: describing trials needs one."""
        if self._requested == ():
            self._requested = (Request(1),)

    def missing(self, slots: Sequence[Slot], found: Offer) -> list[tuple[Labels, bool]]:
        """The workers to ask for, as many as the cluster can give: the labels of each one's node, and whether it comes.

        A device that this study does not hold may be another study's, but its node is there.
        """
        asks: list[tuple[Labels, bool]] = []
        had, _ = deal(self._wanted(found), order(slots, found.made), self.instance)
        for one, count in had:
            where = {**self.anywhere, **self._where(one)}
            there = found.on(where)
            room = 0 if self._growth is None else self._growth.room(found.resource, self._nodes, where)
            for number in range(count, min(one.count, there + room)):
                asks.append((where, number >= there or len(slots) + len(asks) >= found.devices))
        return asks

    def surplus(self, slots: Sequence[Slot], found: Offer) -> list[Slot]:
        """The workers beyond the requests to give up now: those that never began, and idle ones; none that trains.

        An idle worker that keeps the study from a worker of another kind goes at once.
        """
        now, missing = time.monotonic(), self.missing(slots, found)
        _, beyond = deal(self._wanted(found), order(slots, found.made), self.instance)
        for slot in slots:
            slot.spare = inf if slot.running or not beyond else min(slot.spare, now)
        return [
            slot
            for slot in beyond
            if slot.phase == "starting" or now - slot.spare >= self._idle or (missing and not slot.running)
        ]

    def greeted(self, slot: Slot) -> None:
        """Learn from a worker that is ready: the label of its device's type, and its wait if its node had to come.

        Its device gets to know its node's instance.
        """
        if slot.device is not None:
            instance, market = self.instance(slot.labels), slot.device.market
            market = MARKETS[1] if instance is not None and market is None else market
            slot.device = replace(slot.device, instance=instance, market=market)
        if slot.device is not None and ACCELERATOR in slot.labels:
            self._accelerators[slot.device.type] = slot.labels[ACCELERATOR]
        if slot.without is not None and slot.node not in slot.without:
            self._waits.append(time.monotonic() - slot.began)

    def _ask(self, timeout: float = 0.0) -> Growth | None:
        """The nodes that the autoscaler can make, asked for once; None while they are not known."""
        if self._asked is None:
            self._growth = reported()
            self._asked = () if self._growth is not None else question()
        if self._asked:
            ray = require()
            with suppress(ray.exceptions.RayError):
                if ray.wait([self._asked], timeout=timeout)[0]:
                    asked, self._asked = self._asked, ()
                    said = ray.get(asked, timeout=ANSWER)
                    self._growth = None if said is None else read(*said)
        return self._growth


def no_instance(labels: Labels) -> None:
    """No node's instance is known."""


def deal(
    requests: Sequence[Request], slots: Sequence[Slot], instance: Callable[[Labels], str | None] = no_instance
) -> tuple[list[tuple[Request, int]], list[Slot]]:
    """Each request with the number of workers it already has, and the workers that belong to no request.

    The workers come in the order in which to give them up, so requests take the last ones first. A request that names a
    type, a market or an ``instance`` goes before one that does not.
    """
    had, left = list[tuple[Request, int]](), list(slots)
    for one in sorted(requests, key=lambda one: (one.type, one.market, one.instance).count(None)):
        fits = [slot for slot in reversed(left) if _fits(slot, one)]
        taken = [slot for slot in fits if one.instance in (None, instance(slot.labels))][: one.count]
        left = [slot for slot in left if slot not in taken]
        had.append((one, len(taken)))
    return had, left


def _fits(slot: Slot, one: Request) -> bool:
    types = (None, slot.labels.get(ACCELERATOR), slot.device and slot.device.type)
    unsaid = None if one.instance is None else MARKETS[1]  # a node of an instance is bought on demand unless it says so
    return one.type in types and one.market in (None, slot.labels.get(MARKET, unsaid))


def order(slots: Sequence[Slot], made: Collection[str]) -> list[Slot]:
    """Workers in the order in which to give them up, so that whole nodes that the autoscaler made come free.

    Workers that never began come first. Idle ones follow, first on nodes where none trains and where few are. Workers
    that train come last.
    """
    workers = Counter(slot.node for slot in slots)
    busy = Counter(slot.node for slot in slots if slot.running)

    def cost(slot: Slot) -> tuple[Any, ...]:
        if slot.phase == "starting":
            return (0, -slot.began)
        node = (slot.node not in made, busy[slot.node], workers[slot.node], slot.node)
        return (1 + bool(slot.running), *node, -slot.began)

    return sorted(slots, key=cost)


def _too_few(needed: int, found: Offer, market: str | None, growth: Growth | None) -> str:
    kind = "GPUs" if found.resource == "GPU" else "CPUs"
    has = f"whose {market or ''} nodes offer {found.devices} {kind} in all".replace("  ", " ")
    if growth is None:
        todo = "start nodes with `ray start --num-gpus=N` or `--num-cpus=N`"
        if market is not None:
            todo = f"start nodes with `ray start --labels {MARKET}={market}`"
    else:
        has += f" and whose autoscaler can add {found.room}"
        todo = "raise max_workers in the autoscaler's settings"
        if market is not None and not growth.labelled:
            todo = "use the autoscaler's second version, as the first does not heed labels"
    todo += ", or ask for fewer workers or shards"
    return f"Expected a Ray cluster with {needed} devices or more, got one {has}: {todo}."


def nothing_came(found: Offer, seconds: float) -> str:
    """The message for a study that has waited so long for its first device."""
    if found.room:
        return (
            f"No device came within {seconds:.0f} seconds, though the cluster's autoscaler can make {found.room}: see "
            "`ray status` for what keeps it from that, and try again."
        )
    return (
        f"None of the cluster's devices could be had within {seconds:.0f} seconds: others hold them all. See "
        "`ray status`, and try again when they are free."
    )
