"""Trials on several devices: who is tried there, who grows and shrinks, and where they go.

What several devices give a trial is measured by one of its signature, once devices are idle: it moves onto 1, 2, 4, …
of them in turn (invariant 7). After that the scheduler knows its curve, and decides who grows and who shrinks.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.bundle import BundleMode, Parted
from penstock.executors.base import Device
from penstock.fusing import Fusing
from penstock.scheduling.base import Assignment
from penstock.scheduling.placement import arrange, consolidate

if TYPE_CHECKING:
    from penstock.placing import Place, Placing

SLACK = 0.9  # of what was requested may be left before less is: each request is looked at
WORTH = 2  # units that a trial has left, at least, when it tries several devices


@dataclass(frozen=True)
class Destiny:
    """Where a trial goes when it has left its bundle; to ``measure`` on how many of the devices it is best off."""

    devices: tuple[str, ...]
    measure: bool = False
    reason: str = ""


class Spreading:
    """What becomes of devices that nobody waits for, and of trials that were made to leave for them."""

    def __init__(self, placing: Placing) -> None:
        self.placing, executor = placing, placing.executor
        self.on = placing.pace.learns and "distributed" in executor.modes and not executor.virtual
        self.destined: dict[int, Destiny] = {}
        self._apart: set[frozenset[str]] = set()  # devices whose workers did not meet
        self._requested = 0

    def parted(self, event: Parted) -> None:
        """Workers did not meet: they are not tried together again. Their trial is told of after this."""
        self._apart.add(frozenset(event.devices))
        warnings.warn(f"{event.error} It goes on elsewhere.", stacklevel=2)

    def enter(self) -> None:
        """Trials that have left for other devices go there, once these are free; where they cannot be, anywhere."""
        placing = self.placing
        for trial, destiny in list(self.destined.items()):
            there = {other for name in destiny.devices for other in placing.on.get(name, ())} - {trial}
            if not there <= placing.moving or not set(destiny.devices) <= placing.devices.keys():
                del self.destined[trial]
            elif trial in placing.waiting and not there:
                mode: BundleMode = "distributed" if len(destiny.devices) > 1 else "solo"
                place = placing.make(destiny.devices, mode, placing.description(trial).signature or "")
                place.measure, place.reason = destiny.measure, destiny.reason
                if placing.begin(place, trial, float(len(destiny.devices))):
                    if destiny.measure:
                        placing.pace.unlike(trial)
                    placing.declare(place)

    def resize(self, fusing: Fusing) -> None:
        """Who waits is given devices that others have several of. What nobody waits for splits bundles, or goes to one.

        A bundle is split rather than spread: its parts exchange nothing.
        """
        placing = self.placing
        if not self.on or placing.moving or self.destined:
            return
        bundles = placing.bundles()
        if placing.waiting:
            for place in [place for place in bundles if len(place.devices) > 1]:
                self._send_off(place, list(place.members))
            return
        idle = self._idle()
        fused = max(bundles, key=lambda place: len(place.members), default=None)
        if not idle or fused is None:
            return
        if (many := len(fused.members)) > 1:
            parts = min(many, 1 + len(idle))
            if fusing.splits(fused.signature, fused.devices[0], many, parts):
                self._send_off(fused, list(fused.members)[-(-many // parts) :])
            return
        for place in bundles:  # those that shared a device with others have it alone now
            for trial in place.members:
                placing.hold(trial, Assignment(trial, place.devices, float(len(place.devices))))
        made = together(placing.schedule(placing.view(), (), placing.pace.speed()), placing.assigned, placing.devices)
        for one in made:
            if one.trial in placing.running and not self.are_apart(one.devices):
                self._destine(one.trial, Destiny(one.devices))
        if not made:
            self.probe()

    def probe(self) -> None:
        """Where devices are idle, let the best trial that is alone on one find out what they give its signature."""
        if not self.on or self.destined or not (idle := self._idle()):
            return
        alone = [p for p in self.placing.bundles() if len(p.devices) == 1 and len(p.members) == 1]
        scores = {p.name: self.placing.history.trials[trial].best_score for p in alone for trial in p.members}
        for place in sorted(alone, key=lambda place: -scores[place.name]):
            (trial,) = place.members
            if (destiny := self._trial_run(trial, place.devices[0], idle)) is not None:
                self._destine(trial, destiny)
                return

    def _trial_run(self, trial: int, device: str, idle: Collection[str]) -> Destiny | None:
        """The devices on which a trial may measure what they give it, if it is to."""
        placing = self.placing
        record, known, kind = placing.history.trials[trial], placing.description(trial), placing.devices[device].type
        long = record.granted - record.reported >= WORTH
        if not known.signature or not long or not placing.pace.unmeasured(known.signature, kind):
            return None
        free = {name: one for name in (device, *idle) if (one := placing.devices[name]).type == kind}
        few = f"a batch of {known.batch_size} has no more parts" if known.batch_size < len(free) else ""
        for count in range(min(len(free), known.batch_size), 1, -1):
            (names,) = arrange(free, {trial: (device,)}, {trial: count}).values()
            if not self.are_apart(names):
                return Destiny(names, measure=True, reason=few)
        return None

    def request(self) -> None:
        """Say how many devices are of use: to who waits or runs one, or as many as pay.

        Who follows counts as soon as it is there: an algorithm whose group is open keeps what it has. Where nodes would
        come free, trials are packed first (RubberBand §4.4).
        """
        placing = self.placing
        demands = placing.demands()
        shards = placing.sharding and placing.sharding.count
        wanted = sum(shards or placing.pace.pays(demand.trial) for demand in demands)
        if any(demand.open for demand in demands):
            wanted = max(wanted, self._requested)
        few, before = wanted < len(placing.devices), self._requested
        if wanted > before or wanted < SLACK * before or (few and wanted != before):
            self._requested = wanted
            placing.executor.request(wanted)
        if few and self.on and placing.executor.scales and not placing.waiting and not placing.moving:
            self._pack(wanted)

    def _pack(self, count: int) -> None:
        """Move trials so that whole nodes come free, where so many devices are enough."""
        held, fixed = dict[int, tuple[str, ...]](), list[int]()
        for place in self.placing.bundles():
            first = next(iter(place.members))
            held[first] = place.devices
            if len(place.members) > 1:
                fixed.append(first)  # a fused bundle stays
        moves, _ = consolidate(self.placing.devices, held, max(count, len(held)), fixed)
        for trial, devices in moves.items():
            self._destine(trial, Destiny(devices))

    def settle(self, signature: str) -> None:
        """What several devices give a signature is known: who measured it keeps those that pay."""
        self.placing.changed |= self.on
        for place in self.placing.bundles():
            if place.measure and place.signature == signature:
                (trial,) = place.members
                place.measure = False
                widest = self.placing.pace.widest(trial, place.devices[0])
                if widest < len(place.devices):
                    self._destine(trial, Destiny(place.devices[:widest]))

    def _idle(self) -> list[str]:
        return [name for name in self.placing.devices if not self.placing.on[name]]

    def are_apart(self, devices: Collection[str]) -> bool:
        """Whether workers on these devices did not meet."""
        return any(one <= set(devices) for one in self._apart)

    def _send_off(self, place: Place, trials: list[int]) -> None:
        moved = [self.placing.move(place, trial) for trial in trials]
        if any(moved):
            self.placing.declare(place)

    def _destine(self, trial: int, destiny: Destiny) -> None:
        place = self.placing.running[trial]
        if self.placing.move(place, trial):
            self.destined[trial] = destiny
            self.placing.declare(place)
        else:
            self.placing.changed = True  # it came just now: once more at the next boundary


def together(
    made: list[Assignment], running: Mapping[int, Assignment], devices: Mapping[str, Device]
) -> list[Assignment]:
    """The same with the devices of each trial on as few nodes as can be; who is not named stays where it is.

    Trials with a part of a device keep what they were given.
    """
    if all(one.share <= 1 for one in made) or len({device.node for device in devices.values()}) < 2:
        return made
    named = {one.trial for one in made}
    whole = [one for one in made if one.share >= 1]
    parts = {name for one in [*made, *running.values()] if one.share < 1 for name in one.devices}
    held = {trial: one.devices for trial, one in running.items() if one.share >= 1}
    found = arrange(
        {name: device for name, device in devices.items() if name not in parts},
        held,
        {one.trial: round(one.share) for one in whole},
        [trial for trial in held if trial not in named],
    )
    return [Assignment(one.trial, found.get(one.trial, one.devices), one.share) for one in made]
