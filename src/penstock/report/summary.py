"""The facts in a study's folder, as plain values: the rows of every table, and the objects of ``--json``."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from penstock.errors import LogError, StudyError
from penstock.log.events import SOLO, Event
from penstock.log.history import History, TrialRecord
from penstock.log.lock import holder
from penstock.log.ranking import ranked, sound
from penstock.log.reader import read
from penstock.log.states import States, Store, needed
from penstock.log.timeline import packs, timeline, utilisation
from penstock.report.energy import energy_facts
from penstock.report.ranks import present_search, said_fallback, said_rank

LOG = "log.jsonl"


def study_dir(dir: Path, name: str, option: str = "--dir") -> Path:
    """The folder of a study; a StudyError that lists the studies where there is none of that name.

    ``option`` is the way in which the caller gives the folder.
    """
    names = study_names(dir, option)
    if name in names:  # whether or not its log can be read, which its reader says
        return dir / name
    if not names:
        raise StudyError(
            f"There is no study {name!r}, nor any other, in {dir}: start one with `penstock run FILE`, "
            f"or give the folder that holds it with {option}."
        )
    close = get_close_matches(name, names, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    raise StudyError(f"There is no study {name!r} in {dir}, which has: {', '.join(names)}.{meant}")


def study_names(dir: Path, option: str = "--dir") -> list[str]:
    """The studies in a folder, the last one written first. A study whose log cannot be read is there, too."""
    written: dict[str, float] = {}
    try:
        folders = list(os.scandir(dir))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StudyError(
            f"Cannot read the folder {dir} ({error.strerror}): give the one that holds the studies with {option}."
        ) from None
    for folder in folders:
        try:
            written[folder.name] = os.lstat(f"{folder.path}/{LOG}").st_mtime
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # this folder cannot be looked into
            written[folder.name] = 0.0
    return sorted(written, key=lambda name: (-written[name], name))


def events_of(study: Path) -> Iterator[Event]:
    """The events of the study in a folder."""
    return read(study / LOG)


def history_of(study: Path) -> History:
    """The history of the study in a folder."""
    history = History.of(events_of(study))
    if not history.settings:
        raise LogError(f"{study / LOG} holds no event yet: its study has not begun, or was broken off before it did.")
    return history


def begun(trial: TrialRecord) -> bool:
    """Whether a trial has reported at least once, or failed."""
    return bool(trial.curve) or trial.status == "failed"


def study_facts(study: Path, history: History) -> dict[str, Any]:
    """The facts about a study that tables and ``--json`` show."""
    settings = history.settings
    return {
        "name": study.name,
        "dir": str(study),
        **{key: settings.get(key) for key in ("file", "task", "kind", "algorithm", "sampler", "seed")},
        **{key: settings.get(key) for key in ("metric", "mode", "mode_from")},
        "ended": history.ended,
        "running": None if history.ended else holder(study),
        "best": None if history.best is None else trial_facts(history.best),
        "total": settings.get("trials"),
        "begun": sum(1 for trial in history.trials if begun(trial)),
        "surrogates": surrogate_facts(history),
        "trials": dict(Counter(trial.outcome for trial in history.trials)),
        "units": sum(trial.reported for trial in history.trials),
        "seconds": history.clock,
        "deadline": settings.get("deadline"),
        "target": settings.get("target"),
        "cost": history.costs or None,
        "planned": None if history.planned is None else history.planned.reason,
        "max_failures": settings.get("max_failures"),
        **energy_facts(history),
        "simulated": history.simulated,
        "device_seconds": sum(trial.device_seconds for trial in history.trials),
        "states": settings.get("states"),
        "state_bytes": _state_bytes(study, history),
        "model": str(study / "best.pt") if (study / "best.pt").is_file() else None,
        "modes": dict(Counter(history.mode_of.values())),
        "solo": history.solo or None,
        "measured": [{**vars(one), "type": type} for (what, type, _), one in history.measured.items() if what != SOLO],
    }


def device_facts(study: Path) -> dict[str, Any]:
    """How many devices a study had, the part of their time in which trials trained there, and their largest packs."""
    events = list(read(study / "log.jsonl"))
    rows = timeline(events)
    used = utilisation(rows, events)
    return {"devices": len(used.per_device), "utilisation": used.fraction, "packs": packs(rows)}


def trial_facts(trial: TrialRecord, curve: bool = False) -> dict[str, Any]:
    """The facts about a trial, with the metrics at its best report."""
    facts = {
        "number": trial.number,
        "state": trial.outcome,
        "standing": trial.standing,
        "scale": trial.scale,
        "budget": trial.reported,
        "config": trial.measured,
        "metrics": dict(trial.metrics),
        "device_seconds": trial.device_seconds,
        "joules": trial.joules,
        "error": trial.error,
    }
    return {**facts, "curve": trial.curve} if curve else facts


def surrogate_facts(history: History) -> dict[str, Any] | None:
    """The facts about a study's surrogates; None where it has none."""
    settings = history.settings.get("surrogate")
    if settings is None:
        return None
    found = history.surrogates
    return {
        **settings,
        "begun": sum(map(begun, present_search(history))),
        "targets": len(history.targets),
        "best": trial_facts(ranked(found)[0]) if any(map(sound, found)) else None,
        "rank": said_rank(history),
        "fallback": said_fallback(history),
    }


def ending(facts: dict[str, Any]) -> str:
    """Why a study ended, or which process runs it; and whether its devices were simulated."""
    return f"{_ending(facts)} (simulated)" if facts["simulated"] else _ending(facts)


def _ending(facts: dict[str, Any]) -> str:
    if facts["ended"] is not None:
        return str(facts["ended"])
    return "broken off" if facts["running"] is None else f"running (process {facts['running']})"


def to_json(value: Any) -> str:
    """JSON that every reader takes: a number that is not finite is null.

    >>> to_json({"loss": float("nan"), "lr": 0.1})
    '{"loss": null, "lr": 0.1}'
    """
    return json.dumps(_finite(value), allow_nan=False, default=repr)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _state_bytes(study: Path, history: History) -> int:
    """The bytes of the states. The log gives them for states at a URL, so that looking at a study uses no network."""
    states = States.of_study(study, history.settings.get("states"), history.settings.get("home"))
    if isinstance(states, Store):
        kept = {state for trial in history.trials for state in needed(trial, history)}
        return sum(state.bytes for state in kept)
    try:
        return sum(states.size(name) or 0 for name in states.names())
    except OSError as error:
        raise StudyError(f"Cannot look at the states in {states} ({error.strerror}): check your permissions.") from None
