"""How fast trials go: what reports tell the speed model, by the study's clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from penstock.bundle import Measured
from penstock.profiles import Profile, Profiles
from penstock.scheduling.speed import UNKNOWN, Speed, SpeedModel


@dataclass(frozen=True)
class Shelf:
    """The profiles of one task on the kinds of device there are, by name."""

    profiles: Profiles
    task: str
    kinds: Mapping[str, str]

    def get(self, signature: str) -> Profile | None:
        """What was measured last on any of the kinds."""
        found = (self.profiles.get(self.task, kind, signature) for kind in dict.fromkeys(self.kinds.values()))
        return next((profile for profile in found if profile is not None), None)

    def put(self, event: Measured) -> None:
        """Keep what a worker found out."""
        kind = self.kinds.get(event.device, event.device)
        what = (event.signature, event.way, event.size, event.seconds, event.bytes, event.reason, event.scaling)
        self.profiles.put(Profile(self.task, kind, *what))

    def refine(self, model: SpeedModel, signatures: Iterable[str]) -> None:
        """Keep what became of the measurements by what was seen since."""
        for signature in signatures:
            if (profile := self.get(signature)) is not None and 1 in profile.seconds:
                sharing, scaling = model.known(signature)
                unit = profile.seconds[1]
                new = replace(
                    profile,
                    seconds={count: unit * t for count, t in sharing.items()} or profile.seconds,
                    scaling={count: unit * t for count, t in scaling.items()},
                    moving=model.moving if math.isfinite(model.moving) else profile.moving,
                )
                if new != profile:
                    self.profiles.put(new)


@dataclass
class _Going:
    since: float  # the clock at its last report, or when it was placed
    first: float | None = None  # seconds of the unit that began with starting it
    begun: bool = False
    alike: bool = True  # nobody came or left since


class Pace:
    """Times the units of running trials. Without a ``model`` nothing is learnt, and nothing is assumed.

    ``shelf`` is where measurements are kept between studies.
    """

    def __init__(self, model: SpeedModel | None = None, shelf: Shelf | None = None) -> None:
        self.model, self.shelf = model, shelf
        self._going: dict[int, _Going] = {}
        self._known: set[str] = set()

    @property
    def learns(self) -> bool:
        return self.model is not None

    def speed(self) -> Speed:
        """What a scheduler is given."""
        return UNKNOWN if self.model is None else self.model.speed()

    def know(self, trial: int, signature: str) -> None:
        """A trial is of a signature, of which something may be known from an earlier study."""
        if self.model is None:
            return
        self.model.know(trial, signature)
        if self.shelf is not None and signature not in self._known:
            self._known.add(signature)
            if (profile := self.shelf.get(signature)) is not None:
                self.model.measured(signature, profile.seconds, profile.scaling)
                if profile.moving is not None:
                    self.model.started(profile.moving)

    def measured(self, event: Measured) -> list[str]:
        """A worker measured what sharing and spreading cost; gives what was smoothed or cut."""
        if self.shelf is not None:
            self.shelf.put(event)
        return [] if self.model is None else self.model.measured(event.signature, event.seconds, event.scaling)

    def keep(self) -> None:
        """Keep what was learnt for the next study."""
        if self.model is not None and self.shelf is not None:
            self.shelf.refine(self.model, sorted(self._known))

    def entered(self, trial: int, together: Collection[int], clock: float) -> None:
        """A trial has come into a bundle."""
        if self.model is not None:
            self._going[trial] = _Going(clock)
            self._mixed(together, clock)

    def left(self, trial: int, together: Collection[int], clock: float) -> None:
        """A trial has left its bundle, and the others are among themselves."""
        if self.model is not None:
            self._going.pop(trial, None)
            self._mixed(together, clock)

    def reported(self, trial: int, share: float, clock: float) -> None:
        """A trial has reported a unit that it trained at a share."""
        going = self._going.get(trial)
        if going is None or self.model is None:
            return
        seconds, going.since = clock - going.since, clock
        if not going.begun:
            going.begun = True
            if going.alike:
                going.first = seconds
                self.model.observed(trial, share, seconds - self.model.start, first=True)
        elif going.alike:
            if going.first is not None:
                self.model.started(going.first - seconds)
            going.first = None
            self.model.observed(trial, share, seconds)
        going.alike = True

    def done(self, trial: int, share: float, clock: float) -> float:
        """The part of a unit that a trial should have trained since its last report; a half where nothing is known."""
        going = self._going.get(trial)
        if going is None or self.model is None:
            return 0.5
        seconds = clock - going.since - (0.0 if going.begun else self.model.start)
        unit = self.model.unit(trial) * self.model.curve(trial).at(share)
        return min(0.99, max(0.0, seconds / unit))  # it has not reported

    def stopped(self, trial: int, clock: float) -> None:
        """A trial was made to leave; its last report was the boundary."""
        going = self._going.get(trial)
        if going is not None and self.model is not None and going.begun:
            self.model.stopped(clock - going.since)

    def _mixed(self, together: Collection[int], clock: float) -> None:
        for trial in together:
            going = self._going.get(trial)
            if going is not None and going.since < clock:
                going.alike, going.first = False, None
