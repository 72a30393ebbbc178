"""Studies that share a GPU, as their users get them: small networks, unlike networks, Pack's figures and its Hyperband.

    PYTHONPATH=src python bench/packing.py small [--network gru] [--dtype fp32]     six trials, against eager steps
    PYTHONPATH=src python bench/packing.py unlike [--precision tf32] [--steps 1200]     32 models, in turn and packed
    PYTHONPATH=src python bench/packing.py models [--model resnet50] [--kind counts] [--counts 2,4,8] [--repeats 5]
    PYTHONPATH=src python bench/packing.py table4 [--model mlp3] [--fraction 0.1] [--way eager --way auto]
    PYTHONPATH=src python bench/packing.py PART --seconds 120 --json     JSON lines, and the table on standard error
    PYTHONPATH=src python bench/packing.py PART --tiny     a smoke test of a few seconds a row, without a GPU too

Studies are timed from `study.run` to its return, with an empty profile store: all set-up is in their time. No case
begins after --seconds, and no study trains longer than --deadline. A row that fails says why.

rate: model steps a second, over all trials. times: how many times as fast as eager steps in turn, in this run. differs:
the greatest relative difference of a trial's curve from that of the case's first study. GB: the memory that torch held.
!: the row misses its goal. The heads of bench/small.py, unlike.py, pack_figures.py and table4.py say what is in a part.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import penstock as ps
from bench import pack_figures, small, table4, unlike
from bench.packed_models import MODELS
from bench.whole import DEVICE, Clock, Row, attempted, reached, whole

COLUMNS = {  # of the table: the head, the format, the width and the unit of each figure
    "seconds": ("seconds", ".2f", 8, 1),
    "ms": ("ms", ".2f", 8, 1),
    "rate": ("rate", ",.0f", 8, 1),
    "later": ("later", ",.0f", 8, 1),
    "times": ("times", ".2f", 6, 1),
    "graphs": ("graphs", ".2f", 6, 1),
    "impv": ("IMPV", ".0%", 6, 1),
    "other": ("other", ".2f", 6, 1),
    "memory": ("GB", ".2f", 6, 1e9),
    "agree": ("agree", ".0%", 6, 1),
    "differs": ("differs", ".0e", 8, 1),
}
MAIN = {"small": "times", "unlike": "rate", "models": "impv", "table4": "times"}  # the figure of the last table
PARTS = {  # the columns of each
    "small": ("seconds", "rate", "times", "memory", "differs"),
    "unlike": ("seconds", "rate", "later", "times", "memory", "differs"),
    "models": ("seconds", "ms", "times", "impv", "other", "memory", "differs"),
    "table4": ("seconds", "rate", "times", "graphs", "memory", "agree", "differs"),
}


def head(part: str) -> str:
    return f"{'case':32} {'way':10} " + " ".join(f"{COLUMNS[name][0]:>{COLUMNS[name][2]}}" for name in PARTS[part])


def cell(row: Row, name: str, blank: str = "") -> str:
    """A figure of a row, or what stands for a figure that it lacks."""
    _, form, _, unit = COLUMNS[name]
    value = row.get(name)
    return blank if value is None else format(value / unit, form)


def line(row: Row) -> str:
    """A row of the table."""
    cells = [f"{cell(row, name):>{COLUMNS[name][2]}}" for name in PARTS[row["part"]]]
    goal = " !" if row.get("reached") is False else "  "
    return f"{row['case']:32} {row['way']:10} {' '.join(cells)}{goal} {row.get('note', '')}".rstrip()


def summary(part: str, found: Sequence[Row]) -> str:
    """The part's main figure of each case, a column a way; with ! where it misses its goal."""
    ways = list(dict.fromkeys(row["way"] for row in found))
    lines = [f"{COLUMNS[MAIN[part]][0]:32} " + "".join(f"{way:>12}" for way in ways)]
    for case in dict.fromkeys(row["case"] for row in found if row.get(MAIN[part]) is not None):
        by_way = {row["way"]: row for row in found if row["case"] == case}
        cells = [by_way.get(way, {}) for way in ways]
        shown = [cell(row, MAIN[part], "–") + (" !" if row.get("reached") is False else "") for row in cells]
        lines.append(f"{case:32} " + "".join(f"{one:>12}" for one in shown))
    return "\n".join(lines)


def rows(options: argparse.Namespace, clock: Clock) -> Iterator[Row]:
    """The rows of the part that was asked for."""
    common = clock, options.deadline, options.tiny
    models = options.model or list(MODELS)
    if options.part == "small":
        networks = options.network or list(small.NETWORKS)
        yield from small.rows(networks, options.dtype or list(small.DTYPES), *common)
    elif options.part == "unlike":
        ways = options.way or list(unlike.WAYS)
        yield from unlike.rows(options.precision or list(unlike.GOALS), ways, options.steps, *common)
    elif options.part == "models":
        counts, batches = ([2], [4, 8]) if options.tiny else (options.counts, options.batches)
        chosen = pack_figures.cases(options.kind or pack_figures.KINDS, models, counts, batches)
        yield from pack_figures.rows(chosen, options.repeats, *common)
    else:
        yield from table4.rows(models, options.way or list(table4.WAYS), options.fraction, *common)


def warm_up() -> str:
    """A process's first studies import what all studies need: no row is charged for that, but it is said."""

    def studies() -> Row:
        began = time.perf_counter()
        for sharing in ("solo", "fused"):
            task = small.Small("depthwise", "fp32", 2 * small.BATCH)
            whole(task, small.SPACE, ps.Random(budget=1), trials=2, deadline=60.0, sharing=sharing)
        return {"note": f"took {time.perf_counter() - began:.1f} s"}

    return str(attempted({}, studies)["note"])


def whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    ways = ", ".join([*unlike.WAYS, *table4.WAYS])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--network", action="append", choices=small.NETWORKS, help="of small; may be repeated")
    parser.add_argument("--dtype", action="append", choices=small.DTYPES, help="of small; may be repeated")
    parser.add_argument("--precision", action="append", choices=unlike.GOALS, help="of unlike; may be repeated")
    parser.add_argument("--model", action="append", choices=MODELS, help="of models and table4; may be repeated")
    parser.add_argument("--kind", action="append", choices=pack_figures.KINDS, help="of models; may be repeated")
    parser.add_argument("--counts", type=whole_numbers, default=[2, 4, 8], help="of models, as in 2,4,8")
    parser.add_argument("--batches", type=whole_numbers, default=[32, 64, 100], help="of models, as in 32,64,100")
    parser.add_argument("--repeats", type=int, default=1, help="studies of which models gives the mean")
    parser.add_argument("--fraction", type=float, default=0.1, help="of table4's steps in a unit")
    parser.add_argument("--way", action="append", help=f"of unlike and table4: {ways}; may be repeated")
    parser.add_argument("--steps", type=int, default=1200, help="steps of each model of unlike")
    parser.add_argument("--seconds", type=float, default=110.0, help="no case begins later")
    parser.add_argument("--deadline", type=float, default=60.0, help="the most seconds of a study")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if DEVICE.type != "cuda" and not options.tiny:
        parser.error("no GPU here; --tiny runs a smoke test")
    known = {"unlike": unlike.WAYS, "table4": (*table4.WAYS,)}.get(options.part, ())
    if wrong := {*(options.way or ())} - {*known}:
        parser.error(f"the ways of {options.part} are {', '.join(known) or 'fixed'}, got {', '.join(sorted(wrong))}")
    if options.part != "small":  # whose users have torch's defaults
        torch.set_float32_matmul_precision("high")  # TF32, as in the convolutions
    warnings.simplefilter("ignore", ps.SoloWarning)
    table = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    table(f"torch {torch.__version__}, {name}; first studies: {warm_up()}\n{head(options.part)}")
    clock, found = Clock(options.seconds), list[Row]()
    for row in rows(options, clock):
        if DEVICE.type != "cuda" or options.tiny:
            row["reached"] = None  # the goals are an H200's
        found.append(row)
        table(line(row))
        if options.json:
            infinite = {name for name, one in row.items() if isinstance(one, float) and not math.isfinite(one)}
            print(json.dumps({"bench": "packing", **row, **dict.fromkeys(infinite)}), flush=True)
    left_out = f"; {clock.left_out} cases left out for want of time" if clock.left_out else ""
    table(f"{summary(options.part, found)}\n{reached(found)}{left_out}")


if __name__ == "__main__":
    main()
