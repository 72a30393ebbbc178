"""Which unlike trials train together on a device: ``pack_opt`` of Pack §5.2, its baselines, and the stage that uses it.

Pack finds no cost model that is both true and quick, so it packs configurations that are alike: a random one is the
centroid, and its nearest neighbours join it until the device is full. A configuration may always be alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from penstock.domains import Choice, Domain
from penstock.scheduling.base import Assignment, Demand, View
from penstock.scheduling.capacity import everywhere
from penstock.seeds import key
from penstock.speed.model import Speed
from penstock.trial import Config

Pick = Literal["nearest", "random", "batch_size"]
PICKS: tuple[Pick, ...] = ("nearest", "random", "batch_size")
LARGEST = 32
"""The most bundles of a pack: more were never seen to gain."""
LEVELS = 10
"""How many levels a range without steps has, where a distance counts levels."""

Features = tuple[Hashable, ...]
"""A config's place in the space: a number where the values of a domain have an order, else the value itself."""
T = TypeVar("T")


def features(config: Config, domains: Mapping[str, Domain]) -> Features:
    """Where a config is in its space (Pack §5.2): of a number its index among its domain's values, else the value.

    A range without steps has no index. It is cut into ten levels, by the logarithm where it is drawn by it.

    >>> from penstock.domains import choice, loguniform
    >>> space = {"batch": choice([20, 25, 30]), "optimizer": choice(["SGD", "Adam"]), "lr": loguniform(1e-4, 1)}
    >>> features({"batch": 30, "optimizer": "Adam", "lr": 0.01}, space)
    (2.0, 'Adam', 5.0)
    """
    return tuple(_feature(config.get(name), domain) for name, domain in domains.items())


def _feature(value: object, domain: Domain) -> Hashable:
    if isinstance(domain, Choice):
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in domain.values)
        return float(sorted(domain.values).index(value)) if numbers and value in domain.values else str(value)
    if not isinstance(value, int | float):
        return str(value)
    if domain.log:
        low, high, value = math.log(domain.low), math.log(domain.high), math.log(value)
    else:
        low, high = domain.low, domain.high
    if domain.step is not None and not domain.log:
        return float(round((value - low) / domain.step))
    return LEVELS * (value - low) / (high - low) if high > low else 0.0


def distance(one: Features, other: Features) -> float:
    """How far two configs are apart: the sum of their distances in each hyperparameter, as in Pack's own example.

    There A and B differ by four places of the batch size and in the optimizer: the paper calls their distance Euclid's,
    and says that it is 5. So it is the sum over the hyperparameters, of which each is an axis of its own.

    >>> distance((0.0, "SGD", 4.0, "ReLu"), (4.0, "Adagrad", 4.0, "ReLu"))
    5.0
    """
    return sum(map(_apart, one, other))


def _apart(one: Hashable, other: Hashable) -> float:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other)
    return float(one != other)


def time_distance(packed: float, alone: Sequence[float]) -> float:
    """How far two configs are apart by time (Pack §5.2): a step of both packed against one after another, normalized.

    It is below 0 where packing gains, -1/2 where the second comes for free, and above 0 where it costs.

    >>> time_distance(3.0, (2.0, 2.0)), time_distance(5.0, (2.0, 2.0))
    (-0.25, 0.25)
    """
    return (packed - sum(alone)) / sum(alone)


def pack_opt(
    items: Sequence[T],
    bytes: Callable[[T], int],
    memory: int,
    apart: Callable[[T, T], float],
    *,
    threshold: float = math.inf,
    seed: int = 0,
) -> list[list[T]]:
    """Partition items into packs (Pack §5.2): a random centroid, and its nearest neighbours until memory is full.

    Neighbours farther from the centroid than the threshold stay out. An item that is larger than the memory is alone.

    >>> pack_opt([1, 2, 10, 11], lambda item: 1, 2, lambda a, b: abs(a - b))
    [[1, 2], [10, 11]]
    """
    left, packs = list(range(len(items))), list[list[T]]()
    while left:
        centroid = left[key(seed, "centroid", len(packs)) % len(left)]
        left.remove(centroid)
        pack, room = [centroid], memory - bytes(items[centroid])
        for other in sorted(left, key=lambda i: apart(items[centroid], items[i])):  # stable: of equals the first
            if apart(items[centroid], items[other]) > threshold:
                break
            if bytes(items[other]) <= room:
                pack.append(other)
                room -= bytes(items[other])
        left = [i for i in left if i not in pack]
        packs.append([items[i] for i in pack])
    return packs


@dataclass(frozen=True)
class Packing:
    """Who may join a pack: ``pick`` says which trials come first, ``similarity`` how far from its first they may be.

    ``forced`` says that trials share devices whether or not that was measured to pay. ``domains`` are the space's, by
    which trials are near each other, and ``seed`` is of random picks. ``mode`` says whether the trials of a device
    train in one worker, or each in a process of its own.
    """

    pick: Pick = "nearest"
    similarity: float = math.inf
    forced: bool = False
    domains: Mapping[str, Domain] = field(default_factory=dict)
    seed: int = 0
    mode: Literal["packed", "processes"] = "packed"

    def features(self, config: Config) -> Features:
        """Where a config is in the space."""
        return features(config, self.domains)

    def order(self, first: Demand, demands: Sequence[Demand]) -> list[Demand]:
        """The waiting trials that may join the pack of a trial, in the order in which they do."""
        if self.pick == "batch_size":
            return [one for one in demands if one.load == first.load]
        if self.pick == "random":
            return sorted(demands, key=lambda one: key(self.seed, "pack", first.trial, one.trial))
        far = {one.trial: distance(first.features, one.features) for one in demands}
        near = [one for one in demands if far[one.trial] <= self.similarity]
        return sorted(near, key=lambda one: far[one.trial])


def join(
    view: View, demands: Collection[Demand], speed: Speed, packing: Packing, most: Mapping[str, int] | None = None
) -> list[Assignment]:
    """Trials that wait join the bundles on devices, as parts of packs. Pure; it stands after every scheduler.

    The first trial of a device is the centroid of its pack. Trials of one signature are one part, as many of them as
    pay; any other trial is a part of its own. The device with the fewest parts chooses first. Memory is the limit, and
    on each device the ``most`` parts that were measured to pay.
    """
    space = {name: left.bytes for name, left in everywhere(view).items()}
    packs: dict[str, _Pack] = {}
    for _, held in sorted(view.running.items()):
        if len(held.assignment.devices) == 1:
            (name,) = held.assignment.devices
            if name not in packs:
                packs[name] = _Pack(name, held.demand, space[name], (most or {}).get(name, LARGEST))
            packs[name].add(held.demand, _kind(held.demand, speed), 0)
    waiting, made = list(demands), list[Assignment]()
    orders = {name: packing.order(pack.first, waiting) for name, pack in packs.items()}
    given: set[int] = set()
    while packs:
        pack = min(packs.values(), key=lambda pack: (len(pack.parts), pack.device))
        order = orders[pack.device]
        found = next((one for one in order if one.trial not in given and pack.takes(one, speed)), None)
        if found is None:
            del packs[pack.device]
            continue
        alike = [one for one in order if one.trial not in given and _kind(one, speed) == _kind(found, speed)]
        for one in alike if found.signature else [found]:
            if pack.takes(one, speed):
                pack.add(one, _kind(one, speed), one.bytes)
                given.add(one.trial)
                made.append(Assignment(one.trial, (pack.device,), packed=True))
    count = Counter(name for held in view.running.values() for name in held.assignment.devices)
    count += Counter(one.devices[0] for one in made)
    return [replace(one, share=1 / count[one.devices[0]]) for one in made]


def _kind(demand: Demand, speed: Speed) -> str | int:
    """The part of a pack that a trial belongs to: its signature, or where it cannot be fused the trial itself."""
    return demand.signature if demand.signature and speed.curve(demand.trial).most > 1 else demand.trial


class _Pack:
    """The trials on a device, by part, and the memory that is left there."""

    def __init__(self, device: str, first: Demand, bytes: int, most: int) -> None:
        self.device, self.first, self.bytes, self.most = device, first, bytes, most
        self.parts: dict[str | int, int] = {}

    def takes(self, one: Demand, speed: Speed) -> bool:
        """Whether a trial has room here."""
        count = self.parts.get(_kind(one, speed))
        room = len(self.parts) < self.most if count is None else count < speed.curve(one.trial).most
        return room and one.bytes <= self.bytes

    def add(self, one: Demand, kind: str | int, bytes: int) -> None:
        """Take a trial in."""
        self.parts[kind] = self.parts.get(kind, 0) + 1
        self.bytes -= bytes
