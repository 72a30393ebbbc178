"""The speed model: what a unit takes at a share, h(w) of Fluid §4.2.2, measured and not assumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.curve import Curve, measured


@dataclass(frozen=True)
class Speed:
    """What a scheduler knows: the seconds of a unit of each trial alone, its curve, and what moving a trial costs.

    ``moving`` is Fluid's ε in seconds; infinite where trials cannot be moved.
    """

    unit: Callable[[int], float]
    curve: Callable[[int], Curve]
    moving: float = float("inf")

    def seconds(self, trial: int, share: float) -> float:
        """The seconds of a unit of a trial at a share: h(w)."""
        return self.unit(trial) * self.curve(trial).at(share)


UNKNOWN = Speed(unit=lambda trial: 1.0, curve=lambda trial: Curve())
"""Nothing is measured yet, and nothing is assumed: share 1."""


@dataclass
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / self.count


@dataclass
class _Kind:
    """What is known of the trials of one signature: their curve, and the mean of their unit's seconds alone."""

    sharing: dict[int, _Mean] = field(default_factory=dict)
    scaling: dict[int, _Mean] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)
    unit: _Mean = field(default_factory=_Mean)


@dataclass
class _Seen:
    kind: _Kind
    unit: _Mean = field(default_factory=_Mean)
    shares: dict[float, float] = field(default_factory=dict)  # seconds of a unit, as last seen at each share


class SpeedModel:
    """Learns from measurements and from every report; ``speed()`` is what a scheduler is given.

    A curve belongs to a signature: trials of one task that differ in their hyperparameters alone react alike to sharing
    and spreading (Fluid §4.2.2), however long their own units take.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared  # whether a device may be shared
        self._kinds: dict[str, _Kind] = {}
        self._seen: dict[int, _Seen] = {}
        self._all = _Mean()
        self._start, self._stop = _Mean(), _Mean()

    def know(self, trial: int, signature: str) -> None:
        """A trial has a config of a signature, of which nothing was seen yet."""
        self._seen[trial] = _Seen(self._kinds.setdefault(signature, _Kind()))

    def measured(self, signature: str, sharing: Mapping[int, float], scaling: Mapping[int, float]) -> list[str]:
        """Take what a worker measured, or what is known from before; gives what was smoothed or cut."""
        kind = self._kinds.setdefault(signature, _Kind())
        kind.sharing = {p: _Mean(t / sharing[1], 1) for p, t in sharing.items() if 1 in sharing}
        kind.scaling = {w: _Mean(t / scaling[1], 1) for w, t in scaling.items() if 1 in scaling}
        return self._refit(kind)

    def observed(self, trial: int, share: float, seconds: float, *, first: bool = False) -> None:
        """A unit of a trial took ``seconds`` at ``share``: refines its own time, and the curve where it moved.

        The ``first`` unit after a start is less certain by what starting took, and compares with nothing.
        """
        seen = self._seen.get(trial)
        if seen is None or not seconds > 0:
            return
        kind = seen.kind
        if not first:
            self._compare(seen, share, seconds)
        unit = seconds / kind.curve.at(share)
        seen.unit.add(unit)
        kind.unit.add(unit)
        self._all.add(unit)

    def _compare(self, seen: _Seen, share: float, seconds: float) -> None:
        """The first unit that a trial trains at another share than alone tells what that share costs."""
        alone = seen.shares.get(1.0)
        if alone is not None and share != 1 and share not in seen.shares:
            times, count = (seen.kind.sharing, round(1 / share)) if share < 1 else (seen.kind.scaling, round(share))
            if count in times:
                times[count].add(seconds / alone)
                self._refit(seen.kind)
        seen.shares[share] = seconds

    def started(self, seconds: float) -> None:
        """Starting a trial took that much longer than its units do."""
        self._start.add(max(0.0, seconds))

    @property
    def start(self) -> float:
        """What starting a trial takes, as far as that was seen."""
        return self._start.value

    def stopped(self, seconds: float) -> None:
        """Stopping a trial took that long after its last report."""
        self._stop.add(max(0.0, seconds))

    def unit(self, trial: int) -> float:
        """The seconds of a trial's unit alone: its own, else the mean of its like, else that of all, else 1."""
        seen = self._seen.get(trial)
        if seen is not None and seen.unit.count:
            return seen.unit.value
        if seen is not None and seen.kind.unit.count:
            return seen.kind.unit.value
        return self._all.value if self._all.count else 1.0

    def curve(self, trial: int) -> Curve:
        """The curve of a trial's signature."""
        seen = self._seen.get(trial)
        return Curve() if seen is None else seen.kind.curve

    def speed(self) -> Speed:
        """What is known now. Nobody is moved before it was seen what starting costs."""
        return Speed(self.unit, self.curve, self.moving)

    @property
    def moving(self) -> float:
        """What moving a trial was seen to take; infinite before that."""
        return self._start.value + self._stop.value if self._start.count else float("inf")

    def known(self, signature: str) -> tuple[dict[int, float], dict[int, float]]:
        """What sharing and spreading are now taken to cost, relative to a trial alone."""
        kind = self._kinds.get(signature, _Kind())
        return _values(kind.sharing), _values(kind.scaling)

    def _refit(self, kind: _Kind) -> list[str]:
        curve, said = measured(_values(kind.sharing), _values(kind.scaling))
        kind.curve = curve if self.shared else Curve(scaling=curve.scaling)
        return said


def _values(means: Mapping[int, _Mean]) -> dict[int, float]:
    return {count: mean.value for count, mean in means.items()}
