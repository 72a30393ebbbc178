"""The speed model: the seconds of a unit at a share, h(w) of Fluid §4.2.2, measured and not assumed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Literal

from penstock.speed.curve import Curve, measured
from penstock.speed.sizes import FIXED_SIZE, LARGEST, UNKNOWN_SIZE, steps_to_check, steps_to_try

Sharing = Literal["never", "measured", "forced", "fixed"]
"""Whether trials of one signature share a device: never, as many as pay by measurement, all, or a fixed number."""

CPU = "cpu"  # the type of a device on which no step is captured
SIZES: dict[Sharing, int] = {"forced": LARGEST, "fixed": FIXED_SIZE}  # of bundles that measure nothing
_NOTHING: Mapping[int, float] = {}
_ALONE = Curve()


@dataclass(frozen=True)
class Speed:
    """The times that a scheduler knows: the seconds of a unit of each trial alone, its curve, and the cost of a move.

    ``moving`` is Fluid's ε in seconds; infinite where trials cannot be moved. ``timed`` says whether any unit was seen.
    ``tried`` has the measured relative times of a trial's signature by numbers of devices, and ``shared`` says whether
    the cost of sharing a device was measured for it. Where there are devices of several types, ``types`` has a speed
    for each: a measurement on one type says nothing of another.
    """

    unit: Callable[[int], float]
    curve: Callable[[int], Curve]
    moving: float = float("inf")
    types: Mapping[str, Speed] = field(default_factory=dict)
    tried: Callable[[int], Mapping[int, float]] = lambda trial: _NOTHING
    timed: bool = True
    shared: Callable[[int], bool] = lambda trial: True

    def seconds(self, trial: int, share: float) -> float:
        """The seconds of a unit of a trial at a share: h(w)."""
        return self.unit(trial) * self.curve(trial).at(share)

    def on(self, type: str) -> Speed:
        """The speed on devices of a type."""
        return self.types.get(type, self)


UNKNOWN = Speed(unit=lambda trial: 1.0, curve=lambda trial: _ALONE, timed=False)
"""The speed before anything is measured: nothing is assumed, so every trial has a share of 1."""


@dataclass
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / self.count


@dataclass
class _Kind:
    """The measurements of a signature on a device type: its curve, and the mean seconds of a unit of its trials alone.

    ``size`` is the most trials of a bundle, None before it is measured. ``checking`` is how many steps alone the check
    before a first step together costs, where that is known. ``tried`` says that it was made in this study.
    """

    curve: Curve
    sharing: dict[int, _Mean] = field(default_factory=dict)
    scaling: dict[int, _Mean] = field(default_factory=dict)
    size: int | None = None
    unit: _Mean = field(default_factory=_Mean)
    checking: float | None = None
    tried: bool = False


@dataclass
class _Seen:
    """The times seen of a trial on a device type."""

    unit: _Mean = field(default_factory=_Mean)
    shares: dict[float, float] = field(default_factory=dict)  # seconds of a unit, as last seen at each share


@dataclass
class _Type:
    """The measurements on a device type: of each signature, of each trial, and of all trials together."""

    kinds: dict[str, _Kind] = field(default_factory=dict)
    seen: defaultdict[int, _Seen] = field(default_factory=lambda: defaultdict(_Seen))
    unit: _Mean = field(default_factory=_Mean)
    captures: bool = False  # whether steps are captured there, those of a trial alone too


class _Types(dict[str, _Type]):
    def __missing__(self, type: str) -> _Type:
        made = self[type] = _Type(captures=type != CPU)
        return made


class SpeedModel:
    """Learns from measurements and from every report; a scheduler gets its ``speed()``.

    A curve belongs to a signature on a device type. Trials of one task that differ in their hyperparameters alone react
    alike to sharing and spreading (Fluid §4.2.2), however long their own units take; another device type has other
    curves. A signature without a measured bundle is taken to share for free, up to ``UNKNOWN_SIZE``: its first bundle
    measures itself, on steps that count as training (invariant 7). As long as too few steps were asked for to repay
    that, its trials share no device (invariant 8). ``spreads`` says whether a trial may have several devices.
    """

    def __init__(self, sharing: Sharing = "measured", *, spreads: bool = True) -> None:
        self.sharing, self.spreads = sharing, spreads
        self._signatures: dict[int, str] = {}  # by trial
        self._asked: dict[str, dict[int, int]] = {}  # by signature and trial: the steps that were asked for in all
        self._steps: defaultdict[str, int] = defaultdict(int)  # their sums
        self._types = _Types()
        self._all = _Mean()
        self._start, self._stop = _Mean(), _Mean()

    def know(self, trial: int, signature: str) -> None:
        """Note the signature of a trial's config. Times seen with an earlier config are forgotten."""
        before = self._signatures.get(trial, "")
        if before != signature:
            self._steps[before] -= self._asked.get(before, {}).pop(trial, 0)
        self._signatures[trial] = signature
        for one in self._types.values():
            one.seen.pop(trial, None)

    def asked(self, trial: int, steps: int) -> None:
        """Note how many steps a trial was asked for in all, the trained ones included."""
        signature = self._signatures.get(trial, "")
        if signature and steps > 0:
            known = self._asked.setdefault(signature, {})
            self._steps[signature] += steps - known.get(trial, 0)
            known[trial] = steps

    def checked(self, signature: str, type: str, table: Mapping[int, float]) -> None:
        """Take the cost of a check: its seconds at 0, and those of a step alone at 1."""
        if table[1] > 0:
            self._kind(self._types[type], signature).checking = table[0] / table[1]

    def shared(
        self, signature: str, type: str, table: Mapping[int, float], size: int, *, recalled: bool = False
    ) -> list[str]:
        """Take a measurement of bundles: step seconds by size, and the largest size; says what was smoothed.

        Without a table only the size is known: memory ran out, or the trials cannot be fused. A measurement that is
        ``recalled`` is an earlier study's: the way has yet to be checked here.
        """
        kind = self._kind(self._types[type], signature)
        kind.tried = kind.tried or not recalled
        if table:
            kind.sharing = _relative(table)
        kind.size = size
        return self._refit(kind)

    def spread(self, signature: str, type: str, table: Mapping[int, float]) -> list[str]:
        """Take a measurement of a trial on several devices: step seconds by count; says what was smoothed or cut."""
        kind = self._kind(self._types[type], signature)
        kind.scaling = _relative(table)
        return self._refit(kind)

    def size(self, signature: str, type: str) -> int | None:
        """The most trials of a bundle of a signature, or None where its first bundle has to measure this."""
        if self.sharing == "never" or not signature or not self._repaid(self._types[type], signature):
            return 1
        known = self._kind(self._types[type], signature).size
        return SIZES.get(self.sharing) if known is None else known

    def observed(self, trial: int, type: str, share: float, seconds: float, *, compare: bool = True) -> None:
        """Take the ``seconds`` of a unit at a ``share``: they refine the trial's own time, and the curve after a move.

        ``compare`` is False where more than the share differs: after a start, or beside unlike trials.
        """
        signature = self._signatures.get(trial)
        if signature is None or not seconds > 0:
            return
        here = self._types[type]
        seen, kind = here.seen[trial], self._kind(here, signature)
        if compare:
            self._compare(kind, seen, share, seconds)
        # A trial may have more devices than pay, as while it measures them. The curve has no time for so many.
        beyond = kind.scaling.get(round(share)) if share > kind.curve.widest else None
        unit = seconds / (kind.curve.at(share) if beyond is None else beyond.value)
        for mean in (seen.unit, kind.unit, here.unit, self._all):
            mean.add(unit)

    def _compare(self, kind: _Kind, seen: _Seen, share: float, seconds: float) -> None:
        """Learn the cost of a share from the first unit that a trial trains at it, against its unit alone."""
        alone = seen.shares.get(1.0)
        if alone is not None and share != 1 and share not in seen.shares:
            times, count = (kind.sharing, round(1 / share)) if share < 1 else (kind.scaling, round(share))
            if count in times:
                times[count].add(seconds / alone)
                self._refit(kind)
        seen.shares[share] = seconds

    def recall(self, signature: str, type: str, unit: float) -> None:
        """Take an earlier study's mean seconds of a unit, for a signature's trials alone on a type."""
        here = self._types[type]
        for mean in (self._kind(here, signature).unit, here.unit, self._all):
            mean.add(unit)

    def started(self, seconds: float) -> None:
        """Take the seconds by which a trial's first unit was longer than the others: the cost of its start."""
        self._start.add(max(0.0, seconds))

    def stopped(self, seconds: float) -> None:
        """Take the seconds from a trial's last report until it had stopped."""
        self._stop.add(max(0.0, seconds))

    @property
    def start(self) -> float:
        """The mean seconds that starting a trial takes; 0 before a start was seen."""
        return self._start.value

    @property
    def stop(self) -> float:
        """The mean seconds that stopping a trial takes; 0 before a stop was seen."""
        return self._stop.value

    @property
    def moving(self) -> float:
        """The seconds that moving a trial takes; infinite before a start was seen.

        A stop writes a state and a start reads one: until a stop was seen, a stop is taken to cost as much as a start.
        """
        if not self._start.count:
            return math.inf
        return self._start.value + (self._stop.value if self._stop.count else self._start.value)

    def unit(self, type: str, trial: int) -> float:
        """The seconds of a trial's unit alone on a type.

        It is the trial's own mean there, else the mean of its signature there, else the mean of all trials there. Where
        no unit was seen on the type, it is the mean of all trials on all types, and 1 where no unit was seen at all.
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

    def mean(self, signature: str, type: str) -> float | None:
        """The mean seconds of a unit of a signature's trials alone on a type; None where no unit was seen."""
        unit = self._kind(self._types[type], signature).unit
        return unit.value if unit.count else None

    def curve(self, type: str, trial: int) -> Curve:
        """The curve of a trial's signature on a type."""
        return self._curve(self._types[type], trial)

    def _curve(self, here: _Type, trial: int) -> Curve:
        signature = self._signatures.get(trial, "")
        if not signature:
            return _ALONE
        curve = self._kind(here, signature).curve
        return curve if self._repaid(here, signature) else _unshared(curve)

    def _repaid(self, here: _Type, signature: str) -> bool:
        """Whether enough steps were asked for to repay an attempt to fuse, or the check of a way that is known to pay.

        Steps that are unknown say nothing against it. An attempt that was made in this study has been paid for.
        """
        return self._steps[signature] >= self._needed(here, signature)

    def _needed(self, here: _Type, signature: str) -> float:
        kind, asked = self._kind(here, signature), self._asked.get(signature)
        if self.sharing != "measured" or asked is None or kind.tried or kind.size == 1:
            return 0.0
        if kind.size is None:
            return steps_to_try(kind.checking, captured=here.captures)
        return steps_to_check(kind.checking, _values(kind.sharing), min(kind.size, len(asked)))

    def unrepaid(self, signature: str, type: str) -> str:
        """Why trials that could be fused are not, where too few steps were asked for; else nothing."""
        here, trials = self._types[type], len(self._asked.get(signature, ()))
        if trials < 2 or self._repaid(here, signature):
            return ""
        needed = self._needed(here, signature)
        least = "" if needed == math.inf else f" before {needed:.0f}"
        return f"{self._steps[signature]} steps of {trials} trials do not repay an attempt to fuse{least}"

    def _tried(self, here: _Type, trial: int) -> Mapping[int, float]:
        return _values(self._kind(here, self._signatures.get(trial, "")).scaling)

    def speed(self, types: Collection[str]) -> Speed:
        """The present speed on the types given. No trial is moved before the cost of a start was seen."""
        known = {type: self._speed(self._types[type]) for type in types}
        if len(known) == 1:
            return next(iter(known.values()))
        return Speed(UNKNOWN.unit, UNKNOWN.curve, self.moving, known, timed=self._all.count > 0)

    def _speed(self, here: _Type) -> Speed:
        return Speed(
            partial(self._unit, here),
            partial(self._curve, here),
            self.moving,
            tried=partial(self._tried, here),
            timed=self._all.count > 0,
            shared=partial(self._shared, here),
        )

    def _shared(self, here: _Type, trial: int) -> bool:
        signature = self._signatures.get(trial, "")
        kind = self._kind(here, signature)
        known = bool(kind.sharing) or kind.size == 1
        return self.sharing == "never" or not signature or known or not self._repaid(here, signature)

    def known(self, signature: str, type: str) -> tuple[dict[int, float], dict[int, float]]:
        """The times of sharing and of spreading on a type by count, relative to a trial alone on a device."""
        kind = self._kind(self._types[type], signature)
        return _values(kind.sharing), _values(kind.scaling)

    def _kind(self, here: _Type, signature: str) -> _Kind:
        if signature not in here.kinds:
            here.kinds[signature] = _Kind(Curve(sharing=self._unmeasured(None) if signature else (1.0,)))
        return here.kinds[signature]

    def _unmeasured(self, size: int | None) -> tuple[float, ...]:
        """The curve of sharing where nothing was timed: it is free, up to the size given or a default."""
        if self.sharing == "never":
            return (1.0,)
        return _free(size or SIZES.get(self.sharing, UNKNOWN_SIZE))

    def _refit(self, kind: _Kind) -> list[str]:
        curve, said = measured(_values(kind.sharing), _values(kind.scaling) if self.spreads else {})
        if self.sharing == "measured" and kind.sharing:
            sharing = _as_far(curve.sharing, max(kind.sharing), kind.size or 1)
        else:
            sharing = self._unmeasured(kind.size)
        kind.curve = replace(curve, sharing=sharing)
        return said


def _relative(table: Mapping[int, float]) -> dict[int, _Mean]:
    return {count: _Mean(seconds / table[1], 1) for count, seconds in table.items() if 1 in table}


def _values(means: Mapping[int, _Mean]) -> dict[int, float]:
    return {count: mean.value for count, mean in means.items()}


@lru_cache(maxsize=64)
def _unshared(curve: Curve) -> Curve:
    """A curve of trials that are not to share a device, asked for at every decision, of each trial that waits."""
    return replace(curve, sharing=_ALONE.sharing)


@cache
def _free(size: int) -> tuple[float, ...]:
    return (1.0,) * size


def _as_far(sharing: tuple[float, ...], tried: int, size: int) -> tuple[float, ...]:
    """A curve cut at a bundle's ``size``, or extended to it where the largest bundle that was ``tried`` still paid."""
    last = len(sharing)
    if size <= last or last < tried or last == 1:
        return sharing[: max(1, size)]
    slope = math.log2(sharing[-1] / sharing[last // 2 - 1]) / math.log2(last / (last // 2))
    return sharing + tuple(sharing[-1] * (count / last) ** slope for count in range(last + 1, size + 1))
