"""Many trials on one GPU: model steps a second of every public way to train them, and of Penstock.

    python bench/fusion.py --goals                   the cases that have goals, one size of each way: ten minutes
    python bench/fusion.py [--network rn18/8] [--way vmap] [--precision bf16] [--sizes 16,128] [--quick] [--benchmark]
                           [--profile] [--json]
    python bench/fusion.py --network "gpt2 small" --network "bert small" --precision bf16 --sizes 32 --way eager
                           --way graph --way compiled --way mps      transformers, by the ways that have goals
    python bench/fusion.py --device cpu --quick      a smoke test without a GPU: batches of 8, few sizes

eager    trials one after another, with the step as written
graph    trials one after another, the whole step captured as a CUDA graph
vmap     torch.func: `vmap` over the loss, ordinary backward on the sum, torch.optim on the stacked parameters
math     the same with attention spelt out, where `vmap` fails in the backward of the fused attention
grouped  one convolution with groups=F, BatchNorm over F·C channels, baddbmm, as in HFTA and Hydro
penstock one bundle in the fused mode, with plain steps
captured the same with its step captured as a CUDA graph
compiled the same with its step compiled (and then captured), as in a study once enough steps are certain
mps      16 processes under MPS, by graphs or eager, whichever is faster

A model step is one forward, backward and optimizer step of one model; steps are summed over the models. fp32 allows
TF32; bf16 is autocast, with convolutional networks in channels-last. The trials of a row share one config and differ in
their initial weights, the easiest case for the public ways: one torch.optim steps all of them.

floor: the fewest bytes a step moves, at 4.8 TB/s (H200). Convolution, linear, attention, BatchNorm and LayerNorm read
their inputs and write their output; backward they read the output's gradient and the inputs and write the inputs'
gradients: 3 × inputs + 2 × output. The loss reads the logits and writes their gradient; an embedding's output is
written and its gradient read. All other operators are fused into these. A parameter is read forward and backward. The
update reads and writes the parameter and each of the optimizer's tensors, in fp32; the gradient never leaves the chip.
The batch counts for nothing, because the models share it. By this count rn18/8 in bf16 could do 12,000 a second and
mlp512 97,000.

differs: the greatest relative difference between the losses of the row's last trial over its first 8 steps and those of
the same trial alone, eager, in the same precision. control: the same between that run and one whose batches have their
rows permuted, which shows the effect of rounding alone. GB: the most memory that steps hold while they are timed. "made
with" is the memory of the first steps, which find and check a faster way, where that is more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.mps import PROCESSES, mps, pools
from bench.networks import NARROWER, TASKS, Network
from bench.steps import Row, measured
from bench.ways import eager, graph, grouped, math_vmap, penstock, vmap

SIZES = {
    "gpt2 small": (1, 8, 32),
    "bert small": (1, 8, 32),
    "mlp512": (1, 4, 16, 64, 128, 256),
    "rn18/8": (1, 4, 16, 64, 128, 512),
    "rn18": (1, 2, 4),
}
SIZE = (1, 4, 16, 64, 128)
GOALS = {  # the number of trials that Penstock trains at once, for each case with a goal
    ("rn18/8", "bf16"): 512,
    ("rn18/8", "fp32"): 256,
    ("mlp512", "fp32"): 256,
    ("char transformer", "bf16"): 128,
    ("mobilenet/8", "bf16"): 128,
    ("rn18", "bf16"): 4,
    ("gpt2 small", "bf16"): 32,  # at least 8 times one after another (eager), and twice mps
    ("bert small", "bf16"): 32,
}
OTHERS = 128  # the most trials of the other ways, which gain nothing from more


ways: dict[str, Callable[[Network, int, str], Row]] = {
    "eager": partial(measured, eager, single=True),
    "graph": partial(measured, graph, single=True),
    "vmap": partial(measured, vmap),
    "math": partial(measured, math_vmap),
    "grouped": partial(measured, grouped),
    "penstock": partial(measured, penstock),
    "captured": partial(measured, partial(penstock, faster="captured")),
    "compiled": partial(measured, partial(penstock, faster="compiled")),
    "mps": mps,  # last: its processes stay until the end
}
ONE_SIZE = {"eager": 1, "graph": 1, "mps": PROCESSES}
NEEDS_CUDA = ("graph", "mps", "captured", "compiled")
COVERS = {"math": ["char transformer"], "grouped": ["rn18/8", "rn18", "mlp512", "mobilenet/8"]}  # other ways cover all


def rows(
    networks: Sequence[Network], chosen: Sequence[str], precisions: Sequence[str], sizes: Sequence[int], goals: bool
) -> Iterator[Row]:
    for way in chosen:
        if way in NEEDS_CUDA and networks[0].device.type != "cuda":
            print(f"{way}: skipped, needs CUDA", file=sys.stderr)
            continue
        for network in (network for network in networks if network.name in COVERS.get(way, TASKS)):
            for precision in network.precisions:
                goal = GOALS.get((network.name, precision))
                if precision not in precisions or (goals and goal is None):
                    continue
                those = [goal if way in NEEDS_CUDA else min(goal, OTHERS)] if goals and goal else sizes
                for size in [ONE_SIZE[way]] if way in ONE_SIZE else those or SIZES.get(network.name, SIZE):
                    found = attempted(way, network, size, precision)
                    yield {"way": way, **found}
                    if found["rate"] is None:
                        break


def attempted(way: str, network: Network, size: int, precision: str) -> Row:
    """The row of a way, or a row without numbers that says why there are none."""
    try:
        return ways[way](network, size, precision)
    except torch.cuda.OutOfMemoryError:
        note = "out of memory"
    except Exception as error:  # the row says why its way failed, and the other ways go on
        note = f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    nothing = dict.fromkeys(("rate", "memory", "share", "differs", "control"))
    return {"network": network.name, "precision": precision, "size": size, **nothing, "note": note}


def line(row: Row) -> str:
    numbers = f"{'–':>9}"
    if row["rate"] is not None:
        memory = f"{row['memory'] / 1e9:8.2f}" if row["memory"] is not None else f"{'–':>8}"
        numbers = f"{row['rate']:9,.0f} {memory} {row['share']:6.1%} {row['differs']:9.1e} {row['control']:9.1e}"
    return f"{row['network']:17} {row['precision']:5} {row['way']:8} {row['size']:4} {numbers}  {row['note']}".rstrip()


HEAD = f"{'network':17} {'':5} {'way':8} {'F':>4} {'steps/s':>9} {'GB':>8} {'floor':>6} {'differs':>9} {'control':>9}"


def summary(found: Sequence[Row]) -> str:
    """The best size of each way, a column a way."""
    kinds = list(dict.fromkeys(row["way"] for row in found))
    lines = [f"{'best':23}" + "".join(f"{kind:>16}" for kind in kinds)]
    for network, precision in sorted({(row["network"], row["precision"]) for row in found}):
        cells = []
        for kind in kinds:
            same = [r for r in found if (r["network"], r["precision"], r["way"]) == (network, precision, kind)]
            best = max((r for r in same if r["rate"] is not None), key=lambda r: r["rate"], default=None)
            cells.append(f"{best['rate']:,.0f} at {best['size']}" if best else "–")
        lines.append(f"{network:17} {precision:5}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--network", action="append", choices=TASKS, help="may be given several times; all but narrower rn18"
    )
    parser.add_argument("--way", action="append", choices=ways, help="may be given several times; all of them")
    parser.add_argument("--precision", action="append", choices=("fp32", "bf16"))
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[])
    parser.add_argument("--goals", action="store_true", help="the networks, precisions and sizes that have goals")
    parser.add_argument("--quick", action="store_true", help="two sizes and short timings")
    parser.add_argument("--benchmark", action="store_true", help="let cuDNN time its algorithms: tens of seconds a row")
    parser.add_argument("--profile", action="store_true", help="what a step of each row spends its time on")
    parser.add_argument("--json", action="store_true", help="JSON lines, and the table on standard error")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    options = parser.parse_args()

    cuda = options.device.type == "cuda"
    if cuda:
        torch.set_float32_matmul_precision("high")  # TF32, as in the convolutions
        torch.backends.cudnn.benchmark = options.benchmark
    if cuda and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu runs a smoke test")
    table = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    table(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else 'CPU'}\n{HEAD}")
    sizes = options.sizes or ([4, 64] if cuda else [1, 2]) if options.quick else options.sizes
    seconds = 0.1 if options.quick else 0.3
    names = options.network or [name for name in TASKS if name not in NARROWER]
    networks = [Network(name, options.device, None if cuda else 8, seconds) for name in names]
    for network in networks:
        network.profiled = options.profile and cuda
    precisions = options.precision or ["fp32", "bf16"]
    chosen = options.way or [way for way in ways if not options.goals or way not in ("math", "penstock", "captured")]
    found: list[Row] = []
    try:
        for row in rows(networks, chosen, precisions, sizes, options.goals):
            found.append(row)
            table(line(row))
            if options.json:
                print(json.dumps(row), flush=True)
    finally:
        for pool in pools:
            pool.close()
        table(summary(found))


if __name__ == "__main__":
    main()
