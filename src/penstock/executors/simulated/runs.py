"""A trial in simulation: the source of its units, and its position on the virtual clock."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from penstock.bundle import Bundle, BundleMode, Job, Measured, Placement, TrialFailed, TrialFinished, TrialStopped
from penstock.errors import TaskError
from penstock.executors.simulated.settings import Simulated
from penstock.log.states import prefix
from penstock.speed.curve import Curve, doublings
from penstock.speed.packing import how_many
from penstock.speed.sizes import best_size
from penstock.tabulated import Tabulated
from penstock.training.random.generators import own_randomness, random_state, set_random_state
from penstock.training.worker import Worker
from penstock.trial import Report, StateRef, Usage

UnitEnded = Report | TrialFinished | TrialFailed
Phase = Literal["starting", "training", "saving", "stopping"]


class Source(ABC):
    """The source of a trial's units. A unit is trained at its end, or earlier where only training tells its seconds."""

    unit: int
    """How many units the trial has behind it."""
    signature: str = ""
    """The trial's signature, where the source knows it."""
    watts: float | None = None
    """What a device draws while the trial trains there, where the source knows it."""
    limits: Mapping[float, tuple[float, float]] = MappingProxyType({})
    """By power limit, the watts and how many times as long a unit takes, where the source knows them."""
    ahead: bool = False
    """Whether the unit that has begun is trained already: then the trial can leave only after it."""

    over: bool = False
    """Whether the last report had the metric that the trial trains until."""

    @abstractmethod
    def seconds(self) -> float:
        """The seconds of the unit that begins now, alone on a device of speed 1."""

    @abstractmethod
    def end(self, budget: int, device_seconds: float) -> UnitEnded:
        """The trial's event at the end of the unit; a report at the budget has a state."""

    @abstractmethod
    def leave(self) -> TrialStopped:
        """Leave between two units, with a state."""

    @abstractmethod
    def extend(self, budget: int) -> None:
        """Refuse a budget that the trial cannot reach."""

    @abstractmethod
    def close(self) -> None:
        """Leave at once."""


class Lookup(Source):
    """Units from a table. A state is a file of a few bytes, which holds only the trial's position."""

    def __init__(self, placement: Placement, table: Tabulated, job: Job, saving_every: int) -> None:
        self.trial, self.attempt, self.study = placement.trial, placement.attempt, job.study
        self.state = placement.state
        self.unit = self._began = placement.unit
        self._table, self._states, self._saving_every = table, job.states, saving_every
        self._reached = job.reached
        self._seconds: Any = table.seconds
        self._columns = tuple(table.metrics.items())
        self.signature, self.watts, self.limits = table.signature, table.watts, table.limits
        self.extend(placement.budget)

    def extend(self, budget: int) -> None:
        if budget > self._table.units:
            raise TaskError(
                f"Expected a budget of {self._table.units} units at most, which is how many the table of trial "
                f"{self.trial} has, got {budget}: lower the algorithm's largest budget, or give a longer table."
            )

    def seconds(self) -> float:
        return self._seconds[self.unit]  # type: ignore[no-any-return]

    def end(self, budget: int, device_seconds: float) -> UnitEnded:
        row = self.unit
        self.unit = unit = row + 1
        state, metrics = None, {name: values[row] for name, values in self._columns}
        self.over = self._reached(metrics)
        if unit >= budget or self.over or (self._saving_every and unit % self._saving_every == 0):
            state = self._save()
        return Report(self.trial, unit, metrics, self.attempt, state, Usage(device_seconds, 1), self.study)

    def leave(self) -> TrialStopped:
        at = self._began if self.state is None else self.state.unit
        return TrialStopped(self.trial, self.attempt, self.state if self.unit == at else self._save(), self.study)

    def close(self) -> None:
        """Nothing to do: no file is open."""

    def _save(self) -> StateRef:
        name = f"{prefix(self.trial, self.attempt)}{self.unit}.pt"
        content = b"%d\n" % self.unit
        self._states.write(name, content)
        self.state = StateRef(name, self.unit, self.unit, len(content))
        return self.state


class Trained(Source):
    """Units that are really trained. The trials of this process take turns, and each has a worker of its own.

    That worker is a copy of an idle one, and shares with it the data and the trials that are warm.
    """

    def __init__(self, placement: Placement, worker: Worker, unit_seconds: float | None, signature: str) -> None:
        self.placement, self.budget = placement, placement.budget
        self.unit = placement.unit
        self._worker, self._began = copy.copy(worker), False
        self._seconds, self.signature = unit_seconds, signature
        self._ahead: UnitEnded | None = None
        self._random: dict[str, Any] | None = None

    def seconds(self) -> float:
        if self._seconds is None:
            began = time.perf_counter()
            self._ahead, self.ahead = self._train(), True
            self._seconds = time.perf_counter() - began
        return self._seconds

    def end(self, budget: int, device_seconds: float) -> UnitEnded:
        if budget != self.budget:
            self.budget = budget
            if self._began:
                self._worker.place(self._bundle(budget))
        event = self._train() if self._ahead is None else self._ahead
        self._ahead, self.ahead = None, False
        if not isinstance(event, Report):
            return event
        self.unit, self.over = event.unit, self._worker.job.reached(event.metrics)
        return replace(event, usage=replace(event.usage, device_seconds=device_seconds))

    def leave(self) -> TrialStopped:
        if not self._began:
            return self.placement.turned_away(self._worker.job.study)
        self._worker.place(self._bundle())
        with self._turn():
            stopped = self._worker.advance()
        assert isinstance(stopped, TrialStopped)  # the trial stood at the end of a unit
        return stopped

    def extend(self, budget: int) -> None:
        """Nothing to refuse: any budget can be reached by training."""

    def close(self) -> None:
        self._worker.close()

    def _train(self) -> UnitEnded:
        with self._turn():
            if not self._began:
                self._worker.place(self._bundle(self.budget))
                self._began = True
            while True:
                self._worker.trials.save_with_reports_alone()  # the real clock decides when other states are saved
                event = self._worker.advance()
                if event is not None:
                    assert isinstance(event, UnitEnded)
                    return event

    def _bundle(self, budget: int | None = None) -> Bundle:
        placements = () if budget is None else (replace(self.placement, budget=budget),)
        return Bundle("alone", (self._worker.device,), placements)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Give the global random generators the trial's own states for its turn: other trials draw from them too."""
        with own_randomness():
            if self._random is not None:
                set_random_state(self._random)
            yield
            self._random = random_state(with_torch=True)


class SimulatedTrial:
    """A trial of a bundle, from its placement until the event that says it has left."""

    __slots__ = (
        "began",
        "budget",
        "curve",
        "leaving",
        "left",
        "pace",
        "phase",
        "placement",
        "run",
        "share",
        "since",
        "source",
        "used",
        "version",
    )

    def __init__(self, placement: Placement, source: Source, curve: Curve, run: SimulatedBundle, now: float) -> None:
        self.placement, self.source, self.curve, self.run = placement, source, curve, run
        self.budget, self.leaving = placement.budget, False
        self.phase: Phase = "starting"
        # `pace`: seconds on the clock for a second of the trial alone on a device of speed 1. `share`: of its devices.
        self.pace = self.share = 1.0
        self.left = 0.0  # seconds of its unit that were left at `since`, as if alone on a device of speed 1
        self.used = 0.0  # device seconds from its last report until `since`
        self.since = self.began = now  # when `left` and `used` were last computed, and when its unit began
        self.version = 0  # scheduled actions of an older version are passed over

    def repace(self, now: float, settings: Simulated) -> float | None:
        """Go on at the pace that its company gives it; gives the new end of its unit, where that changes."""
        changed, share = pace(self, settings)
        if (changed, share) == (self.pace, self.share):
            return None
        self.used += (now - self.since) * self.share
        ends = None
        if self.phase == "training":
            self.left = max(0.0, self.left - (now - self.since) / self.pace)
            self.version += 1
            ends = now + self.left * changed
        self.since, self.pace, self.share = now, changed, share
        return ends


class SimulatedBundle:
    """A bundle on its devices, or waiting for other bundles to leave them."""

    __slots__ = (
        "coming",
        "devices",
        "limit",
        "measure",
        "members",
        "mode",
        "name",
        "size",
        "slower",
        "speed",
        "study",
    )

    def __init__(self, bundle: Bundle, speed: float) -> None:
        self.study, self.name, self.devices = bundle.study, bundle.name, bundle.devices
        self.mode: BundleMode = bundle.mode
        self.size, self.measure = bundle.size, bundle.measure
        self.speed, self.slower = speed, 1.0  # by its power limit
        self.limit: float | None = None
        self.members: dict[tuple[int, int], SimulatedTrial] = {}
        self.coming: dict[tuple[int, int], tuple[Placement, Source, Curve]] = {}

    @property
    def together(self) -> bool:
        """Whether trials may enter while others are there."""
        return self.mode not in ("solo", "distributed")


def pace(member: SimulatedTrial, settings: Simulated) -> tuple[float, float]:
    """The seconds on the clock for a second of a trial alone, and its share of all its devices together."""
    curve, run = member.curve, member.run
    speed = run.speed / run.slower
    if settings.fixed_shares:
        return curve.at(member.placement.share) / speed, member.placement.share
    width, together = len(run.devices), len(run.members)
    if run.mode == "packed":
        return _turns(member) / min(settings.packs, parts(run)) / speed, 1 / together
    slower = _turns(member) if settings.curves else curve.at(1 / together)
    return curve.at(min(width, curve.widest)) * slower / speed, width / together


def _turns(member: SimulatedTrial) -> float:
    """How much slower a trial is beside the others: each signature has its own curve, and signatures take turns."""
    there = member.run.members.values()
    curves = {one.source.signature: one.curve for one in (*there, member)}
    counts = Counter(one.source.signature for one in there)
    return sum(curves[signature].at(1 / count) for signature, count in counts.items())


def parts(run: SimulatedBundle) -> int:
    """How many bundles a pack has: one for each signature, and one for each trial without."""
    signatures = [member.source.signature for member in run.members.values()]
    return len(set(signatures) - {""}) + signatures.count("")


def measured(run: SimulatedBundle, settings: Simulated) -> Measured | None:
    """The measurement that a worker would make on the first steps of a bundle, if any."""
    first, device = next(iter(run.members.values())), run.devices[0]
    if run.mode == "fused" and run.size is None and len(run.members) > 1:
        found = shared(first, device)
        run.size = found.size
        return found
    if not run.measure:
        return None
    run.measure = False
    return packed(run, device, settings) if run.mode == "packed" else spread(first, device)


def packed(run: SimulatedBundle, device: str, settings: Simulated) -> Measured:
    """The true gain of a pack over its bundles in turn."""
    table = {count: min(float(count), settings.packs) for count in range(2, parts(run) + 1)}
    return Measured("pack", device, "packing", table, how_many(table), "simulated", "simulated")


def shared(member: SimulatedTrial, device: str) -> Measured:
    """The true cost of sharing a device, as a measurement of the trial's signature."""
    curve, unit = member.curve, member.source.seconds() / member.run.speed
    table = {count: unit * curve.at(1 / count) for count in doublings(curve.most)}
    size = best_size(table, curve.most)
    return Measured(member.source.signature, device, "sharing", table, size, "simulated", "simulated")


def spread(member: SimulatedTrial, device: str) -> Measured:
    """The true gain of several devices, up to as many as the trial has, as a measurement of its signature."""
    curve, unit = member.curve, member.source.seconds() / member.run.speed
    table = {count: unit * curve.at(min(count, curve.widest)) for count in doublings(len(member.run.devices))}
    best = min(table, key=lambda count: (table[count], count))
    return Measured(member.source.signature, device, "scaling", table, best, "simulated", "simulated")
