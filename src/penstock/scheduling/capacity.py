"""What is free on the devices, and who fits where; and how groups that run at once divide devices among them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.scheduling.base import FULL, Demand, Room, View

NO_KINDS: Mapping[str, str] = MappingProxyType({})


class Space:
    """What is left of devices while a scheduler gives it away.

    ``kinds`` has the signature of the trials on each device that is not free: a fraction of it goes to trials of that
    signature alone, unless ``unlike`` trials can share a device.

    >>> from penstock.executors.base import Device
    >>> devices = {name: Device(name, "h200", 8) for name in ("gpu 0", "gpu 1")}
    >>> space = Space(devices, {"gpu 0": Room(0.5, 8), "gpu 1": Room(1.0, 8)}, {"gpu 0": "a"})
    >>> space.fit(0.5, 1), space.fit(1.0, 1), space.fit(2.0, 1)
    (('gpu 1',), ('gpu 1',), None)
    >>> space.take(("gpu 1",), 1.0, 1)
    >>> space.fit(0.5, 1, signature="a"), space.fit(0.5, 1, signature="b")
    (('gpu 0',), None)
    """

    def __init__(
        self,
        devices: Mapping[str, Device],
        room: Mapping[str, Room],
        kinds: Mapping[str, str] = NO_KINDS,
        unlike: bool = False,
    ) -> None:
        self.devices = devices
        self.room = dict(room)
        self.kinds = dict(kinds)
        self.unlike = unlike
        names = sorted(room, key=lambda name: devices[name].memory)  # large ones are kept for those that need them
        self._order = {name: i for i, name in enumerate(names)}
        self._emptiest: defaultdict[str, list[tuple[float, int, str]]] = defaultdict(list)  # by who may join
        self._whole: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for i, name in enumerate(names):
            left = room[name]
            if left.share > 1 - FULL:
                self._whole[devices[name].node][name] = None
            if left.share > FULL and (joins := self._joins(name)) is not None:
                self._emptiest[joins].append((-left.share, i, name))
        for heap in self._emptiest.values():
            heapq.heapify(heap)  # entries that the room has since outdated are passed over

    def whole(self) -> int:
        """How many devices are free."""
        return sum(map(len, self._whole.values()))

    def free(self) -> dict[str, Room]:
        """What is left of those that are not full."""
        return {name: left for name, left in self.room.items() if left.share > FULL}

    def fit(self, share: float, bytes: int, own: Collection[str] = (), signature: str = "") -> tuple[str, ...] | None:
        """Where a trial can go: a fraction onto the emptiest device (Fluid A.3), whole devices onto few nodes.

        A fraction goes to a free device, or beside trials of the same ``signature``. At equal emptiness, and among free
        devices, those that are its ``own`` come first.
        """
        if share >= 1:
            return self._whole_devices(round(share), bytes, own)
        return self._fraction(share, bytes, own, signature)

    def take(self, devices: Iterable[str], share: float, bytes: int, signature: str = "") -> None:
        """Give a trial what it was found to fit on; a free device is from then on one of its signature."""
        for name in devices:
            left = self.room[name]
            if left.share > 1 - FULL:
                self.kinds[name] = signature
            self._set(name, Room(left.share - min(1.0, share), left.bytes - bytes))

    def give(self, devices: Iterable[str], share: float, bytes: int) -> None:
        """Take back what a trial had; devices that are gone are not."""
        for name in devices:
            if name in self.devices:
                left = self.room.get(name, Room(0.0, 0))
                self._set(name, Room(min(1.0, left.share + min(1.0, share)), left.bytes + bytes))

    def _set(self, name: str, left: Room) -> None:
        self.room[name] = left
        order = self._order.setdefault(name, len(self._order))
        if left.share > FULL and (joins := self._joins(name)) is not None:
            heapq.heappush(self._emptiest[joins], (-left.share, order, name))
        if left.share > 1 - FULL:
            self._whole[self.devices[name].node][name] = None
        else:
            self._whole[self.devices[name].node].pop(name, None)

    def _joins(self, name: str) -> str | None:
        """The signature of trials that may join those on a device: "" for any, None for nobody's."""
        if self.unlike or self.room[name].share > 1 - FULL:
            return ""
        return self.kinds.get(name) or None

    def _fraction(self, share: float, bytes: int, own: Collection[str], signature: str) -> tuple[str, ...] | None:
        found = self._first("", share, bytes) or (self._first(signature, share, bytes) if signature else None)
        if found is None:
            return None
        for name in own:
            left = self.room.get(name, Room(0.0, 0))
            joins = left.share > FULL and self._joins(name) in ("", signature)
            if joins and left.share >= self.room[found].share and left.bytes >= bytes:
                return (name,)
        return (found,)

    def _first(self, joins: str, share: float, bytes: int) -> str | None:
        """The emptiest device that trials of a signature may join, where one has the room."""
        heap, passed, found = self._emptiest[joins], list[tuple[float, int, str]](), None
        while heap and -heap[0][0] >= share - FULL:
            entry = heap[0]
            left = self.room[entry[2]]
            if left.share == -entry[0] and self._joins(entry[2]) == joins:
                if left.bytes >= bytes:
                    found = entry[2]
                    break
                passed.append(entry)
            heapq.heappop(heap)
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def _whole_devices(self, wanted: int, bytes: int, own: Collection[str]) -> tuple[str, ...] | None:
        chosen = [name for name in own if self._free(name, bytes)][:wanted]
        if not chosen and wanted == 1:
            free = (name for names in self._whole.values() for name in names if self._free(name, bytes))
            one = next(free, None)
            return None if one is None else (one,)
        while len(chosen) < wanted:
            missing = wanted - len(chosen)
            nodes = [(len(names) < missing, abs(len(names) - missing), node) for node, names in self._whole.items()]
            for _, _, node in sorted(nodes):  # first the one that just has enough, or else the one that has most
                left = [name for name in self._whole[node] if name not in chosen and self._free(name, bytes)]
                if left:
                    chosen += left[:missing]
                    break
            else:
                return None
        return tuple(chosen)

    def _free(self, name: str, bytes: int) -> bool:
        left = self.room.get(name)
        return left is not None and left.share > 1 - FULL and left.bytes >= bytes


def everywhere(view: View) -> dict[str, Room]:
    """What is left of each device, full ones too."""
    full = {name: device.memory for name, device in view.devices.items() if name not in view.room}
    for holding in view.running.values():
        for name in holding.assignment.devices:
            if name in full:
                full[name] -= holding.demand.bytes
    return {name: view.room[name] if name in view.room else Room(0.0, full[name]) for name in view.devices}


@dataclass(frozen=True)
class Part:
    """Demands that are scheduled together, of which groups they are (None: of all), and the room that they may have."""

    demands: list[Demand]
    groups: frozenset[str] | None
    room: dict[str, Room]


def divide(view: View, demands: Collection[Demand]) -> list[Part]:
    """Divide the room among the groups that wait, so that with what they have they come near their weights' due.

    A due is a number of devices, by largest remainder. Groups whose weight is 1 are scheduled as one, so that all of
    them end soonest; each counts as 1. So are groups that are due less than a device: they could not share it
    otherwise. Room on devices that others are on goes to the first.
    """
    said = {demand.group: demand.weight for demand in demands if demand.weight != 1}
    if not said:
        return [Part(list(demands), None, dict(view.room))]
    groups = dict.fromkeys(demand.group for demand in demands)
    if len(groups) == 1:
        return [Part(list(demands), frozenset(groups), dict(view.room))]
    used: defaultdict[str, float] = defaultdict(float)
    for holding in view.running.values():
        used[holding.demand.group] += holding.assignment.share
        if holding.demand.weight != 1:
            said[holding.demand.group] = holding.demand.weight
    weights = {name: max(0.0, said.get(name, 1.0)) for name in (*groups, *sorted(used))}
    total = sum(weights.values()) or 1.0
    small = {name for name, weight in weights.items() if weight * len(view.devices) < total}
    small |= weights.keys() - said.keys()
    parts: dict[str | None, list[Demand]] = {}
    for demand in demands:
        parts.setdefault(None if demand.group in small else demand.group, []).append(demand)
    dues: defaultdict[str | None, float] = defaultdict(float)
    for name, weight in weights.items():
        dues[None if name in small else name] += weight * len(view.devices) / total - used[name]
    whole = [name for name, left in view.room.items() if left.share > 1 - FULL]
    given = largest_remainder(len(whole), {name: max(0.0, dues[name]) for name in parts})
    others = {name: left for name, left in view.room.items() if left.share <= 1 - FULL}
    made = []
    for part, ours in parts.items():
        mine, whole = whole[: given[part]], whole[given[part] :]
        names = frozenset(demand.group for demand in ours)
        made.append(Part(ours, names, others | {device: view.room[device] for device in mine}))
        others = {}
    return made


K = TypeVar("K")


def largest_remainder(total: int, weights: Mapping[K, float]) -> dict[K, int]:
    """Whole numbers in proportion to the weights, or equal ones where all are 0, that add up to ``total``.

    >>> largest_remainder(5, {"a": 1, "b": 1, "c": 2})
    {'a': 1, 'b': 1, 'c': 3}
    """
    if sum(weights.values()) <= 0:
        weights = dict.fromkeys(weights, 1.0)
    exact = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    given = {name: int(one) for name, one in exact.items()}
    first = sorted(exact, key=lambda name: given[name] - exact[name])  # stable: of equal ones, the first
    for name in first[: total - sum(given.values())]:
        given[name] += 1
    return given


def refuse_impossible(view: View, demands: Iterable[Demand]) -> None:
    """Raise for what can never run: trials without devices, or with more bytes than any device has."""
    largest = -1
    for demand in demands:
        if largest < 0:  # many devices are looked at only where there is a trial to refuse
            largest = max((device.memory for device in view.devices.values()), default=-1)
        if largest < 0:
            raise StudyError(
                f"trial {demand.trial} waits on a cluster of no devices: at least one is needed; add a device, or run "
                "the study where there is one"
            )
        if demand.bytes > largest:
            raise StudyError(
                f"trial {demand.trial} takes {demand.bytes:,} bytes and the largest device has {largest:,}: make its "
                "model or batch smaller, or add a device with more memory"
            )
