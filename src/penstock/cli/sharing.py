"""The speed of a study's trials on one device: alone in turn, fused, and packed (Pack §4.2), measured by a few steps.

The trials' states are thrown away, and the study's own log and folder are not touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from penstock.bundle import Bundle, BundleMode, Description, Device, Job, Measured, Placement, TrialFailed
from penstock.cli.profile import NAME, configs_of
from penstock.cli.units import time_units
from penstock.errors import StudyError
from penstock.executors.local import find_devices
from penstock.log.states import States
from penstock.report.groups import group
from penstock.report.sharing import Sharing, Way
from penstock.running import executor_of
from penstock.settings import RunSettings
from penstock.speed.packing import switching, throughput
from penstock.task import task_name
from penstock.training.random.generators import own_randomness
from penstock.training.runs.packed import PackedRun
from penstock.training.worker import Worker
from penstock.trial import Config

if TYPE_CHECKING:
    from penstock.study import Study

PARTS, TRIALS = 8, 8  # the most bundles that are packed, and trials of one
GRANT = 600  # steps that a trial is granted: more, and compiling a step would pay, which takes a while
IN_PACKS = 20_000  # steps of one that is packed on an accelerator, beside slower ones
STEPS, SECONDS = 50, 1.0  # of a trial, or of all in a bundle: a way is timed for so many steps, or so long
PATIENCE = 60.0  # seconds within which a way must come to its full speed


@dataclass(frozen=True)
class _Timed:
    """A bundle's seconds of a model step, its memory, and the seconds and steps from its first placement to its end.

    ``parts`` has the seconds of a model step of each part of a pack, beside the others, by name.
    """

    each: float
    parts: Mapping[str, float]
    bytes: int | None
    whole: float
    steps: int


def profile_one(study: Study) -> Sharing:
    """Train a few trials for a few steps in every way in which they can share the device; keep the gain of packs."""
    device = find_devices()[0]
    with TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as scratch, own_randomness():
        states = States.of(Path(scratch) / "states")
        worker = Worker(Job(study.task, study.seed, study.metric, study.mode, states, NAME), device.name)
        try:
            found, steps = _found(study, device, _Profiling(worker, sample := configs_of(study)))
        finally:
            worker.close()
        executor = executor_of(study, RunSettings("local", 1), states, NAME)
        try:
            described = executor.describe(sample, train=False, trials=range(len(sample)), study=NAME)
            return replace(found, units=tuple(time_units(study, executor, sample, described, steps, NAME)))
        finally:
            executor.close()


def _found(study: Study, device: Device, trials: _Profiling) -> tuple[Sharing, dict[str, float]]:
    """The ways of sharing the device, and the seconds of a step of each signature."""
    described = trials.described()
    bundles = _bundles(described)
    alone = [trials.time_alone(numbers[0]) for numbers in bundles]
    ways = [_way("solo, in turn", 1, len(alone), alone)]
    best = [trials.bundle("solo", numbers[:1]) for numbers in bundles]
    quickest = [timed.each for timed in alone]
    fused = list[tuple[int, int, _Timed]]()  # the place of a bundle, and its trials
    for i, numbers in enumerate(bundles):
        together = trials.fused(numbers)
        if together is not None and (timed := trials.time(together)) is not None:
            fused.append((i, len(numbers), timed))
            if timed.each < quickest[i]:
                best[i], quickest[i] = together, timed.each
    if fused:
        count = sum(size for _, size, _ in fused)
        sigma = sum(alone[i].each for i, *_ in fused) / sum(timed.each for *_, timed in fused)
        row = _way("fused, in turn", count / len(fused), count, [timed for *_, timed in fused])
        ways.append(replace(row, sigma=sigma))
    told, packed = trials.pack(best)
    if packed is not None:
        there = [i for i in range(len(best)) if _part(i) in packed.parts]  # all, or as many as memory holds
        count = sum(len(best[i].placements) for i in there)
        sigma = throughput([quickest[i] for i in there], [packed.parts[_part(i)] for i in there])
        ways.append(replace(_way("packed", count, count, [packed]), sigma=sigma))
    change = switching(sum(timed.whole for timed in alone), [timed.steps * timed.each for timed in alone])
    steps = {described[one[0]].signature or "": timed.each for one, timed in zip(bundles, alone, strict=True)}
    found = Sharing(
        task_name(study.task),
        device.type,
        tuple(ways),
        change / len(alone),
        {} if told is None else told.table,
        _reason(len(best), told),
        cpu=not trials.worker.on_gpu,
        bundles=tuple(map(len, bundles)),
        groups=tuple(group(described)),
    )
    return found, steps


def _reason(bundles: int, event: Measured | None) -> str:
    if bundles < 2:
        return "all trials are one bundle, so there is nothing to pack"
    return "the parts were not timed together" if event is None else event.reason


def _way(name: str, together: float, trials: int, timed: Sequence[_Timed]) -> Way:
    """The row of a way: bundles that train in turn, each step of the same number of trials at once."""
    each = sum(one.each for one in timed) / len(timed)
    known = [one.bytes for one in timed if one.bytes is not None]
    return Way(name, trials, together * each, 1 / each, max(known, default=None))


def _bundles(described: Sequence[Description]) -> list[list[int]]:
    """The trials by their signature, of which the most come first; a trial without one is a bundle of its own."""
    kinds: dict[str | int, list[int]] = {}
    for number, one in enumerate(described):
        kinds.setdefault(one.signature or number, []).append(number)
    return [numbers[:TRIALS] for numbers in sorted(kinds.values(), key=lambda one: -len(one))[:PARTS]]


def _part(number: int) -> str:
    return f"part {number}"


class _Profiling:
    """A worker, and the configs whose trials train there."""

    def __init__(self, worker: Worker, configs: Sequence[Config]) -> None:
        self.worker, self.configs = worker, configs
        self._attempts, self._names = count(1), count()
        self._told: Measured | None = None  # the gain of a pack

    def described(self) -> list[Description]:
        """The signatures of the trials."""
        self._signatures = self.worker.describe_all(self.configs, train=False, trials=range(len(self.configs)))
        return self._signatures

    def bundle(self, mode: BundleMode, numbers: Sequence[int], size: int | None = None) -> Bundle:
        """A new bundle of trials."""
        units = -(-GRANT // (self._signatures[numbers[0]].steps or 1))
        placed = tuple(Placement(one, next(self._attempts), self.configs[one], units) for one in numbers)
        signature = self._signatures[numbers[0]].signature or ""
        return Bundle(f"{mode} {next(self._names)}", (self.worker.device,), placed, mode, signature, size, study=NAME)

    def fused(self, numbers: Sequence[int]) -> Bundle | None:
        """A bundle of trials that can be fused, or None where there are not several."""
        alike = len(numbers) > 1 and bool(self._signatures[numbers[0]].signature)
        return self.bundle("fused", numbers, len(numbers)) if alike else None

    def time_alone(self, number: int) -> _Timed:
        """Train one trial until it is timed."""
        timed = self.time(self.bundle("solo", [number]))
        if timed is None:
            raise StudyError(f"The trial ended before it was timed, with {self.configs[number]}: try again.")
        return timed

    def pack(self, parts: Sequence[Bundle]) -> tuple[Measured | None, _Timed | None]:
        """What a pack of bundles gains, and its time with all of them, where there are several."""
        if len(parts) < 2:
            return None, None
        new = tuple(replace(one, name=_part(i), placements=self._again(one)) for i, one in enumerate(parts))
        placed = tuple(one for part in new for one in part.placements)
        pack = Bundle("pack", (self.worker.device,), placed, "packed", measure=True, parts=new, study=NAME)
        self._told = None
        timed = self.time(pack, first=self._weighed)
        return self._told, timed

    def _weighed(self) -> bool:
        return self._told is not None and (bool(self._told.table) or self._told.size == 1)

    def _again(self, bundle: Bundle) -> tuple[Placement, ...]:
        more = IN_PACKS // GRANT if self.worker.on_gpu else 1
        return tuple(replace(p, attempt=next(self._attempts), budget=more * p.budget) for p in bundle.placements)

    def time(self, bundle: Bundle, first: Callable[[], bool] | None = None) -> _Timed | None:
        """Train a bundle until it is timed, once ``first`` is so; None where its trials leave by themselves."""
        worker, began = self.worker, time.perf_counter()
        before = worker.account.watch_peak() if worker.on_gpu else None
        worker.place(bundle)
        run = worker.training
        assert run is not None
        while time.perf_counter() - began < PATIENCE:  # the first steps are slow
            if run.settled and run.steps > STEPS // 10 and (first is None or first()):
                break
            if not self._advance(bundle):
                return None
        run.wait()
        runs = run.runs if isinstance(run, PackedRun) else {bundle.name: run}
        start, since, taken = [one.steps for one in runs.values()], time.perf_counter(), [0]
        while min(taken) < 1 or (min(taken) < STEPS and time.perf_counter() - since < SECONDS):
            if not self._advance(bundle):
                return None
            taken = [one.steps - before for one, before in zip(runs.values(), start, strict=True)]
        run.wait()
        seconds, steps = time.perf_counter() - since, run.steps
        peak = None if before is None else worker.account.peak_since(before)
        worker.place(replace(bundle, placements=(), parts=()))
        while self._advance(bundle):
            pass
        each = {name: seconds / one for name, one in zip(runs, taken, strict=True)}
        return _Timed(seconds / sum(taken), each, peak, time.perf_counter() - began, steps)

    def _advance(self, bundle: Bundle) -> bool:
        """Train to the next event or step; whether the bundle trains on."""
        if self.worker.idle:
            return False
        event = self.worker.advance()
        if isinstance(event, TrialFailed):
            config = next(one.config for one in bundle.placements if one.trial == event.trial)
            raise StudyError(f"The trial failed with {config}: {event.error}")
        if isinstance(event, Measured) and event.kind == "packing":
            self._told = event
        return not self.worker.idle
