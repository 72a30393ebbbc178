"""Trials that change their devices: moves onto idle devices and back, and the number of devices that are of use.

When devices are idle, a trial of a signature measures the gain of several devices: it times its steps on 1, 2, 4, … of
them (invariant 7). From then on the scheduler knows the curve of that signature, and decides which trials grow and
which shrink. Devices that are still idle are lent to trials that are alone on their devices, until other trials wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.bundle import Parted
from penstock.scheduling.base import Assignment, Demand, View
from penstock.scheduling.growing import Growing, give_back, grow_apart, keeps, on_the_way, probe, split
from penstock.scheduling.nodes import consolidate
from penstock.scheduling.sizing import size
from penstock.speed.model import Speed

if TYPE_CHECKING:
    from penstock.engine.placing import Placing

SLACK = 0.9  # while all devices are of use, a request shrinks only below this part: an executor looks at each request


class Elastic:
    """The use of idle devices, and the trials that leave their bundles to move there."""

    def __init__(self, placing: Placing, growing: Growing, *, spreads: bool) -> None:
        self._placing, self._bundling = placing, placing.bundling
        self._growing, self._spreads = growing, spreads
        self.destined: dict[int, Assignment] = {}  # assignments of trials that leave their bundles to move
        self.apart: set[frozenset[str]] = set()  # sets of devices whose workers did not meet
        self._measured: set[int] = set()  # trials that have measured, until it is decided which devices they keep
        self._requested = 0

    def parted(self, event: Parted) -> None:
        """Workers did not meet: their devices are not tried together again. An event about their trial follows."""
        self.apart.add(frozenset(event.devices))
        warnings.warn(f"{event.error} It goes on elsewhere.", stacklevel=2)

    def enter(self) -> None:
        """Trials that have left their bundles to move enter their new devices, once these are free.

        Where the new devices are lost or will not come free, the trial waits for any devices. A trial that has ended
        meanwhile moves nowhere.
        """
        bundling, waiting = self._bundling, self._placing.queue.waiting
        if not self.destined.keys().isdisjoint(waiting):
            self._placing.queue.describe(bundling.devices.values(), self.destined)
        told = {}
        for trial, one in list(self.destined.items()):
            there = {other for name in one.devices for other in bundling.on(name)} - {trial}
            friends = one.share < 1 and all(bundling.assigned[other].share == one.share for other in there)
            gone = trial not in waiting and trial not in bundling.running
            if gone or not (there <= bundling.moving or friends) or not set(one.devices) <= bundling.devices.keys():
                del self.destined[trial]
            elif trial in waiting and bundling.fits(one, waiting[trial].bytes):
                place = self._placing.entering.enter(one)
                if place is not None:
                    told[place.name] = place
        for place in told.values():
            bundling.declare(place)

    def on_the_way(
        self, view: View, demands: Sequence[Demand], made: list[Assignment], speed: Speed
    ) -> list[Assignment]:
        """The assignments; a trial that moves anyway may measure the gain of several devices."""
        return on_the_way(view, demands, made, speed) if self._spreads and not self.destined else made

    def use_idle(self) -> None:
        """Use devices that are idle while no trial waits: split a bundle, let a trial measure, or let trials grow."""
        self._keep()
        if self.destined:
            return
        view, speed = self._placing.view(), self._placing.pace.speed()
        if not view.room:
            return
        if self._bundling.moving:
            one = probe(view, self._ranked(), speed, self._growing) if self._spreads else None
            self._destine([] if one is None else [one])
            return
        made = split(view, speed)
        if not made and self._spreads:
            ranked = self._ranked()
            one = probe(view, ranked, speed, self._growing)
            made = [one] if one is not None else grow_apart(view, ranked, speed, self._growing)
        self._destine(made)

    def give_back(self) -> None:
        """Make running trials give back lent devices to trials that wait."""
        if self._spreads and not self.destined and not self._bundling.moving:
            view = self._placing.view()
            self._destine(give_back(view, self._ranked(), len(self._placing.queue.waiting)))

    def settle(self, signature: str) -> None:
        """The gain of several devices is measured for a signature: the trial that did so keeps the devices that pay."""
        for place in self._bundling.bundles():
            if place.measure and place.signature == signature:
                (trial,) = place.members
                place.measure = False
                self._bundling.hold(replace(self._bundling.assigned[trial], measure=False))
                self._measured.add(trial)
        self._keep()

    def _keep(self) -> None:
        """Trials that have measured keep the devices that pay; one that has come at this instant is decided later."""
        placing, bundling = self._placing, self._bundling
        for trial in sorted(self._measured):
            there = trial in bundling.assigned and trial not in bundling.moving
            made = keeps(placing.view(), trial, self._ranked(), placing.pace.speed(), self._growing) if there else None
            self._destine([] if made is None else [made])
            if made is None or trial in self.destined:
                self._measured.discard(trial)

    def request(self) -> None:
        """Tell the executor how many devices are of use; pack trials where nodes can come free (RubberBand §4.4)."""
        placing, bundling, executor = self._placing, self._bundling, self._placing.executor
        demands = list(placing.queue.waiting.values())
        wanted = size(placing.view(), demands, placing.pace.known(), executor.provisioning, self._requested)
        few, before = wanted.count < len(bundling.devices), self._requested
        if wanted.count > before or wanted.count < SLACK * before or (few and wanted.count != before):
            self._requested = wanted.count
            executor.request([wanted])
        if few and self._spreads and executor.scales and not demands and not bundling.moving:
            self._pack(wanted.count)

    def _pack(self, count: int) -> None:
        """Move trials so that whole nodes come free, while ``count`` devices are enough."""
        held, fixed = dict[int, tuple[str, ...]](), list[int]()
        for place in self._bundling.bundles():
            first = next(iter(place.members))
            held[first] = place.devices
            if len(place.members) > 1:
                fixed.append(first)  # a fused bundle stays
        moves, _ = consolidate(self._bundling.devices, held, max(count, len(held)), fixed)
        assigned = self._bundling.assigned
        self._destine(
            [
                Assignment(trial, devices, float(len(devices)), lent=assigned[trial].lent)
                for trial, devices in moves.items()
            ]
        )

    def _ranked(self) -> list[int]:
        """The running trials, the best first."""
        trials = self._placing.history.trials
        return sorted(
            self._bundling.assigned, key=lambda number: (trials[number].diverged, -trials[number].best_score, number)
        )

    def _destine(self, made: list[Assignment]) -> None:
        told = {}
        for one in made:
            if self._bundling.move(one.trial):
                self.destined[one.trial] = one
                told[self._bundling.running[one.trial].name] = self._bundling.running[one.trial]
            else:
                self._placing.changed = True  # the trial cannot leave at this instant: decide again
        for place in told.values():
            self._bundling.declare(place)
