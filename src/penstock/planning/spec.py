"""The job that is planned: its stages, and the seconds of a unit on each type of device (RubberBand §3, fig. 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from penstock.algorithms.base import Algorithm
from penstock.algorithms.successive_halving import CONCURRENCY, UNLEARNED
from penstock.errors import StudyError
from penstock.numeric import finite, shown
from penstock.planning.cloud import Instance
from penstock.planning.draws import NOTHING, ONE, Draws
from penstock.speed.curve import Curve, measured
from penstock.trial import Stage


@dataclass(frozen=True)
class Purpose:
    """The study that a plan is for: a task's name, the fingerprint of its source, its algorithm, its trials in all."""

    task: str = ""
    source: str = ""
    algorithm: str = ""
    trials: int = 0


@dataclass(frozen=True)
class Work:
    """A stage's work: ``trials`` train ``units`` more units each, to ``budget`` units in all.

    At most ``at_once`` trials run at a time, where an algorithm limits them. ``left`` has the units that each trial
    still has to train, where the stage is under way; ``units`` is then the most of them.
    """

    trials: int
    budget: int
    units: float
    bracket: int = 0
    number: int = 0
    at_once: int | None = None
    left: tuple[float, ...] = ()


@dataclass(frozen=True)
class Times:
    """The seconds of trials of one ``signature`` on a type of node; ``weight`` is how frequent the signature is.

    ``unit`` is a unit of a trial alone on one device, with its evaluation and saving: each unit is a draw. ``factor``
    is a trial's own speed: a draw a trial, by whose ratio to its mean all of the trial's units are longer. ``curve``
    says what sharing a device costs, and what more devices gain.
    """

    unit: Draws
    curve: Curve = field(default_factory=Curve)
    factor: Draws = ONE
    weight: float = 1.0
    signature: str = ""

    def __post_init__(self) -> None:
        if not self.unit.expected > 0:
            raise StudyError(f"A unit's seconds must be above 0, got {shown(self.unit.mean)}.")
        if not self.factor.expected > 0 or (weight := finite(self.weight)) is None or weight <= 0:
            raise StudyError(
                f"A signature's factor and weight must be above 0, got {shown(self.factor.mean)} and "
                f"{shown(self.weight)}."
            )


@dataclass(frozen=True)
class Job:
    """What is planned: the stages of each bracket, and times by instance type or by type of device.

    Stages of a bracket follow one another; brackets run at once, each on nodes of its own. ``start`` is how long a
    trial takes to start in a stage. ``assumed`` says in sentences what was not measured.
    """

    stages: tuple[Work, ...]
    times: Mapping[str, tuple[Times, ...]]
    start: Draws = NOTHING
    purpose: Purpose = field(default_factory=Purpose)
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages or any(work.trials < 1 for work in self.stages):
            raise StudyError("There are no trials to plan: give trials= at least 1.")
        if not any(self.times.values()):
            raise StudyError(
                "Nothing says how long a unit takes: run `penstock profile FILE`, give unit_seconds=, or name a "
                "study's log."
            )

    @property
    def brackets(self) -> list[tuple[Work, ...]]:
        """The stages of each bracket in turn."""
        return [tuple(works) for _, works in groupby(self.stages, key=lambda work: work.bracket)]

    def on(self, instance: Instance) -> tuple[Times, ...]:
        """The times on a type of node; refused where nothing was measured there."""
        for name in (instance.name, instance.type):
            if self.times.get(name):
                return self.times[name]
        raise StudyError(
            f"Nothing says how long a unit takes on {instance.name} (type {instance.type}): there are times of "
            f"{', '.join(sorted(self.times))}. Run `penstock profile FILE` on such a node, or give unit_seconds= with "
            "its name."
        )

    def rest(self, progress: Mapping[int, tuple[int, Sequence[float]]]) -> Job | None:
        """The job that is left of this one, None where nothing is.

        For each bracket that is not over, ``progress`` has the number of its stage and the units that each of its
        trials still has to train; without them, the whole stage is left.
        """
        kept = []
        for work in self.stages:
            number, left = progress.get(work.bracket, (None, ()))
            if number is not None and work.number == number and left:
                kept.append(replace(work, trials=len(left), units=max(left), left=tuple(left)))
            elif number is not None and work.number >= number:
                kept.append(work)
        return replace(self, stages=tuple(kept)) if kept else None


def works(stages: Sequence[Stage], *, follow: bool = False, at_once: int | None = None) -> tuple[Work, ...]:
    """The work of an algorithm's stages: their budgets are cumulative, so the units are their differences.

    Brackets ``follow`` one another where draws learn from results; ``at_once`` then limits each bracket's first stage.

    >>> [(work.trials, work.units) for work in works([Stage(9, 1), Stage(3, 3), Stage(1, 9)])]
    [(9, 1), (3, 2), (1, 6)]
    """
    made: list[Work] = []
    for index, (_, rungs) in enumerate(groupby(stages, key=lambda stage: stage.bracket)):
        below = 0
        for rung, stage in enumerate(rungs):
            bracket, number = (0, len(made)) if follow else (index, rung)
            cap = at_once if rung == 0 else None
            made.append(Work(stage.trials, stage.budget, stage.budget - below, bracket, number, cap))
            below = stage.budget
    return tuple(made)


def work_of(
    algorithm: Algorithm, trials: int | None, *, learns: bool = False
) -> tuple[tuple[Work, ...], tuple[str, ...]]:
    """An algorithm's work, and what was assumed about it; ``learns`` says whether its draws know earlier results."""
    if trials is not None and trials < 1:
        raise StudyError(f"There are no trials to plan: trials must be at least 1, got {trials}.")
    at_once = getattr(algorithm, "concurrency", None) if learns else None
    stages = algorithm.stages(trials)
    if stages is not None:
        return works(stages, follow=learns, at_once=at_once), ()
    stages = algorithm.expected(trials)
    if stages is None:
        raise StudyError(
            f"{type(algorithm).__name__} does not say how many trials will train how far: give trials=, or an "
            "algorithm with stages, such as SuccessiveHalving."
        )
    said = f"{type(algorithm).__name__} has no barriers: its rungs are planned as stages of the trials expected there"
    most = getattr(algorithm, "concurrency", None) or (CONCURRENCY if learns else UNLEARNED)
    return tuple(replace(work, at_once=most) for work in works(stages, follow=True)), (said,)


def times_of(
    where: str,
    unit: Draws,
    sharing: Mapping[int, float] | None = None,
    scaling: Mapping[int, float] | None = None,
    *,
    factor: Draws = ONE,
    weight: float = 1.0,
    signature: str = "",
) -> tuple[Times, tuple[str, ...]]:
    """Times made of measured step seconds by count, and what is assumed where nothing was measured.

    >>> times_of("a v100", Draws(85.0, 4.0), scaling={1: 2.0, 2: 1.1})[1]
    ('on a v100 trials are taken not to share a device: sharing was not measured',)
    """
    curve, said = measured(sharing or {}, scaling or {})
    assumed = [f"on {where}, {one}" for one in said]
    if len(scaling or {}) < 2:
        assumed.append(f"on {where} a trial is taken to gain nothing from a second device: scaling was not measured")
    if len(sharing or {}) < 2:
        assumed.append(f"on {where} trials are taken not to share a device: sharing was not measured")
    if not (unit.std or factor.std):
        assumed.append(f"on {where} every unit is taken to last the same: its spread was not measured")
    return Times(unit, curve, factor, weight, signature), tuple(assumed)
