"""The gain of several devices for a trial, as plain values and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from penstock.report.format import short, value
from penstock.report.groups import Group
from penstock.report.units import Unit
from penstock.trial import Config


@dataclass(frozen=True)
class Scaling:
    """The speed of one trial on several devices.

    ``seconds`` has the time of a step by the number of devices; it is empty where no step was timed. ``pays`` is the
    most devices that a trial is given, and ``reason`` says why. ``kept`` is the file that keeps the times for the next
    study, or None. ``groups`` are the configs of a sample of the space that can be fused.
    """

    task: str
    config: Config
    type: str
    seconds: dict[int, float]
    pays: int
    reason: str
    kept: Path | None
    groups: tuple[Group, ...] = ()
    others: tuple[Scaling, ...] = ()
    units: tuple[Unit, ...] = ()


def scaling_facts(found: Scaling) -> dict[str, Any]:
    """The facts about a trial on several devices, with a row for each number of devices that was timed."""
    rows = [
        {
            "devices": count,
            "seconds": seconds,
            "steps_per_second": 1 / seconds,
            "speedup": found.seconds[1] / seconds,
            "efficiency": found.seconds[1] / seconds / count,
        }
        for count, seconds in sorted(found.seconds.items())
    ]
    known = {key: one for key, one in vars(found).items() if key != "seconds"}
    known["groups"], known["units"] = ([vars(one) for one in some] for some in (found.groups, found.units))
    known["others"] = [scaling_facts(one) for one in found.others]
    return {**known, "kept": None if found.kept is None else str(found.kept), "rows": rows}


def what(facts: dict[str, Any]) -> str:
    """The trial that was measured, on one line."""
    return f"{facts['task']}, trial 0 on {facts['type']}: {short(facts['config'])}"


def scaling_table(facts: dict[str, Any]) -> Table:
    """One row for each number of devices."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for name in ("devices", "ms a step", "steps a second", "speedup", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in facts["rows"]:
        table.add_row(
            str(row["devices"]),
            value(1000 * row["seconds"]),
            value(row["steps_per_second"]),
            f"{row['speedup']:.2f}",
            f"{row['efficiency']:.0%}",
            style="bold green" if row["devices"] == facts["pays"] else "",
        )
    return table


def verdict(facts: dict[str, Any]) -> str:
    """How many devices pay and why, and where the measurement is kept."""
    kept = f"Kept in {facts['kept']}, for the next study of this task on such devices."
    if facts["kept"] is None:
        kept = "It could not be kept for the next study: its folder cannot be written." if facts["rows"] else ""
    others = [f"{short(one['config'])}: {_pays(one)}" for one in facts["others"]]
    return "\n".join([_pays(facts), *others, kept]).rstrip()


def _pays(facts: dict[str, Any]) -> str:
    """How many devices pay for a trial, and why."""
    pays = "1 device is best" if facts["pays"] == 1 else f"Up to {facts['pays']} devices pay"
    return f"{pays}: {facts['reason'].rstrip('.')}."
