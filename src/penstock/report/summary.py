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
from penstock.log.events import Event, read
from penstock.log.history import History, TrialRecord
from penstock.log.states import States, Store, needed
from penstock.log.timeline import timeline, utilisation

LOG = "log.jsonl"


def study_dir(dir: Path, name: str) -> Path:
    """The folder of a study; a StudyError that lists the studies where there is none of that name."""
    if name and Path(name).name == name and (dir / name / LOG).is_file():
        return dir / name
    names = study_names(dir)
    if not names:
        raise StudyError(
            f"There is no study {name!r}, nor any other, in {dir}: start one with `penstock run FILE`, "
            "or give the folder that holds it with --dir."
        )
    close = get_close_matches(name, names, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    raise StudyError(f"There is no study {name!r} in {dir}, which has: {', '.join(names)}.{meant}")


def study_names(dir: Path) -> list[str]:
    """The studies in a folder, the last one written first."""
    logs = list(dir.glob(f"*/{LOG}"))
    return [log.parent.name for log in sorted(logs, key=lambda log: (-log.stat().st_mtime, log.parent.name))]


def events_of(study: Path) -> Iterator[Event]:
    """The events of the study in a folder."""
    return read(study / LOG)


def history_of(study: Path) -> History:
    """The history of the study in a folder."""
    history = History.of(events_of(study))
    if not history.settings:
        raise LogError(f"{study / LOG} holds no event yet: its study has not begun, or was broken off before it did.")
    return history


def ranked(history: History) -> list[TrialRecord]:
    """The trials that can be the best, in order from the best."""
    finite = [trial for trial in history.trials if trial.best_unit and not trial.diverged]
    return sorted(finite, key=lambda trial: (-trial.best_score, trial.number))


def begun(trial: TrialRecord) -> bool:
    """Whether a trial has reported at least once, or failed."""
    return bool(trial.curve) or trial.status == "failed"


def study_facts(study: Path, history: History) -> dict[str, Any]:
    """The facts about a study that tables and ``--json`` show."""
    settings = history.settings
    return {
        "name": study.name,
        "dir": str(study),
        **{key: settings.get(key) for key in ("file", "task", "algorithm", "sampler", "metric", "mode", "seed")},
        "ended": history.ended,
        "running": None if history.ended else _driver(study),
        "best": None if history.best is None else trial_facts(history.best),
        "total": settings.get("trials"),
        "begun": sum(1 for trial in history.trials if begun(trial)),
        "trials": {state: count for state, count in history.counts.items() if count},
        "units": sum(trial.reported for trial in history.trials),
        "seconds": history.clock,
        "deadline": settings.get("deadline"),
        "target": settings.get("target"),
        "device_seconds": sum(trial.device_seconds for trial in history.trials),
        "states": settings.get("states"),
        "state_bytes": _state_bytes(study, history),
        "model": str(study / "best.pt") if (study / "best.pt").is_file() else None,
        "modes": dict(Counter(history.mode_of.values())),
        "measured": [{**vars(one), "type": type} for (_, type, _), one in history.measured.items()],
    }


def device_facts(study: Path) -> dict[str, Any]:
    """How many devices a study had, and the part of their time in which trials trained on them."""
    events = list(read(study / "log.jsonl"))
    used = utilisation(timeline(events), events)
    return {"devices": len(used.per_device), "utilisation": used.fraction}


def trial_facts(trial: TrialRecord, curve: bool = False) -> dict[str, Any]:
    """The facts about a trial; its metrics are those at its best report."""
    facts = {
        "number": trial.number,
        "state": trial.status,
        "budget": trial.reported,
        "config": trial.measured,
        "metrics": dict(trial.metrics),
        "device_seconds": trial.device_seconds,
        "error": trial.error,
    }
    return {**facts, "curve": trial.curve} if curve else facts


def ending(facts: dict[str, Any]) -> str:
    """Why a study ended, or which process runs it."""
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


def _driver(study: Path) -> int | None:
    """The process that runs the study, by the number in its lock file: taking the lock could disturb a driver."""
    try:
        pid = int((study / "lock").read_text())
        os.kill(pid, 0)
    except PermissionError:
        return pid
    except (OSError, ValueError):
        return None
    return pid


def _state_bytes(study: Path, history: History) -> int:
    """The bytes of the states; by the log where they are elsewhere, so that looking at a study asks no network."""
    states = States.of_study(study, history.settings.get("states"))
    if isinstance(states, Store):
        kept = {state for trial in history.trials for state in needed(trial, history)}
        return sum(state.bytes for state in kept)
    return sum(states.size(name) or 0 for name in states.names())
