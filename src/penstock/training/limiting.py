"""The power limit of a worker's device while it trains (Zeus §4.2): tried at step boundaries, kept, and then set.

A limit is tried for five seconds of training, which counts. What it gave is the seconds of a step and the power. Units
and moves go on meanwhile: a search belongs to the signature and the size of a bundle, and waits for the next such one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.bundle import Limited
from penstock.energy.cost import Draw, Objective
from penstock.energy.lease import Lease
from penstock.energy.meter import CHOSEN, GpuMeter, MeterError
from penstock.energy.nvml import Gpu, NvmlError
from penstock.energy.power import SLICE, Search, limits

if TYPE_CHECKING:
    from penstock.training.runs.base import Run

Key = tuple[str, int]  # signature and number of trials


class Limiter:
    """Tries limits of a device, and holds the best one for whatever bundle trains there."""

    def __init__(self, device: str, gpu: Gpu, eta: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._lease, self._meter = Lease(gpu), GpuMeter(gpu)
        self._all = limits(*gpu.limits())
        self._objective = Objective(eta, self._all[0])
        self._prior = gpu.limit()
        self._searches: dict[Key, Search] = {}
        self._best: dict[Key, float] = {}
        self._trying: tuple[Key, float, float, float, int] | None = None  # bundle, limit, and since when
        self._wish: float | None = None
        self.over = False  # whether the device cannot be limited

    def boundary(self, run: Run) -> Limited | None:
        """Between two steps of a run: go on with its search, or set its limit. Gives a line once a limit is found."""
        key = run.bundle.signature, run.together
        if self.over:
            return None
        try:
            if not all(key) or not run.settled:  # several kinds of trials, or steps that will soon be others
                self._trying = None
                if self._wish is not None:
                    self._set(self._prior)
                return None
            if key not in self._best and (table := run.bundle.limits.get(key[1])):
                before = {float(limit): Draw(*both) for limit, both in table.items()}
                return self._found(key, Search(self._objective, self._all, 0.0, before), "were measured before")
            if key not in self._best:
                return self._go_on(key, run)
            self._set(self._best[key])
        except (NvmlError, MeterError) as error:
            self.over, self._trying = True, None
            self.close()
            why = f"the power limit is only observed: {error}"
            return Limited(self._device, "", 0, self._prior, False, 1.0, 1.0, reason=why)
        return None

    def close(self) -> None:
        """The prior limit returns."""
        self._lease.close()

    def _go_on(self, key: Key, run: Run) -> Limited | None:
        search = self._searches.setdefault(key, Search(self._objective, self._all, 0.0))
        if self._trying is not None and self._trying[0] == key:
            _, limit, began, joules, steps = self._trying
            seconds, taken = self._clock() - began, (run.steps - steps) / key[1]
            if seconds < SLICE or taken < 1:
                return None
            draw = Draw(seconds / taken, max(0.0, self._meter.read() - joules) / seconds)
            search.tried[limit] = draw
            search.certain = max(search.certain, run.certain * draw.seconds)
        limit_next = search.next()
        if limit_next is None:
            self._trying = None
            return self._found(key, search, "were tried")
        self._set(limit_next)
        self._trying = key, limit_next, self._clock(), self._meter.read(), run.steps
        return None

    def _found(self, key: Key, search: Search, how: str) -> Limited:
        """Set the best limit that is known, and say so."""
        self._best[key] = best = search.best
        self._set(best)
        none, there = search.tried[max(search.tried)], search.tried[best]
        parts = there.seconds / none.seconds, there.joules / none.joules if none.joules else 1.0
        said = f"of {len(search.tried)} limits that {how}, {best:.0f} W costs least by objective="
        table = {round(limit): (draw.seconds, draw.watts) for limit, draw in sorted(search.tried.items())}
        reason = f"{said}{self._objective.eta:g}: {parts[0]:.2f} times as long, {parts[1]:.2f} of the joules"
        return Limited(self._device, *key, best, True, *parts, table=table, reason=reason)

    def _set(self, limit: float) -> None:
        if self._wish != limit:
            self._wish = None
            self._lease.wish(limit)
            self._wish = limit


def limiter(device: str, eta: float) -> tuple[Limiter | None, Limited | None]:
    """The limiter of a device, as torch names it; or why it has none."""
    uuid = uuid_of(device)
    try:
        if uuid is None:
            raise NvmlError("a CPU has no power limit that Penstock sets")
        return Limiter(device, Gpu(uuid), eta), None
    except NvmlError as error:
        why = f"the power limit is only observed: {error}"
        return None, Limited(device, "", 0, 0.0, False, 1.0, 1.0, reason=why)


def uuid_of(device: str) -> str | None:
    """The UUID by which NVML knows a device of this machine; for a CPU that of the device that meters it, if any."""
    if device.startswith("MIG-"):
        return device
    if device.startswith("cuda"):
        import torch

        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    kind, _, named = os.environ.get(CHOSEN, "").partition(":")
    return named if kind == "nvml" else None
