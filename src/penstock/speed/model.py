"""The speed model: what a unit takes at a share, h(w) of Fluid §4.2.2, measured and not assumed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.speed.curve import Curve, measured


@dataclass(frozen=True)
class Speed:
    """What a scheduler knows: the seconds of a unit of each trial alone, its curve, and what moving a trial costs.

    ``moving`` is Fluid's ε in seconds; infinite where trials cannot be moved. Where there are devices of several types,
    ``types`` has what is known on each: what was measured on one says nothing of another.
    """

    unit: Callable[[int], float]
    curve: Callable[[int], Curve]
    moving: float = float("inf")
    types: Mapping[str, Speed] = field(default_factory=dict)

    def seconds(self, trial: int, share: float) -> float:
        """The seconds of a unit of a trial at a share: h(w)."""
        return self.unit(trial) * self.curve(trial).at(share)


_ALONE = Curve()
UNKNOWN = Speed(unit=lambda trial: 1.0, curve=lambda trial: _ALONE)
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
    """What is known of a signature on a device type: its curve, and the mean of its trials' seconds of a unit alone."""

    sharing: dict[int, _Mean] = field(default_factory=dict)
    scaling: dict[int, _Mean] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)
    unit: _Mean = field(default_factory=_Mean)


@dataclass
class _Seen:
    """What was seen of a trial on a device type."""

    unit: _Mean = field(default_factory=_Mean)
    shares: dict[float, float] = field(default_factory=dict)  # seconds of a unit, as last seen at each share


@dataclass
class _Type:
    """What is known on a device type: of signatures, of trials, and of all together."""

    kinds: defaultdict[str, _Kind] = field(default_factory=lambda: defaultdict(_Kind))
    seen: defaultdict[int, _Seen] = field(default_factory=lambda: defaultdict(_Seen))
    unit: _Mean = field(default_factory=_Mean)


class SpeedModel:
    """Learns from measurements and from every report; ``speed()`` is what a scheduler is given.

    A curve belongs to a signature on a device type: trials of one task that differ in their hyperparameters alone react
    alike to sharing and spreading (Fluid §4.2.2), however long their own units take, and other devices are other.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared  # whether a device may be shared
        self._signatures: dict[int, str] = {}  # by trial
        self._types: defaultdict[str, _Type] = defaultdict(_Type)
        self._all = _Mean()
        self._start, self._stop = _Mean(), _Mean()

    def know(self, trial: int, signature: str) -> None:
        """A trial has a config of a signature, of which nothing was seen yet."""
        self._signatures[trial] = signature
        for one in self._types.values():
            one.seen.pop(trial, None)

    def measured(
        self, signature: str, type: str, sharing: Mapping[int, float], scaling: Mapping[int, float]
    ) -> list[str]:
        """Take what a worker measured, or what is known from before; gives what was smoothed or cut."""
        kind = self._types[type].kinds[signature]
        kind.sharing = {p: _Mean(t / sharing[1], 1) for p, t in sharing.items() if 1 in sharing}
        kind.scaling = {w: _Mean(t / scaling[1], 1) for w, t in scaling.items() if 1 in scaling}
        return self._refit(kind)

    def observed(self, trial: int, type: str, share: float, seconds: float, *, compare: bool = True) -> None:
        """A unit of a trial took ``seconds`` at ``share``: refines its own time, and the curve where it moved.

        It is not to ``compare`` where it is not only the share that differs: after a start, or beside unlike trials.
        """
        signature = self._signatures.get(trial)
        if signature is None or not seconds > 0:
            return
        here = self._types[type]
        seen, kind = here.seen[trial], here.kinds[signature]
        if compare:
            self._compare(kind, seen, share, seconds)
        unit = seconds / kind.curve.at(share)
        for mean in (seen.unit, kind.unit, here.unit, self._all):
            mean.add(unit)

    def _compare(self, kind: _Kind, seen: _Seen, share: float, seconds: float) -> None:
        """The first unit that a trial trains at another share than alone tells what that share costs."""
        alone = seen.shares.get(1.0)
        if alone is not None and share != 1 and share not in seen.shares:
            times, count = (kind.sharing, round(1 / share)) if share < 1 else (kind.scaling, round(share))
            if count in times:
                times[count].add(seconds / alone)
                self._refit(kind)
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

    @property
    def timed(self) -> bool:
        """Whether any unit was seen."""
        return self._all.count > 0

    def unit(self, type: str, trial: int) -> float:
        """The seconds of a trial's unit alone on a type: its own there, else the mean of its like, else of all there.

        Where nothing was seen on the type, those of all on the others are as good as any; without those it is 1.
        """
        return self._unit(self._types[type], trial)

    def _unit(self, here: _Type, trial: int) -> float:
        if (seen := here.seen.get(trial)) is not None and seen.unit.count:
            return seen.unit.value
        kind = here.kinds.get(self._signatures.get(trial, ""))
        if kind is not None and kind.unit.count:
            return kind.unit.value
        mean = here.unit if here.unit.count else self._all
        return mean.value if mean.count else 1.0

    def curve(self, type: str, trial: int) -> Curve:
        """The curve of a trial's signature on a type: one that says nothing where it was not measured there."""
        return self._curve(self._types[type], trial)

    def _curve(self, here: _Type, trial: int) -> Curve:
        kind = here.kinds.get(self._signatures.get(trial, ""))
        return _ALONE if kind is None else kind.curve

    def speed(self, types: Collection[str]) -> Speed:
        """What is known now on the types that there are. Nobody is moved before it was seen what starting costs."""
        there = {type: self._types[type] for type in types}
        known = {t: Speed(partial(self._unit, one), partial(self._curve, one), self.moving) for t, one in there.items()}
        if len(known) == 1:
            return next(iter(known.values()))
        return Speed(UNKNOWN.unit, UNKNOWN.curve, self.moving, known)

    @property
    def moving(self) -> float:
        """What moving a trial was seen to take; infinite before that."""
        return self._start.value + self._stop.value if self._start.count else float("inf")

    def known(self, signature: str, type: str) -> tuple[dict[int, float], dict[int, float]]:
        """What sharing and spreading are now taken to cost on a type, relative to a trial alone."""
        kind = self._types[type].kinds.get(signature, _Kind())
        return _values(kind.sharing), _values(kind.scaling)

    def _refit(self, kind: _Kind) -> list[str]:
        curve, said = measured(_values(kind.sharing), _values(kind.scaling))
        kind.curve = curve if self.shared else replace(curve, sharing=(1.0,))
        return said


def _values(means: Mapping[int, _Mean]) -> dict[int, float]:
    return {count: mean.value for count, mean in means.items()}
