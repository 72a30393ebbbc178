"""The joules of a cluster's devices: read by each worker on its own node, and charged in the driver.

A worker tells what it read twice a second, among its events. Workers of one node may have one meter, such as that of
its processors: the first of them is listened to, and the next one once that has gone.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bundle import Device
from penstock.energy import account
from penstock.energy.meter import CHOSEN, MeterError, Unmetered, meter_of
from penstock.executors.metering import EVERY, MeteredDevice, Metering, uuids
from penstock.executors.ray.cluster import require

LAST = 2.0  # seconds that a worker has to read its meter when it is asked
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Meterable:
    """The meter of a worker's device: its name on all machines, or the reason why there is none."""

    name: str = ""
    kind: str = ""
    range: tuple[float, float] | None = None
    reason: str = ""


@dataclass(frozen=True)
class Reading:
    """A meter's joules since its worker began, and the power limit; no joules where it fails, with the reason."""

    joules: float | None
    limit: float | None = None
    reason: str = ""


class Reader:
    """Reads the meter of a worker's device there, in a thread, until it fails."""

    def __init__(self, device: Device, tell: Callable[[Reading], None]) -> None:
        (uuid,) = uuids([device]).values()
        self._meter, self._tell, self._end = meter_of(uuid), tell, threading.Event()
        self._reading = threading.Lock()
        if isinstance(self._meter, Unmetered):
            self.found = Meterable(reason=self._meter.reason)
            return
        machine = BOOT.read_text().strip() if BOOT.is_file() else platform.node()
        self.found = Meterable(uuid or f"{machine} {os.environ.get(CHOSEN, '')}", self._meter.kind, self._meter.range)
        threading.Thread(target=self._read, daemon=True, name="meter").start()

    def look(self) -> Reading:
        """Read now."""
        if isinstance(self._meter, Unmetered):
            return Reading(None, reason=self._meter.reason)
        with self._reading:
            try:
                return Reading(self._meter.read(), self._meter.limit())
            except MeterError as error:
                return Reading(None, reason=str(error))

    def close(self) -> None:
        """Read no more."""
        self._end.set()

    def _read(self) -> None:
        while not self._end.wait(EVERY):
            reading = self.look()
            self._tell(reading)
            if reading.joules is None:
                return


class _Told:
    """A meter elsewhere, as its readings come."""

    def __init__(self, found: Meterable) -> None:
        self.kind, self.range = found.kind, found.range
        self._limit: float | None = None
        self._last: dict[str, float] = {}  # by device: the joules that its worker has counted
        self._source = ""  # the device whose worker is listened to
        self._base = self._total = 0.0

    @property
    def devices(self) -> int:
        """How many devices it counts for together."""
        return len(self._last)

    def add(self, device: str) -> None:
        """The worker of a device reads it, too: it counts from its own beginning."""
        self._last[device] = 0.0
        if not self._source:
            self._source, self._base = device, self._total

    def remove(self, device: str) -> None:
        """That worker has gone."""
        self._last.pop(device, None)
        if device == self._source:
            self._source = next(iter(self._last), "")
            self._base = self._total - self._last.get(self._source, 0.0)

    def tell(self, device: str, joules: float, limit: float | None) -> None:
        """Take a reading."""
        self._last[device] = joules
        if device == self._source:
            self._total, self._limit = self._base + joules, limit

    def read(self) -> float:
        return self._total

    def limit(self) -> float | None:
        return self._limit


class RayMetering(Metering):
    """The meters of a cluster's devices. A study whose first devices have none goes on without."""

    def __init__(self) -> None:
        super().__init__({})
        self._told: dict[str, _Told] = {}  # by the name of the meter
        self._begun = False

    def begin(self) -> None:
        """The study begins: its log says from here on whether there are joules."""
        self._begun = True

    def add(self, device: str, found: Meterable) -> None:
        """A device has come."""
        late = "the study began without joules" if self._begun and not self.active else ""
        if why := found.reason or late:
            self.unmetered[device] = why
            return
        now = time.monotonic()
        with self._lock:
            told = self._told.setdefault(found.name, _Told(found))
            there = next((one for one in self._devices if one.metered.meter is told), None)
            if there is None:
                there = MeteredDevice(device, account.Metered(told, now), at=now, near=False)
                self._devices.append(there)
            told.add(device)
            there.metered.ledger.share(now, told.devices)
            self._of[device] = there

    def remove(self, device: str) -> None:
        """A device has gone; what trials used of it may still be claimed."""
        if (there := self._of.get(device)) is None:
            return
        with self._lock:
            told = there.metered.meter
            assert isinstance(told, _Told)
            told.remove(device)
            there.metered.ledger.share(time.monotonic(), max(1, told.devices))

    def look(self, workers: Mapping[str, Any]) -> None:
        """Have the workers of these devices read their meters now."""
        ray = require()
        asked = {device: actor.read.remote() for device, actor in workers.items() if device in self._of}
        for device, answer in asked.items():
            with suppress(ray.exceptions.RayError):  # it has gone
                self.tell(device, ray.get(answer, timeout=LAST))

    def tell(self, device: str, reading: Reading) -> None:
        """A worker has read the meter of its device."""
        if (there := self._of.get(device)) is None:
            return
        with self._lock:
            told = there.metered.meter
            assert isinstance(told, _Told)
            if reading.joules is None:
                there.metered.fail(reading.reason)
            else:
                told.tell(device, reading.joules, reading.limit)
                there.take(time.monotonic(), told.read())
