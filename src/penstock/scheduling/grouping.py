"""Who trains with whom: devices are dealt among signatures, and trials at one place in the data come together.

Trials of one signature can be fused, and trials of two cannot share a device. So a policy that gives away parts of
devices is asked for each signature on its own, with the devices that the signature was dealt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice

from penstock.scheduling.base import FULL, Assignment, Demand, Scheduler, View
from penstock.scheduling.capacity import Space, refuse_impossible
from penstock.speed.model import Speed

AHEAD = 256  # trials that are dealt, besides twice as many as could start now


def by_signature(scheduler: Scheduler) -> Scheduler:
    """Make a scheduler of trials that are alike one of any: it is asked for each signature on its own.

    - A free device goes to a signature that has none, the heaviest first, and then to the one whose devices carry most;
      a signature weighs batch size × trials (Hydro §4.3: B × N), those that run already included. So every signature
      has a device while there are enough, and none idles while a trial waits.
    - Trials that share no device with others, because they cannot or because that does not pay, are one part.
    - Trials of which it was not measured what sharing costs are spread over the devices evenly, and measure it.
    - No signature starves. Heavy ones, and bundles that are always open, could keep others waiting for as long as their
      trials come back. So while a signature has no place for its eldest trial, that one is overtaken only by trials
      asked for less than a round after it, a round being as many askings as trials wait and run now. Trials that came
      later enter no bundle, so that bundles drain. A trial that comes back comes with a new ``asked``: nobody is
      overtaken by more than a round, however often the others come back.
    """

    @wraps(scheduler)
    def schedule(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
        if view.unlike or not demands or not view.room:
            return scheduler(view, demands, speed)
        some = list(islice(demands, AHEAD + 2 * len(view.room)))
        if len({_kind(demand, speed) for demand in some}) == 1 and speed.shared(some[0].trial):
            return scheduler(view, demands, speed)
        refuse_impossible(view, some)
        parts = _parts(view, some, speed)
        patience = len(demands) + len(view.running)
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

    return schedule


def _spread(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
    """Trials of which it is not known what sharing costs them: on all devices evenly, neighbours together."""
    space, fitting, places = Space(view.devices, view.room, view.kinds), [], []
    for demand in sorted(demands, key=lambda demand: -demand.priority):
        share = 1 / speed.curve(demand.trial).most
        if (devices := space.fit(share, demand.bytes, signature=demand.signature)) is not None:
            space.take(devices, share, demand.bytes, demand.signature)
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
    """The signature of a trial that can share a device; "" where it has one to itself."""
    return demand.signature if speed.curve(demand.trial).most > 1 else ""


@dataclass
class _Part:
    """The trials of one signature that wait, how much they weigh, and the devices that they may have."""

    demands: list[Demand]
    load: float
    held: set[str]  # devices that its trials have
    places: set[str]  # devices with room beside its trials, and the free ones that it is dealt
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
    """Give each free device to a part, one for its eldest trial, one for the next, and so on; ``free`` has their bytes.

    A device goes to a part whose next trial fits there. Ties go to the part that has waited longest, which comes first.
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
    """What a part sees: its own trials that run, the devices that they have, and its room."""
    mine = part.held | part.places
    devices = {name: device for name, device in view.devices.items() if name in mine}
    running = {t: one for t, one in view.running.items() if part.held.issuperset(one.assignment.devices)}
    room = {name: left for name, left in view.room.items() if name in part.places}
    return replace(view, devices=devices, running=running, room=room)


def by_position(made: Sequence[Assignment], demands: Sequence[Demand]) -> list[Assignment]:
    """The same shares of the same devices, exchanged so that trials at one position in the data are together.

    Trials at the same position share a batch. Only equal shares are exchanged, among trials of one signature that take
    as many bytes. The device with most of them chooses first.

    >>> waiting = [Demand(trial, "g", 1, signature="a", position=(trial % 2, 0)) for trial in range(4)]
    >>> made = [Assignment(trial, (f"gpu {trial // 2}",), 0.5) for trial in range(4)]
    >>> [one.devices[0] for one in by_position(made, waiting)]
    ['gpu 0', 'gpu 1', 'gpu 0', 'gpu 1']
    """
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
            # The position that is used up by it, or else the most common one.
            position = max(enough or left, key=lambda one: (len(left[one]) == count, len(left[one])))
            taken = left[position][:count]
            left[position] = left[position][count:]
            if not left[position]:
                del left[position]
            places |= dict.fromkeys(taken, devices)
            count -= len(taken)
    return places
