"""Which trials train together: devices are dealt among signatures, and trials at one position in the data meet.

Trials of one signature can be fused, and trials of two cannot share a device. So a policy that gives away parts of
devices is asked for each signature on its own, with the devices that the signature was dealt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice
from operator import attrgetter

from penstock.scheduling.base import FULL, Assignment, Demand, Scheduler, View
from penstock.scheduling.capacity import Capacity, refuse_impossible
from penstock.speed.model import Speed

AHEAD = 256  # waiting trials that are looked at, besides two for each device with room


def by_signature(scheduler: Scheduler) -> Scheduler:
    """Make a scheduler for trials of one signature a scheduler for any trials: it is called for each signature.

    - A free device goes to a signature that has no device, the heaviest first, and then to the signature whose devices
      carry most. A signature's weight is batch size × trials (Hydro §4.3: B × N), running trials included. So every
      signature has a device while there are enough, and no device idles while a trial waits.
    - Trials that share no device, because they cannot or because it does not pay, are treated as one signature.
    - Trials whose cost of sharing is not measured yet are spread evenly over the devices, and measure it.
    - No signature starves. A heavy signature, or a bundle that is always open, could keep others waiting for as long as
      its trials come back. So while a signature has no place for its eldest trial, only trials that were asked for less
      than a round after it may overtake it. A round is as many askings as trials now wait and run. Trials that were
      asked for later enter no bundle, so that bundles drain. A trial that comes back has a new ``asked``. So no trial
      is overtaken by more than a round, however often the others come back.
    """

    @wraps(scheduler)
    def schedule(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
        some = _first(view, demands)
        alike = len({_kind(demand, speed) for demand in some}) == 1
        if not some or (alike and speed.shared(some[0].trial)):
            return scheduler(view, demands, speed)
        return _for_each(scheduler, view, some, len(demands), speed)

    return schedule


def until_measured(scheduler: Scheduler) -> Scheduler:
    """Spread trials whose cost of sharing is not measured; a scheduler that heeds signatures itself has the others.

    As long as there is such a trial, devices are dealt as ``by_signature`` deals them.
    """

    @wraps(scheduler)
    def schedule(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
        some = _first(view, demands)
        if all(speed.shared(demand.trial) for demand in some):
            return scheduler(view, demands, speed)
        return _for_each(scheduler, view, some, len(demands), speed)

    return schedule


def _first(view: View, demands: Collection[Demand]) -> list[Demand]:
    """The trials that are looked at; none where there is nothing to divide."""
    return [] if view.unlike or not view.room else list(islice(demands, AHEAD + 2 * len(view.room)))


def _for_each(
    scheduler: Scheduler, view: View, demands: Sequence[Demand], waiting: int, speed: Speed
) -> list[Assignment]:
    refuse_impossible(view, demands)
    if len(view.devices) == 1 and not view.running and not _any_shares(demands, speed):
        return _next_alone(scheduler, view, demands, speed)
    parts = _parts(view, demands, speed)
    patience = waiting + len(view.running)
    _deal(parts, {name: left.bytes for name, left in view.room.items() if left.share > 1 - FULL}, patience)
    late = min((part.demands[0].asked for part in parts if not part.places), default=math.inf) + patience
    made: list[Assignment] = []
    for part in parts:
        largest = max((view.devices[name].memory for name in part.places), default=0)
        early = [demand for demand in part.demands if demand.asked < late and demand.bytes <= largest]
        if part.places and early:
            policy = scheduler if speed.shared(early[0].trial) else _spread
            made += policy(_seen(view, part), early, speed)
    return made


def _any_shares(demands: Sequence[Demand], speed: Speed) -> bool:
    """Whether any of these trials can share a device."""
    signed = filter(attrgetter("signature"), demands)  # mostly all or none, and then it is quick
    return any(_kind(demand, speed) for demand in signed)


def _next_alone(scheduler: Scheduler, view: View, demands: Sequence[Demand], speed: Speed) -> list[Assignment]:
    """Give the only device, which is free, to the next of some trials that share none: there is nothing to deal."""
    if speed.shared(demands[0].trial):
        return scheduler(view, demands, speed)
    return [Assignment(max(demands, key=attrgetter("priority")).trial, tuple(view.devices))]


def _spread(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
    """Spread trials whose cost of sharing is not measured evenly over all devices, neighbours together."""
    space, fitting, places = Capacity(view.devices, view.room, view.kinds), [], []
    left = sum(room.share for room in view.room.values())
    for demand in sorted(demands, key=lambda demand: -demand.priority):
        if left <= FULL:
            break
        share = 1 / speed.curve(demand.trial).most
        if (devices := space.fit(share, demand.bytes, signature=demand.signature)) is not None:
            space.take(devices, share, demand.bytes, demand.signature)
            left -= share
            fitting.append(demand)
            places.append(devices)
    if len({demand.bytes for demand in fitting}) == 1:
        first = {devices: i for i, devices in reversed(list(enumerate(places)))}
        places.sort(key=first.__getitem__)
    return [
        Assignment(demand.trial, devices, 1 / speed.curve(demand.trial).most)
        for demand, devices in zip(fitting, places, strict=True)
    ]


def _kind(demand: Demand, speed: Speed) -> str:
    """The signature of a trial that can share a device; "" for a trial that has its devices to itself."""
    return demand.signature if speed.curve(demand.trial).most > 1 else ""


@dataclass
class _Part:
    """The waiting trials of one signature, their weight, and the devices that they may have."""

    demands: list[Demand]
    load: float
    held: set[str]  # devices that running trials of the signature have
    places: set[str]  # devices with room beside these trials, and the free devices that the part is dealt
    dealt: int = 0

    @property
    def devices(self) -> int:
        return self.dealt + len(self.held)


def _parts(view: View, demands: Sequence[Demand], speed: Speed) -> list[_Part]:
    groups: dict[str, list[Demand]] = {}
    for demand in demands:
        groups.setdefault(_kind(demand, speed), []).append(demand)
    loads = {kind: float(sum(demand.load for demand in ours)) for kind, ours in groups.items()}
    held: dict[str, set[str]] = {kind: set() for kind in groups}
    for one in view.running.values():
        if (kind := _kind(one.demand, speed)) in groups:
            loads[kind] += one.demand.load
            held[kind].update(one.assignment.devices)
    begun = {name: view.kinds.get(name, "") for name, left in view.room.items() if left.share <= 1 - FULL}
    return [
        _Part(ours, loads[kind], held[kind], {name for name, there in begun.items() if kind and there == kind})
        for kind, ours in groups.items()
    ]


def _deal(parts: Sequence[_Part], free: Mapping[str, int], patience: int) -> None:
    """Give each free device to a part: the first for its eldest trial, and so on. ``free`` has the devices' bytes.

    A device goes to a part whose next trial fits there. Ties go to the part that has waited longest: it comes first.
    """
    for device, bytes in free.items():
        nexts = {i: one.demands[one.dealt] for i, one in enumerate(parts) if one.dealt < len(one.demands)}
        late = min((demand.asked for demand in nexts.values()), default=0) + patience
        able = [i for i, demand in nexts.items() if demand.asked < late and demand.bytes <= bytes]
        without = [i for i in able if not parts[i].devices]
        if able:
            heaviest = parts[max(without or able, key=lambda i: parts[i].load / max(1, parts[i].devices))]
            heaviest.places.add(device)
            heaviest.dealt += 1


def _seen(view: View, part: _Part) -> View:
    """The view of a part: its own running trials, the devices that they have, and its room."""
    mine = part.held | part.places
    devices = {name: device for name, device in view.devices.items() if name in mine}
    running = {t: one for t, one in view.running.items() if part.held.issuperset(one.assignment.devices)}
    room = {name: left for name, left in view.room.items() if name in part.places}
    return replace(view, devices=devices, running=running, room=room)


def by_position(made: Sequence[Assignment], demands: Sequence[Demand]) -> list[Assignment]:
    """The same shares of the same devices, exchanged so that trials at one position in the data are together.

    Trials at the same position share a batch. Only equal shares are exchanged, among trials of one signature that take
    equal bytes. The device with the most such trials chooses first.

    >>> waiting = [Demand(trial, "g", 1, signature="a", position=(trial % 2, 0)) for trial in range(4)]
    >>> made = [Assignment(trial, (f"gpu {trial // 2}",), 0.5) for trial in range(4)]
    >>> [one.devices[0] for one in by_position(made, waiting)]
    ['gpu 0', 'gpu 1', 'gpu 0', 'gpu 1']
    """
    if all(one.share >= 1 for one in made):
        return list(made)
    known = {demand.trial: demand for demand in demands}
    hands: dict[tuple[str, float, int], list[Assignment]] = {}
    for one in made:
        if one.share < 1 and one.trial in known:
            demand = known[one.trial]
            hands.setdefault((demand.signature, one.share, demand.bytes), []).append(one)
    places: dict[int, tuple[str, ...]] = {}
    for ours in hands.values():
        if len({known[one.trial].position for one in ours}) > 1:
            places |= _exchange(ours, known)
    return [replace(one, devices=places.get(one.trial, one.devices)) for one in made]


def _exchange(ours: Sequence[Assignment], known: dict[int, Demand]) -> dict[int, tuple[str, ...]]:
    slots: dict[tuple[str, ...], int] = {}
    for one in ours:
        slots[one.devices] = slots.get(one.devices, 0) + 1
    left: dict[tuple[int, int], list[int]] = {}
    for one in ours:
        left.setdefault(known[one.trial].position, []).append(one.trial)
    places: dict[int, tuple[str, ...]] = {}
    for devices, count in sorted(slots.items(), key=lambda slot: -slot[1]):
        while count:
            enough = [position for position, trials in left.items() if len(trials) >= count]
            # The position whose trials just fill the device, or else the most common position.
            position = max(enough or left, key=lambda one: (len(left[one]) == count, len(left[one])))
            taken = left[position][:count]
            left[position] = left[position][count:]
            if not left[position]:
                del left[position]
            places |= dict.fromkeys(taken, devices)
            count -= len(taken)
    return places
