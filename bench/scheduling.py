"""The quality of the schedulers: against the true optimum, and in whole studies on simulated clusters.

    python bench/scheduling.py [--json] [--groups N] [--seeds N] [--algorithm BOHB] [toy] [optimum] [resizing]
                               [decision] [macro] [concurrency] [halving] [mechanisms] [scale]

toy          the paper's example, Fluid figure 5
optimum      random groups, resizing off, against a bound on the optimum by CP-SAT; theorem 2 of Fluid
resizing     the same groups with trials that move
decision     the time of one decision
macro        PBT, Hyperband, ASHA, SyncBOHB, BOHB on 4, 8, 16 devices: time to the same target (figures 7 and 8), over
             three seeds or --seeds, of all or --algorithm
concurrency  ASHA at a fixed concurrency (figure 10), and device seconds to a target by concurrency (figure 3)
halving      successive halving on 2 to 32 devices (table 2)
mechanisms   packing alone, scaling alone, runtime variance, overheads (figures 11 to 13)
scale        a Hyperband study of 113,736 trials on 1,000 devices

macro, concurrency, halving and mechanisms need ../shared/data (or PENSTOCK_DATA); without it they are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import clusters, groups, workloads

Row = dict[str, Any]
OF_DATA = ("macro", "concurrency", "halving", "mechanisms")


def main(arguments: list[str]) -> None:
    given = dict(pairwise(arguments))  # each argument by the option before it
    count = int(given.get("--groups", 1000))
    names = [given["--algorithm"]] if "--algorithm" in given else list(clusters.algorithms(4))
    seeds = range(int(given.get("--seeds", 3)))
    benches: dict[str, Callable[[], Iterable[Row]]] = {
        "toy": groups.toy,
        "optimum": lambda: groups.optimum(count),
        "resizing": lambda: groups.resizing(count),
        "decision": groups.decision,
        "macro": lambda: clusters.macro(seeds=seeds, names=names),
        "concurrency": clusters.concurrency,
        "halving": clusters.halving,
        "mechanisms": clusters.mechanisms,
        "scale": clusters.scale,
    }
    absent = workloads.missing()
    for name in [name for name in arguments if name in benches] or list(benches):
        if name in OF_DATA and absent:
            print(f"{name} is left out, for want of {', '.join(absent)}", file=sys.stderr)
            continue
        for line in benches[name]():
            show(line, "--json" in arguments)


def show(line: Row, as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
        return
    mark = {True: "yes", False: "NO", None: ""}[line["reached"]]
    print(f"{line['bench']:10} {line['what']:96} {line['value']:>8.4g}  {line['goal']:13} {mark}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
