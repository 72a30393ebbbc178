"""The free room on devices and where a trial fits; and how groups that run at once divide the devices."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.scheduling.base import FULL, Demand, Room, View


class Capacity:
    """The room on devices while a scheduler gives it away; ``kinds`` and ``unlike`` are as in a view.

    >>> from penstock.bundle import Device
    >>> devices = {name: Device(name, "h200", 8) for name in ("gpu 0", "gpu 1")}
    >>> space = Capacity(devices, {"gpu 0": Room(0.5, 8), "gpu 1": Room(1.0, 8)}, {"gpu 0": "a"})
    >>> space.fit(0.5, 1, signature="a"), space.fit(1.0, 1), space.fit(2.0, 1)
    (('gpu 1',), ('gpu 1',), None)
    >>> space.take(("gpu 1",), 0.5, 1, "b")
    >>> space.fit(0.5, 1, signature="a"), space.fit(0.5, 1, signature="c")
    (('gpu 0',), None)
    """

    def __init__(
        self,
        devices: Mapping[str, Device],
        room: Mapping[str, Room],
        kinds: Mapping[str, str] | None = None,
        unlike: bool = False,
    ) -> None:
        self.devices, self.unlike = devices, unlike
        self.room = dict(room)
        self.kinds = dict(kinds or {})
        # Devices with much memory come last: they are kept for trials that need it.
        names = sorted(room, key=lambda name: devices[name].memory)
        self._order = {name: i for i, name in enumerate(names)}
        self._emptiest: defaultdict[str | None, list[tuple[float, int, str]]] = defaultdict(list)
        self._whole: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for i, name in enumerate(names):
            left = room[name]
            self._emptiest[self._company(name)].append((-left.share, i, name))
            if left.share > 1 - FULL:
                self._whole[devices[name].node][name] = None
        for heap in self._emptiest.values():  # `_top` passes over entries that no longer agree with the room
            heapq.heapify(heap)

    def whole(self) -> int:
        """How many devices are wholly free."""
        return sum(map(len, self._whole.values()))

    def free(self) -> dict[str, Room]:
        """The room on each device that is not full."""
        return {name: left for name, left in self.room.items() if left.share > FULL}

    def fit(self, share: float, bytes: int, own: Collection[str] = (), signature: str = "") -> tuple[str, ...] | None:
        """Devices for a trial: the emptiest device for a fraction (Fluid A.3), devices on few nodes otherwise.

        A fraction goes beside trials of its signature, or onto an empty device. Among equally empty devices, and among
        free devices, the trial's ``own`` devices come first.
        """
        if share >= 1:
            return self._whole_devices(round(share), bytes, own)
        return self._fraction(share, bytes, own, signature)

    def take(self, devices: Iterable[str], share: float, bytes: int, signature: str = "") -> None:
        """Give a share of each of these devices to a trial."""
        for name in devices:
            left = self.room[name]
            if left.share > 1 - FULL:
                self.kinds[name] = signature
            elif self.kinds.get(name) != signature:
                self.kinds[name] = ""
            self._set(name, Room(left.share - min(1.0, share), left.bytes - bytes))

    def give(self, devices: Iterable[str], share: float, bytes: int) -> None:
        """Take a trial's share back; devices that are gone are passed over."""
        for name in devices:
            if name in self.devices:
                left = self.room.get(name, Room(0.0, 0))
                self._set(name, Room(min(1.0, left.share + min(1.0, share)), left.bytes + bytes))

    def joins(self, name: str, signature: str) -> bool:
        """Whether a trial of a signature may share a device with the trials there."""
        company = self._company(name)
        return company is None or (company == signature and bool(signature))

    def _company(self, name: str) -> str | None:
        """The signature that a trial must have to share a device; None where any signature will do."""
        return None if self.unlike or self.room[name].share > 1 - FULL else self.kinds.get(name, "")

    def _set(self, name: str, left: Room) -> None:
        self.room[name] = left
        order = self._order.setdefault(name, len(self._order))
        if left.share > FULL:
            heapq.heappush(self._emptiest[self._company(name)], (-left.share, order, name))
        if left.share > 1 - FULL:
            self._whole[self.devices[name].node][name] = None
        else:
            self._whole[self.devices[name].node].pop(name, None)

    def _fraction(self, share: float, bytes: int, own: Collection[str], signature: str) -> tuple[str, ...] | None:
        tops = [self._top(company, share, bytes) for company in ((None, signature) if signature else (None,))]
        found = min((top for top in tops if top is not None), default=None)
        if found is None:
            return None
        for name in own:
            left = self.room.get(name, Room(0.0, 0))
            if left.share >= -found[0] and left.bytes >= bytes and self.joins(name, signature):
                return (name,)
        return (found[2],)

    def _top(self, company: str | None, share: float, bytes: int) -> tuple[float, int, str] | None:
        """The emptiest device that has room, among devices with that company."""
        heap, passed, found = self._emptiest[company], [], None
        while heap and -heap[0][0] >= share - FULL:
            entry = heap[0]
            left = self.room[entry[2]]
            current = left.share == -entry[0] and self._company(entry[2]) == company
            if current and left.bytes >= bytes:
                found = entry
                break
            heapq.heappop(heap)
            if current:
                passed.append(entry)
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
            for _, _, node in sorted(nodes):  # the node with just enough free devices first, or else with most
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
    """The room on each device, full devices included."""
    full = {name: device.memory for name, device in view.devices.items() if name not in view.room}
    for holding in view.running.values():
        for name in holding.assignment.devices:
            if name in full:
                full[name] -= holding.demand.bytes
    return {name: view.room[name] if name in view.room else Room(0.0, full[name]) for name in view.devices}


@dataclass(frozen=True)
class Due:
    """Demands that are scheduled together, their groups (None for all groups), and the room that they may have."""

    demands: list[Demand]
    groups: frozenset[str] | None
    room: dict[str, Room]


def divide(view: View, demands: Collection[Demand]) -> list[Due]:
    """Divide the room among the groups that wait, so that each comes near its due, counting the devices it has.

    A due is a number of devices in proportion to the weight, by largest remainder. Groups whose weight is 1 are
    scheduled as one part, so that all of them end soonest; each counts with its weight of 1. Groups that are due less
    than a device join that part too: otherwise they could not share a device. Room on devices that are partly used
    goes to the first part.
    """
    said = {demand.group: demand.weight for demand in demands if demand.weight != 1}
    if not said:
        return [Due(list(demands), None, dict(view.room))]
    groups = dict.fromkeys(demand.group for demand in demands)
    if len(groups) == 1:
        return [Due(list(demands), frozenset(groups), dict(view.room))]
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
        made.append(Due(ours, names, others | {device: view.room[device] for device in mine}))
        others = {}
    return made


K = TypeVar("K")


def largest_remainder(total: int, weights: Mapping[K, float]) -> dict[K, int]:
    """Whole numbers that add up to ``total``, in proportion to the weights, or equal where all weights are 0.

    >>> largest_remainder(5, {"a": 1, "b": 1, "c": 2})
    {'a': 1, 'b': 1, 'c': 3}
    """
    if sum(weights.values()) <= 0:
        weights = dict.fromkeys(weights, 1.0)
    exact = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    given = {name: int(one) for name, one in exact.items()}
    first = sorted(exact, key=lambda name: given[name] - exact[name])  # a stable sort: of equals, the first goes first
    for name in first[: total - sum(given.values())]:
        given[name] += 1
    return given


def refuse_impossible(view: View, demands: Iterable[Demand]) -> None:
    """Raise for a trial that can never run: there are no devices, or it takes more bytes than any device has."""
    if not (asked := list(demands)):
        return  # the devices are looked at only where there is a trial
    largest = max((device.memory for device in view.devices.values()), default=-1)
    if max(map(attrgetter("bytes"), asked)) <= largest:
        return
    for demand in asked:
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
