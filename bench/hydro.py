"""Hydro's figures and tables that need a GPU, one part each; a row is printed as soon as it is known.

    python bench/hydro.py PART … [--known FILE] [--steps N] [--trials N] [--seeds N] [--scales 8,4] [--widths 128,4096]
                                 [--algorithms random,asha] [--precision fp32] [--deadline SECONDS] [--sharing fused]
                                 [--tiny] [--json]

mlp          figure 1 a, b: the best learning rate by width, SGD, in the standard parametrization and in this one
transformer  figure 1 c, d: the same of two layers of attention, by Adam, on tinyshakespeare
resnet       figure 10: how well the order of 50 configs of ResNet-18 carries over, beside that of another seed
decoder      the same of a character transformer of width 256
eager        one trial after another in a plain loop, 8 of them: model steps a second
mps          the same model in 16 processes under MPS: model steps a second
whole        tables 2 and 3, figure 12 b: 100 trials of ResNet-18 from end to end, by Random and ASHA, at each scale
fused        the same trials fused at full width, which is what narrow twins are to beat; cut off at --deadline
solo         figure 12 a: narrow twins one after another, without fusion; cut off at --deadline
deadline     table 4: the best that 60 s find, by narrow twins and fused at full width

bench/rates.py, bench/orders.py and bench/tables.py say how each is measured. bf16, but for figure 1. The images are of
3×32×32: two of MNIST's digits, shifted, in two channels, and the larger one is to be told.

A part is made of pieces of a few minutes at most: a width, the configs of one batch size at a scale, a study. With
``--known FILE`` each piece is kept in a file as it ends, and one that is there is not measured again: a bench that was
cut short goes on with the same command, and prints all of its rows. ``eager`` and ``mps`` go before ``whole``, which
compares itself with them. In a lease of 250 s, for example:

    eager mps mlp --known K                            transformer --known K
    whole --scales 8 --algorithms random --known K     whole --scales 8 --algorithms asha --known K
    resnet --scales 8 --known K                        (again, until it has both seeds)
    fused --deadline 200 --known K                     deadline --known K

Needs ../shared/data (or PENSTOCK_DATA): images/mnist.npz and text/tinyshakespeare.txt. A part that fails says why, and
the others go on. ``--tiny`` is a smoke test of all parts on a CPU. Figures 8 and 13 are `python bench/fusion.py` with
the networks rn18, rn18/2, rn18/4, rn18/8 and rn18/16, whose memory it tells too; it has --precision.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna
import torch

import penstock as ps
from bench import orders, rates, tables
from bench.known import Known

Row = dict[str, Any]
PARTS: dict[str, Callable[[argparse.Namespace, Known], Iterator[Row]]] = {
    "mlp": rates.mlp,
    "transformer": rates.transformer,
    "resnet": orders.resnet,
    "decoder": orders.decoder,
    "eager": tables.eager,
    "mps": tables.mps,
    "whole": tables.whole,
    "fused": tables.fused,
    "solo": tables.solo,
    "deadline": tables.deadline,
}
TINY = {"steps": 8, "trials": 4, "scales": [4, 2], "widths": [32, 64], "deadline": 20.0, "algorithms": ["asha"]}


def whole_numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def names(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [one for one in found if one not in tables.UNITS]:
        raise argparse.ArgumentTypeError(f"the algorithms are {', '.join(tables.UNITS)}, got {', '.join(unknown)}")
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="+", choices=PARTS)
    parser.add_argument("--known", type=Path, help="a file that keeps what was measured")
    parser.add_argument("--steps", type=int, help="of a trial: 150 in figure 1, 1,000 for orders, 3,000 end to end")
    parser.add_argument("--trials", type=int, help="50 for orders, 100 from end to end, 1,000 with the deadline")
    parser.add_argument("--seeds", type=int, default=1, help="of figure 1")
    parser.add_argument("--scales", type=whole_numbers, default=[8, 4, 16, 2], help="the first one before targets")
    parser.add_argument("--widths", type=whole_numbers, default=[128, 512, 1024, 4096], help="of figure 1")
    parser.add_argument("--algorithms", type=names, default=[*tables.UNITS], help="of whole, fused and solo")
    parser.add_argument("--precision", choices=["bf16", "fp32"], help="of whole studies, and of eager and mps")
    parser.add_argument("--deadline", type=float, default=240.0, help="the most seconds of a study")
    parser.add_argument("--sharing", default="fused", help="of the studies of orders")
    parser.add_argument("--tiny", action="store_true", help="few steps of small models")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        vars(options).update(TINY)
    elif not torch.cuda.is_available():
        parser.error("no GPU here; --tiny runs a smoke test")
    return options


def show(row: Row, as_json: bool) -> None:
    finite = {name: one for name, one in row.items() if not isinstance(one, float) or math.isfinite(one)}
    if as_json:
        print(json.dumps(finite), flush=True)
        return
    told = (f"{name} {one:.4g}" if isinstance(one, float) else f"{name} {one}" for name, one in finite.items())
    print("  ".join(one for one in told if not one.startswith(("part ", "what "))), end="  ")
    print(f"| {row['part']}: {row['what']}", flush=True)


def main() -> None:
    options = parsed()
    known = Known(options.known)
    torch.set_float32_matmul_precision("high")  # TF32, as in the convolutions
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", ps.SoloWarning)
    for part in options.part:
        began = time.perf_counter()

        def told(part: str = part, began: float = began, **row: Any) -> None:
            show({"part": part, "at": time.perf_counter() - began, **row}, options.json)

        try:
            for row in PARTS[part](options, known):
                told(**row)
        except Exception as error:  # the row says why it failed, and the other parts go on
            said = str(error).strip().splitlines() or [""]
            told(what=f"fails: {type(error).__name__}: {said[0]}")
        told(what="done")


if __name__ == "__main__":
    main()
