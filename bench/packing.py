"""Studies that share a GPU, as their users get them: small networks, unlike networks, Pack's figures and its Hyperband.

    PYTHONPATH=src python bench/packing.py small [--network gru] [--dtype fp32]     six trials, against eager steps
    PYTHONPATH=src python bench/packing.py unlike [--precision tf32] [--steps 1200]     32 models, in turn and packed
    PYTHONPATH=src python bench/packing.py PART --seconds 120 --json     JSON lines, and the table on standard error
    PYTHONPATH=src python bench/packing.py PART --tiny     a smoke test of a few seconds a row, without a GPU too

Studies are timed from `study.run` to its return, with an empty profile store: all set-up is in their time. No case
begins after --seconds, and no study trains longer than --deadline. A row that fails says why.

rate: model steps a second, over all trials. times: how many times as fast as eager steps in turn, in this run. differs:
the greatest relative difference of a trial's curve from that of the case's first study. GB: the memory that torch held.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import penstock as ps
from bench import small, unlike
from bench.whole import DEVICE, Clock, Row, reached, whole

HEAD = f"{'case':28} {'way':10} {'seconds':>8} {'rate':>8} {'later':>8} {'times':>6} {'GB':>6} {'differs':>8}"


def line(row: Row) -> str:
    """A row of the table: figures that a row lacks are left blank."""

    def cell(name: str, form: str, width: int, unit: float = 1.0) -> str:
        value = row.get(name)
        return f"{'' if value is None else format(value / unit, form):>{width}}"

    figures = [("seconds", ".2f", 8), ("rate", ",.0f", 8), ("later", ",.0f", 8), ("times", ".2f", 6)]
    cells = [cell(*figure) for figure in figures] + [cell("memory", ".2f", 6, 1e9), cell("differs", ".0e", 8)]
    goal = "" if row.get("reached") is None else "  " if row["reached"] else " !"
    return f"{row['case']:28} {row['way']:10} {' '.join(cells)}{goal} {row.get('note', '')}".rstrip()


def rows(options: argparse.Namespace, clock: Clock) -> Iterator[Row]:
    """The rows of the part that was asked for."""
    common = clock, options.deadline, options.tiny
    if options.part == "small":
        networks = options.network or list(small.NETWORKS)
        yield from small.rows(networks, options.dtype or list(small.DTYPES), *common)
    elif options.part == "unlike":
        precisions = options.precision or list(unlike.GOALS)
        ways = options.way or ["eager", "graph", "auto", "packed"]
        yield from unlike.rows(precisions, ways, 8 if options.tiny else options.steps, *common)


def warm_up() -> float:
    """The seconds of a process's first study, which imports what all studies need; no row is charged for it."""
    began = time.perf_counter()
    for sharing in ("solo", "fused"):
        task = small.Small("depthwise", "fp32", 2 * small.BATCH)
        whole(task, small.SPACE, ps.Random(budget=1), trials=2, deadline=60.0, sharing=sharing)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("small", "unlike"))
    parser.add_argument("--network", action="append", choices=small.NETWORKS, help="of small; may be repeated")
    parser.add_argument("--dtype", action="append", choices=small.DTYPES, help="of small; may be repeated")
    parser.add_argument("--precision", action="append", choices=unlike.GOALS, help="of unlike; may be repeated")
    parser.add_argument("--way", action="append", help="may be repeated; all of the part's ways")
    parser.add_argument("--steps", type=int, default=1200, help="steps of each model of unlike")
    parser.add_argument("--seconds", type=float, default=110.0, help="no row begins later")
    parser.add_argument("--deadline", type=float, default=60.0, help="the most seconds of a study")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if DEVICE.type != "cuda" and not options.tiny:
        parser.error("no GPU here; --tiny runs a smoke test")
    torch.set_float32_matmul_precision("high")  # TF32, as in the convolutions
    warnings.simplefilter("ignore", ps.SoloWarning)
    table = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    table(f"torch {torch.__version__}, {name}; the process's first studies took {warm_up():.1f} s\n{HEAD}")
    clock, found = Clock(options.seconds), list[Row]()
    for row in rows(options, clock):
        if options.tiny:
            row.pop("reached", None)  # toys have no goal
        found.append(row)
        table(line(row))
        if options.json:
            print(json.dumps({"bench": "packing", **row}), flush=True)
    left_out = f"; {clock.left_out} cases left out for want of time" if clock.left_out else ""
    table(f"{options.part}: {reached(found)}{left_out}")


if __name__ == "__main__":
    main()
