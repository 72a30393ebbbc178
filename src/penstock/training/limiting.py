"""The power limit of a worker's device while it trains (Zeus §4.2): tried at step boundaries, kept, and then set.

A limit is tried for five seconds of training, which counts. What it gave is the seconds of a step and the power. Units
and moves go on meanwhile: a search belongs to the kind of a run, such as the signature and the size of a bundle, and
goes on with the next such run. A pack is tried as a whole, and a trial on several devices with one limit for all of
them (``training/spread/limiting.py``). Nothing is measured while another process holds a limit of the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.bundle import Limited
from penstock.energy.cost import Draw, Objective
from penstock.energy.lease import Lease
from penstock.energy.meter import CHOSEN, GpuMeter, MeterError
from penstock.energy.nvml import Gpu, NvmlError
from penstock.energy.power import SLICE, Search, limits

if TYPE_CHECKING:
    from penstock.training.runs.base import Run

Key = tuple[str, int]  # the kind of a run, and its number of trials
LOOK = 1.0  # seconds between two looks at whether others hold the device


class Limitable(Protocol):
    """One device, or all devices of a trial, under one limit."""

    range: tuple[float, float]
    """The least and the greatest limit of each."""
    count: int
    """How many there are."""

    def set(self, limit: float | None) -> bool:
        """Wish for a limit, or with None for the prior one; says whether nobody else wishes for one."""

    def look(self) -> None:
        """Look anew who holds them: the next ``set`` says it."""

    def joules(self) -> float:
        """Their joules since some time in the past, in all."""


class OneDevice:
    """The device of a worker."""

    count = 1

    def __init__(self, gpu: Gpu) -> None:
        self._lease, self._meter = Lease(gpu), GpuMeter(gpu)
        self.range, self.prior = gpu.limits(), self._lease.prior()
        self._wish: float | None = None

    def set(self, limit: float | None) -> bool:
        wish = self.prior if limit is None else limit
        if self._wish != wish:
            self._wish = None
            self._lease.wish(wish)
            self._wish = wish
        return self._lease.alone

    def look(self) -> None:
        self._wish = None

    def joules(self) -> float:
        return self._meter.read()

    def close(self) -> None:
        """The prior limit returns."""
        self._lease.close()


@dataclass
class _Slice:
    """Training under one limit so far, in pieces where runs ended meanwhile; and the piece that is under way."""

    key: Key
    limit: float
    on: Limitable
    seconds: float = 0.0
    joules: float = 0.0
    steps: dict[Key, float] = field(default_factory=dict)  # of a trial, by the kind of the part that it is in
    run: Run | None = None
    began: float = 0.0
    joules_before: float = 0.0
    steps_before: Mapping[Key, float] = field(default_factory=dict)

    def begin(self, run: Run, now: float) -> None:
        """A piece begins here."""
        self.run, self.began = run, now
        self.joules_before, self.steps_before = self.on.joules(), run.progress

    def end(self, now: float) -> None:
        """The piece ends, and counts."""
        assert self.run is not None
        self.seconds += now - self.began
        self.joules += max(0.0, self.on.joules() - self.joules_before)
        for kind, steps in self.run.progress.items():
            self.steps[kind] = self.steps.get(kind, 0.0) + steps - self.steps_before.get(kind, 0.0)
        self.run = None


class Limiter:
    """Tries limits of a device, and holds the best one for whatever bundle trains there."""

    def __init__(self, device: str, gpu: Gpu, eta: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._eta, self._clock = device, eta, clock
        self.own = OneDevice(gpu)
        self._searches: dict[Key, Search] = {}
        self._steps: dict[Key, Mapping[Key, float]] = {}  # what each part of a run did in a second of the first slice
        self._best: dict[Key, float] = {}
        self._unable: set[Key] = set()  # kinds of runs whose devices cannot be limited together
        self._slice: _Slice | None = None
        self._looked = clock()
        self._said: dict[Key, int] = {}  # how many limits a line told of
        self.over = False  # whether the device cannot be limited

    def boundary(self, run: Run, on: Limitable | None = None) -> Limited | None:
        """Between two steps of a run: go on with its search, or set its limit. Gives a line once a limit is found."""
        on, key = on or self.own, run.alike
        if self.over:
            return None
        try:
            if not all(key) or not run.settled or key in self._unable:  # it has no kind, or will soon be faster
                self._drop()
                on.set(None)
            elif key in self._best:
                self._drop()
                on.set(self._best[key])
            else:
                return self._go_on(key, run, on)
        except (NvmlError, MeterError) as error:
            return self._fail(key, on, error)
        return None

    def left(self, run: Run, on: Limitable | None = None) -> Limited | None:
        """A run has ended: what it trained under a limit counts. Gives a line of limits that were not told yet."""
        there, on, key = self._slice, on or self.own, run.alike
        if there is not None and there.run is run:
            key = there.key
            if there.on is not on:  # the other devices are gone
                self._drop()
                return None
            if run.alike != key:  # trials have left, and its steps count otherwise
                self._drop()
        try:
            if there is not None and there.run is run:
                there.end(self._clock())
                self._take(there, run)
        except (NvmlError, MeterError) as error:
            return self._fail(key, on, error)
        search = self._searches.get(key)
        if search is None or key in self._best or len(search.tried) <= max(1, self._said[key]):
            return None
        return self._line(key, on, search, f"of {len(search.tried)} limits so far", found=False)

    def close(self) -> None:
        """The prior limit returns."""
        self.own.close()

    def _go_on(self, key: Key, run: Run, on: Limitable) -> Limited | None:
        there, now = self._slice, self._clock()
        if there is not None and there.key == key and there.run is run:
            if self._seconds(there, now) < SLICE or not _moved(there, run):
                return None
            there.end(now)
            self._take(there, run)
        elif now - self._looked < LOOK and self._slice is None and key in self._searches:
            return None  # others held the device a moment ago
        self._looked = now
        if (search := self._searches.get(key)) is None:
            all = limits(*on.range)
            known = run.bundle.limits.get(key[1], {})  # by whole watts
            tried = {limit: Draw(*known[round(limit)]) for limit in all if round(limit) in known}
            search = self._searches[key] = Search(Objective(self._eta, on.count * all[0]), all, 0.0, tried)
            self._said[key] = len(tried)
        if (limit := search.next()) is None:
            return self._found(key, on, search)
        if self._slice is None or self._slice.key != key or self._slice.limit != limit:
            self._slice = _Slice(key, limit, on)
        on.look()
        if on.set(limit):
            self._slice.on = on
            self._slice.begin(run, self._clock())
        else:
            self._slice = None
            on.set(None)
        return None

    def _seconds(self, there: _Slice, now: float) -> float:
        return there.seconds + now - there.began

    def _take(self, there: _Slice, run: Run) -> None:
        """Take what a slice gave, once it is long enough, unless others came to hold the device meanwhile."""
        if there.seconds < SLICE or min(there.steps.values(), default=0.0) < 1:
            return
        self._slice = None
        there.on.look()
        if not there.on.set(there.limit):
            return
        each = self._steps.setdefault(there.key, {kind: one / there.seconds for kind, one in there.steps.items()})
        # The parts of a pack go on at paces of their own: each one's steps count by what they were in the first slice.
        steps = sum(one / each[kind] for kind, one in there.steps.items()) / len(there.steps)
        steps *= next(iter(each.values())) if len(each) == 1 else 1.0
        search = self._searches[there.key]
        draw = search.tried[there.limit] = Draw(there.seconds / steps, there.joules / there.seconds)
        search.certain = max(search.certain, run.certain * draw.seconds)

    def _drop(self) -> None:
        if self._slice is not None:
            self._slice.run = None

    def _found(self, key: Key, on: Limitable, search: Search) -> Limited:
        """Set the best limit that is known, and say so."""
        how = "were tried" if len(search.tried) > self._said[key] or key in self._steps else "were measured before"
        self._slice, self._best[key] = None, search.best
        on.set(search.best)
        return self._line(key, on, search, f"of {len(search.tried)} limits that {how}")

    def _line(self, key: Key, on: Limitable, search: Search, how: str, *, found: bool = True) -> Limited:
        self._said[key] = len(search.tried)
        none, there = search.tried[max(search.tried)], search.tried[search.best]
        parts = there.seconds / none.seconds, there.joules / none.joules if none.joules else 1.0
        each = "" if on.count == 1 else f" on each of {on.count} devices"
        said = f"{how}, {search.best:.0f} W{each} costs least by objective={self._eta:g}"
        table = {round(limit): (draw.seconds, draw.watts) for limit, draw in sorted(search.tried.items())}
        reason = f"{said}: {parts[0]:.2f} times as long, {parts[1]:.2f} of the joules"
        return Limited(self._device, *key, search.best, found, *parts, table=table, reason=reason)

    def _fail(self, key: Key, on: Limitable, error: Exception) -> Limited:
        self._slice = None
        if on is self.own:
            self.over = True
            self.close()
        else:
            self._unable.add(key)
        return unlimited(self._device, str(error), self.own.prior)


def _moved(there: _Slice, run: Run) -> bool:
    """Whether each part of a run took a step in a slice."""
    before, so_far = there.steps_before, there.steps
    return all(one - before.get(kind, 0.0) + so_far.get(kind, 0.0) >= 1 for kind, one in run.progress.items())


def unlimited(device: str, why: str, limit: float = 0.0) -> Limited:
    """A line that says why a device is not limited."""
    return Limited(device, "", 0, limit, False, 1.0, 1.0, reason=f"the power limit is only observed: {why}")


def limiter(device: str, eta: float) -> tuple[Limiter | None, Limited | None]:
    """The limiter of a device, as torch names it; or why it has none."""
    uuid = uuid_of(device)
    try:
        if not eta:
            raise NvmlError("by objective=0 time alone counts, and a limit saves none")
        if uuid is None:
            raise NvmlError("a CPU has no power limit that Penstock sets")
        return Limiter(device, Gpu(uuid), eta), None
    except NvmlError as error:
        return None, unlimited(device, str(error))


def uuid_of(device: str) -> str | None:
    """The UUID by which NVML knows a device of this machine; for a CPU that of the device that meters it, if any."""
    if device.startswith("MIG-"):
        return device
    if device.startswith("cuda"):
        visible, _, _ = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")
        if visible.startswith("MIG-"):
            return visible
        import torch

        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    kind, _, named = os.environ.get(CHOSEN, "").partition(":")
    return named if kind == "nvml" else None
