"""A study's events as messages of Python's ``logging``, under the name "penstock".

A program that wants to see them configures logging; without that they are silent. A study's begin and end are infos,
failures of a trial's own are warnings, and placements, moves and measurements are debugging messages.
"""

from __future__ import annotations

import logging
from typing import Any

from penstock.log.events import Devices, Ended, Event, Failed, Measured, Opened, Placed, Planned, Stopped
from penstock.log.history import History

LOGGER = logging.getLogger("penstock")
LOGGER.addHandler(logging.NullHandler())


def said_mode(settings: dict[str, Any]) -> str:
    """The metric and its mode as a person reads them, with the mode's origin where no one gave it.

    >>> said_mode({"metric": "loss", "mode": "min", "mode_from": "name"})
    'loss min (by its name)'
    """
    origin = {"name": " (by its name)", "log": " (as its log began)"}.get(settings.get("mode_from") or "", "")
    return f"{settings['metric']} {settings['mode']}{origin}"


def say(study: str, event: Event, history: History) -> None:
    """Log an event that was applied to the history; most kinds of event say nothing."""
    match event:
        case Opened(settings):
            begun = f"goes on after {history.units} units" if history.trials else "begins"
            goal = said_mode(settings)
            LOGGER.info("%s %s: %s, %s trials, %s", study, begun, settings["algorithm"], settings["trials"], goal)
        case Ended(reason, clock):
            failed, best = history.counts["failed"], "none"
            if history.best is not None:
                best = f"trial {history.best.number}, {history.metric} {history.best.metrics[history.metric]:.6g}"
            told = (study, reason, clock, len(history.trials), failed, best)
            LOGGER.info("%s ended: %s after %.1f s, %d trials, %d failed, best %s", *told)
        case Failed(trial, _, error, final):
            fate = "failed" if final else "is tried again after an error"
            level = logging.WARNING if event.own else logging.DEBUG  # the cause has a message of its own
            LOGGER.log(level, "%s: trial %d %s: %s", study, trial, fate, (error.strip().splitlines() or [""])[-1])
        case Placed(trial, attempt, devices, mode):
            LOGGER.debug("%s: trial %d, attempt %d on %s, %s", study, trial, attempt, ", ".join(devices), mode)
        case Stopped(trial):
            LOGGER.debug("%s: trial %d leaves its devices after %d units", study, trial, history.trials[trial].reported)
        case Planned(plan, _, reason):
            LOGGER.info("%s: plan of %.2f %s: %s", study, plan.get("cost", 0.0), plan.get("currency", ""), reason)
        case Measured():
            LOGGER.debug("%s: measured on %s, at most %d: %s", study, event.device, event.size, event.reason)
        case Devices(devices):
            LOGGER.debug("%s: devices are %s", study, ", ".join(str(one["name"]) for one in devices))
