"""Trials on several devices: who is tried there, who grows and shrinks, and where they go.

What several devices give a trial is measured by one of its signature, once devices are idle: it moves onto 1, 2, 4, …
of them in turn (invariant 7). After that the scheduler knows its curve, and decides who grows and who shrinks; what it
leaves idle is dealt to those that are alone on their devices, and given back to who waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.bundle import BundleMode, Device, Parted, Request
from penstock.engine.fusing import Fusing
from penstock.scheduling.base import Assignment, Room
from penstock.scheduling.growing import Growing, grow, widen
from penstock.scheduling.nodes import arrange, consolidate

if TYPE_CHECKING:
    from penstock.engine.placing import Place, Placing

SLACK = 0.9  # of what was requested may be left before less is: each request is looked at
WORTH = 2  # units that a trial has left, at least, when it tries several devices or grows


@dataclass(frozen=True)
class Destiny:
    """Where a trial goes when it has left its bundle; to ``measure`` on how many of the devices it is best off.

    Those that are ``lent`` were idle, and go back to who waits.
    """

    devices: tuple[str, ...]
    measure: bool = False
    reason: str = ""
    lent: int = 0


class Spreading:
    """What becomes of devices that nobody waits for, and of trials that were made to leave for them."""

    def __init__(self, placing: Placing, growing: Growing) -> None:
        self.placing, self.growing, executor = placing, growing, placing.executor
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
                place.measure, place.reason, place.lent = destiny.measure, destiny.reason, destiny.lent
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
            else:
                self.use_idle()
            return
        for place in bundles:  # those that shared a device with others have it alone now
            for trial in place.members:
                placing.hold(trial, Assignment(trial, place.devices, float(len(place.devices))))
        made = together(placing.schedule(placing.view(), (), placing.pace.speed()), placing.assigned, placing.devices)
        for one in made:
            if one.trial in placing.running and not self.are_apart(one.devices):
                self._destine(one.trial, Destiny(one.devices))
        if not made:
            self.use_idle()

    def use_idle(self) -> None:
        """Idle devices that nobody waits for: the best trial finds out what they give its signature, or trials grow."""
        if self.on and not self.destined and (idle := self._idle()) and not self._probe(idle):
            self._grow()

    def _alone(self) -> list[Place]:
        """Those who have all of their devices to themselves, the best first."""
        alone = [place for place in self.placing.bundles() if len(place.members) == 1 and not place.measure]
        trials = {place.name: self.placing.history.trials[trial] for place in alone for trial in place.members}

        def order(place: Place) -> tuple[bool, float, int]:
            record = trials[place.name]
            return record.diverged, -record.best_score, record.number

        return sorted(alone, key=order)

    def _probe(self, idle: Collection[str]) -> bool:
        for place in self._alone():
            (trial,) = place.members
            if (destiny := self._trial_run(trial, place, idle)) is not None:
                self._destine(trial, destiny)
                return True
        return False

    def _trial_run(self, trial: int, place: Place, idle: Collection[str]) -> Destiny | None:
        """The devices on which a trial may measure what they give it, if it is to."""
        placing, mixed = self.placing, self.growing.mixed
        known, kind = placing.description(trial), placing.devices[place.devices[0]].type
        if not known.signature or not self._long(trial):
            return None
        free = [n for n in idle if mixed or placing.devices[n].type == kind]
        most = len(place.devices) + len(free)
        few = f"a batch of {known.batch_size} has no more parts" if known.batch_size < most else ""
        for count in range(min(most, known.batch_size), len(place.devices), -1):
            if not placing.pace.unmeasured(known.signature, kind, count):
                return None
            names = widen(placing.devices, free, place.devices, count, mixed=mixed)
            if not self.are_apart(names):
                return Destiny(names, measure=True, reason=few, lent=count - self._own(place))
        return None

    def _grow(self) -> None:
        """Deal idle devices to trials that are alone on theirs and have some way to go."""
        placing = self.placing
        trials = [trial for place in self._alone() for trial in place.members if self._long(trial)]
        while True:
            made = grow(placing.view(), trials, placing.pace.speed(), self.growing)
            apart = {one.trial for one in made if self.are_apart(one.devices)}
            if not apart:
                break
            trials = [trial for trial in trials if trial not in apart]
        for one in made:
            own = self._own(placing.running[one.trial])
            self._destine(one.trial, Destiny(one.devices, lent=len(one.devices) - own))

    def give_back(self) -> None:
        """Who waits is given devices that were idle when trials grew onto them, those of the worst trials first."""
        missing = len(self.placing.waiting)
        if not self.on or self.destined or self.placing.moving:
            return
        for place in reversed(self._alone()):
            if missing > 0 and place.lent:
                (trial,) = place.members
                missing -= place.lent
                self._destine(trial, Destiny(place.devices[: self._own(place)]))

    def _own(self, place: Place) -> int:
        return len(place.devices) - place.lent

    def _long(self, trial: int) -> bool:
        record = self.placing.history.trials[trial]
        return record.granted - record.reported >= WORTH

    def request(self) -> None:
        """Say how many devices are of use: to who waits or runs one, or as many as pay.

        One that is yet to come is of use to who waits, and beside others only to who still trains when it is there. Who
        follows counts as soon as it is there: an algorithm whose group is open keeps what it has. Where nodes would
        come free, trials are packed first (RubberBand §4.4).
        """
        placing = self.placing
        demands, coming = placing.demands(), placing.executor.provisioning
        shards = placing.sharding and placing.sharding.count
        pays = {demand.trial: shards or placing.pace.pays(demand.trial) for demand in demands}
        late = {trial for trial, most in pays.items() if most > 1 and not shards and not self._outlasts(trial, coming)}
        later = sum(1 if trial in late else most for trial, most in pays.items())
        wanted = max(later, min(sum(pays.values()), len(placing.devices)))
        if any(demand.open for demand in demands):
            wanted = max(wanted, self._requested)
        few, before = wanted < len(placing.devices), self._requested
        if wanted > before or wanted < SLACK * before or (few and wanted != before):
            self._requested = wanted
            placing.executor.request([Request(wanted)])
        if few and self.on and placing.executor.scales and not placing.waiting and not placing.moving:
            self._pack(wanted)

    def _outlasts(self, trial: int, coming: float) -> bool:
        holding, waits = self.placing.view().running.get(trial), self.placing.waiting.get(trial)
        if holding is not None:
            units, share = holding.demand.units - holding.done, holding.assignment.share
        else:
            units, share = 0.0 if waits is None else float(waits.units), 1.0
        return self.placing.pace.outlasts(trial, units, share, coming)

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
            self._destine(trial, Destiny(devices, lent=self.placing.running[trial].lent))

    def settle(self, signature: str) -> None:
        """What several devices give a signature is known: who measured it keeps those that pay."""
        self.placing.changed |= self.on
        for place in self.placing.bundles():
            if place.measure and place.signature == signature:
                (trial,) = place.members
                place.measure = False
                keeps = self.placing.pace.widest(trial, place.devices[0])
                if self.growing.first == "evenly":
                    keeps = min(keeps, self._due(trial, place))
                if keeps < len(place.devices):
                    self._destine(trial, Destiny(place.devices[:keeps], lent=max(0, keeps - self._own(place))))

    def _due(self, trial: int, place: Place) -> int:
        """How many devices it would be dealt if those that it has measured on were idle."""
        view, own = self.placing.view(), max(1, self._own(place))
        holding = view.running[trial]
        before = replace(holding, assignment=Assignment(trial, place.devices[:own], float(own)))
        free = {name: Room(1.0, view.devices[name].memory) for name in place.devices[own:]}
        view = replace(view, running={**view.running, trial: before}, room={**view.room, **free})
        trials = [one for alone in self._alone() for one in alone.members if one == trial or self._long(one)]
        made = grow(view, trials, replace(self.placing.pace.speed(), moving=0.0), self.growing)
        return next((len(one.devices) for one in made if one.trial == trial), own)

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

    Each has devices of the type that it was given: elsewhere they may cost another time. Trials with a part of a device
    keep what they were given.
    """
    if all(one.share <= 1 for one in made) or len({device.node for device in devices.values()}) < 2:
        return made
    named = {one.trial for one in made}
    whole = [one for one in made if one.share >= 1]
    parts = {name for one in [*made, *running.values()] if one.share < 1 for name in one.devices}
    held = {trial: one.devices for trial, one in running.items() if one.share >= 1}
    found: dict[int, tuple[str, ...]] = {}
    for type in sorted({devices[one.devices[0]].type for one in whole}):
        there = {name: one for name, one in devices.items() if one.type == type and name not in parts}
        here = {trial: tuple(name for name in names if name in there) for trial, names in held.items()}
        wanted = {one.trial: round(one.share) for one in whole if one.devices[0] in there}
        found |= arrange(there, here, wanted, [trial for trial in held if trial not in named])
    return [Assignment(one.trial, found.get(one.trial, one.devices), one.share) for one in made]
