"""Models of public libraries and by hand, trained fused and solo: how many fuse, and whether the results are the same.

    python bench/coverage.py [--family transformers] [--only WORD] [--json]

Each model is made from its config at a small size, in float64. Four trials with rates of their own train two units of
two whole batches and a short one, once as a fused bundle and once each alone; their whole saved states (parameters,
buffers, optimizer, scheduler, position, best weights) and their metrics are compared.

way       native, general (vmap), or solo with the reason
differs   the greatest difference between a number fused and alone, relative where the number is above 1
control   the same between two runs alone, of which one permutes the rows inside each batch. Where the forward draws at
          random, masks belong to places in a training batch: there the one run begins with weights that are one unit
          in the last place off, and only validation batches are permuted. By luck one order may round as the rows do
          as they are, so up to three orders are tried. Invariant 2 allows ten times the control, or 1e-9

Needs torchvision, timm and transformers for the families of these names: `pip install 'penstock[bench]'`, or
`pip install --target FOLDER --no-deps …` and PYTHONPATH, to leave torch as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.zoo.model import BATCH, TRIALS, Model, Zoo
from penstock.bundle import Bundle, Job, Measured, Placement, TrialFailed
from penstock.log.states import States
from penstock.training.checkpoint import load
from penstock.training.worker import Worker
from penstock.trial import Report

farthest: Any = import_module("tests.training.together").farthest  # tests have no types

FAMILIES = {  # the module with a family's models, and the libraries that they need
    "written": ("written", ()),
    "torchvision": ("vision", ("torchvision",)),
    "timm": ("image_models", ("torchvision", "timm")),
    "transformers": ("huggingface", ("torchvision", "transformers")),
}
UNITS = 2
LEAST = 1e-9  # a difference that is always allowed
MORE = 10.0  # times the control that a difference may be
Row = dict[str, Any]
Ended = dict[int, tuple[Any, list[Any]]]  # by trial: its state at the end, and its metrics


class Refused(Exception):
    """The reason why trials train solo."""


def trained(task: Zoo, *, fused: bool) -> tuple[Ended, str]:
    """The trials of a task at their end, and the way in which they were trained."""
    configs = task.of.configs()
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(Job(task, 0, "loss", "min", States.of(folder), deterministic=True), "cpu")
        placements = tuple(Placement(number, 1, config, UNITS) for number, config in enumerate(configs))
        bundles = [Bundle(f"b{p.trial}", ("cpu",), (p,)) for p in placements]
        if fused:
            worker.describe(configs[0], train=True)
            described = worker.describe_all(configs, train=False, trials=range(len(configs)))
            if reason := next((one.reason for one in described if one.signature is None), ""):
                raise Refused(reason)
            if len({one.signature for one in described}) > 1:
                raise Refused("trials differ in their signatures")
            whole = Bundle("b", ("cpu",), placements, "fused", str(described[0].signature), TRIALS)
            bundles = [whole]
        ended: Ended = {}
        reason = ""
        curves: dict[int, list[Any]] = {number: [] for number in range(len(configs))}
        way = "solo"
        for bundle in bundles:
            worker.place(bundle)
            while not worker.idle:
                event = worker.advance()
                if isinstance(event, TrialFailed):
                    raise RuntimeError(event.error)
                if isinstance(event, Measured):
                    if event.way == "solo":
                        raise Refused(event.reason)
                    way, reason = event.way, event.reason.partition("not native: ")[2]
                if isinstance(event, Report):
                    curves[event.trial].append(dict(event.metrics))
                    if event.state is not None and event.unit == UNITS:
                        state = load(worker.job.states, event.state)
                        ended[event.trial] = {k: v for k, v in state.items() if k != "random"}, curves[event.trial]
        worker.close()
    if len(ended) != len(configs):
        raise RuntimeError(f"{len(ended)} of {len(configs)} trials came to their end")
    return ended, way if not reason else f"{way}: {reason}"


def difference(one: Ended, other: Ended) -> tuple[float, str]:
    """The greatest difference of two sets of trials, and its place."""
    far: tuple[float, str] = max(farthest(list(one[number]), list(other[number])) for number in one)
    return far


def draws(model: Model) -> bool:
    """Whether a model's forward or loss draws at random in training."""
    task = Zoo(model)
    config = model.configs()[0]
    data = task.data(config)[0]
    batch = tree_map(lambda rows: rows[:BATCH], data)
    torch.manual_seed(0)
    made = task.model(config).train()
    before = torch.get_rng_state()
    task.loss(made, batch, config)
    return not torch.equal(before, torch.get_rng_state())


ORDERS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda rows: rows.flip(0), lambda rows: rows.roll(1, 0), lambda rows: rows.roll(2, 0),
)  # fmt: skip


def row(model: Model) -> Row:
    """The row of a model in the table."""
    began = time.perf_counter()
    found: Row = {"family": model.family, "model": model.name, "way": "solo", "reason": ""}
    try:
        together, said = trained(Zoo(model), fused=True)
        found["way"], _, found["reason"] = said.partition(": ")
    except Refused as error:
        found["reason"] = str(error)
    except Exception as error:
        found |= {"way": "fails", "reason": f"{type(error).__name__}: {error}"}
    if found["way"] not in ("solo", "fails"):
        try:
            alone, _ = trained(Zoo(model), fused=False)
            found["differs"], found["where"] = difference(together, alone)
            found["control"] = 0.0
            for order in ORDERS:
                if not found["control"] or not right(found):
                    found["control"] = max(found["control"], control(model, alone, order))
        except Exception as error:
            found |= {"way": "fails", "reason": f"alone: {type(error).__name__}: {error}"}
    found["seconds"] = time.perf_counter() - began
    return found


def control(model: Model, alone: Ended, order: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """How far rounding takes trials from their runs alone, when the rows of a batch come in another order."""
    task = Zoo(model, partial(tree_map, order), nudge=draws(model))
    return difference(trained(task, fused=False)[0], alone)[0]


def right(found: Row) -> bool:
    """Whether a fused model's difference is within invariant 2."""
    return bool(found["differs"] <= max(LEAST, MORE * found["control"]))


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each family and for all: the part that fuses, and the worst difference."""
    families = list(dict.fromkeys(found["family"] for found in rows))
    yield f"\n{'family':14} {'models':>6} {'native':>6} {'general':>7} {'solo':>5} {'fails':>5} {'fused':>6}  worst"
    for family in (*families, "all"):
        ours = [found for found in rows if family in (found["family"], "all")]
        ways = [sum(found["way"] == way for found in ours) for way in ("native", "general", "solo", "fails")]
        fused = [found for found in ours if "differs" in found]
        worst = max(fused, key=lambda found: found["differs"] / max(LEAST, MORE * found["control"]), default=None)
        said = "" if worst is None else f"{worst['differs']:.1e}, control {worst['control']:.1e}: {worst['model']}"
        native, general, solo, fails = ways
        share = (native + general) / max(1, len(ours))
        yield f"{family:14} {len(ours):6} {native:6} {general:7} {solo:5} {fails:5} {share:6.0%}  {said}"
    wrong = [found["model"] for found in rows if "differs" in found and not right(found)]
    yield f"beyond invariant 2: {', '.join(wrong) if wrong else 'none'}"


def line(found: Row) -> str:
    numbers = f"{found['differs']:8.1e} {found['control']:8.1e}" if "control" in found else f"{'–':>8} {'–':>8}"
    wrong = "  WRONG" if "control" in found and not right(found) else ""
    said = found["reason"] or (found["where"] if wrong else "")
    who = f"{found['family']:13} {found['model']:32.32} {found['way']:8}"
    return f"{who} {numbers} {found['seconds']:5.1f}{wrong}  {said}".rstrip()


def load_families(names: Sequence[str]) -> list[Model]:
    """The models of some families; a family whose library is missing is left out, and says what to install."""
    found: list[Model] = []
    for name in names:
        module, libraries = FAMILIES[name]
        try:
            for library in libraries:
                _import(library)
            models: Callable[[], Iterator[Model]] = import_module(f"bench.zoo.{module}").models
            found += models()
        except ImportError as error:
            print(
                f"{name}: left out, because of {error}: pip install 'penstock[bench]', or pip install --target FOLDER "
                f"--no-deps {' '.join(libraries)} and what they import, with FOLDER in PYTHONPATH",
                file=sys.stderr,
            )
    return found


def _import(library: str) -> None:
    """Import a library; torchvision without its compiled operators, where these were built for another torch."""
    try:
        import_module(library)
    except RuntimeError:
        if library != "torchvision":
            raise
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        _DEFINED.append(torch.library.Library("torchvision", "FRAGMENT"))  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            _DEFINED[-1].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module(library)


_DEFINED: list[Any] = []  # a library's operators are there as long as it is


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="may be given several times; all of them")
    parser.add_argument("--only", default="", help="the models whose name has this word")
    parser.add_argument("--json", action="store_true", help="JSON lines, and the table on standard error")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    out = sys.stderr if given.json else sys.stdout
    print(f"torch {torch.__version__}, float64, {TRIALS} trials", file=out)
    print(f"{'family':13} {'model':32} {'way':8} {'differs':>8} {'control':>8} {'s':>5}", file=out, flush=True)
    rows = []
    for model in load_families(given.family or list(FAMILIES)):
        if given.only.lower() not in model.name.lower():
            continue
        rows.append(row(model))
        print(line(rows[-1]), file=out, flush=True)
        if given.json:
            print(json.dumps(rows[-1]), flush=True)
    for said in summary(rows):
        print(said, file=out)
    return 1 if any("differs" in found and not right(found) for found in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
