"""Who shares a device with whom: trials of one signature, where that can be, for they can be fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Room


def alike_together(
    made: Sequence[Assignment],
    signatures: Mapping[int, str],
    bytes: Mapping[int, int],
    devices: Mapping[str, Device],
    room: Mapping[str, Room],
    there: Mapping[str, str],
) -> list[Assignment]:
    """The same shares of the same devices, exchanged among those that start now: a scheduler knows no signatures.

    ``there`` are the signatures on devices that trials share already. Only equal shares of one device type are
    exchanged, and nothing is where the memory of a device would not do.

    >>> cards = {name: Device(name, "h200", 8) for name in ("gpu 0", "gpu 1")}
    >>> made = [Assignment(trial, (f"gpu {trial % 2}",), 0.5) for trial in range(4)]
    >>> room = {name: Room(1.0, 8) for name in cards}
    >>> together = alike_together(made, {0: "a", 1: "a", 2: "b", 3: "b"}, dict.fromkeys(range(4), 1), cards, room, {})
    >>> [one.devices[0] for one in together]
    ['gpu 0', 'gpu 0', 'gpu 1', 'gpu 1']
    """
    kinds: dict[tuple[float, str], list[Assignment]] = {}
    for one in made:
        if one.share < 1:
            kinds.setdefault((one.share, devices[one.devices[0]].type), []).append(one)
    places: dict[int, str] = {}
    for ours in kinds.values():
        places |= _exchange(ours, signatures, there)
    used: Counter[str] = Counter()
    for trial, name in places.items():
        used[name] += bytes[trial]
    if any(total > room[name].bytes for name, total in used.items()):
        return list(made)
    return [replace(one, devices=(places[one.trial],)) if one.share < 1 else one for one in made]


def _exchange(ours: Sequence[Assignment], signatures: Mapping[int, str], there: Mapping[str, str]) -> dict[int, str]:
    """First those that join their like, then the most common on the devices with most places."""
    left: dict[str, list[int]] = {}
    for one in ours:
        left.setdefault(signatures[one.trial], []).append(one.trial)
    slots = Counter(one.devices[0] for one in ours)
    if len(left.keys() | {there[name] for name in slots if name in there}) < 2:
        return {one.trial: one.devices[0] for one in ours}
    places: dict[int, str] = {}
    for name in sorted(slots, key=lambda name: (name not in there, -slots[name])):
        first = there.get(name, "")
        for _ in range(slots[name]):
            signature = first if left.get(first) else max(left, key=lambda one: len(left[one]))
            first = signature
            places[left[signature].pop(0)] = name
    return places
