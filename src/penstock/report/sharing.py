"""The ways in which a study's trials can share one device, as plain values and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from penstock.report.format import size, value
from penstock.report.groups import Group
from penstock.report.units import Unit
from penstock.speed.packing import how_many, improvement


@dataclass(frozen=True)
class Way:
    """One way: its ``trials``, the ``seconds`` of a step, the steps of all models in a second, and the peak memory.

    ``sigma`` is how many times as fast it is as the bundles alone, each in its best way, one after another.
    """

    mode: str
    trials: int
    seconds: float
    steps_per_second: float
    bytes: int | None
    sigma: float | None = None


@dataclass(frozen=True)
class Sharing:
    """What sharing one device gives.

    ``switching`` are the seconds that a change of trials costs (Pack, eq. 4). ``sigmas`` has the gain of packs by the
    number of their bundles, and ``reason`` says it.
    ``bundles`` are the numbers of trials of each signature, ``groups`` the configs that can be fused, and ``units``
    the seconds of a unit of each signature.
    """

    task: str
    type: str
    ways: tuple[Way, ...]
    switching: float
    sigmas: Mapping[int, float]
    reason: str
    cpu: bool
    bundles: tuple[int, ...]
    groups: tuple[Group, ...]
    units: tuple[Unit, ...] = ()


def sharing_facts(found: Sharing) -> dict[str, Any]:
    """The facts about a device that trials share, with a row for each way."""
    rows = [
        {**vars(one), "improvement": None if one.sigma is None else improvement(one.sigma)}  # IMPV (Pack, eq. 3)
        for one in found.ways
    ]
    known = {key: one for key, one in vars(found).items() if key != "ways"}
    known |= {"groups": [vars(one) for one in found.groups], "units": [vars(one) for one in found.units]}
    return {**known, "pays": how_many(found.sigmas), "rows": rows}


def what(facts: Mapping[str, Any]) -> str:
    """What was measured, on one line."""
    return f"{facts['task']} on {facts['type']}, one device"


def sharing_table(facts: Mapping[str, Any]) -> Table:
    """One row for each way."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("mode", no_wrap=True)
    for name in ("trials", "ms a step", "model steps a second", "memory", "σ", "IMPV"):
        table.add_column(name, justify="right", no_wrap=True)
    fastest = max(row["steps_per_second"] for row in facts["rows"])
    for row in facts["rows"]:
        table.add_row(
            row["mode"],
            str(row["trials"]),
            value(1000 * row["seconds"]),
            value(row["steps_per_second"]),
            "" if row["bytes"] is None else size(row["bytes"]),
            "" if row["sigma"] is None else f"{row['sigma']:.2f}",
            "" if row["improvement"] is None else f"{row['improvement']:.0%}",
            style="bold green" if row["steps_per_second"] == fastest else "",
        )
    return table


def verdict(facts: Mapping[str, Any]) -> str:
    """Whether packs pay and why, and what a change of trials costs.

    >>> facts = {"pays": 2, "reason": "so it is", "switching": 0.1, "cpu": False}
    >>> print(verdict(facts))
    Packs of 2 bundles pay: so it is.
    A change from trial to trial takes 100 ms.
    """
    pays = "No pack pays" if facts["pays"] == 1 else f"Packs of {facts['pays']} bundles pay"
    cpu = ' "auto" packs nothing on a CPU, where bundles take turns.' if facts["cpu"] else ""
    lines = [f"{pays}: {facts['reason'].rstrip('.')}.{cpu}"]
    lines.append(f"A change from trial to trial takes {value(1000 * facts['switching'])} ms.")
    return "\n".join(lines)
