"""The seconds of a unit of each signature, with its evaluation and saving, and how they vary: what plans are made of.

A few trials of each signature train some units alone on a device. Their states are thrown away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from penstock.bundle import Bundle, Description, Device, Placement, TrialFailed, TrialFinished, TrialStopped
from penstock.engine.clocking import Shelf, spread
from penstock.executors.base import Executor
from penstock.report.units import Unit
from penstock.speed.profiles import Profiles
from penstock.task import fingerprint
from penstock.trial import Config, Report

if TYPE_CHECKING:
    from penstock.study import Study

UNITS, TRIALS = 4, 2  # units of a trial, and trials of a signature, that are timed
LONG = 300.0  # seconds of a unit that is too long to be timed here
PATIENCE = 30.0  # seconds of a trial after which no other of its signature is timed


def time_units(
    study: Study,
    executor: Executor,
    sample: Sequence[Config],
    described: Sequence[Description],
    steps: Mapping[str, float],
    name: str,
) -> list[Unit]:
    """Time the units of each signature of the sample, and keep the times; ``steps`` has the seconds of a step."""
    device = executor.devices()[0]
    shelf = Shelf(Profiles.open(study.dir / "profiles.jsonl"), fingerprint(study.task))
    kinds: dict[str, list[int]] = {}
    for number, one in enumerate(described):
        kinds.setdefault(one.signature or "", []).append(number)
    timing = _Timing(executor, device, name)
    return [
        _unit(shelf, device, timing, sample, numbers, kind, described[numbers[0]].steps * steps.get(kind, 0.0))
        for kind, numbers in kinds.items()
    ]


def _unit(
    shelf: Shelf,
    device: Device,
    timing: _Timing,
    sample: Sequence[Config],
    numbers: Sequence[int],
    kind: str,
    expected: float,
) -> Unit:
    if expected > LONG:
        return Unit(kind, len(numbers), reason=f"a unit takes about {expected / 60:.0f} minutes, and was not timed")
    units, starts, stops = list[list[float]](), list[float](), list[float]()
    for number in numbers[:TRIALS]:
        clocks, why = timing.trial(number, sample[number], kind)
        if why:
            return Unit(kind, len(numbers), reason=why)
        seen = [end - begin for begin, end in pairwise(clocks[1:-1])]
        units.append(seen)
        starts.append(max(0.0, clocks[1] - clocks[0] - fmean(seen)))
        stops.append(clocks[-1] - clocks[-2])
        if clocks[-1] - clocks[0] > PATIENCE:
            break
    mean, varies = fmean(map(fmean, units)), {**spread(units), 2: float(len(numbers))}
    shelf.put(kind, device, "unit", {1: mean})
    shelf.put(kind, device, "spread", varies)
    if shelf.get(kind, device, "moving") is None:  # the first trial of all starts a worker, too
        shelf.put(kind, device, "moving", {0: starts[-1], 1: stops[-1]})
    return Unit(kind, len(numbers), mean, varies.get(0, 0.0), varies.get(1, 0.0))


class _Timing:
    """Trains one trial after another alone on a device."""

    def __init__(self, executor: Executor, device: Device, study: str) -> None:
        self._executor, self._device, self._study = executor, device, study
        self._attempts = count(1)

    def trial(self, number: int, config: Config, signature: str) -> tuple[list[float], str]:
        """The clock at a trial's placement, at each of its reports and at its end; or why it cannot be timed."""
        placed = Placement(number, next(self._attempts), config, UNITS)
        bundle = Bundle(f"unit {placed.attempt}", (self._device.name,), (placed,), "solo", signature, study=self._study)
        clocks = [self._executor.now()]
        self._executor.place(bundle)
        while True:
            for event in self._executor.wait():
                if isinstance(event, Report):
                    clocks.append(self._executor.now())
                elif isinstance(event, TrialFailed):
                    return [], f"a trial of it failed: {event.error.strip().splitlines()[-1]}"
                elif isinstance(event, TrialStopped):
                    return [], "its trial was stopped before it was timed"
                elif isinstance(event, TrialFinished):
                    return [*clocks, self._executor.now()], ""
