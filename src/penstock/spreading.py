"""Trials on several devices: who is tried there first, who is to go where, and which devices do not find each other.

What several devices give a trial is measured by one of its signature, once devices are idle: it moves onto 1, 2, 4, …
of them in turn (invariant 7). After that the scheduler knows its curve, and decides who grows and who shrinks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.executors.base import Device
from penstock.pace import Pace
from penstock.scheduling.base import Assignment
from penstock.scheduling.placement import arrange

WORTH = 2  # units that a trial has left, at least, when it tries several devices


@dataclass(frozen=True)
class Lone:
    """A trial that runs alone on a device, and could be tried on several."""

    trial: int
    device: str
    signature: str
    units: int
    batch_size: int
    score: float


@dataclass(frozen=True)
class Destiny:
    """Where a trial goes when it has left its bundle; to ``measure`` on how many of the devices it is best off."""

    devices: tuple[str, ...]
    measure: bool = False
    reason: str = ""


class Spreading:
    """What is to become of trials that were made to leave for other devices."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.destined: dict[int, Destiny] = {}
        self._apart: set[frozenset[str]] = set()  # devices whose workers did not meet

    def parted(self, devices: Collection[str]) -> None:
        """The workers on these devices did not meet: they are not tried together again."""
        self._apart.add(frozenset(devices))

    def apart(self, devices: Collection[str]) -> bool:
        """Whether these devices are known not to find each other."""
        return any(one <= set(devices) for one in self._apart)

    def probe(self, alone: Iterable[Lone], idle: Collection[str], devices: Mapping[str, Device]) -> int | None:
        """Destine the best of these trials to find out what idle devices give its signature; gives which, if any."""
        for one in sorted(alone, key=lambda one: (-one.score, one.trial)):
            type = devices[one.device].type
            if not one.signature or one.units < WORTH or not self.pace.unmeasured(one.signature, type):
                continue
            free = {name: devices[name] for name in (one.device, *idle) if devices[name].type == type}
            most = min(len(free), one.batch_size)
            while most > 1:
                (names,) = arrange(free, {one.trial: (one.device,)}, {one.trial: most}).values()
                if not self.apart(names):
                    few = f"a batch has {one.batch_size} samples, so it has no more devices"
                    reason = few if one.batch_size < len(free) else ""
                    self.destined[one.trial] = Destiny(names, measure=True, reason=reason)
                    return one.trial
                most -= 1
        return None


def together(
    made: list[Assignment], running: Mapping[int, Assignment], devices: Mapping[str, Device]
) -> list[Assignment]:
    """The same with the devices of each trial on as few nodes as can be; who is not named stays where it is.

    Trials with a part of a device keep what they were given.
    """
    if all(one.share <= 1 for one in made) or len({device.node for device in devices.values()}) < 2:
        return made
    named = {one.trial for one in made}
    whole = [one for one in made if one.share >= 1]
    parts = {name for one in [*made, *running.values()] if one.share < 1 for name in one.devices}
    held = {trial: one.devices for trial, one in running.items() if one.share >= 1}
    found = arrange(
        {name: device for name, device in devices.items() if name not in parts},
        held,
        {one.trial: round(one.share) for one in whole},
        [trial for trial in held if trial not in named],
    )
    return [Assignment(one.trial, found.get(one.trial, one.devices), one.share) for one in made]
