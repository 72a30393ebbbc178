"""How fast trials go: what reports tell the speed model, by the study's clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from penstock.bundle import Device, Measured
from penstock.engine.fusing import kind
from penstock.speed.model import UNKNOWN, Speed, SpeedModel
from penstock.speed.profiles import Kind, Profile, Profiles


@dataclass(frozen=True)
class Shelf:
    """The profiles of one task."""

    profiles: Profiles
    task: str

    def get(self, signature: str, device: Device, what: Kind) -> Profile | None:
        """What was measured last on a device of its kind."""
        return self.profiles.get(self.task, kind(device), signature, what)

    def put(self, event: Measured, device: Device) -> None:
        """Keep what a worker found out."""
        what = (event.signature, event.kind, event.table, event.size, event.way, event.reason)
        if event.table:
            self.profiles.put(Profile(self.task, kind(device), *what))

    def refine(self, model: SpeedModel, signature: str, device: Device) -> None:
        """Keep what became of a measurement by what was seen since."""
        sharing, scaling = model.known(signature, device.type)
        found: tuple[tuple[Kind, dict[int, float]], ...] = (("sharing", sharing), ("scaling", scaling))
        for what, times in found:
            if times and (profile := self.get(signature, device, what)) is not None and 1 in profile.table:
                self.profiles.put(replace(profile, table={n: profile.table[1] * t for n, t in times.items()}))
        if math.isfinite(model.moving):
            self.profiles.put(Profile(self.task, kind(device), signature, "moving", {0: model.moving}))


@dataclass
class _Going:
    type: str  # of its devices
    since: float  # the clock at its last report, or when it was placed
    first: float | None = None  # seconds of the unit that began with starting it
    begun: bool = False
    alike: bool = True  # nobody came or left since


class Pace:
    """Times the units of running trials. Without a ``model`` nothing is learnt, and nothing is assumed.

    ``shelf`` is where measurements are kept between studies.
    """

    def __init__(self, model: SpeedModel | None = None, shelf: Shelf | None = None) -> None:
        self.model, self.shelf = model, shelf
        self._going: dict[int, _Going] = {}
        self._signatures: set[str] = set()
        self._devices: dict[str, Device] = {}  # lost ones too: what was measured there may still be told
        self._types: dict[str, Device] = {}  # the first device of each type that there is
        self._recalled: set[tuple[str, str]] = set()  # signatures and types

    @property
    def learns(self) -> bool:
        return self.model is not None

    def look(self, devices: Mapping[str, Device]) -> None:
        """These devices there are; of those of a new type something may be known from an earlier study."""
        self._devices.update(devices)
        self._types = {device.type: device for device in reversed(list(devices.values()))}
        for signature in sorted(self._signatures):
            self._recall(signature)

    def speed(self) -> Speed:
        """What a scheduler is given."""
        return UNKNOWN if self.model is None else self.model.speed(self._types)

    def know(self, trial: int, signature: str) -> None:
        """A trial is of a signature, of which something may be known from an earlier study."""
        if self.model is None:
            return
        self.model.know(trial, signature)
        if signature not in self._signatures:
            self._signatures.add(signature)
            self._recall(signature)

    def _recall(self, signature: str) -> None:
        for type, device in self._types.items():
            if self.model is None or self.shelf is None or (signature, type) in self._recalled:
                continue
            self._recalled.add((signature, type))
            tables = {}
            for what in ("sharing", "scaling", "moving"):
                profile = self.shelf.get(signature, device, what)
                tables[what] = {} if profile is None else profile.table
            self.model.measured(signature, type, tables["sharing"], tables["scaling"])
            if tables["moving"]:
                self.model.started(tables["moving"][0])

    def pays(self, trial: int) -> int:
        """The most devices that pay for a trial, of any type there is: one, where that was not measured."""
        if self.model is None:
            return 1
        return max((self.model.curve(type, trial).widest for type in self._types), default=1)

    def outlasts(self, trial: int, units: float, share: float, coming: float) -> bool:
        """Whether a trial trains on, at its share, for longer than a device takes to come and the trial to move there.

        Nothing is given up on an assumption: where no unit was timed yet, it does.
        """
        if self.model is None or not self.model.timed:
            return True
        left = units * min(self.model.unit(t, trial) * self.model.curve(t, trial).at(share) for t in self._types)
        return left > coming + (self.model.moving if math.isfinite(self.model.moving) else 0.0)

    def widest(self, trial: int, device: str) -> int:
        """The most devices that pay for a trial, of the type of this one."""
        return 1 if self.model is None else self.model.curve(self._devices[device].type, trial).widest

    def unmeasured(self, signature: str, type: str, count: int) -> bool:
        """Whether it is to be found out what so many devices give a signature: where the last doubling tried paid."""
        if self.model is None:
            return False
        scaling = self.model.known(signature, type)[1]
        most = max(scaling, default=0)
        return most == 0 or (1 < most <= count / 2 and min(scaling, key=lambda w: (scaling[w], w)) == most)

    def measured(self, event: Measured) -> list[str]:
        """A worker measured what sharing and spreading cost on its device; gives what was smoothed or cut."""
        device = self._devices[event.device]
        if self.shelf is not None:
            self.shelf.put(event, device)
        if self.model is None:
            return []
        sharing, scaling = self.model.known(event.signature, device.type)
        if event.kind == "sharing":
            return self.model.measured(event.signature, device.type, event.table, scaling)
        return self.model.measured(event.signature, device.type, sharing, event.table)

    def keep(self) -> None:
        """Keep what was learnt for the next study."""
        if self.model is not None and self.shelf is not None:
            for signature in sorted(self._signatures):
                for device in {kind(one): one for one in self._devices.values()}.values():
                    self.shelf.refine(self.model, signature, device)

    def entered(self, trial: int, device: str, together: Collection[int], clock: float) -> None:
        """A trial has come into a bundle on a device, or on several of its type."""
        if self.model is not None:
            self._going[trial] = _Going(self._devices[device].type, clock)
            self._mixed(together, clock)

    def unlike(self, trial: int) -> None:
        """What a trial's next unit takes says nothing of those that follow."""
        if (going := self._going.get(trial)) is not None:
            going.alike = False

    def left(self, trial: int, together: Collection[int], clock: float) -> None:
        """A trial has left its bundle, and the others are among themselves."""
        if self.model is not None:
            self._going.pop(trial, None)
            self._mixed(together, clock)

    def reported(self, trial: int, share: float, clock: float, *, unlike: bool = False) -> None:
        """A trial has reported a unit that it trained at a share; beside ``unlike`` trials that refines no curve."""
        going = self._going.get(trial)
        if going is None or self.model is None:
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
        if going is None or self.model is None:
            return 0.5
        seconds = clock - going.since - (0.0 if going.begun else self.model.start)
        unit = self.model.unit(going.type, trial) * self.model.curve(going.type, trial).at(share)
        return min(0.99, max(0.0, seconds / unit))  # it has not reported

    def stopped(self, trial: int, clock: float) -> None:
        """A trial was made to leave; its last report was the boundary."""
        going = self._going.get(trial)
        if going is not None and self.model is not None and going.begun:
            self.model.stopped(clock - going.since)

    def _mixed(self, together: Collection[int], clock: float) -> None:
        for trial in together:
            going = self._going.get(trial)
            if going is not None and going.since < clock:
                going.alike, going.first = False, None
