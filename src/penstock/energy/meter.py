"""Meters: what tells the joules of a device. A device without one is ``Unmetered``, with the reason, and never at zero.

On a GPU the meter is NVML's counter of energy, or its power over time where that counter stands still. On a CPU it is
RAPL, which counts for the whole processor, under ``/sys/class/powercap``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from penstock.energy.nvml import Gpu, NvmlError
from penstock.errors import PenstockError

RAPL = Path("/sys/class/powercap")
CHOSEN = "PENSTOCK_METER"
"""The environment variable that names another meter for a CPU: "nvml:UUID", "rapl:FOLDER", "replay:FILE", "none"."""
STANDS = 2.0  # seconds for which a counter may stand still while the device draws power


class MeterError(PenstockError):
    """A meter cannot be read."""


@dataclass(frozen=True)
class Unmetered:
    """A device whose joules nobody can tell, and the reason."""

    reason: str


class Meter(Protocol):
    """Tells the joules of a device."""

    kind: str
    """How it counts, in words."""

    def read(self) -> float:
        """Joules since some time in the past: never fewer than before. Raises a MeterError where it fails."""

    range: tuple[float, float] | None
    """The least and the greatest power limit that the device can have."""

    def limit(self) -> float | None:
        """The device's power limit in watts; None where it has none."""


class GpuMeter:
    """A GPU, by NVML's counter of energy while that moves, and else by its power over time.

    Some drivers have a counter that is there and stands still: the power in between is counted then.
    """

    def __init__(self, gpu: Gpu, clock: Callable[[], float] = time.monotonic) -> None:
        self.kind = "NVML's counter"
        self._gpu, self._clock = gpu, clock
        self.range = _range(gpu)
        self._at, self._watts, self._total = clock(), gpu.watts(), 0.0
        try:
            self._count: float | None = gpu.joules()
        except NvmlError:
            self._count = None
            self.kind = "NVML's power over time"
        self._moved = self._at  # when the counter was last seen to move
        self._sampled = 0  # the time of the last sample of processes

    def busy(self) -> dict[int, int]:
        """How busy each process kept it since the last call, by number; empty where NVML does not tell."""
        try:
            found, self._sampled = self._gpu.busy(self._sampled)
        except NvmlError:
            return {}
        return found

    def read(self) -> float:
        try:
            return self._by_power() if self._count is None else self._by_counter(self._count)
        except NvmlError as error:
            raise MeterError(str(error)) from None

    def limit(self) -> float | None:
        try:
            return self._gpu.limit()
        except NvmlError:
            return None

    def _by_counter(self, before: float) -> float:
        count, now = self._gpu.joules(), self._clock()
        if count != before:
            self._total += max(0.0, count - before)  # a driver that was loaded anew begins at zero
            self._count, self._moved = count, now
        elif now - self._moved > STANDS and self._gpu.watts() > 0:
            self._count, self._at, self.kind = None, self._moved, "NVML's power over time"
            return self._by_power()
        return self._total

    def _by_power(self) -> float:
        watts, now = self._gpu.watts(), self._clock()
        self._total += (watts + self._watts) / 2 * max(0.0, now - self._at)
        self._watts, self._at = watts, now
        return self._total


class Rapl:
    """A machine's processors together, by the counters of their packages, each of which wraps at its own range.

    A counter wraps after a minute or more at full power, and is read far more often.
    """

    kind = "RAPL"
    range: tuple[float, float] | None = None

    def __init__(self, folder: Path) -> None:
        self._zones = packages(folder)
        if not self._zones:
            raise MeterError(f"there is no RAPL package under {folder}")
        self._ranges = [_number(zone / "max_energy_range_uj") for zone in self._zones]
        self._last, self._total = [_number(zone / "energy_uj") for zone in self._zones], 0

    def read(self) -> float:
        now = [_number(zone / "energy_uj") for zone in self._zones]
        for before, after, most in zip(self._last, now, self._ranges, strict=True):
            self._total += after - before if after >= before else after + most - before
        self._last = now
        return self._total / 1e6

    def limit(self) -> None:
        """A processor's limits are none of its whole draw."""


class Replay:
    """A recorded meter: rows of seconds and joules, the joules between two rows in a straight line.

    >>> ticks = iter([0.0, 5.0, 40.0])
    >>> meter = Replay([(0.0, 0.0), (10.0, 2000.0)], clock=lambda: next(ticks))
    >>> meter.read(), meter.read()
    (1000.0, 2000.0)
    """

    kind = "a replayed meter"
    range: tuple[float, float] | None = None

    def __init__(self, rows: Sequence[tuple[float, float]], clock: Callable[[], float] = time.monotonic) -> None:
        if len(rows) < 2 or any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(rows)):
            raise MeterError("a replayed meter needs two rows or more, with times and joules that rise")
        self._rows, self._clock = rows, clock
        self._began = clock()

    def read(self) -> float:
        at = self._rows[0][0] + self._clock() - self._began
        for (t0, j0), (t1, j1) in pairwise(self._rows):
            if at < t1:
                return j0 + (j1 - j0) * max(0.0, at - t0) / (t1 - t0)
        return self._rows[-1][1]

    def limit(self) -> None:
        """None was recorded."""


def _range(gpu: Gpu) -> tuple[float, float] | None:
    try:
        return gpu.limits()
    except NvmlError:
        return None


def packages(folder: Path) -> list[Path]:
    """The RAPL zones of whole processors, one a socket; zones inside of them would count twice."""
    return sorted(zone for zone in folder.glob("intel-rapl:*") if zone.name.count(":") == 1)


def meter_of(uuid: str | None) -> Meter | Unmetered:
    """The meter of a GPU, by its UUID, or of this machine's CPU where that is None."""
    try:
        return _meter(f"nvml:{uuid}" if uuid is not None else os.environ.get(CHOSEN) or f"rapl:{RAPL}")
    except NvmlError as error:
        return Unmetered(str(error))
    except MeterError as error:
        return Unmetered(str(error))


def _meter(named: str) -> Meter | Unmetered:
    kind, _, where = named.partition(":")
    if kind == "nvml":
        return GpuMeter(Gpu(where))
    if kind == "rapl":
        if not Path(where).is_dir():
            return Unmetered(f"this machine has no RAPL, the meter of a CPU: there is no {where}")
        return Rapl(Path(where))
    if kind == "replay":
        return Replay(_rows(Path(where)))
    if kind == "none":
        return Unmetered(f"{CHOSEN} says none")
    raise MeterError(f"{CHOSEN} must be nvml:UUID, rapl:FOLDER, replay:FILE or none, got {named!r}")


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except PermissionError:
        raise MeterError(f"{file} may be read by root alone: `sudo chmod a+r {file}` allows it") from None
    except (OSError, ValueError) as error:
        raise MeterError(f"{file} cannot be read ({error})") from None


def _rows(file: Path) -> list[tuple[float, float]]:
    try:
        return [(float(at), float(joules)) for at, joules in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise MeterError(f"{file} is no list of [seconds, joules] in JSON ({error})") from None
