"""Settings that may change between two runs of a study: the log's last settings against the present ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import SpaceError, StudyError
from penstock.log.events import Asked, Event, Opened
from penstock.log.history import History, TrialRecord
from penstock.log.states import States, needed
from penstock.space import Space
from penstock.trial import StateRef

FIXED = ("metric", "mode", "seed")  # a study in which one of these differs is another study
CODE = "the task's code is another"
CHANGEABLE = ("task", "source", "space", "algorithm", "sampler")  # not "states": see check_states


def changes(past: Sequence[Event], now: dict[str, Any], grows: bool, allowed: bool) -> list[str]:
    """The names of settings that differ from the log's last ones; raises a StudyError where a change is refused."""
    opened = [event.settings for event in past if isinstance(event, Opened)]
    if not opened:
        return []
    before = opened[-1]
    if fixed := [name for name in FIXED if before[name] != now[name]]:
        said = ", ".join(f"{name}={before[name]!r} (got {now[name]!r})" for name in fixed)
        raise StudyError(f"Study {before['name']!r} exists with {said}: start a new study under another name.")
    if before["trials"] is not None and now["trials"] is not None and now["trials"] < before["trials"]:
        raise StudyError(
            f"Study {before['name']!r} has trials={before['trials']}, a total over all resumes, "
            f"got trials={now['trials']}: give at least as many."
        )
    if before["trials"] != now["trials"] and not grows:
        raise StudyError(
            f"Study {before['name']!r} halves {before['trials']} trials, got trials={now['trials']}: its rungs "
            "are made from that number, so start a new study under another name."
        )
    if now.get("kind") == "task" and before.get("draws", 1) != now.get("draws"):
        warnings.warn(
            f"Study {before['name']!r} was begun by a Penstock that keyed no random function but dropout. Trials whose "
            "model or loss calls others, such as torch.randn, go on with other numbers than they began with.",
            stacklevel=2,
        )
    changed = [name for name in CHANGEABLE if before[name] != now[name]]
    if changed and not allowed:
        said = "; ".join(
            CODE if name == "source" else f"{name} was {before[name]} and is {now[name]}" for name in changed
        )
        raise StudyError(
            f"Study {before['name']!r} changed since its log was written: {said}. Put it back, start a new study under "
            "another name, or go on all the same with allow_changes=True (--allow-changes), which works where the "
            "algorithm would have decided the same so far."
        )
    return changed


def given(past: Sequence[Event], changed: bool) -> int:
    """How many events lie before the last change of settings: their configs come from the log."""
    if changed:
        return len(past)
    return max((i for i, e in enumerate(past) if isinstance(e, Opened) and e.settings.get("changed")), default=0)


def check_configs(past: Sequence[Event], space: Space) -> None:
    """Refuse a space in which a logged config does not lie."""
    for event in past:
        if isinstance(event, Asked):
            try:
                space.check(event.config)
            except SpaceError as error:
                raise StudyError(
                    f"Trial {event.trial} of the log does not fit the changed space: {error} "
                    "Widen the space again, or start a new study under another name."
                ) from None


def check_states(
    past: Sequence[Event], history: History, states: States, dir: Path, place: str | None, allowed: bool
) -> None:
    """Refuse a place that holds another study's states, or that lacks states which this study needs."""
    opened = [event.settings for event in past if isinstance(event, Opened)]
    if not opened:
        if place is not None and states.names():
            raise StudyError(
                f"{states} holds the states of another study, got states={place!r} for a new one of that name: give "
                "this one another name, or delete them."
            )
        return
    before = opened[-1].get("states")  # absent in a log that is older than this setting
    if before == place:
        return
    missing = [
        record for record in history.trials if any(states.size(r.file) != r.bytes for r in _all(record, history))
    ]
    if not missing or allowed:
        return
    back = "leave states= (--states) out" if before is None else f"give states={before!r} (--states)"
    there = States.of_study(dir, before, opened[-1].get("home"))
    raise StudyError(
        f"Study {dir.name!r} has its states in {there}, got {states}, where the states of {len(missing)} trials are "
        f"missing: {back}, or copy them there, or let those trials begin again with allow_changes=True "
        "(--allow-changes)."
    )


def _all(record: TrialRecord, history: History) -> list[StateRef]:
    return needed(record, history) + ([] if record.start is None else [record.start])
