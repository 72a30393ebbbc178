"""Measured step times of AdaptDL's models on V100s, as speed curves (Qiao et al., 2021)."""

from __future__ import annotations

import csv
import math
from functools import cache

import numpy as np

from bench.workloads import DATA
from penstock.speed.curve import Curve

NODE = 4  # devices


@cache
def curve(model: str, batch: int) -> Curve:
    """How a step of one global batch gets quicker with devices, on the fewest nodes of four.

    The batch is divided among the devices, and each device's part into micro-batches of the size that is quickest. More
    devices are never slower: some of them may be left idle.
    """
    best, times = math.inf, {}
    for count, table in sorted(_steps(model).items()):
        best = min(best, _seconds(table, batch / count))
        times[count] = best
    counts = sorted(times)
    relative = np.exp(np.interp(np.log(range(1, counts[-1] + 1)), np.log(counts), np.log([times[n] for n in counts])))
    return Curve(scaling=tuple(relative / relative[0]), tried=tuple(counts))


def _seconds(table: list[tuple[int, float, float]], part: float) -> float:
    """The least seconds of a device's part of a batch: gradients are exchanged after the last micro-batch alone."""
    sizes, steps, syncs = (np.array(column, dtype=float) for column in zip(*table, strict=True))
    least = math.inf
    for micro in range(max(1, math.ceil(part / sizes[-1])), max(2, math.ceil(part / sizes[0]) + 1)):
        step, sync = np.interp(part / micro, sizes, steps), np.interp(part / micro, sizes, syncs)
        least = min(least, float((micro - 1) * (step - sync) + step))
    return least


@cache
def _steps(model: str) -> dict[int, list[tuple[int, float, float]]]:
    """By the number of devices: micro-batch, seconds of a step, and of them those that gradients are exchanged."""
    found: dict[int, list[tuple[int, float, float]]] = {}
    folder = DATA / "systems/adaptdl" / model
    with (folder / "placements.csv").open() as file:
        rows = list(csv.DictReader(file))
    by_count: dict[int, set[str]] = {}
    for row in rows:
        count = sum(map(int, row["placement"]))
        if len(row["placement"]) == -(-count // NODE):
            by_count.setdefault(count, set()).add(row["placement"])
    for row in rows:
        count = sum(map(int, row["placement"]))
        if row["placement"] == max(by_count.get(count, {""}), key=lambda one: sorted(one, reverse=True)):
            found.setdefault(count, []).append(_row(row))
    with (folder / "scalability.csv").open() as file:
        for row in csv.DictReader(file):
            count = int(row["num_replicas"])
            if count > 4 * NODE and int(row["num_nodes"]) == -(-count // NODE):
                found.setdefault(count, []).append(_row(row))
    return {count: sorted(table) for count, table in found.items()}


def _row(row: dict[str, str]) -> tuple[int, float, float]:
    return int(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])
