"""Real learning curves and speeds for simulated clusters, from ../shared/data (or PENSTOCK_DATA).

Curves and unit seconds come from LCBench (surrogate); a config has the row of the nearest of 256. The cost of two
trials on one GPU comes from Gavel's pairs of equal jobs on a V100. The time of a fixed global batch on several GPUs
comes from AdaptDL's step times by placement, four GPUs a node.
"""

from __future__ import annotations

import csv
import json
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock.speed.curve import Curve, measured
from penstock.trial import Config

DATA = Path(os.environ.get("PENSTOCK_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
FILES = ("curves/lcbench_surrogate.npz", "systems/gavel/simulation_throughputs.json", "systems/adaptdl")
LOGARITHMIC = ("batch_size", "learning_rate", "weight_decay", "max_units")
GPU = "v100"
UNITS = 27
TABLES = 20
PAIRS = ("ResNet-18 (batch size 128)", "LM (batch size 20)", "ResNet-50 (batch size 64)", "Transformer (batch size 32)")
SPREADS = (("cifar10", 512), ("bert", 12), ("imagenet", 200))


@dataclass(frozen=True)
class Workload:
    """A task to tune on simulated devices: its space, its table, and its true curve of sharing and spreading."""

    name: str
    space: dict[str, Any]
    look_up: Callable[[Config], ps.Tabulated]
    curve: Curve
    target: float  # validation accuracy, in per cent


def missing() -> list[str]:
    """The data files that are missing; the benches need all of them."""
    return [str(DATA / file) for file in FILES if not (DATA / file).exists()]


def workloads() -> list[Workload]:
    """Three tasks, from one that shares well to one that only spreads."""
    return [
        _workload("ResNet-18, CIFAR-10", 6, "ResNet-18 (batch size 128)", "cifar10", 512),
        _workload("language model", 13, "LM (batch size 20)", "bert", 12),
        _workload("ResNet-50, ImageNet", 17, "ResNet-50 (batch size 64)", "imagenet", 200),
    ]


def _workload(name: str, table: int, pair: str, scaling: str, batch: int) -> Workload:
    found = tabulated(table)

    def look_up(config: Config) -> ps.Tabulated:
        row = found.nearest(config)
        return ps.Tabulated({"accuracy": found.accuracy[row]}, float(found.seconds[row]), signature=name)

    last = np.sort(found.accuracy[:, :UNITS].max(1))
    # The target is an accuracy that 20 of the 256 configs reach.
    return Workload(name, found.space, look_up, costs(pair, scaling, batch), float(last[-20]))


@dataclass(frozen=True)
class Table:
    """Learning curves and unit seconds of 256 configs, and the space that they lie in."""

    space: dict[str, Any]
    accuracy: np.ndarray[Any, Any]
    seconds: np.ndarray[Any, Any]
    nearest: Callable[[Config], int]


@cache
def tabulated(table: int) -> Table:
    """One of LCBench's tasks."""
    file = np.load(DATA / FILES[0])
    names = [str(n) for n in file["config_names"]]
    columns = {str(m): file["curves"][table, :, :, i] for i, m in enumerate(file["metrics"])}
    accuracy = np.clip(columns["val_accuracy"], 0, 100)
    seconds = np.maximum(columns["time_s_cumulative"][:, -1] / accuracy.shape[1], 1e-3)
    configs, space = _coordinates(file["configs"], names)
    span = np.ptp(configs, axis=0)
    assert (span > 0).all()

    def nearest(config: Config) -> int:
        point = np.array([np.log(config[n]) if n in LOGARITHMIC else config[n] for n in names])
        return int(np.argmin((((configs - point) / span) ** 2).sum(1)))

    return Table(space, accuracy, seconds, nearest)


def costs(pair: str, scaling: str, batch: int) -> Curve:
    """The curve of a job that shares a device with its like, and of a task's global batch on several devices."""
    return measured(_pairs(pair), _spread(scaling, batch))[0]


def _coordinates(rows: np.ndarray[Any, Any], names: list[str]) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    columns, space = [], {}
    for name, column in zip(names, rows.T.astype(float), strict=True):
        low, high = float(column.min()), float(column.max())
        logarithmic = name in LOGARITHMIC
        space[name] = ps.loguniform(low, high) if logarithmic else ps.uniform(low, high)
        columns.append(np.log(column) if logarithmic else column)
    return np.stack(columns, 1), space


def _pairs(job: str) -> dict[int, float]:
    """Seconds of a step of a job alone, and beside its like; a pair that does not fit is left out."""
    rates = json.loads((DATA / FILES[1]).read_text())[GPU][f"('{job}', 1)"]
    pair = rates.get(f"('{job}', 1)", [0.0])[0]
    return {1: 1 / rates["null"]} | ({2: 1 / pair} if pair else {})


def _spread(task: str, batch: int) -> dict[int, float]:
    """Seconds of a step of a global batch by the number of GPUs, on as few nodes as possible."""
    steps: dict[int, list[tuple[float, float]]] = defaultdict(list)
    with (DATA / FILES[2] / task / "placements.csv").open() as file:
        for row in csv.DictReader(file):
            nodes = [int(digit) for digit in row["placement"]]
            if len(nodes) == -(-sum(nodes) // 4):
                steps[sum(nodes)].append((float(row["local_bsz"]), float(row["step_time"])))
    spread = {}
    for replicas, points in sorted(steps.items()):
        points.sort()
        if points[0][0] <= batch / replicas * 1.05:
            sizes, times = zip(*points, strict=True)
            spread[replicas] = float(np.interp(batch / replicas, sizes, times))
    return spread
