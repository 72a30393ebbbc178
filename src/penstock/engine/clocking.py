"""The speed of trials by the study's clock: reports teach the speed model, and profiles are kept for the next study."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from statistics import fmean, variance

from penstock import __version__
from penstock.bundle import Device, Limited, Measured, Metered
from penstock.engine.costing import Costs
from penstock.speed.model import UNKNOWN, Speed, SpeedModel
from penstock.speed.profiles import Kind, Profile, Profiles, batch_size
from penstock.speed.sizes import first_guess
from penstock.trial import Usage

Limits = dict[int, dict[int, tuple[float, float]]]  # by bundle size and power limit: seconds of a step, and watts


@dataclass(frozen=True)
class Shelf:
    """The profiles of one task: the one memory of its measurements."""

    profiles: Profiles
    task: str

    def get(self, signature: str, device: Device, kind: Kind) -> Profile | None:
        """The last profile of a kind, measured on a device like this one."""
        return self.profiles.get(self.task, device_kind(device), signature, kind)

    def put(self, signature: str, device: Device, kind: Kind, table: Mapping[int, float]) -> None:
        """Keep a table, with the size, way and reason of the earlier profile, where there was one."""
        before = self.get(signature, device, kind) or Profile(self.task, device_kind(device), signature, kind, {})
        self.profiles.put(replace(before, table=dict(table)))

    def put_limits(self, what: str, device: Device, table: Mapping[int, tuple[float, float]]) -> None:
        """Keep what power limits gave: seconds of a step, and watts."""
        self.put(what, device, "limit seconds", {limit: both[0] for limit, both in table.items()})
        self.put(what, device, "limit watts", {limit: both[1] for limit, both in table.items()})

    def limits(self, signature: str, device: Device) -> Limits:
        """What power limits gave for a signature, by the number of trials in a bundle."""
        found: Limits = {}
        for one in self.profiles.of(self.task, device_kind(device)):
            name, _, size = one.signature.rpartition(" x")
            watts = self.get(one.signature, device, "limit watts")
            if one.kind == "limit seconds" and name == signature and watts is not None and size.isdecimal():
                both = [limit for limit in one.table if limit in watts.table]
                found[int(size)] = {limit: (one.table[limit], watts.table[limit]) for limit in both}
        return found

    def guess(self, signature: str, device: Device) -> int:
        """The size of a bundle to time first, by what paid for trials of another batch size; 0 where none did."""
        known = self.profiles.beside(self.task, device_kind(device), signature)
        if known is None:
            return 0
        return first_guess(known.table, known.size, (batch_size(known.signature), batch_size(signature)))

    def measured(self, event: Measured, device: Device) -> None:
        """Keep a worker's measurement."""
        if event.kind == "threads" or event.kind == "packing":
            return  # both depend on what else there is, and are measured in each study
        if event.kind == "refusing" or event.table:
            what = (event.signature, event.kind, event.table, event.size, event.way, event.reason)
            self.profiles.put(Profile(self.task, device_kind(device), *what))


def spread(units: Sequence[Sequence[float]]) -> dict[int, float]:
    """How the seconds of units vary, for each trial its units: a profile's table; empty where no two can be compared.

    The deviation of the trials' means is without the part that the deviation of their units explains.

    >>> spread([[9.0, 11.0], [19.0, 21.0]])[2], spread([[10.0]])
    (2.0, {})
    """
    several = [some for some in units if len(some) > 1]
    free = sum(len(some) - 1 for some in several)
    if not free:
        return {}
    within = sum(variance(some) * (len(some) - 1) for some in several) / free
    between = variance([fmean(some) for some in units]) if len(units) > 1 else 0.0
    explained = within * fmean([1 / len(some) for some in units])
    return {0: math.sqrt(within), 1: math.sqrt(max(0.0, between - explained)), 2: float(len(units))}


def device_kind(device: Device) -> str:
    """Everything besides the task that a step's time depends on. Memory is not part of it: it only limits sizes."""
    threads = "" if device.threads is None else f", {device.threads} threads"
    return f"{device.type}{threads}, torch {_torch()}, penstock {__version__}"


@cache
def _torch() -> str:
    return version("torch")


@dataclass
class _Going:
    type: str  # the type of its devices
    since: float  # the clock at its last report, or when it was placed
    first: float | None = None  # seconds of its first unit, which include the start
    begun: bool = False
    alike: bool = True  # whether no trial entered or left the bundle since


class Pace:
    """Times the units of running trials for a ``model``; ``shelf`` keeps measurements between studies."""

    def __init__(self, model: SpeedModel | None = None, shelf: Shelf | None = None, eta: float = 0.0) -> None:
        self.model, self.shelf = model or SpeedModel(), shelf
        self.costs = Costs(eta)
        self._going: dict[int, _Going] = {}
        self._signatures: dict[int, str] = {}  # the signatures of trials, as the model was told
        self._devices: dict[str, Device] = {}  # lost devices too: a measurement made there may still arrive
        self._count = 0  # how many devices there are
        self._types: dict[str, Device] = {}  # the first device of each type that there is
        self._recalled: set[tuple[str, str]] = set()  # pairs of signature and type whose profiles were looked up
        self._reasons: dict[tuple[str, str], str] = {}  # why bundles of a signature on a type have their size
        self._refused: dict[str, str] = {}  # by signature: why an earlier study could not fuse its trials
        self._alone: dict[tuple[str, str], dict[int, list[float]]] = {}  # by signature and type: units of trials alone
        self._unlimited: set[str] = set()  # why devices have no limit, as it was said
        self._limits: dict[tuple[str, str], Limits] = {}  # by signature and type: what power limits gave
        self._opened = 0.0  # the clock when the study was taken up
        self._opening: tuple[Device, float] | None = None  # the first placement: its device, and seconds since opening

    def open(self, clock: float) -> None:
        """A driver takes the study up."""
        self._opened = clock

    def look(self, devices: Mapping[str, Device]) -> None:
        """Take the present devices, and recall profiles of an earlier study on types that are new."""
        self._devices.update(devices)
        self._count = len(devices)
        self._types = {device.type: device for device in reversed(list(devices.values()))}
        for signature in sorted(set(self._signatures.values())):
            self._recall(signature)

    def alike(self, device: str) -> list[str]:
        """The devices of the same type: measurements on this device hold for them."""
        return [name for name, other in self._devices.items() if other.type == self._devices[device].type]

    def known(self) -> Speed:
        """The speed of the trials, with all that was measured."""
        speed = self.model.speed(self._types)
        if not self.costs.eta or not speed.types:
            return speed
        return replace(speed, types={type: self._weighed(one, type) for type, one in speed.types.items()})

    def _weighed(self, speed: Speed, type: str) -> Speed:
        """The speed on a type, with seconds that are as many as they cost."""
        unit, factor = speed.unit, self.costs.on(type)
        return replace(speed, unit=lambda trial: factor * unit(trial))

    def speed(self) -> Speed:
        """The speed that a scheduler is given.

        On one device no order of trials ends sooner than another, no trial has a place to move to, and sharing as far
        as it pays wastes least. So the seconds of units are left out there: trials start in the order of asking, as
        many together as can be, and a run with one worker repeats itself (invariant 4).
        """
        speed = self.known()
        if self._count != 1:
            return speed
        return Speed(UNKNOWN.unit, speed.curve, tried=speed.tried, timed=speed.timed, shared=lambda trial: False)

    def know(self, trial: int, signature: str) -> None:
        """Note a trial's signature, and recall profiles of an earlier study."""
        self._signatures[trial] = signature
        self.model.know(trial, signature)
        self._recall(signature)

    def asked(self, trial: int, steps: int) -> None:
        """Note how many steps a trial was asked for in all: whether fusing repays its cost depends on that."""
        self.model.asked(trial, steps)

    def _recall(self, signature: str) -> None:
        if self.shelf is None or not signature:
            return
        for type, device in self._types.items():
            if (signature, type) in self._recalled:
                continue
            self._recalled.add((signature, type))
            if (watts := self.shelf.get(signature, device, "watts")) is not None:
                self.costs.recall(signature, type, watts.table)
            sharing = self.shelf.get(signature, device, "sharing")
            refusing = self.shelf.get(signature, device, "refusing")
            if refusing is not None and self.model.sharing == "measured":
                self._refused[signature] = (
                    f'{refusing.reason}; an earlier study found this, sharing="fused" tries again'
                )
                self.model.shared(signature, type, {}, 1, recalled=True)
            elif sharing is not None and self.model.sharing == "measured":
                size = self.costs.size(signature, type, sharing.table, sharing.size)
                self.model.shared(signature, type, sharing.table, size, recalled=True)
            if (trying := self.shelf.get(signature, device, "trying")) is not None:
                self.model.checked(signature, type, trying.table)
            if (scaling := self.shelf.get(signature, device, "scaling")) is not None:
                self.model.spread(signature, type, self.costs.spread(signature, type, scaling.table))
            if (unit := self.shelf.get(signature, device, "unit")) is not None:
                self.model.recall(signature, type, unit.table[1])
            if (moving := self.shelf.get(signature, device, "moving")) is not None:
                self.model.started(moving.table[0])
                self.model.stopped(moving.table[1])

    def size(self, signature: str, device: str) -> int | None:
        """The most trials of a bundle on a device, or None where the bundle has to measure this."""
        return self.model.size(signature, self._devices[device].type)

    def refused(self, signature: str) -> str:
        """Why an earlier study could not fuse the trials of a signature; else nothing."""
        return self._refused.get(signature, "")

    def alone(self, signature: str, device: str) -> str:
        """Why trials of one signature are placed solo, where no measurement of this study says so; else nothing.

        Too few steps were asked for, or an earlier study found that fusing them fails or does not pay.
        """
        type, count = self._devices[device].type, sum(known == signature for known in self._signatures.values())
        if said := self.model.unrepaid(signature, type):
            return said
        measured = self.model.sharing == "measured" and self.model.size(signature, type) == 1
        if not signature or count < 2 or not measured or (signature, type) in self._reasons:
            return ""
        return self.refused(signature) or self.reason(signature, device)

    def guess(self, signature: str, device: str) -> int:
        """The size that a bundle which has to measure its own is to time first; 0 where nothing suggests one."""
        return 0 if self.shelf is None else self.shelf.guess(signature, self._devices[device])

    def reason(self, signature: str, device: str) -> str:
        """The reason for a bundle's size, in words for the user."""
        if (signature, self._devices[device].type) in self._reasons:
            return self._reasons[signature, self._devices[device].type]
        if self.model.sharing == "forced":
            return 'asked for by sharing="fused"'
        if self.model.sharing == "fixed":
            return "fixed by deterministic=True"
        known = None if self.shelf is None else self.shelf.get(signature, self._devices[device], "sharing")
        return "" if known is None else f"measured before: {known.reason.removeprefix('measured before: ')}"

    def measured(self, event: Measured) -> list[str]:
        """Take a worker's measurement; gives notes on values that were smoothed or cut."""
        device = self._devices[event.device]
        if self.shelf is not None:
            self.shelf.measured(event, device)
        if event.kind == "scaling":
            table = self.costs.spread(event.signature, device.type, event.table)
            return self.model.spread(event.signature, device.type, table)
        if event.kind == "packing":
            return []  # its worker trains as many bundles at once as pay
        if event.kind == "trying":
            self.model.checked(event.signature, device.type, event.table)
            return []
        if event.kind == "refusing":
            return []  # the measurement of sharing beside it says so for this study
        self._reasons[event.signature, device.type] = event.reason
        size = self.costs.size(event.signature, device.type, event.table, event.size)
        weighed = [] if size == event.size else [f"at most {size} trials cost least by objective={self.costs.eta:g}"]
        return weighed + self.model.shared(event.signature, device.type, event.table, size)

    def metered(self, event: Metered) -> None:
        """Take a device's line: the greatest power that it can have, or else had."""
        if (device := self._devices.get(event.device)) is not None:
            self.costs.metered(device.type, event.most if event.range is None else event.range[1])

    def limited(self, event: Limited) -> str:
        """Keep what a worker measured of power limits; gives why a device has none, the first time.

        What a pack as a whole gave is not kept: the next study has other packs.
        """
        device, own = self._devices.get(event.device), event.signature.partition(" on ")[0] in self._signatures.values()
        if self.shelf is not None and device is not None and event.table and own:
            self.shelf.put_limits(f"{event.signature} x{event.size}", device, event.table)
            self._limits.pop((event.signature, device.type), None)
        if event.set or event.table or event.reason in self._unlimited:
            return ""
        self._unlimited.add(event.reason)
        return f"{event.device}: {event.reason}"

    def limits(self, signature: str, device: str) -> Limits:
        """What was measured of power limits for a signature, by bundle size."""
        if self.shelf is None or not signature:
            return {}
        key = signature, self._devices[device].type
        if key not in self._limits:
            self._limits[key] = self.shelf.limits(signature, self._devices[device])
        return self._limits[key]

    def measured_limits(self, device: str) -> dict[tuple[str, int], dict[int, tuple[float, float]]]:
        """What was measured of power limits for this study's trials, by signature and bundle size."""
        known = sorted(set(self._signatures.values())) if device in self._devices else []
        return {(one, size): table for one in known for size, table in self.limits(one, device).items()}

    def keep(self) -> None:
        """Keep the measurements and times for the next study."""
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
            if varying := spread(list(self._alone.get((signature, device.type), {}).values())):
                shelf.put(signature, device, "spread", varying)
            if watts := self.costs.watts(signature, device.type):
                shelf.put(signature, device, "watts", watts)
            if joules := self.costs.joules(signature, device.type):
                shelf.put(signature, device, "joules", joules)
            if math.isfinite(self.model.moving):
                stop = self.model.moving - self.model.start
                shelf.put(signature, device, "moving", {0: self.model.start, 1: stop})

    # Events, by the clock

    def entered(self, trial: int, device: str, together: Collection[int], clock: float) -> None:
        """A trial has entered a bundle on a device, or on several devices of its type."""
        if self._opening is None:
            self._opening = self._devices[device], clock - self._opened
        self._going[trial] = _Going(self._devices[device].type, clock)
        self._mixed(together, clock)

    def unlike(self, trial: int) -> None:
        """Leave out the time of a trial's next unit: it is not typical of later units."""
        if (going := self._going.get(trial)) is not None:
            going.alike = False

    def left(self, trial: int, together: Collection[int], clock: float) -> None:
        """A trial has left its bundle, where the trials in ``together`` remain."""
        self._going.pop(trial, None)
        self._mixed(together, clock)

    def reported(
        self, trial: int, share: float, clock: float, *, unlike: bool = False, usage: Usage | None = None
    ) -> None:
        """A trial has reported a unit trained at a share; beside ``unlike`` trials its time refines no curve."""
        going = self._going.get(trial)
        if going is None:
            return
        if usage is not None and going.alike and not unlike:
            self.costs.observed(self._signatures.get(trial, ""), going.type, max(1, round(1 / share)), usage)
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
            if share == 1 and not unlike:
                kind = self._signatures.get(trial, ""), going.type
                self._alone.setdefault(kind, {}).setdefault(trial, []).append(seconds)
        going.alike = True

    def done(self, trial: int, share: float, clock: float) -> float:
        """An estimate of the part of a unit that a trial has trained since its last report; a half if unknown."""
        going = self._going.get(trial)
        if going is None:
            return 0.5
        seconds = clock - going.since - (0.0 if going.begun else self.model.start)
        unit = self.model.unit(going.type, trial) * self.model.curve(going.type, trial).at(share)
        return min(0.99, max(0.0, seconds / unit))  # below 1, because the trial has not reported the unit

    def stopped(self, trial: int, clock: float) -> None:
        """A trial was made to leave: the stop took the time since its last report, which was the boundary."""
        going = self._going.get(trial)
        if going is not None and going.begun:
            self.model.stopped(clock - going.since)

    def _mixed(self, together: Collection[int], clock: float) -> None:
        for trial in together:
            going = self._going.get(trial)
            if going is not None and going.since < clock:
                going.alike, going.first = False, None
