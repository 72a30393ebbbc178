"""The small records that flow between the parts: requests to train trials, and their reports.

Data goes down as ``TrialGroup``s of ``Member``s and comes up as ``Report``s; all are frozen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Config = dict[str, Any]
Metrics = Mapping[str, float]
Mode = Literal["min", "max"]
Status = Literal["waiting", "running", "paused", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class StateRef:
    """Where a trial's state lies, and how far the trial had come: units reported and steps trained.

    ``sum`` is the CRC-32 of the content as it was written. It is None in logs from before there were sums, and where
    the content is never read.
    """

    file: str
    unit: int
    step: int
    bytes: int
    sum: int | None = None

    @property
    def trial(self) -> int:
        """The trial that wrote it, by the name of the file."""
        return int(self.file.split("-")[0])


@dataclass(frozen=True)
class Usage:
    """The resources that a trial used since its previous report.

    ``joules`` are None where nobody can tell them; ``unmetered`` says why, where the trial's device has a meter.
    """

    device_seconds: float = 0.0
    steps: int = 0
    peak_bytes: int | None = None
    joules: float | None = None
    unmetered: str = ""


@dataclass(frozen=True)
class Report:
    """A trial's metrics after ``unit`` units of training.

    ``attempt`` counts the trial's placements: reports of an older attempt are discarded. An algorithm is told of a
    failed trial by a report without metrics at its granted budget.
    """

    trial: int
    unit: int
    metrics: Metrics
    attempt: int = 0
    state: StateRef | None = None
    usage: Usage = field(default_factory=Usage)
    study: str = ""


class StartFrom(NamedTuple):
    """A member begins with the state of ``trial`` after ``unit`` units: its own trial, or a donor in PBT."""

    trial: int
    unit: int


class Leg(NamedTuple):
    """A part of the training behind a state: ``trial`` trained ``config`` until it had ``unit`` units in all.

    A trial that took over a donor's state has the donor's legs behind it. Trained again one after the other, they give
    that state again.
    """

    trial: int
    config: Config
    unit: int


@dataclass(frozen=True)
class Member:
    """One trial of a group: train ``config`` until ``budget`` units in all, beginning with ``start_from``.

    Members of a higher ``priority`` get devices before others of their group. ``variant`` names the task that the trial
    trains, where a study has several.
    """

    trial: int
    config: Config
    budget: int
    start_from: StartFrom | None = None
    priority: float = 0.0
    variant: str = ""


class Later(NamedTuple):
    """A rung to come: ``trials`` trials of the rung before it go on, each for ``units`` more units."""

    trials: int
    units: int


@dataclass(frozen=True)
class TrialGroup:
    """Trials that an algorithm wants run, each to a budget; the unit of scheduling (Fluid §3.2).

    Groups of one name belong together: an algorithm may add members to a rung it has asked for before. Groups that run
    at once share the devices by ``weight``. An ``open`` group gets a new member as soon as one is done: its throughput
    counts, and not the end of its last member. ``later`` are the rungs that follow once all of the group's members are
    done, where they are known.
    """

    name: str
    members: tuple[Member, ...]
    weight: float = 1.0
    open: bool = False
    later: tuple[Later, ...] = ()


class Course(NamedTuple):
    """The rungs that an algorithm expects its trials to climb, beside the budgets that it has granted already.

    ``groups`` names the group of each rung, and ``rungs`` has the trials still to be asked for there. If the course
    ``waits``, a rung begins once all rungs before it are done; otherwise its trials come as the rung before reports.
    """

    groups: tuple[str, ...]
    rungs: tuple[Later, ...]
    waits: bool = False


class Stage(NamedTuple):
    """``trials`` trials that each train to ``budget`` units in all; stages of a bracket follow one another."""

    trials: int
    budget: int
    bracket: int = 0


REDUCED = "reduced "


def variant_of(scale: int, *, reduced: bool = False) -> str:
    """The name of a study's task at a scale; the target is the study's own task.

    A ``reduced`` surrogate has fewer blocks, rows or pixels too.

    >>> variant_of(8), variant_of(8, reduced=True), variant_of(1)
    ('surrogate 8', 'reduced surrogate 8', '')
    """
    return f"{REDUCED if reduced else ''}surrogate {scale}" if scale > 1 else ""


def is_reduced(variant: str) -> bool:
    """Whether a variant has fewer blocks, rows or pixels beside its narrower width.

    >>> is_reduced("reduced surrogate 8"), is_reduced("surrogate 8")
    (True, False)
    """
    return variant.startswith(REDUCED)


def scale_of(variant: str) -> int:
    """How many times narrower a variant of a study's task is.

    >>> scale_of("surrogate 8"), scale_of("")
    (8, 1)
    """
    return int(variant.split()[-1]) if variant else 1


def score(metrics: Metrics, metric: str, mode: Mode) -> float:
    """The metric as a number that is larger for a better trial; minus infinity where it is missing, NaN or infinite.

    >>> score({"loss": 2.0}, "loss", "min")
    -2.0
    """
    value = metrics.get(metric)
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return float("-inf")
    return value if mode == "max" else -value


def reached(metrics: Metrics, metric: str, mode: Mode, until: float | None) -> bool:
    """Whether the metric is as good as the one that a trial trains until.

    >>> reached({"loss": 0.2}, "loss", "min", 0.3), reached({"loss": 0.2}, "loss", "min", None)
    (True, False)
    """
    return until is not None and score(metrics, metric, mode) >= score({metric: until}, metric, mode)


def plain(value: Any) -> Any:
    """A config's value as JSON keeps it: numbers, strings, lists and dicts as they are, anything else by its repr.

    The parts of a repr that differ between two processes are left out: addresses, and the module name of the study's
    own file, because ``python FILE`` and ``penstock run FILE`` import it under two names. A set is sorted for the same
    reason.

    >>> plain({"widths": (64, 32), "act": len, "layers": {"b", "a"}})
    {'widths': [64, 32], 'act': '<built-in function len>', 'layers': ['a', 'b']}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(v) for v in value), key=repr)
    return _PASSING.sub("", repr(value))


_PASSING = re.compile(r" at 0x[0-9a-f]+|\b(__main__|penstock_file_\w+)\.")
