"""The runs of a recurring job for people: the size that each tried, its cost and stake, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from math import isclose
from typing import Any

from rich.table import Table

from penstock.algorithms.recurring import WROTE, Ended
from penstock.log.events import Event, Wrote
from penstock.report.format import clock, value
from penstock.report.tables import rows_table


def run_facts(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The runs of a recurring job, the latest last; none where a study is no such job."""
    lines = [event for event in events if isinstance(event, Wrote) and event.key == WROTE]
    return [asdict(Ended.of(line)) for line in lines]


def shown(runs: Sequence[dict[str, Any]], metric: str) -> Table:
    """The runs as a terminal shows them."""
    costs = _unit(runs)
    return rows_table(
        [
            {
                "recurrence": run["recurrence"],
                "batch size": run["size"],
                "units": run["units"],
                metric: "" if run["best"] is None else value(run["best"]),
                "cost": costs(run["cost"]),
                "stake": "none" if run["stake"] is None else costs(run["stake"]),
                "energy": "" if run["joules"] is None else _joules(run["joules"]),
                "time": clock(run["seconds"]),
                "verdict": run["verdict"],
            }
            for run in runs
        ]
    )


def summed(runs: Sequence[dict[str, Any]]) -> str:
    """How many recurrences there were, and what they cost, in a sentence."""
    costs = _unit(runs)
    done = {run["recurrence"] for run in runs if run["verdict"] == "reached"}
    first, last = runs[0]["cost"], [run["cost"] for run in runs if run["recurrence"] in sorted(done)[-5:]]
    mean = sum(last) / max(1, min(5, len(done)))
    total = costs(sum(run["cost"] for run in runs))
    lost = costs(sum(run["cost"] for run in runs if run["verdict"] != "reached"))
    return (
        f"{len(done)} recurrences reached the target in {len(runs)} runs, which cost {total}, {lost} of it in runs "
        f"that did not. The first cost {costs(first)}, the last five {costs(mean)} each."
    )


def _unit(runs: Sequence[dict[str, Any]]) -> Callable[[float], str]:
    """How costs are written: those of a device whose greatest power is not known are seconds."""
    return clock if all(isclose(run["cost"], run["seconds"]) for run in runs) else _joules


def _joules(cost: float) -> str:
    """Joules in one unit, so that a column can be read down."""
    return f"{cost / 1e3:.4g} kJ"
