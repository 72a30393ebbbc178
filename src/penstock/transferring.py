"""A study's surrogates as a run has them: the algorithm around the study's own, the tasks, and what the log keeps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.algorithms.base import Algorithm
from penstock.algorithms.transfer import CHECKED, Transfer
from penstock.errors import StudyError
from penstock.log.events import Event, Opened
from penstock.surrogate.settings import Surrogate
from penstock.surrogate.task import task_of
from penstock.task import Task
from penstock.trial import variant_of

if TYPE_CHECKING:
    from penstock.study import Study
    from penstock.surrogate.examine import Examined

PART = 0.05  # of the target's tuning, which the rank check may cost
FEWEST, MOST = 8, 16  # pairs of the rank check


@dataclass(frozen=True)
class Transferring:
    """The algorithm of a run, its tasks beside the study's own, and the settings of its surrogates for the log."""

    algorithm: Algorithm
    variants: Mapping[str, Task] = field(default_factory=dict)
    settings: dict[str, Any] | None = None


def transferring(study: Study, past: Sequence[Event]) -> Transferring:
    """The surrogates of a study, looked at before its first line; later runs do as the log says."""
    opened = [event.settings for event in past if isinstance(event, Opened)]
    before = opened[-1].get("surrogate") if opened else None
    if opened:
        _refuse_another(study.surrogate, before, opened[-1]["name"])
    if study.surrogate is None:
        return Transferring(study.algorithm)
    assert isinstance(study.task, Task)
    traced: dict[str, Any] = {}
    if before is None:
        before = _new(study, study.surrogate, traced)
    if "without" in before:
        return Transferring(study.algorithm, settings=before)
    names = [variant_of(one) for n in range(8) if (one := study.surrogate.scale // 2**n) > 1]
    if reduced := before.get("admissible", False):
        names.append(variant_of(study.surrogate.scale, reduced=True))
    algorithm = Transfer(
        study.algorithm,
        before["scale"],
        best=before["best"],
        eager=before["eager"],
        pairs=before["pairs"],
        reduced=reduced,
    )
    variants = {name: task_of(study.task, study.surrogate, name, traced) for name in names}
    return Transferring(algorithm, variants, before)


def _refuse_another(given: Surrogate | None, before: Mapping[str, Any] | None, name: str) -> None:
    was = None if before is None else Surrogate.of(before)
    if given != was:
        raise StudyError(
            f"Study {name!r} exists with surrogate={was!r}, got surrogate={given!r}: start a new study under another "
            "name."
        )


def _new(study: Study, surrogate: Surrogate, traced: dict[str, Any]) -> dict[str, Any]:
    """The settings of a new study's surrogates; where its model cannot be analysed, why it goes on without."""
    from penstock.executors.local import find_devices
    from penstock.surrogate.examine import examine, refuse_wrong
    from penstock.surrogate.trace import Unanalysable

    assert isinstance(study.task, Task)
    settings = dict(vars(surrogate))
    try:
        found = examine(study.task, study.space, surrogate, seed=study.seed, device=find_devices()[0].name)
    except Unanalysable as error:
        if surrogate.required:
            raise
        warnings.warn(f"{error} The study goes on without surrogates.", stacklevel=2)
        return {**settings, "pairs": 0, "without": str(error)}
    refuse_wrong(found)
    traced.update(found.task._traced)
    checked = pairs(found, study.trials or 0)
    if surrogate.reduced and not checked:
        warnings.warn(
            f"Only a rank check can admit the fewer {surrogate.fewer} of {surrogate!r}, and none is cheap enough for "
            f"{study.trials} trials: surrogates are narrower alone.",
            stacklevel=2,
        )
    return {**settings, "pairs": checked, "admissible": surrogate.reduced and checked > 0}


def pairs(found: Examined, trials: int) -> int:
    """How many configs the rank check trains at twice the width: as many as are cheap, or none if these are too few."""
    if found.scale < CHECKED:
        return 0
    cheap = min(trials, int(PART * trials / found.cost(found.scale // 2)))
    return min(cheap, MOST) if cheap >= FEWEST else 0
