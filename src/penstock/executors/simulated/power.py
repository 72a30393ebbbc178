"""The joules of simulated devices, which draw their trials' watts while these train there, and less while idle."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.bundle import Device, Job, Limited, Metered, TrialFailed, TrialFinished, TrialStopped
from penstock.energy.cost import Draw, Objective
from penstock.executors.simulated.runs import SimulatedBundle, SimulatedTrial
from penstock.executors.simulated.settings import Simulated
from penstock.trial import Report

TELL = 60.0  # seconds between two lines of a device, while trials report there
Told = TypeVar("Told", Report | TrialFinished | TrialFailed, TrialStopped, TrialFailed)


@dataclass
class _Device:
    """What was charged of a device, and told."""

    type: str
    came: float | None  # since when it is there
    there: float = 0.0  # seconds, before that
    used: float = 0.0  # seconds that trials were charged with
    joules: float = 0.0  # of these seconds
    told: tuple[float, float] = (0.0, 0.0)  # joules, and those of them that were idle
    at: float = 0.0


class Power:
    """Charges trials for the joules of simulated devices, sets their limits, and tells of both."""

    def __init__(self, settings: Simulated, devices: Iterable[Device], now: float, job: Job) -> None:
        self._settings, self._eta, self._how = settings, job.eta, job.power
        self._devices = {device.name: _Device(device.type, now, at=now) for device in devices}
        self._touched: dict[str, None] = {}
        self._limited: set[tuple[str, str, int]] = set()
        self.active = settings.watts is not None
        why = "simulated devices count joules with Simulated(watts=...)"
        self.unmetered = {} if self.active else {settings.type: why}

    def added(self, device: Device, now: float) -> None:
        """A device has come."""
        self._devices.setdefault(device.name, _Device(device.type, None, at=now)).came = now

    def lost(self, device: str, now: float) -> None:
        """A device has gone."""
        one = self._devices[device]
        one.there, one.came = one.there + now - (now if one.came is None else one.came), None

    def charged(self, member: SimulatedTrial | None, event: Told, now: float, *, left: bool = False) -> Told:
        """A trial's event with the joules of its usage; one that ``left`` between reports is charged with its time."""
        if not self.active or member is None:
            return event
        usage = event.usage
        if left:
            usage = replace(usage, device_seconds=member.used + (now - member.since) * member.share)
        watts, names = self._draw(member).watts, member.run.devices
        for name in names:
            one = self._devices[name]
            one.used += usage.device_seconds / len(names)
            one.joules += watts * usage.device_seconds / len(names)
            self._touched[name] = None
        return replace(event, usage=replace(usage, joules=watts * usage.device_seconds))

    def limit(self, run: SimulatedBundle) -> list[Limited]:
        """Choose a bundle's limit by what its first trial draws at each, known at once; gives the lines of it."""
        if self._how is None or not run.members:
            return []
        first = next(iter(run.members.values()))
        table, type = self._limits(first), self._devices[run.devices[0]].type
        if not table:
            return []
        draws = {limit: Draw(slower, watts) for limit, (watts, slower) in table.items()}
        none = draws[max(draws)]
        best = Objective(self._eta, max(draws)).best_limit(draws)
        if self._how == "limit":
            run.limit, run.slower = best, draws[best].seconds
        key = first.source.signature, type, len(run.members)
        if key in self._limited:
            return []
        self._limited.add(key)
        parts = draws[best].seconds / none.seconds, draws[best].joules / none.joules
        shown = {round(limit): (draw.seconds, draw.watts) for limit, draw in draws.items()}
        known = (key[0], key[2], best, self._how == "limit", *parts)
        return [Limited(name, *known, table=shown, reason="simulated") for name in run.devices]

    def lines(self, on: Mapping[str, SimulatedBundle], now: float) -> list[Metered]:
        """The lines of devices on which trials reported, where they are due."""
        touched = [name for name in self._touched if now - self._devices[name].at >= TELL]
        for name in touched:
            del self._touched[name]
        return self._lines(touched, on, now)

    def settle(self, now: float) -> list[Metered]:
        """The last lines of all devices."""
        return self._lines(self._devices, {}, now) if self.active else []

    def _lines(self, names: Collection[str], on: Mapping[str, SimulatedBundle], now: float) -> list[Metered]:
        made = []
        for name in names:
            one, run = self._devices[name], on.get(name)
            members = () if run is None else run.members.values()
            under_way = sum((m.used + (now - m.since) * m.share) / len(m.run.devices) for m in members)
            there = one.there + (0.0 if one.came is None else now - one.came)
            # Idle seconds only grow: a trial that turned out to use more than it seemed to is charged all the same.
            idle = max(one.told[1], self._settings.idle_watts * (there - one.used - under_way))
            joules, before, seconds = one.joules + idle, one.told, now - one.at
            if joules > before[0]:
                watts = (joules - before[0]) / seconds if seconds > 0 else 0.0
                limit = None if run is None else run.limit
                made.append(Metered(name, joules - before[0], idle - before[1], watts, watts, limit, meter="simulated"))
            one.told, one.at = (joules, idle), now
        return made

    def _draw(self, member: SimulatedTrial) -> Draw:
        table, type = self._limits(member), self._devices[member.run.devices[0]].type
        if table:
            watts, slower = table.get(member.run.limit or max(table), table[max(table)])
            return Draw(slower, watts)
        own = member.source.watts
        return Draw(1.0, self._settings.watts_of(type) if own is None else own)

    def _limits(self, member: SimulatedTrial) -> Mapping[float, tuple[float, float]]:
        return member.source.limits or self._settings.limits
