"""Packs: the bundles that share a device, in one worker or each in a process of its own, and the trials that join."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.bundle import Measured
from penstock.engine.bundling import Place
from penstock.scheduling.base import Assignment, Demand, Holding, View, room
from penstock.scheduling.packs import LARGEST, Packing, join
from penstock.speed.model import Speed
from penstock.trial import Config

if TYPE_CHECKING:
    from penstock.engine.placing import Placing


class Packs:
    """The packs of a study; without ``packing`` there are none."""

    def __init__(self, placing: Placing, packing: Packing | None) -> None:
        self._placing, self._packing = placing, packing
        self._room: dict[str, int] = {}  # by device: how many bundles its memory was seen to hold
        self._timed = defaultdict[str, set[frozenset[str]]](set)  # by device: the signatures of packs timed there

    @property
    def any(self) -> bool:
        """Whether trials may be packed at all."""
        return self._packing is not None

    @property
    def forced(self) -> bool:
        """Whether every bundle on one device is a pack, or one of processes."""
        return self._packing is not None and self._packing.forced

    @property
    def features(self) -> Callable[[Config], tuple[Hashable, ...]] | None:
        """Where a config is in the space, if trials may be packed."""
        return None if self._packing is None else self._packing.features

    def join(self, view: View, made: Sequence[Assignment], demands: Sequence[Demand], speed: Speed) -> list[Assignment]:
        """The assignments, and trials that got no devices and join the packs there; a suspect may kill its worker."""
        placing = self._placing
        made = [replace(one, packed=True) if self.calls_for(one) else one for one in made]
        if self._packing is None or len(made) >= len(demands) or placing.bundling.moving:
            return made
        half = placing.suspects.half
        asked = {demand.trial: demand for demand in demands if not half(demand.trial)}
        running = {**view.running, **{one.trial: Holding(asked[one.trial], one) for one in made if one.trial in asked}}
        unsafe = {name for trial, place in placing.running.items() if half(trial) for name in place.devices}
        unsafe |= {name for one in made if one.trial not in asked for name in one.devices}
        devices = {name: device for name, device in view.devices.items() if name not in unsafe}
        there = {trial: one for trial, one in running.items() if devices.keys() >= {*one.assignment.devices}}
        seen = replace(view, devices=devices, running=there, room=room(devices, there.values()))
        largest = (placing.executor.processes if self._packing.mode == "processes" else 0) or LARGEST
        most = {name: min(largest, self._room.get(name, largest)) for name in devices}
        left = [demand for trial, demand in asked.items() if trial not in running and not demand.width]
        return made + join(seen, left, speed, self._packing, most)

    def measured(self, event: Measured) -> None:
        """A worker has timed its pack, and trains as many bundles at once as pay; or its memory had no room for one."""
        if not event.table:  # the bundle that had no room has left
            self._room[event.device] = event.size
            return
        bundling = self._placing.bundling
        for place in bundling.bundles():
            if place.mode == "packed" and event.device in place.devices:
                self._timed[event.device].add(self._signatures(place))
                place.measure = False
                bundling.declare(place)

    def alike(self, made: Sequence[Assignment]) -> dict[int, int]:
        """By trial that enters a pack: how many trials of its signature will be there."""
        placing = self._placing
        entering = [one for one in made if self.calls_for(one)]
        kinds = {one.trial: (one.devices[0], placing.queue.waiting[one.trial].signature) for one in entering}
        count = Counter(kinds.values())
        for name in {one.devices[0] for one in entering}:
            count.update((name, placing.bundling.demands[trial].signature) for trial in placing.bundling.on(name))
        return {trial: count[kind] for trial, kind in kinds.items()}

    def calls_for(self, one: Assignment) -> bool:
        """Whether an assignment is to a pack."""
        return one.packed or (self.forced and len(one.devices) == 1)

    def bundle(self, one: Assignment) -> Place:
        """The pack on a device, made of the bundle that is there, or new."""
        bundling = self._placing.bundling
        first = next(iter(bundling.on(one.devices[0])), None)
        if first is None:
            return bundling.make(one.devices, "packed" if self._packing is None else self._packing.mode, "")
        place = self._placing.running[first]
        if place.mode != "processes":
            place.pack(bundling.demands[first].signature if place.mode == "fused" else first)
        return place

    def _signatures(self, place: Place) -> frozenset[str]:
        return frozenset(self._placing.bundling.demands[trial].signature for trial in place.members)

    def _measures(self, place: Place, one: Assignment) -> bool:
        """Whether a pack is to time what it gains with a trial: all of its kinds were never timed together."""
        met = self._signatures(place) | {self._placing.queue.waiting[one.trial].signature}
        return not self.forced and not any(met <= timed for timed in self._timed[one.devices[0]])

    def part(self, place: Place, one: Assignment, *, lonely: bool) -> Place:
        """The part of a pack that a trial enters: the fused bundle of its signature, or else a bundle of its own."""
        placing = self._placing
        signature, size = placing.descriptions.of(one.trial).signature or "", placing.entering.size(one)
        fuses = bool(signature) and size != 1 and not lonely
        kind = placing.queue.waiting[one.trial].signature if fuses else one.trial
        place.measure = place.measure or self._measures(place, one)
        if kind not in place.parts:
            part = place.parts[kind] = placing.bundling.make(one.devices, "fused" if fuses else "solo", signature)
            if fuses:
                part.size, part.reason = size, placing.pace.reason(signature, one.devices[0])
        return place.parts[kind]
