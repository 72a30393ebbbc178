"""A whole study as a user gets it: model steps a second from ``study.run`` to its return, caches cold and warm.

    python bench/whole_study.py [--study mixed|few|one-kind ...] [--sharing auto] [--json]

ASHA over residual networks on MNIST in bf16 (mnist.py): ``mixed`` is 48 trials of two widths and three batch sizes,
``few`` is 16 of them, ``one-kind`` is 48 trials of one signature. Each study is a fresh process. The first finds no
compiled kernels, no block sizes and no profiles; the second finds what the first has left. They are compared with a
loop by hand over tensors that lie on the device, one trial after another, for a few steps of each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import penstock as ps
from bench.mnist import ONE_KIND, SPACE, ResidualDigits
from penstock.log import events, reader

STUDIES: dict[str, tuple[dict[str, Any], int]] = {"mixed": (SPACE, 48), "few": (SPACE, 16), "one-kind": (ONE_KIND, 48)}
BY_HAND = 60  # steps of each kind


def study(name: str, budget: int, sharing: str, dir: str) -> dict[str, Any]:
    """Run a study in this process."""
    space, trials = STUDIES[name]
    algorithm = ps.ASHA(max_budget=budget)
    made = ps.Study(ResidualDigits(), space, metric="accuracy", algorithm=algorithm, trials=trials, dir=dir, name=name)
    began = time.perf_counter()
    result = made.run(progress=False, sharing=sharing)
    seconds = time.perf_counter() - began
    log = list(reader.read(Path(dir) / name / "log.jsonl"))
    steps = sum(event.usage.steps for event in log if isinstance(event, events.Reported))
    said = [f"{e.clock:.1f} s: {e.kind} {e.size}: {e.reason}" for e in log if isinstance(e, events.Measured)]
    best = result.best.metrics["accuracy"]
    return {"seconds": seconds, "steps": steps, "best": best, "failed": len(result.failed), "said": said}


def in_turn() -> float:
    """Model steps a second of a loop by hand, over all kinds equally."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    task, seconds = ResidualDigits(), 0.0
    (x, y), _ = task.data({})
    x, y = x.to(device), y.to(device)
    kinds = [(width, size) for width in SPACE["width"].values for size in SPACE["batch_size"].values]
    for width, size in kinds:
        config = {"width": width, "batch_size": size, "lr": 0.1, "decay": 1e-4, "dropout": 0.1}
        model = task.model(config).to(device)
        optimizer = task.optimizer(model.parameters(), config)
        order = torch.randperm(len(x), device=device)
        for step in range(BY_HAND + 5):
            if step == 5:  # libraries choose their kernels before
                _wait(device)
                began = time.perf_counter()
            rows = order[step * size : (step + 1) * size]
            with torch.autocast(device, torch.bfloat16):
                loss = task.loss(model, (x[rows], y[rows]), config)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        _wait(device)
        seconds += time.perf_counter() - began
    return len(kinds) * BY_HAND / seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def fresh(name: str, folder: str, there: str, budget: int, sharing: str) -> dict[str, Any]:
    """The same study in a process of its own; its caches lie in a folder, and its log in one inside of it."""
    caches = {"XDG_CACHE_HOME": "user", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    environment = os.environ | {key: f"{folder}/{value}" for key, value in caches.items()}
    here = ["--here", f"{folder}/{there}", "--study", name, "--budget", str(budget), "--sharing", sharing]
    made = subprocess.run(
        [sys.executable, __file__, *here], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--budget", type=int, default=27, help="ASHA's largest budget, in epochs")
    parser.add_argument("--sharing", default="auto")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(study(args.study[0], args.budget, args.sharing, args.here)))
        return
    rows, hand = [], in_turn()
    for name in args.study:
        with tempfile.TemporaryDirectory() as folder:
            for caches in ("cold", "warm"):
                row = fresh(name, folder, caches, args.budget, args.sharing)
                rate = row["steps"] / row["seconds"]
                rows.append({"study": name, "caches": caches, "rate": rate, "by hand": hand, **row})
                said = f"{name}, {caches}: {row['steps']:,} steps in {row['seconds']:.1f} s, {rate:,.0f} a second"
                print(*row["said"], said, sep="\n", file=sys.stderr, flush=True)
    if args.json:
        print(*map(json.dumps, rows), sep="\n")
        return
    print(f"one trial after another by hand: {hand:,.0f} model steps a second\n")
    print(f"{'study':10}{'caches':>8}{'steps':>10}{'seconds':>9}{'steps/s':>9}{'times':>7}{'best':>8}{'failed':>8}")
    for row in rows:
        print(
            f"{row['study']:10}{row['caches']:>8}{row['steps']:>10,}{row['seconds']:>9.1f}{row['rate']:>9,.0f}"
            f"{row['rate'] / hand:>7.1f}{row['best']:>8.4f}{row['failed']:>8}"
        )


if __name__ == "__main__":
    main()
