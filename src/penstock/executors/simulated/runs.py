"""A trial in simulation: where its units come from, and where it stands on the virtual clock."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from penstock.bundle import Bundle, BundleMode, Failed, Finished, Measured, Placement, Stopped
from penstock.errors import TaskError
from penstock.executors.simulated.settings import Simulated
from penstock.log.states import States
from penstock.speed.curve import Curve, doublings
from penstock.speed.sizes import best_size
from penstock.tabulated import Tabulated
from penstock.training.random.generators import own_randomness, random_state, set_random_state
from penstock.training.worker import Worker
from penstock.trial import Report, StateRef, Usage

Ended = Report | Finished | Failed
Phase = Literal["starting", "training", "saving", "stopping"]


class Source(ABC):
    """What gives a trial's units. Nothing of a unit is trained before its end, except where its seconds need it."""

    unit: int
    """How many units it has behind it."""
    signature: str = ""
    """What its trial shares with those it can be fused with, where the source knows."""
    ahead: bool = False
    """Whether the unit that has begun is trained already: then the trial can leave only after it."""

    @abstractmethod
    def seconds(self) -> float:
        """What the unit that begins now takes, alone on a device of speed 1."""

    @abstractmethod
    def end(self, budget: int, device_seconds: float) -> Ended:
        """What the trial says at the end of the unit; a report at the budget has a state."""

    @abstractmethod
    def leave(self) -> Stopped:
        """Leave between two units, with a state."""

    @abstractmethod
    def extend(self, budget: int) -> None:
        """Refuse a budget that it cannot give."""

    @abstractmethod
    def close(self) -> None:
        """Leave at once."""


class Lookup(Source):
    """Units that stand in a table. A state is a file of a few bytes, which only the trial's position is read from."""

    def __init__(self, placement: Placement, table: Tabulated, states: States, saving_every: int) -> None:
        self.trial, self.attempt = placement.trial, placement.attempt
        self.state = placement.state
        self.unit = 0 if placement.state is None else placement.state.unit
        self._table, self._states, self._saving_every = table, states, saving_every
        self._seconds: Any = table.seconds
        self._columns = tuple(table.metrics.items())
        self.signature = table.signature
        self.extend(placement.budget)

    def extend(self, budget: int) -> None:
        if budget > self._table.units:
            raise TaskError(
                f"Expected a budget of {self._table.units} units at most, which is how many the table of trial "
                f"{self.trial} has, got {budget}: lower the algorithm's largest budget, or give a longer table."
            )

    def seconds(self) -> float:
        return self._seconds[self.unit]  # type: ignore[no-any-return]

    def end(self, budget: int, device_seconds: float) -> Ended:
        row = self.unit
        self.unit = unit = row + 1
        state = None
        if unit >= budget or (self._saving_every and unit % self._saving_every == 0):
            state = self._save()
        metrics = {name: values[row] for name, values in self._columns}
        return Report(self.trial, unit, metrics, self.attempt, state, Usage(device_seconds, 1))

    def leave(self) -> Stopped:
        at = 0 if self.state is None else self.state.unit
        return Stopped(self.trial, self.attempt, self.state if self.unit == at else self._save())

    def close(self) -> None:
        """Nothing is open."""

    def _save(self) -> StateRef:
        name = f"{self.trial:06d}-{self.attempt}-{self.unit}.pt"
        content = b"%d\n" % self.unit
        self._states.write(name, content)
        self.state = StateRef(name, self.unit, self.unit, len(content))
        return self.state


class Trained(Source):
    """Units that a worker of the trial's own really trains, in turns with the others of this process.

    Its worker is a copy of an idle one, with which it shares what that has: the data, and the trials that are warm.
    """

    def __init__(self, placement: Placement, worker: Worker, unit_seconds: float | None, signature: str) -> None:
        self.placement, self.budget = placement, placement.budget
        self.unit = 0 if placement.state is None else placement.state.unit
        self._worker, self._began = copy.copy(worker), False
        self._seconds, self.signature = unit_seconds, signature
        self._ahead: Ended | None = None
        self._random: dict[str, Any] | None = None

    def seconds(self) -> float:
        if self._seconds is None:
            began = time.perf_counter()
            self._ahead, self.ahead = self._train(), True
            self._seconds = time.perf_counter() - began
        return self._seconds

    def end(self, budget: int, device_seconds: float) -> Ended:
        if budget != self.budget:
            self.budget = budget
            if self._began:
                self._worker.place(self._bundle(budget))
        event = self._train() if self._ahead is None else self._ahead
        self._ahead, self.ahead = None, False
        if not isinstance(event, Report):
            return event
        self.unit = event.unit
        return replace(event, usage=replace(event.usage, device_seconds=device_seconds))

    def leave(self) -> Stopped:
        if not self._began:
            return Stopped(self.placement.trial, self.placement.attempt, self.placement.state)
        self._worker.place(self._bundle())
        with self._turn():
            stopped = self._worker.advance()
        assert isinstance(stopped, Stopped)  # it stood at the end of a unit
        return stopped

    def extend(self, budget: int) -> None:
        """Any budget can be trained to."""

    def close(self) -> None:
        self._worker.close()

    def _train(self) -> Ended:
        with self._turn():
            if not self._began:
                self._worker.place(self._bundle(self.budget))
                self._began = True
            while True:
                self._worker.save_with_reports_alone()  # states in between would go by the real clock
                event = self._worker.advance()
                if event is not None:
                    assert isinstance(event, Ended)
                    return event

    def _bundle(self, budget: int | None = None) -> Bundle:
        placements = () if budget is None else (replace(self.placement, budget=budget),)
        return Bundle("alone", (self._worker.device,), placements)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The global random generators are the trial's own for a while: others draw from them in between."""
        with own_randomness():
            if self._random is not None:
                set_random_state(self._random)
            yield
            self._random = random_state(with_torch=True)


class Member:
    """A trial of a bundle. It is in it from its placement until it says that it has left."""

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

    def __init__(self, placement: Placement, source: Source, curve: Curve, run: Run, now: float) -> None:
        self.placement, self.source, self.curve, self.run = placement, source, curve, run
        self.budget, self.leaving = placement.budget, False
        self.phase: Phase = "starting"
        self.pace = self.share = 1.0  # seconds on the clock of a second of its own, and what it has of its devices
        self.left = 0.0  # of its unit, in seconds of its own, when `since` was now
        self.used = 0.0  # device seconds from its last report until then
        self.since = self.began = now  # `began`: the unit
        self.version = 0  # what was to happen to an older one does not


class Run:
    """A bundle: on its devices, or waiting for others to leave them."""

    __slots__ = ("coming", "devices", "measure", "members", "mode", "name", "size", "speed")

    def __init__(self, bundle: Bundle, speed: float) -> None:
        self.name, self.devices = bundle.name, bundle.devices
        self.mode: BundleMode = bundle.mode
        self.size, self.measure = bundle.size, bundle.measure
        self.speed = speed
        self.members: dict[tuple[int, int], Member] = {}
        self.coming: dict[tuple[int, int], tuple[Placement, Source, Curve]] = {}

    @property
    def together(self) -> bool:
        """Whether trials may enter while others are there."""
        return self.mode not in ("solo", "distributed")


def pace(member: Member, settings: Simulated) -> tuple[float, float]:
    """The seconds on the clock of a second of a trial's own, and its share of all its devices together."""
    curve, run = member.curve, member.run
    if settings.fixed_shares:
        return curve.at(member.placement.share) / run.speed, member.placement.share
    width, together = len(run.devices), len(run.members)
    slower = _turns(member) if settings.curves else curve.at(1 / together)
    return curve.at(width) * slower / run.speed, width / together


def _turns(member: Member) -> float:
    """A curve is that of trials of one signature; those of several take turns."""
    there = member.run.members.values()
    curves = {one.source.signature: one.curve for one in (*there, member)}
    counts = Counter(one.source.signature for one in there)
    return sum(curves[signature].at(1 / count) for signature, count in counts.items())


def shared(member: Member, device: str) -> Measured:
    """What sharing a device costs a trial's like in truth."""
    curve, unit = member.curve, member.source.seconds() / member.run.speed
    table = {count: unit * curve.at(1 / count) for count in doublings(curve.most)}
    size = best_size(table, curve.most)
    return Measured(member.source.signature, device, "sharing", table, size, "simulated", "simulated")


def spread(member: Member, device: str) -> Measured:
    """What several devices give a trial's like in truth, as far as it has them."""
    curve, unit = member.curve, member.source.seconds() / member.run.speed
    table = {count: unit * curve.at(min(count, curve.widest)) for count in doublings(len(member.run.devices))}
    best = min(table, key=lambda count: (table[count], count))
    return Measured(member.source.signature, device, "scaling", table, best, "simulated", "simulated")
