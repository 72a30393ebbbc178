"""Where and how a study runs: one record, checked when it is made, kept in the log, and said again on an interrupt.

Beside it are the types of all options of ``tune``, for editors and type checkers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict, cast

from penstock.errors import StudyError
from penstock.executors.ray.address import is_ray
from penstock.executors.simulated.settings import Simulated
from penstock.numeric import finite, shown, whole
from penstock.scheduling.base import Scheduler
from penstock.scheduling.fifo import fifo
from penstock.scheduling.fluid import dynamic_fluid, static_fluid
from penstock.scheduling.growing import FIRST, First, Growing
from penstock.scheduling.packs import PICKS, Packing, Pick
from penstock.scheduling.waterfill import waterfill
from penstock.space import Space
from penstock.surrogate.settings import Surrogate
from penstock.tabulated import TabulatedTask
from penstock.task import AnyTask, Task, shards, task_name
from penstock.trial import Mode

if TYPE_CHECKING:
    import optuna

    from penstock.algorithms.base import Algorithm
    from penstock.planning.plan import Plan

POWER = ("observe", "limit")
LATE = ("finish", "stop", "pay")
SHARING = ("auto", "solo", "fused", "packed", "processes", "distributed")
SCHEDULERS: dict[str, Scheduler] = {
    "waterfill": waterfill,
    "dynamic_fluid": dynamic_fluid,
    "static_fluid": static_fluid,
    "fifo": fifo,
}


@dataclass(frozen=True)
class RunSettings:
    """The options of one run of a study; ``Study.run`` says what each of them means.

    >>> RunSettings(on="ray", workers=4).changed()
    {'on': 'ray', 'workers': 4}
    """

    on: str | Simulated = "local"
    workers: int | None = None
    weight: float = 1.0
    sharing: str = "auto"
    scheduler: str = "waterfill"
    growing: str = "best"
    mixed_types: bool = False
    deterministic: bool = False
    packing: str | None = None
    similarity: float | None = None
    active_threads: float | None = None
    late: str = "finish"
    power: str | None = None

    def __post_init__(self) -> None:
        if (
            not isinstance(self.on, Simulated)
            and not self.ray
            and not (isinstance(self.on, str) and self.on == "local")
        ):
            raise StudyError(
                f'on must be "local", "ray", "ray://host:port" or penstock.Simulated(devices=64), got {shown(self.on)}.'
            )
        if isinstance(self.on, Simulated) and self.workers is not None:
            raise StudyError("workers= is for real devices: a simulated cluster has Simulated(devices=...).")
        if not isinstance(self.sharing, str) or self.sharing not in SHARING:
            raise StudyError(f"sharing must be one of {', '.join(SHARING)}, got {shown(self.sharing)}.")
        if not isinstance(self.scheduler, str) or self.scheduler not in SCHEDULERS:
            raise StudyError(f"scheduler must be one of {', '.join(SCHEDULERS)}, got {shown(self.scheduler)}.")
        if self.scheduler == "fifo" and self.sharing in ("fused", "packed", "processes", "distributed"):
            raise StudyError(
                f'scheduler="fifo" gives each trial a device of its own: leave sharing="{self.sharing}" out.'
            )
        workers, weight = whole(self.workers), finite(self.weight)
        if self.workers is not None and (workers is None or workers < 1):
            raise StudyError(f"workers must be a whole number above 0, got {shown(self.workers)}.")
        if weight is None or weight <= 0:
            raise StudyError(f"weight must be a number above 0, got {shown(self.weight)}.")
        if weight != 1 and not self.ray:
            raise StudyError('weight= is a study\'s part of a Ray cluster: it goes with on="ray".')
        if not isinstance(self.growing, str) or self.growing not in FIRST:
            raise StudyError(f'growing must be "best" or "evenly", got {shown(self.growing)}.')
        if not isinstance(self.mixed_types, bool):
            raise StudyError(f"mixed_types must be True or False, got {shown(self.mixed_types)}.")
        if not isinstance(self.deterministic, bool):
            raise StudyError(f"deterministic must be True or False, got {self.deterministic!r}.")
        if self.deterministic and (self.ray or (self.workers or 1) > 1):
            raise StudyError(
                "deterministic=True needs one worker, as reports of several come in the order of their times: leave "
                f"{'on' if self.ray else 'workers'}= out, or deterministic=."
            )
        if self.deterministic and self.sharing == "distributed":
            raise StudyError(
                "deterministic=True measures nothing, and sharing='distributed' has to: leave one of them out."
            )
        if not isinstance(self.late, str) or self.late not in LATE:
            raise StudyError(f'late must be "finish", "stop" or "pay", got {shown(self.late)}.')
        if self.power is not None and (not isinstance(self.power, str) or self.power not in POWER):
            raise StudyError(f'power must be "observe" or "limit", got {shown(self.power)}.')
        if self.power == "limit" and self.deterministic:
            raise StudyError('power="limit" decides by measured power, and deterministic=True by none: leave one out.')
        if self.power == "limit" and self.sharing == "processes":
            raise StudyError(
                'power="limit" measures what one bundle draws, and with sharing="processes" several train at once: '
                "leave one out."
            )
        self._check_packing()
        self._check_processes()
        object.__setattr__(self, "workers", workers)
        object.__setattr__(self, "weight", weight)

    def _check_packing(self) -> None:
        if self.packing is not None and (not isinstance(self.packing, str) or self.packing not in PICKS):
            raise StudyError(f"packing must be one of {', '.join(PICKS)}, got {shown(self.packing)}.")
        similarity = finite(self.similarity)
        if self.similarity is not None and (similarity is None or similarity < 0):
            raise StudyError(f"similarity must be a number of at least 0, got {shown(self.similarity)}.")
        if self.similarity is not None and self.packing not in (None, "nearest"):
            raise StudyError(f'similarity= goes with packing="nearest", got packing="{self.packing}": leave one out.')
        for name in ("packing", "similarity"):
            if getattr(self, name) is not None and self.sharing not in ("auto", "packed"):
                raise StudyError(
                    f'{name}= says which trials share a device in a pack, got sharing="{self.sharing}": use '
                    f'sharing="packed" or "auto", or leave {name}= out.'
                )
        object.__setattr__(self, "similarity", similarity)

    def _check_processes(self) -> None:
        percentage = finite(self.active_threads)
        if self.active_threads is not None and (percentage is None or not 0 < percentage <= 100):
            raise StudyError(
                f"active_threads must be a percentage above 0 and at most 100, got {shown(self.active_threads)}."
            )
        object.__setattr__(self, "active_threads", percentage)
        if self.sharing != "processes":
            if percentage is not None:
                raise StudyError(
                    f'active_threads= limits processes that share a GPU, got sharing="{self.sharing}": use '
                    'sharing="processes", or leave active_threads= out.'
                )
            return
        if self.deterministic:
            raise StudyError(
                'deterministic=True needs reports in one order, and those of sharing="processes" come in the order of '
                "their times: leave one of them out."
            )
        if self.ray:
            raise StudyError(
                'sharing="processes" starts worker processes on this machine, and on a Ray cluster each device has one '
                'worker: leave on= out, or use sharing="packed".'
            )
        if isinstance(self.on, Simulated) and not self.on.processes:
            raise StudyError(
                'sharing="processes" needs simulated devices that trials can share in processes of their own: use '
                "Simulated(processes=True)."
            )

    @property
    def ray(self) -> bool:
        """Whether the study runs on a Ray cluster."""
        return is_ray(self.on)

    @property
    def schedule(self) -> Scheduler:
        """The scheduler of that name."""
        return SCHEDULERS[self.scheduler]

    def packs(self, task: AnyTask, space: Space, seed: int, *, concurrent: bool) -> Packing | None:
        """Which trials are packed; None where none is. Bundles that would take turns gain nothing by it.

        Trials in processes of their own join a device in the order of asking: without domains, all are near each other.
        """
        if self.sharing == "processes":
            return Packing(forced=True, mode="processes")
        measured = self.sharing == "auto" and concurrent and not self.deterministic and self.scheduler != "fifo"
        if self.sharing != "packed" and not (measured and isinstance(task, Task) and shards(task) == 1):
            return None
        similarity = math.inf if self.similarity is None else self.similarity
        forced = self.sharing == "packed"
        return Packing(cast(Pick, self.packing or PICKS[0]), similarity, forced, space.domains, seed)

    @property
    def growth(self) -> Growing:
        """How trials grow onto idle devices."""
        return Growing(cast(First, self.growing), self.mixed_types)

    def plain(self) -> dict[str, Any]:
        """The settings as the log keeps them; of a simulated cluster only how many devices it has."""
        on = f"Simulated(devices={len(self.on.cluster())})" if isinstance(self.on, Simulated) else self.on
        said = {name: value for name, value in vars(self).items() if value is not None or name == "workers"}
        return {**said, "on": on}

    def changed(self) -> dict[str, Any]:
        """The settings that are not the default ones."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}


class TuneOptions(TypedDict, total=False):
    """The options of ``tune``: those of ``Study`` and of ``Study.run``, which have the defaults."""

    metric: Required[str]
    mode: Mode | None
    algorithm: Required[Algorithm]
    trials: int | None
    sampler: optuna.samplers.BaseSampler | None
    seed: int
    name: str | None
    dir: str | Path
    states: str | Path | None
    deadline: float | str | None
    target: float | None
    keep: int
    max_failures: int | None
    surrogate: Surrogate | None
    objective: str | float
    max_energy: float | str | None
    on: str | Simulated
    sharing: str
    scheduler: str
    workers: int | None
    weight: float
    growing: str
    mixed_types: bool
    deterministic: bool
    packing: str | None
    similarity: float | None
    active_threads: float | None
    plan: Plan | str | Path | None
    late: str
    power: str | None
    allow_changes: bool
    progress: bool | None


def check_task(settings: RunSettings, task: AnyTask, states: str | None, *, narrow: bool = False) -> None:
    """Refuse settings that do not go with a study's task, or with the place of its states.

    ``narrow`` says that the study has surrogates, which train on one device each and may share it.
    """
    simulated = isinstance(settings.on, Simulated)
    if isinstance(task, TabulatedTask) and not simulated:
        raise StudyError(
            "The trials of a TabulatedTask are looked up and not trained: run it on a simulated cluster, as in "
            "study.run(on=penstock.Simulated(devices=8)), or with --on simulated."
        )
    timed = isinstance(settings.on, Simulated) and settings.on.unit_seconds is None
    if settings.deterministic and timed and not isinstance(task, TabulatedTask):
        raise StudyError(
            "deterministic=True needs Simulated(unit_seconds=...): without it a unit takes as long as it really took."
        )
    several = settings.ray or (settings.workers or 1) > 1 or settings.sharing == "processes"
    if several and states is not None and states.startswith("memory:"):
        less = "another sharing=" if settings.sharing == "processes" else "workers=1"
        raise StudyError(f"Expected a place that all workers reach, got states={states!r}: use {less}.")
    count = shards(task)
    if count == 1:
        return
    what = f"{task_name(task)} has shards = {count}, so that each trial trains on {count} devices"
    if settings.sharing == "processes" or (settings.sharing in ("solo", "fused", "packed") and not narrow):
        raise StudyError(f"{what}, got sharing={settings.sharing!r}: leave it out.")
    if settings.workers is None and not settings.ray and not simulated:
        raise StudyError(f"{what}, and without workers= there is one: use workers={count} or more.")
    if settings.workers is not None and settings.workers < count:
        raise StudyError(f"{what}, got workers={settings.workers}: use workers={count} or more.")
