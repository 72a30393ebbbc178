"""How a trial enters its devices: the bundle that its assignment calls for, and the line in the log.

A trial with a part of a device shares a bundle with the other trials there. The bundle is fused where all of them have
one signature; otherwise it is a pack of such bundles, or each trial has a process of its own. A trial with one whole
device trains solo, and a trial with several devices is distributed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.bundle import BundleMode, Placement
from penstock.engine.bundling import Place
from penstock.engine.origins import Origin, origin
from penstock.log import events
from penstock.scheduling.base import Assignment

if TYPE_CHECKING:
    from penstock.engine.placing import Placing


class Entering:
    """Puts waiting trials into bundles, and logs each before it takes effect."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._alone: set[str] = set()  # signatures whose trials were said to train solo

    def start(self, made: list[Assignment]) -> Iterator[Place]:
        """Start the trials whose devices have room now; a trial waits while others still leave its devices."""
        placing = self._placing
        company: dict[str, int] = {}
        alike = placing.packs.alike(made)
        for one in made:
            for name in one.devices:
                company[name] = company.get(name, len(placing.bundling.on(name))) + 1
        for one in made:
            if placing.bundling.fits(one, placing.queue.waiting[one.trial].bytes):
                # A lone trial cannot measure fusing, so it has its device to itself, or a part of a pack.
                lonely = alike.get(one.trial, company[one.devices[0]]) == 1 and self.size(one) is None
                alone = replace(one, share=1.0) if one.share < 1 and lonely and not one.packed else one
                place = self.enter(alone, lonely=lonely)
                if place is not None:
                    yield place

    def size(self, one: Assignment) -> int | None:
        """The most trials of a fused bundle of a trial's signature where it is assigned, None before it is measured."""
        return self._placing.pace.size(self._placing.descriptions.of(one.trial).signature or "", one.devices[0])

    def enter(self, one: Assignment, *, lonely: bool = False) -> Place | None:
        """Put a trial into the bundle that its assignment calls for; None where the trial's state is gone for good.

        A ``lonely`` trial of a pack trains solo there.
        """
        placing = self._placing
        if len(one.devices) > 1 and placing.shards is None and self._origin(one.trial).legs:
            one = replace(one, devices=one.devices[:1], share=1.0, measure=False)  # legs are trained on one device
        place = self.bundle(one)
        packed = place.mode == "packed" or placing.packs.calls_for(one)
        part = placing.packs.part(place, one, lonely=lonely) if packed else None
        return place if self._begin(place, one, part) else None

    def bundle(self, one: Assignment) -> Place:
        """The bundle that an assignment calls for: the one that is on its devices, or a new one."""
        placing = self._placing
        signature = placing.descriptions.of(one.trial).signature or ""
        others = placing.bundling.on(one.devices[0])
        if placing.packs.calls_for(one):
            return placing.packs.bundle(one)
        if one.share >= 1:
            mode: BundleMode = "solo" if len(one.devices) == 1 else "distributed"
            place = placing.bundling.make(one.devices, mode, signature)
            place.size = 1
            self._tell_alone(signature, one.devices[0])
            if one.measure:
                place.measure, few = True, placing.descriptions.of(one.trial).batch_size
                place.reason = f"a batch of {few} has no more parts" if few == len(one.devices) else ""
        elif others:
            place = placing.running[next(iter(others))]
            if place.mode != "packed" and (place.signature != signature or not signature):
                place.mode = "processes"
        else:
            place = placing.bundling.make(one.devices, "fused" if signature else "processes", signature)
            place.size = self.size(one)
            place.guess = placing.pace.guess(signature, one.devices[0]) if place.size is None else 0
            place.reason = placing.pace.reason(signature, one.devices[0])
        return place

    def _tell_alone(self, signature: str, device: str) -> None:
        """Log once why trials of a signature are not fused, where nothing was measured in this study."""
        placing = self._placing
        if signature not in self._alone and (said := placing.pace.alone(signature, device)):
            self._alone.add(signature)
            placing.log(events.Measured(signature, device, "sharing", {}, 1, said, "solo", placing.clock()))

    def _begin(self, place: Place, one: Assignment, part: Place | None = None) -> bool:
        """Log that a trial enters a bundle, and enter it; False where the trial's state is gone for good."""
        placing = self._placing
        demand = placing.queue.pop(one.trial)
        placing.elastic.destined.pop(one.trial, None)
        record = placing.history.trials[one.trial]
        begins, attempt = self._origin(one.trial), record.attempt + 1
        state, legs, lost = begins
        if lost is not None and legs and placing.shards is not None:
            error = f"had taken over the lost state {lost.file}, and one device cannot train its donor again: it failed"
            placing.keeper.tell(record, lost, error)
            placing.log(events.Failed(one.trial, record.attempt, f"It {error}.", True, placing.clock()))
            placing.changed = True  # its devices are free for other trials
            return False
        if lost is not None:
            placing.keeper.tell(record, lost, begins.said)
        name = (part or place).name
        where = (place.devices, place.mode, state, placing.clock(), one.share, record.variant, name)
        placing.log(events.Placed(one.trial, attempt, *where))
        inherited = bool(legs) or (state is not None and state == record.start)
        since = None if part is not None else placing.history.turns.since(one.trial)
        placement = Placement(
            one.trial, attempt, record.config, record.granted, state, inherited, one.share, record.variant, legs, since
        )
        placing.bundling.enter(place, demand, placement, one, part)
        if placing.following is not None:
            placing.following.entered(one.trial)
        if one.measure:
            placing.pace.unlike(one.trial)
        return True

    def _origin(self, trial: int) -> Origin:
        return origin(self._placing.history.trials[trial], self._placing.keeper.intact)
