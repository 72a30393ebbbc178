"""From the number of each trial's devices to the devices themselves, by node (RubberBand §4.4, algorithm 3).

A trial's workers are on one node, or else on as few nodes as possible, so that their messages cross few links. A trial
that stays in place trains on without a pause, so a trial moves only for the sake of a larger one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.scheduling.base import Assignment

Devices = Mapping[str, Device]
Held = Mapping[int, tuple[str, ...]]
Places = dict[int, tuple[str, ...]]


def arrange(
    devices: Devices, held: Held, wanted: Mapping[int, int], fixed: Collection[int] = (), *, mixed: bool = False
) -> Places:
    """Devices for each trial. ``wanted`` has their number; a trial's are of one type unless types may be ``mixed``.

    ``held`` are the whole devices that running trials have. A trial whose number does not change keeps its devices,
    unless a larger trial would be on more nodes without them. The other trials are placed on as few nodes as possible,
    the largest first. Each gets devices that it already has, or else the node with the fewest free devices that are
    enough. The first device is on the node with most of the trial's devices. A ``fixed`` trial stays, and keeps its
    devices even where ``wanted`` does not name it.

    >>> devices = {f"{node}{i}": Device(f"{node}{i}", "h200", 80, node) for node in "ab" for i in range(4)}
    >>> arrange(devices, {0: ("a0",), 1: ("b0", "b1", "b2")}, {0: 1, 1: 3, 2: 4})
    {0: ('b3',), 1: ('b0', 'b1', 'b2'), 2: ('a0', 'a1', 'a2', 'a3')}
    """
    pools: dict[str, dict[str, Device]] = {}
    for name, device in _in_order(devices).items():
        pools.setdefault("" if mixed else device.type, {})[name] = device
    staying = {trial: held[trial] for trial in fixed if trial in held}
    of_types = list(pools.values())
    _refuse_impossible(of_types, staying, wanted)
    rooms = [len(pool.keys() - _all(staying)) for pool in of_types]
    if _possible([wanted[trial] for trial in wanted.keys() - staying.keys()], rooms):
        # It matters more that all trials run than that few move: with several types, a larger trial may have to make
        # way for smaller ones. So the second attempt lets every trial move.
        for kept in (_unchanged(of_types, held, wanted, staying), {}):
            made = _place(of_types, held, wanted, staying, kept)
            if made is not None:
                same = {trial for trial in wanted if set(held.get(trial, ())) == set(made[trial])}
                return {trial: held[trial] if trial in same else made[trial] for trial in wanted}
    there = " and ".join(f"{len(pool)} of type {type}" for type, pool in pools.items())
    raise StudyError(
        f"Trials are to have {sum(wanted.values())} devices in all, each trial those of one type, and {there} cannot "
        "be divided like that: ask for fewer, or allow devices of several types."
    )


def consolidate(
    devices: Devices, held: Held, count: int, fixed: Collection[int] = ()
) -> tuple[Places, tuple[str, ...]]:
    """The moves to make before all but ``count`` devices go, and the nodes that are empty after the moves.

    Nodes are emptied while the other nodes have ``count`` devices. The nodes with the fewest devices in use go first. A
    trial that moves has as many devices as before, of the same type, on no more nodes. A node is not emptied where a
    trial cannot move like that, or where a ``fixed`` trial is on it.

    >>> devices = {f"{node}{i}": Device(f"{node}{i}", "h200", 80, node) for node in "abc" for i in range(2)}
    >>> consolidate(devices, {0: ("a0",), 1: ("b1",)}, count=2)
    ({0: ('b0',)}, ('a', 'c'))
    """
    left, places, freed = _in_order(devices), dict(held), list[str]()
    while True:
        size = Counter(device.node for device in left.values())
        used = Counter(left[name].node for name in _all(places) if name in left)
        for node in sorted(size, key=lambda node: (used[node], size[node])):
            rest = {name: device for name, device in left.items() if device.node != node}
            made = _without(rest, devices, held, places, fixed) if len(rest) >= count else None
            if made is not None:
                left, places = rest, made
                freed.append(node)
                break
        else:
            moves = {trial: names for trial, names in places.items() if names != held[trial]}
            return moves, tuple(sorted(freed, key=_natural))


def together(
    made: list[Assignment], running: Mapping[int, Assignment], devices: Mapping[str, Device]
) -> list[Assignment]:
    """The same assignments with each trial's devices on as few nodes as possible; other running trials stay in place.

    Each trial gets devices of the type that it was assigned: on another type its units may take another time. A trial
    with a part of a device keeps that device.
    """
    if all(one.share <= 1 for one in made) or len({device.node for device in devices.values()}) < 2:
        return made
    named = {one.trial for one in made}
    whole = [one for one in made if one.share >= 1]
    staying = [one for trial, one in running.items() if trial not in named]
    parts = {name for one in [*made, *staying] if one.share < 1 for name in one.devices}
    held = {trial: one.devices for trial, one in running.items() if one.share >= 1}
    found: dict[int, tuple[str, ...]] = {}
    for type in sorted({devices[one.devices[0]].type for one in whole}):
        there = {name: one for name, one in devices.items() if one.type == type and name not in parts}
        held_there = {trial: tuple(name for name in names if name in there) for trial, names in held.items()}
        wanted = {one.trial: round(one.share) for one in whole if one.devices[0] in there}
        found |= arrange(there, held_there, wanted, [trial for trial in held if trial not in named])
    return [replace(one, devices=found.get(one.trial, one.devices)) for one in made]


def _without(rest: Devices, devices: Devices, held: Held, places: Held, fixed: Collection[int]) -> Places | None:
    """The places with all trials on the ``rest`` of the devices; None where that is not possible."""
    made = {trial: names for trial, names in places.items() if rest.keys() >= devices.keys() & names}
    moving = places.keys() - made.keys()
    if not moving.isdisjoint(fixed):
        return None
    for trial in sorted(moving, key=lambda trial: (-len(held[trial]), trial)):
        before = [devices[name] for name in held[trial] if name in devices]
        alike = {name: device for name, device in rest.items() if device.type in {one.type for one in before}}
        fit = _fit(alike, _all(made), {}, len(held[trial]), held[trial], ())
        if fit is None or fit.nodes > len({device.node for device in before}):
            return None
        made[trial] = fit.devices
    return made


def _unchanged(pools: Sequence[Devices], held: Held, wanted: Mapping[int, int], staying: Held) -> Places:
    kept: Places = {}
    for trial in sorted(wanted.keys() & held.keys() - staying.keys(), key=lambda trial: (-wanted[trial], trial)):
        names = set(held[trial])
        there = any(names <= pool.keys() for pool in pools)  # a device may have been lost since
        if there and len(names) == wanted[trial] and names.isdisjoint(_all(staying) | _all(kept)):
            kept[trial] = held[trial]
    return kept


def _place(pools: Sequence[Devices], held: Held, wanted: Mapping[int, int], staying: Held, kept: Held) -> Places | None:
    """Algorithm 3: always place the largest trial that waits; smaller trials that it displaces wait again."""
    made, locked = {**staying, **kept}, set(staying)
    claimed = {name for trial in wanted for name in held.get(trial, ())}
    while waiting := wanted.keys() - made.keys():
        trial = min(waiting, key=lambda trial: (-wanted[trial], trial))
        count, used, own = wanted[trial], _all(made), held.get(trial, ())
        smaller = {one: made[one] for one in made.keys() - locked if wanted[one] < count}
        fits = [_fit(pool, used, smaller, count, own, claimed) for pool in pools]
        locked.add(trial)  # a trial that was placed here is never displaced, so the loop ends
        others = [wanted[one] for one in wanted.keys() - locked]
        for fit in sorted(filter(None, fits), key=lambda fit: fit.cost):
            after = {one: names for one, names in made.items() if one not in fit.displaced} | {trial: fit.devices}
            taken = _all({one: after[one] for one in locked})
            if _possible(others, [len(pool.keys() - taken) for pool in pools]):
                made = after
                break
        else:
            return None
    return made


class _Fit(NamedTuple):
    devices: tuple[str, ...]
    nodes: int
    displaced: set[int]
    cost: tuple[int, ...]  # nodes, devices of displaced trials, own devices given up, devices left on the last node


def _fit(
    devices: Devices, used: Collection[str], smaller: Held, count: int, own: Collection[str], claimed: Collection[str]
) -> _Fit | None:
    """A place for ``count`` workers on the fewest nodes; ``smaller`` trials are displaced only to save nodes."""
    holder = {name: trial for trial, names in smaller.items() for name in names}
    free: dict[str, list[str]] = {device.node: [] for device in devices.values()}
    most: dict[str, list[str]] = {node: [] for node in free}
    for name, device in devices.items():
        if name not in used:
            free[device.node].append(name)
        if name not in used or name in holder:
            most[device.node].append(name)
    nodes = _span(map(len, most.values()), count)
    if nodes > len(most):
        return None
    rooms = most if nodes < _span(map(len, free.values()), count) else free
    taken: dict[str, list[str]] = {}
    displaced: set[int] = set()
    spare = 0
    for left in range(nodes, 0, -1):  # how many nodes are still to be chosen
        missing = count - sum(map(len, taken.values()))
        choices = {node: names for node, names in rooms.items() if node not in taken}
        beside = sum(sorted(map(len, choices.values()), reverse=True)[: left - 1])
        ranked = []
        for i, (node, names) in enumerate(choices.items()):
            take = min(missing, len(names))
            if take + beside < missing:
                continue  # with this node, even the largest other nodes have too few devices
            here = Counter(holder[name] for name in names if name in holder and holder[name] not in displaced)
            off = _fewest(here, smaller, take - len(names) + here.total())
            keeps = min(take, sum(name in own for name in names))
            size = len(names) if left == 1 else -len(names)  # best fit for the last node; the nodes before are filled
            others = sum(name in claimed and name not in own for name in names)
            ranked.append((sum(len(smaller[one]) for one in off), -keeps, size, others, i, node, off))
        *_, node, off = min(ranked)
        displaced.update(off)
        names = [name for name in rooms[node] if name not in holder or holder[name] in displaced]
        names.sort(key=lambda name: (name not in own, name in claimed))
        taken[node] = [name for name in rooms[node] if name in names[:missing]]
        spare = len(rooms[node]) - len(taken[node])
    order = sorted((node for node in rooms if node in taken), key=lambda node: -len(taken[node]))
    chosen = tuple(name for node in order for name in taken[node])
    moved = sum(len(smaller[one]) for one in displaced)
    return _Fit(chosen, nodes, displaced, (nodes, moved, len({*own} - {*chosen}), spare))


def _span(rooms: Iterable[int], count: int) -> int:
    """How many of the largest rooms hold ``count``; one more than there are rooms where all together do not."""
    return sum(held < count for held in accumulate(sorted(rooms, reverse=True), initial=0))


def _fewest(here: Mapping[int, int], places: Held, need: int) -> tuple[int, ...]:
    """The trials ``here`` to displace so that ``need`` devices come free and the fewest devices move in all."""
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for trial in sorted(here):
        for freed, (moved, trials, whose) in list(best.items()):
            more = (moved + len(places[trial]), trials + 1, (*whose, trial))
            enough = min(max(0, need), freed + here[trial])
            best[enough] = min(best.get(enough, more), more)
    return best[max(0, need)][2]


def _possible(sizes: Collection[int], rooms: Sequence[int]) -> bool:
    """Whether trials of these sizes can be divided among the types; a trial of one device fits any type with room."""
    wide = sorted((size for size in sizes if size > 1), reverse=True)
    stack = [(0, tuple(sorted(rooms)))]
    seen = set(stack)
    while stack and len(rooms) > 1:
        placed, left = stack.pop()
        if placed == len(wide):
            return True
        for i in reversed(range(len(left))):  # the smallest room that is enough is pushed last and so looked at first
            after = (placed + 1, tuple(sorted((*left[:i], left[i] - wide[placed], *left[i + 1 :]))))
            if left[i] >= wide[placed] and after not in seen:
                seen.add(after)
                stack.append(after)
    return len(rooms) < 2


def _refuse_impossible(pools: Sequence[Devices], staying: Held, wanted: Mapping[int, int]) -> None:
    there, most = sum(map(len, pools)), max(map(len, pools), default=0)
    for trial, count in wanted.items():
        if trial in staying and count != len(staying[trial]):
            raise StudyError(
                f"Trial {trial} is to stay where it is with {count} devices, and it has {len(staying[trial])}: leave "
                "its number as it is, or let it move."
            )
        if count > most > 0 and trial not in staying:
            nodes = Counter(device.node for device in max(pools, key=len).values()).most_common()
            where = ", ".join(f"{number} on {node}" for node, number in nodes[:4]) + ", ..." * (len(nodes) > 4)
            one, instead = (" of one type", "allow devices of several types") if there > most else ("", "add devices")
            raise StudyError(
                f"Trial {trial} is to have {count} devices, and the nodes have {most}{one} ({where}): ask for {most} "
                f"or fewer, or {instead}."
            )
    stay = {name for pool in pools for name in pool} & _all(staying)
    total = len(stay) + sum(count for trial, count in wanted.items() if trial not in staying)
    if total > there:
        raise StudyError(
            f"Trials are to have {total} devices in all, and there are {there}: a scheduler must give out no more than "
            "there are, so this is a mistake in the scheduler."
        )


def _all(places: Held) -> set[str]:
    return {name for names in places.values() for name in names}


def _in_order(devices: Devices) -> dict[str, Device]:
    return dict(sorted(devices.items(), key=lambda one: (_natural(one[1].node), _natural(one[0]))))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key in which numbers inside names count as numbers: gpu 10 comes after gpu 9."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"([0-9]+)", name)]
