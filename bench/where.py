"""Where the time of the host goes in a whole study: before its first report, and in all.

    python bench/where.py [--study mixed|few|one-kind|unlike|small|smoothed] [--sharing auto] [--tiny] [--json]

The studies are those of whole_study.py, unlike.py and small.py; ``--tiny`` has little data and few steps, so that what
is left is what a study costs besides training. A thread looks at the stack of the program a few hundred times a second,
and each look counts for the first kind of work in ``KINDS`` that is on the stack. A look needs Python's lock, so that
work that never gives it away is seen a little too rarely.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import penstock as ps
from bench.mnist import ONE_KIND, SPACE, ResidualDigits
from bench.networks import Split
from bench.small import SMOOTHING, Small, Smoothed
from bench.small import SPACE as SMALL
from bench.unlike import KINDS as MODELS
from bench.unlike import RATES, UNITS, Unlike
from penstock.log import events
from penstock.log.reader import read
from penstock.trial import Config

SECONDS = 0.003  # between two looks
# Kinds of work, by a piece of a file's name and the names of functions there (all, where none are given).
KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("imports: torch's compiler", "torch/_dynamo", ("<module>",)),
    ("imports: torch's compiler", "torch/_inductor", ("<module>",)),
    ("imports", "importlib._bootstrap", ()),
    ("the dry batch", "training/check.py", ("dry_batch",)),
    ("one thread or all", "training/threads.py", ("looked",)),
    ("describing", "training/describing.py", ()),
    ("tracing a step", "fused/compiles.py", ("Compiles.trace",)),
    ("taking a compiled step", "fused/speeding.py", ("Speeding._taken",)),
    ("which kernels a step needs", "fused/speeding.py", ("Speeding._needed",)),
    ("comparing kernels", "fused/agreement.py", ("agree_kernels",)),
    ("comparing in float64", "fused/agreement.py", ("_in_float64",)),
    ("comparing with a trial alone", "fused/agreement.py", ("agree",)),
    ("timing captured steps", "fused/speeding.py", ("_seconds",)),
    ("capturing a step alone, to time it", "fused/speeding.py", ("Speeding._time",)),
    ("capturing", "fused/recording.py", ("Recording.__init__",)),
    ("audits", "fused/audit.py", ("step_alone", "holdings", "compare", "Row.__init__")),
    ("audits", "fused/copies.py", ()),
    ("evaluating", "fused/evaluating.py", ()),
    ("evaluating", "training/loop.py", ("Training.evaluate",)),
    ("writing and reading states", "training/checkpoint.py", ()),
    ("writing and reading states", "fused/bundle.py", ("Fused.state",)),
    ("trials that come and go", "runs/fused.py", ("FusedRun._change", "FusedRun._finish", "FusedRun._stop")),
    ("trials that come and go", "training/trials.py", ()),
    ("waiting for the device", "runs/ahead.py", ("Ahead._wait",)),
    ("waiting for the device", "training/worker.py", ("Worker.synchronize",)),
    ("launching steps", "fused/bundle.py", ("Fused.leap",)),
    ("launching steps", "fused/faster.py", ("Faster.train",)),
    ("plain steps together", "fused/bundle.py", ("Fused.step",)),
    ("steps alone", "training/loop.py", ("Training.train_step",)),
    ("turns of a pack", "runs/packed.py", ()),
    ("deciding and logging", "penstock/engine/", ()),
)


class Sampler(threading.Thread):
    """Looks at the stack of the thread that makes it, until it is stopped; ``seen`` has kinds and when they were."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, str]] = []
        self._of, self._over = threading.get_ident(), threading.Event()

    def run(self) -> None:
        while not self._over.wait(SECONDS):
            self.seen.append((time.perf_counter(), kind_of(sys._current_frames().get(self._of))))

    def stop(self) -> None:
        self._over.set()
        self.join()


def kind_of(frame: FrameType | None) -> str:
    """The first kind of work that is on a stack."""
    there = []
    while frame is not None:
        there.append((frame.f_code.co_filename, frame.f_code.co_qualname))
        frame = frame.f_back
    for kind, file, functions in KINDS:
        if any(file in where and (not functions or name in functions) for where, name in there):
            return kind
    return "all else"


def _few(split: Split, rows: int, side: int) -> Split:
    """The first rows of some images, cut to a few pixels."""
    return tuple((x[:rows, :, :side, :side].contiguous(), y[:rows]) for x, y in split)  # type: ignore[return-value]


class TinyDigits(ResidualDigits):
    def data(self, config: Config) -> Split:
        return _few(super().data(config), 2_048, 8)


class TinyUnlike(Unlike):
    def data(self, config: Config) -> Split:
        return _few(super().data(config), 256, 32)


def study(name: str, tiny: bool, dir: str) -> ps.Study:
    """The study of that name."""
    if name in ("small", "smoothed"):
        task = (Smoothed if name == "smoothed" else Small)("gru", "fp32", *([410] if tiny else []))
        space: dict[str, Any] = SMALL | (SMOOTHING if name == "smoothed" else {})
        return ps.Study(
            task, space, metric="loss", mode="min", algorithm=ps.Random(budget=4), trials=6, dir=dir, name=name
        )
    if name == "unlike":
        space = {"kind": ps.grid(MODELS), "lr": ps.grid(RATES), "momentum": 0.9}
        unlike = TinyUnlike("fp32", 3, 16) if tiny else Unlike("fp32", 600 // UNITS, 256)
        return ps.Study(unlike, space, metric="loss", mode="min", algorithm=ps.Grid(budget=UNITS), dir=dir, name=name)
    trials, space = (16 if name == "few" else 48), ONE_KIND if name == "one-kind" else SPACE
    digits, algorithm = TinyDigits() if tiny else ResidualDigits(), ps.ASHA(max_budget=9 if tiny else 27)
    return ps.Study(digits, space, metric="accuracy", algorithm=algorithm, trials=trials, dir=dir, name=name)


def looked_at(name: str, sharing: str, tiny: bool) -> dict[str, Any]:
    """Run a study; gives the seconds of each kind of work, before its first report and in all."""
    with tempfile.TemporaryDirectory() as dir:
        made, sampler = study(name, tiny, dir), Sampler()
        began, cpu = time.perf_counter(), time.process_time()
        sampler.start()
        made.run(progress=False, sharing=sharing)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        sampler.stop()
        log = list(read(Path(dir) / name / "log.jsonl"))
    reports = [event for event in log if isinstance(event, events.Reported)]
    first = next(at for at in sorted(report.clock for report in reports))
    counts = Counter(kind for _, kind in sampler.seen)
    early = Counter(kind for at, kind in sampler.seen if at - began < first)
    each = seconds / max(1, len(sampler.seen))
    kinds = {kind: (early[kind] * each, count * each) for kind, count in counts.most_common()}
    said = [f"{e.clock:.1f} s: {e.kind} {e.size}: {e.reason}" for e in log if isinstance(e, events.Measured)]
    steps = sum(report.usage.steps for report in reports)
    return {"seconds": seconds, "cpu": cpu, "first": first, "steps": steps, "kinds": kinds, "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("mixed", "few", "one-kind", "unlike", "small", "smoothed")
    parser.add_argument("--study", choices=names, default="mixed")
    parser.add_argument("--sharing", default="auto")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    row = looked_at(args.study, args.sharing, args.tiny)
    if args.json:
        print(json.dumps({"study": args.study, "sharing": args.sharing, "tiny": args.tiny, **row}))
        return
    print(*row["said"], sep="\n", file=sys.stderr)
    print(f"{args.study}, {args.sharing}: {row['steps']:,} steps in {row['seconds']:.1f} s, {row['cpu']:.1f} s of CPU")
    print(f"{'seconds of the host':40}{'first report':>14}{'in all':>9}")
    print(f"{'all':40}{row['first']:>14.2f}{row['seconds']:>9.2f}")
    for kind, (before, whole) in row["kinds"].items():
        print(f"{kind:40}{before:>14.2f}{whole:>9.2f}")


if __name__ == "__main__":
    main()
