"""Taking up a study: the settings that the log then keeps, where it may run, and what is said if nothing is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.errors import StudyError
from penstock.executors.simulated.settings import Simulated
from penstock.log.events import PLAIN, SURROGATES, Event, Opened
from penstock.seeds import DRAWS
from penstock.task import FunctionTask, fingerprint, kind_of, task_name
from penstock.trial import plain

if TYPE_CHECKING:
    from penstock.study import Study


def settings_of(study: Study, name: str, past: Sequence[Event]) -> dict[str, Any]:
    """A study's settings as JSON keeps them. ``began`` is the present date, for people: nothing decides by it."""
    settings = {
        "log": PLAIN if study.surrogate is None else SURROGATES,
        "penstock": __version__,
        "name": name,
        "began": time.time(),
        "file": _file(study, past),
        "task": task_name(study.task),
        "kind": kind_of(study.task),
        "source": fingerprint(study.task),
        "space": study.space.describe(),
        "metric": study.metric,
        "mode": study.mode,
        "mode_from": study.mode_from,
        "algorithm": repr(study.algorithm),
        "max_budget": study.algorithm.max_budget,
        "until": study.algorithm.until,
        "sampler": None if study.sampler is None else type(study.sampler).__name__,
        "seed": study.seed,
        "draws": DRAWS,
        "trials": study.trials,
        "states": study.states,
        "deadline": study.deadline,
        "target": study.target,
        "keep": study.keep,
        "max_failures": study.max_failures,
        "eta": study.eta,
        "max_energy": study.max_energy,
    }
    if more := study.algorithm.kept():
        settings["kept"] = more
    kept: dict[str, Any] = plain(settings)
    return kept


def check_place(name: str, past: Sequence[Event], on: str | Simulated) -> None:
    """Refuse simulated reports in the log of a trained study, and trained ones in the log of a simulated study.

    A log of an earlier version may not say where its study ran, and is not refused.
    """
    ran = [event.settings.get("run", {}).get("on") for event in past if isinstance(event, Opened)]
    known = {str(place).startswith("Simulated") for place in ran if place is not None}
    if not known or isinstance(on, Simulated) in known:
        return
    if isinstance(on, Simulated):
        raise StudyError(
            f"Expected real devices, on which the study {name!r} has run, got a simulated cluster: rehearse it under "
            "another name, with name= or as in `penstock run FILE --name NAME --on simulated`, or leave on= (--on) out."
        )
    raise StudyError(
        f"Expected a simulated cluster, on which the study {name!r} has run, got on={on!r}: train it under another "
        "name, with name= or as in `penstock run FILE --name NAME`, or go on with on=penstock.Simulated(devices=8) "
        "(--on simulated)."
    )


def nothing_left(name: str, reason: str, trials: int, grows: bool) -> str:
    """The line for a study that was taken up and had nothing left to train; ``grows``: it may have more trials."""
    more = ". Give more with trials= (--trials) to go on" if grows else ""
    said = {
        "deadline": "its time is used up. Give a later deadline= (--deadline) to go on",
        "energy": "its energy is used up. Give more with max_energy= (--max-energy) to go on",
        "target": "its target is reached. Give a better target= (--target) to go on",
        "failed": "it has failed",
    }
    return f"Nothing was left to train in {name}: {said.get(reason, f'its {trials} trials are done{more}')}."


def _file(study: Study, past: Sequence[Event]) -> str | None:
    """The file that `penstock resume` loads. A script that only takes up a study of another file is not that file."""
    before = next((event.settings.get("file") for event in reversed(past) if isinstance(event, Opened)), None)
    if before is None or not Path(before).is_file() or study.file != main_file():
        return study.file
    task = study.task.function if isinstance(study.task, FunctionTask) else type(study.task)
    return study.file if getattr(task, "__module__", None) == "__main__" else str(before)


def main_file() -> str | None:
    """The file that Python runs; None at a prompt."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if main is None else str(Path(main).absolute())
