"""How fast trials go by the study's clock: what reports tell the speed model, and what is kept for the next study."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version

from penstock import __version__
from penstock.bundle import Device, Measured
from penstock.speed.model import UNKNOWN, Speed, SpeedModel
from penstock.speed.profiles import Kind, Profile, Profiles


@dataclass(frozen=True)
class Shelf:
    """The profiles of one task: the one memory of what was measured."""

    profiles: Profiles
    task: str

    def get(self, signature: str, device: Device, kind: Kind) -> Profile | None:
        """What was measured last on a device of its kind."""
        return self.profiles.get(self.task, device_kind(device), signature, kind)

    def put(self, signature: str, device: Device, kind: Kind, table: Mapping[int, float]) -> None:
        """Keep numbers, with the words that a measurement came with, where there was one."""
        before = self.get(signature, device, kind) or Profile(self.task, device_kind(device), signature, kind, {})
        self.profiles.put(replace(before, table=dict(table)))

    def measured(self, event: Measured, device: Device) -> None:
        """Keep what a worker found out."""
        if event.table:
            what = (event.signature, event.kind, event.table, event.size, event.way, event.reason)
            self.profiles.put(Profile(self.task, device_kind(device), *what))


def device_kind(device: Device) -> str:
    """All that a step's time depends on besides the task. Memory is none of it: what fits is asked where it is used."""
    threads = "" if device.threads is None else f", {device.threads} threads"
    return f"{device.type}{threads}, torch {_torch()}, penstock {__version__}"


@cache
def _torch() -> str:
    return version("torch")


@dataclass
class _Going:
    type: str  # of its devices
    since: float  # the clock at its last report, or when it was placed
    first: float | None = None  # seconds of the unit that began with starting it
    begun: bool = False
    alike: bool = True  # no trial came or left since


class Pace:
    """Times the units of running trials for a ``model``; ``shelf`` keeps measurements between studies."""

    def __init__(self, model: SpeedModel | None = None, shelf: Shelf | None = None) -> None:
        self.model, self.shelf = model or SpeedModel(), shelf
        self._going: dict[int, _Going] = {}
        self._signatures: dict[int, str] = {}  # of trials, as the model was told
        self._devices: dict[str, Device] = {}  # lost ones too: what was measured there may still be told
        self._count = 0  # how many devices there are
        self._types: dict[str, Device] = {}  # the first device of each type that there is
        self._recalled: set[tuple[str, str]] = set()  # signatures and types
        self._reasons: dict[tuple[str, str], str] = {}  # why bundles of a signature on a type are as large as they are
        self._opened = 0.0  # the clock when the study was taken up
        self._opening: tuple[Device, float] | None = None  # where the first trial was placed, and how long after

    def open(self, clock: float) -> None:
        """A driver takes the study up."""
        self._opened = clock

    def look(self, devices: Mapping[str, Device]) -> None:
        """These devices there are; of those of a new type something may be known from an earlier study."""
        self._devices.update(devices)
        self._count = len(devices)
        self._types = {device.type: device for device in reversed(list(devices.values()))}
        for signature in sorted(set(self._signatures.values())):
            self._recall(signature)

    def alike(self, device: str) -> list[str]:
        """The devices that what was measured on this one holds for."""
        return [name for name, other in self._devices.items() if other.type == self._devices[device].type]

    def known(self) -> Speed:
        """All that is known of the trials' speed."""
        return self.model.speed(self._types)

    def speed(self) -> Speed:
        """What a scheduler is given.

        On one device no order of trials ends sooner than another, and no trial has a place to move to. There the
        seconds of units are left out, so that a run with one worker repeats itself (invariant 4).
        """
        speed = self.known()
        return replace(speed, unit=UNKNOWN.unit, moving=math.inf) if self._count == 1 else speed

    def know(self, trial: int, signature: str) -> None:
        """A trial is of a signature, of which something may be known from an earlier study."""
        self._signatures[trial] = signature
        self.model.know(trial, signature)
        self._recall(signature)

    def _recall(self, signature: str) -> None:
        if self.shelf is None or not signature:
            return
        for type, device in self._types.items():
            if (signature, type) in self._recalled:
                continue
            self._recalled.add((signature, type))
            sharing = self.shelf.get(signature, device, "sharing")
            if sharing is not None and self.model.sharing == "measured":
                self.model.shared(signature, type, sharing.table, sharing.size)
            if (scaling := self.shelf.get(signature, device, "scaling")) is not None:
                self.model.spread(signature, type, scaling.table)
            if (unit := self.shelf.get(signature, device, "unit")) is not None:
                self.model.recall(signature, type, unit.table[1])
            if (moving := self.shelf.get(signature, device, "moving")) is not None:
                self.model.started(moving.table[0])
                self.model.stopped(moving.table[1])

    def size(self, signature: str, device: str) -> int | None:
        """The most trials of a bundle on a device, or None where the bundle is to measure that."""
        return self.model.size(signature, self._devices[device].type)

    def reason(self, signature: str, device: str) -> str:
        """Where a bundle's size comes from, for a person."""
        if (signature, self._devices[device].type) in self._reasons:
            return self._reasons[signature, self._devices[device].type]
        if self.model.sharing == "forced":
            return 'asked for by sharing="fused"'
        known = None if self.shelf is None else self.shelf.get(signature, self._devices[device], "sharing")
        return "" if known is None else f"measured before: {known.reason.removeprefix('measured before: ')}"

    def measured(self, event: Measured) -> list[str]:
        """A worker measured what sharing or spreading costs on its device; gives what was smoothed or cut."""
        device = self._devices[event.device]
        if self.shelf is not None:
            self.shelf.measured(event, device)
        if event.kind == "scaling":
            return self.model.spread(event.signature, device.type, event.table)
        self._reasons[event.signature, device.type] = event.reason
        return self.model.shared(event.signature, device.type, event.table, event.size)

    def keep(self) -> None:
        """Keep what was learnt for the next study."""
        signatures = sorted(set(self._signatures.values()) - {""})
        if self.shelf is None or not signatures or self._opening is None:
            return
        self.shelf.put("", self._opening[0], "opening", {0: self._opening[1]})
        for signature in signatures:
            for device in {device_kind(one): one for one in self._devices.values()}.values():
                self._keep(self.shelf, signature, device)

    def _keep(self, shelf: Shelf, signature: str, device: Device) -> None:
        sharing, scaling = self.model.known(signature, device.type)
        found: tuple[tuple[Kind, dict[int, float]], ...] = (("sharing", sharing), ("scaling", scaling))
        for kind, times in found:
            if times and (before := shelf.get(signature, device, kind)) is not None and 1 in before.table:
                shelf.put(signature, device, kind, {count: before.table[1] * t for count, t in times.items()})
        if (unit := self.model.mean(signature, device.type)) is not None:
            shelf.put(signature, device, "unit", {1: unit})
            if math.isfinite(self.model.moving):
                stop = self.model.moving - self.model.start
                shelf.put(signature, device, "moving", {0: self.model.start, 1: stop})

    # What happens, by the clock

    def entered(self, trial: int, device: str, together: Collection[int], clock: float) -> None:
        """A trial has come into a bundle on a device, or on several of its type."""
        if self._opening is None:
            self._opening = self._devices[device], clock - self._opened
        self._going[trial] = _Going(self._devices[device].type, clock)
        self._mixed(together, clock)

    def unlike(self, trial: int) -> None:
        """What a trial's next unit takes says nothing of those that follow."""
        if (going := self._going.get(trial)) is not None:
            going.alike = False

    def left(self, trial: int, together: Collection[int], clock: float) -> None:
        """A trial has left its bundle, and the others are among themselves."""
        self._going.pop(trial, None)
        self._mixed(together, clock)

    def reported(self, trial: int, share: float, clock: float, *, unlike: bool = False) -> None:
        """A trial has reported a unit that it trained at a share; beside ``unlike`` trials that refines no curve."""
        going = self._going.get(trial)
        if going is None:
            return
        seconds, going.since = clock - going.since, clock
        if not going.begun:
            going.begun = True
            if going.alike:
                going.first = seconds
                self.model.observed(trial, going.type, share, seconds - self.model.start, compare=False)
        elif going.alike:
            if going.first is not None:
                self.model.started(going.first - seconds)
            going.first = None
            self.model.observed(trial, going.type, share, seconds, compare=not unlike)
        going.alike = True

    def done(self, trial: int, share: float, clock: float) -> float:
        """The part of a unit that a trial should have trained since its last report; a half where nothing is known."""
        going = self._going.get(trial)
        if going is None:
            return 0.5
        seconds = clock - going.since - (0.0 if going.begun else self.model.start)
        unit = self.model.unit(going.type, trial) * self.model.curve(going.type, trial).at(share)
        return min(0.99, max(0.0, seconds / unit))  # it has not reported

    def stopped(self, trial: int, clock: float) -> None:
        """A trial was made to leave; its last report was the boundary."""
        going = self._going.get(trial)
        if going is not None and going.begun:
            self.model.stopped(clock - going.since)

    def _mixed(self, together: Collection[int], clock: float) -> None:
        for trial in together:
            going = self._going.get(trial)
            if going is not None and going.since < clock:
                going.alike, going.first = False, None
