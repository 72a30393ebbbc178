"""The joules of an executor's devices: read by one thread, and charged to the trials by what they tell of their usage.

The driver reads, as far as devices are on its machine: so the joules of a worker that is killed are known, too. Each
trial has a window on each of its devices, from its placement to the event of its leaving.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.bundle import Bundle, Device, Left, Metered, TrialFailed
from penstock.energy import account
from penstock.energy.meter import GpuMeter, Meter, Unmetered, meter_of
from penstock.training.limiting import uuid_of
from penstock.trial import Report, Usage

EVERY = 0.5  # seconds between two readings
TELL = 5.0  # seconds between two lines of a device
Key = tuple[str, int, int]  # study, trial, attempt
Users = Callable[[], Mapping[int, Key]]  # the trial of each process, by the process's number
Told = TypeVar("Told")


@dataclass
class MeteredDevice:
    """A meter of one device, or of a machine's processors together."""

    name: str
    metered: account.Metered
    told: float = 0.0  # joules
    idle: float = 0.0  # joules that were told
    most: float = 0.0  # watts
    at: float = 0.0  # when it was told last
    failed: bool = False  # whether it was told that the meter fails
    near: bool = True  # whether the meter can be read here

    def take(self, now: float, joules: float | None) -> None:
        """Count a reading."""
        self.metered.take(now, joules)
        self.most = max(self.most, self.metered.ledger.watts)

    def look(self, now: float) -> None:
        """Read the meter here as long as the power is not known: later on the thread does, and nobody waits for it."""
        if self.near and not self.metered.ledger.watts:
            self.take(now, self.metered.read())

    def line(self, now: float) -> Metered | None:
        """What was not told yet; None where that is nothing."""
        ledger, meter = self.metered.ledger, self.metered.meter
        joules, idle = ledger.total - self.told, ledger.idle() - self.idle
        seconds, most = now - self.at, self.most
        self.told, self.idle, self.at, self.most = ledger.total, ledger.idle(), now, 0.0
        if self.metered.failed and not self.failed:
            self.failed = True
            return Metered(self.name, None, idle, meter=meter.kind, reason=self.metered.failed)
        if not joules and not idle:
            return None
        watts = joules / seconds if seconds > 0 else 0.0
        return Metered(self.name, joules, idle, watts, max(most, watts), meter.limit(), meter.range, meter.kind)


class Metering:
    """Meters by device: reads them, charges trials, and tells of devices."""

    def __init__(self, meters: Mapping[str, Meter | Unmetered], *, users: Users | None = None) -> None:
        now, beside = time.monotonic(), users is not None
        self._users = users
        self.unmetered = {name: one.reason for name, one in meters.items() if isinstance(one, Unmetered)}
        self._of: dict[str, MeteredDevice] = {}
        for name, meter in meters.items():
            if not isinstance(meter, Unmetered):
                there = [other for other, same in meters.items() if same is meter]
                known = self._of.get(there[0])
                made = known or MeteredDevice(name, account.Metered(meter, now, len(there), beside=beside), at=now)
                self._of[name] = made
        self._devices = list({id(one): one for one in self._of.values()}.values())
        self._on: dict[Key, tuple[str, ...]] = {}
        self._lock, self._end = threading.Lock(), threading.Event()
        self._tell = now + TELL
        if self._devices:
            threading.Thread(target=self._read, daemon=True, name="penstock meters").start()

    @classmethod
    def of(cls, uuids: Mapping[str, str | None], *, users: Users | None = None) -> Metering:
        """The meters of devices of this machine, by their UUIDs; all parts of its CPU, without one, share a meter.

        Where processes share devices, ``users`` gives what each of them trains.
        """
        made = {uuid: meter_of(uuid) for uuid in set(uuids.values())}
        return cls({name: made[uuid] for name, uuid in uuids.items()}, users=users)

    @property
    def active(self) -> bool:
        """Whether there is a meter."""
        return bool(self._devices)

    @property
    def within(self) -> float | None:
        """Seconds until the next line is due; None without a meter."""
        return max(0.0, self._tell - time.monotonic()) if self._devices else None

    def placed(self, bundle: Bundle) -> None:
        """Trials are given to devices."""
        if not self._devices or not bundle.placements:
            return
        now = time.monotonic()
        with self._lock:
            for placement in bundle.placements:
                key = bundle.study, placement.trial, placement.attempt
                if key not in self._on:
                    self._on[key] = bundle.devices
                    for one in self._under(bundle.devices):
                        one.look(now)
                        one.metered.ledger.enter(key, now)

    def took(self, event: Told) -> Told:
        """An event as the engine is to have it: with the joules of its trial's usage."""
        if not self._devices or not isinstance(event, Report | Left):
            return event
        key = event.study, event.trial, event.attempt
        if key not in self._on:
            return event
        with self._lock:
            usage = self._charged(key, event)
            if isinstance(event, Left):
                for one in self._under(self._on.pop(key)):
                    one.metered.ledger.leave(key)
        return replace(event, usage=usage)

    def _charged(self, key: Key, event: Report | Left) -> Usage:
        devices, now, joules, usage = self._on[key], time.monotonic(), 0.0, event.usage
        unknown = isinstance(event, TrialFailed) and event.died and not usage.device_seconds  # its worker is gone
        used = 0.0 if unknown else usage.device_seconds
        for one in self._under(devices):
            one.look(now)
            ledger = one.metered.ledger
            part = sum(1 for name in devices if self._of.get(name) is one) / len(devices)
            seconds = ledger.present(key, now) if unknown else used * part
            joules += ledger.claim(key, now, seconds)
            usage = replace(usage, device_seconds=usage.device_seconds + seconds) if unknown else usage
        failed = [one.metered.failed for one in self._under(devices) if one.metered.failed]
        why = [self.unmetered[name] for name in devices if name in self.unmetered] + failed
        return replace(usage, joules=None if why else joules, unmetered=why[0] if why else "")

    def _under(self, devices: Sequence[str]) -> list[MeteredDevice]:
        return list({id(one): one for name in devices if (one := self._of.get(name)) is not None}.values())

    def due(self) -> list[Metered]:
        """The lines of devices, where they are due."""
        now = time.monotonic()
        if not self._devices or now < self._tell:
            return []
        self._tell = now + TELL
        with self._lock:
            return [line for one in self._devices if (line := one.line(now)) is not None]

    def settle(self) -> list[Metered]:
        """The last lines: no trial trains any more."""
        now = time.monotonic()
        with self._lock:
            for key, devices in self._on.items():
                for one in self._under(devices):
                    one.metered.ledger.leave(key)
            self._on.clear()
            for one in self._devices:
                if one.near:
                    one.take(time.monotonic(), one.metered.read())
            return [line for one in self._devices if (line := one.line(now)) is not None]

    def close(self) -> None:
        """Read no more."""
        self._end.set()

    def _read(self) -> None:
        while not self._end.wait(EVERY):
            for one in self._devices:
                joules, now = one.metered.read(), time.monotonic()
                worked = self._worked(one.metered.meter)
                with self._lock:
                    one.metered.ledger.weigh(worked)
                    one.take(now, joules)

    def _worked(self, meter: Meter) -> dict[Hashable, int]:
        """How busy each trial kept a device that processes share, where NVML knows one of them."""
        if self._users is None or not isinstance(meter, GpuMeter):
            return {}
        busy, users = meter.busy(), self._users()
        return {key: busy.get(pid, 0) for pid, key in users.items()} if busy.keys() & users.keys() else {}


def uuids(devices: Sequence[Device]) -> dict[str, str | None]:
    """The UUIDs by which NVML knows devices of this machine: a slice's own, and None for a CPU."""
    return {device.name: None if device.type == "cpu" else uuid_of(device.name) for device in devices}
