"""Studies in a notebook: a line that changes while a cell runs, and studies, results and trials as HTML.

IPython is used only where a notebook has imported it already. Colours are the notebook's own, so that both its light
and its dark theme can be read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

from penstock.log.history import History, TrialRecord
from penstock.log.messages import said_mode
from penstock.report.format import clock, short, value

ROWS = 10  # trials of a result that are shown


def in_notebook() -> bool:
    """Whether this is a cell of a notebook, whose kernel shows HTML; IPython on a terminal is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Cell:
    """A line below the running cell that can be shown again."""

    def __init__(self) -> None:
        display: Any = import_module("IPython.display")  # of Any type: some versions of IPython are typed in parts
        self._handle = display.DisplayHandle()
        self._handle.display(_bundle("Preparing…", None), raw=True)

    def update(self, line: str, done: float | None) -> None:
        """Show a line, after a bar of the part that is done."""
        self._handle.update(_bundle(line, done), raw=True)


def _bundle(line: str, done: float | None) -> dict[str, str]:
    bar = "" if done is None else f'<progress value="{done:.4f}" max="1"></progress> '
    return {"text/plain": line, "text/html": f"<div>{bar}{escape(line)}</div>"}


def facts_html(title: str, facts: Mapping[str, str | Mapping[str, str]]) -> str:
    """A title and a line for each fact; a fact of several parts names each.

    >>> facts_html("Study", {"space": {"a<b": "2", "c": "3"}})
    '<div><b>Study</b><div>space: a&lt;b = 2, c = 3</div></div>'
    """
    said = {
        k: one if isinstance(one, str) else ", ".join(f"{n} = {v}" for n, v in one.items()) for k, one in facts.items()
    }
    lines = "".join(f"<div>{escape(name)}: {escape(one)}</div>" for name, one in said.items() if one)
    return f"<div><b>{escape(title)}</b>{lines}</div>"


def result_html(history: History, trials: Sequence[TrialRecord]) -> str:
    """A result: how the study ended, and its best trials, which are given from the best."""
    failed = [trial for trial in history.trials if trial.status == "failed"]
    why = "" if not failed else f"{len(failed)}, the first: {_last_line(failed[0].error)}"
    used = ("simulated: " if history.simulated else "") + clock(history.clock)
    facts = {
        "metric": said_mode(history.settings),
        "ended": history.ended or "",
        "time": f"{used}, {history.units:,} units",
        "failed": why,
    }
    title = f"{history.settings.get('name', 'Result')}: {len(history.trials)} trials"
    return facts_html(title, facts) + (_table(history, trials[:ROWS]) if trials else "")


def trial_html(trial: TrialRecord) -> str:
    """One trial: its standing, its config and its metrics at its best report."""
    facts = {
        "config": short(trial.measured),
        "metrics": short(trial.metrics),
        "budget": str(trial.reported),
        "error": _last_line(trial.error),
    }
    return facts_html(f"Trial {trial.number}: {trial.standing}", facts)


def _table(history: History, trials: Sequence[TrialRecord]) -> str:
    names = list(dict.fromkeys(name for trial in trials for name in trial.measured))
    head = ["trial", history.metric, *names, "budget", "state"]
    rows = [
        [
            trial.number,
            trial.metrics.get(history.metric, ""),
            *(trial.measured.get(name, "") for name in names),
            trial.reported,
            trial.standing,
        ]
        for trial in trials
    ]
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{_cells('th', head)}</tr>{body}</table>"


def _cells(tag: str, row: Sequence[Any]) -> str:
    return "".join(f"<{tag}>{escape(value(one))}</{tag}>" for one in row)


def _last_line(error: str | None) -> str:
    return "".join((error or "").strip().splitlines()[-1:])
