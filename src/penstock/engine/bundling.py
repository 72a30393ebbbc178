"""The bundles that an executor is told to hold, and the room that they leave on the devices."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from penstock.bundle import Bundle, BundleMode, Device, Placement, limited_as
from penstock.engine.clocking import Limits, Pace
from penstock.scheduling.base import FULL, Assignment, Demand, Room


@dataclass(eq=False)
class Place:
    """A bundle, and the trials that are to leave it.

    A pack has ``parts``, by the signature or trial of each; so have trials in processes of their own.
    """

    name: str
    devices: tuple[str, ...]
    mode: BundleMode
    signature: str
    size: int | None = None
    reason: str = ""
    measure: bool = False  # whether its workers measure the gain of several devices
    members: dict[int, Placement] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    torn: bool = False  # whether a trial died here beside others
    parts: dict[str | int, Place] = field(default_factory=dict)
    guess: int = 0  # the size to time first, where the bundle is to measure its own
    limits: Limits = field(default_factory=dict)  # what was measured of power limits

    @property
    def share(self) -> float:
        """The share at which each of its trials really trains: the trials that are there divide the whole device."""
        return float(len(self.devices)) if len(self.devices) > 1 else 1 / len(self.members)

    def pack(self, kind: str | int) -> None:
        """Become a pack, whose first part is the bundle as it was."""
        if self.mode != "packed":
            self.parts[kind] = replace(self, members=dict(self.members), leaving=set(), parts={})
            self.mode, self.signature, self.size, self.reason = "packed", "", None, ""

    def bundle(self, study: str) -> Bundle:
        """The bundle as an executor is told of it, without the trials that are to leave."""
        return Bundle(
            self.name,
            self.devices,
            tuple(one for trial, one in self.members.items() if trial not in self.leaving),
            self.mode,
            self.signature,
            self.size,
            self.reason,
            measure=self.measure,
            study=study,
            guess=self.guess,
            limits=self.limits,
            parts=tuple(part for one in self.parts.values() if (part := one.bundle(study)).placements),
        )


@dataclass
class _Taken:
    """The part of a device that trials have."""

    share: float = 0.0
    bytes: int = 0
    trials: dict[int, Assignment] = field(default_factory=dict)


class Bundling:
    """The bundles that run, and the account of the devices' shares and memory; ``place`` tells the executor."""

    def __init__(self, place: Callable[[Bundle], None], clock: Callable[[], float], pace: Pace, study: str) -> None:
        self._study = study
        self._place, self._clock, self._pace = place, clock, pace
        self.devices: dict[str, Device] = {}
        self.running: dict[int, Place] = {}
        self.demands: dict[int, Demand] = {}  # the demands of running trials; their units may have been trained since
        self.assigned: dict[int, Assignment] = {}
        self.room: dict[str, Room] = {}  # the room on devices that are not full
        self.kinds: dict[str, str] = {}  # the signature of the trials on each device
        self.moving: set[int] = set()  # trials that are to leave their bundles for other devices
        self.lost: set[int] = set()  # trials whose device was lost under them
        self._taken: dict[str, _Taken] = {}  # by device, lost devices included
        self._begun: dict[int, float] = {}  # the clock when each running trial was placed
        self._count = 0  # how many bundles there have been

    def look(self, devices: dict[str, Device]) -> None:
        """Take the present devices; earlier devices that are not among them are lost."""
        for name in self.devices.keys() - devices.keys():
            self.lose(name)
        self.devices = devices
        for name in devices:
            self._taken.setdefault(name, _Taken())
        for name in self._taken:
            self._account(name)

    def demand(self, trial: int, units: int) -> Demand:
        """The demand of a running trial that has so many units left; it is kept until that number changes."""
        demand = self.demands[trial]
        if demand.units != units:
            demand = self.demands[trial] = replace(demand, units=units)
        return demand

    def on(self, device: str) -> dict[int, Assignment]:
        """The trials that have a part of a device."""
        return self._taken[device].trials if device in self._taken else {}

    def fits(self, assignment: Assignment, bytes: int) -> bool:
        """Whether an assignment's devices have room already: a trial that moves away leaves at its next boundary."""
        if assignment.packed:
            (name,) = assignment.devices
            return self.devices[name].memory - self._taken[name].bytes >= bytes
        share = min(1.0, assignment.share) - FULL
        left = [self.room.get(name, Room(0.0, 0)) for name in assignment.devices]
        return all(one.share >= share and one.bytes >= bytes for one in left)

    # Coming and going

    def make(self, devices: tuple[str, ...], mode: BundleMode, signature: str) -> Place:
        """A new bundle without trials."""
        self._count += 1
        limits = self._pace.limits(limited_as(signature, len(devices)), devices[0])
        return Place(f"bundle {self._count}", devices, mode, signature, limits=limits)

    def enter(
        self, place: Place, demand: Demand, placement: Placement, assignment: Assignment, part: Place | None = None
    ) -> None:
        """Put a trial into a bundle, and into its part of a pack."""
        trial, clock = demand.trial, self._clock()
        self.running[trial], self._begun[trial] = place, clock
        place.members[trial] = placement
        if part is not None:
            part.members[trial] = placement
        self._pace.entered(trial, place.devices[0], place.members, clock)
        self.demands[trial] = demand
        self.hold(assignment)
        self._even(place)

    def _even(self, place: Place) -> None:
        """Let the trials of a pack, or of processes, divide their device equally."""
        there = place.members.keys() & self.assigned.keys()
        if any(self.assigned[trial].packed for trial in there):
            for trial in there:
                self.hold(replace(self.assigned[trial], share=place.share, packed=True))

    def hold(self, assignment: Assignment) -> None:
        """Account for a trial's new share of devices, in place of its old share."""
        self._release(assignment.trial)
        bytes = self.demands[assignment.trial].bytes
        self.assigned[assignment.trial] = assignment
        for name in assignment.devices:
            taken = self._taken[name]
            taken.trials[assignment.trial] = assignment
            taken.share += min(1.0, assignment.share)
            taken.bytes += bytes
            self._account(name)

    def relabel(self, trial: int, signature: str) -> None:
        """Change a running trial's signature: trials of the new signature may join it."""
        self.demands[trial] = replace(self.demands[trial], signature=signature)
        for name in self.running[trial].devices:
            self._account(name)

    def left(self, trial: int) -> Placement:
        """Take a trial that has left out of its bundle; gives its placement there."""
        place = self.running.pop(trial)
        placement = place.members.pop(trial)
        del self._begun[trial]
        place.leaving.discard(trial)
        self.moving.discard(trial)
        self.lost.discard(trial)
        self._pace.left(trial, place.members, self._clock())
        self._release(trial)
        self.demands.pop(trial)
        for kind, part in list(place.parts.items()):
            if part.members.pop(trial, None) is not None and not part.members:
                del place.parts[kind]
        self._even(place)
        return placement

    def lose(self, device: str) -> None:
        """A device is gone: trials that run there give up all their devices, and events about them follow."""
        for trial in [trial for trial, place in self.running.items() if device in place.devices]:
            self.lost.add(trial)
            self._release(trial)

    def _release(self, trial: int) -> None:
        assignment = self.assigned.pop(trial, None)
        for name in () if assignment is None else assignment.devices:
            taken = self._taken[name]
            gone = taken.trials.pop(trial)
            taken.share -= min(1.0, gone.share)
            taken.bytes -= self.demands[trial].bytes
            self._account(name)

    def _account(self, name: str) -> None:
        taken = self._taken[name]
        if not taken.trials:
            taken.share = 0.0  # sums of shares such as 1/3 do not come back to 0 exactly
        if name in self.devices and taken.share < 1 - FULL:
            self.room[name] = Room(1.0 - taken.share, self.devices[name].memory - taken.bytes)
        else:
            self.room.pop(name, None)
        if len(taken.trials) > 1:
            return  # trials that share a device have one signature, or a scheduler may mix signatures anyway
        self.kinds.pop(name, None)
        for trial in taken.trials:
            self.kinds[name] = self.demands[trial].signature

    # Changing bundles that run

    def bundles(self) -> list[Place]:
        """The bundles that run, except bundles that lost a device: these end by themselves."""
        return list({place.name: place for trial, place in self.running.items() if trial not in self.lost}.values())

    def move(self, trial: int) -> bool:
        """Have a trial leave at its next boundary; False where it is leaving already or came at this instant.

        A trial that could leave as soon as it came might move for ever without training.
        """
        place = self.running[trial]
        if trial in place.leaving or self._clock() <= self._begun[trial]:
            return False
        place.leaving.add(trial)
        self.moving.add(trial)
        return True

    def shrink(self, signature: str, size: int, devices: Collection[str]) -> None:
        """Limit fused bundles of a signature on these devices to ``size`` trials; a size of 1 dissolves them."""
        for place in self.bundles():
            for one in place.parts.values() or [place]:
                ours = one.signature == signature and one.mode == "fused" and place.devices[0] in devices
                if not ours or one.size == size:
                    continue
                one.size = size
                if one is place:
                    for trial in place.members.keys() & self.assigned.keys():
                        self.hold(replace(self.assigned[trial], share=1 / size))
                if len(one.members) > size:
                    place.leaving |= set(list(one.members)[size if size > 1 else 0 :])
                    self.declare(place)

    def stop(self) -> None:
        """Have every trial leave at its next boundary."""
        for place in self.bundles():
            place.leaving |= place.members.keys()
            self.declare(place)

    def declare(self, place: Place) -> None:
        """Tell the executor which trials a bundle should hold, and how."""
        for part in place.parts.values():
            part.leaving = place.leaving & part.members.keys()
        if place.members:
            self._place(place.bundle(self._study))
