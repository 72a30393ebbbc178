"""Whether ``sharing="auto"`` is ever the worse choice: whole studies against ``sharing="solo"``, interleaved.

    python bench/auto.py [--json] [--pairs 7] [--cpu] [--steps 16 64 ...] [TASK ...]

Every study is random search on one device, in this process, over so many training steps in all. A pair is a study
"solo", one "auto" from an empty profile store, and one "auto" from the store that the latter left, in an order that
changes from pair to pair. Columns are medians: the seconds of a solo study, and the ratios of the others to it, pair
by pair. The goal is a ratio of at most 1.05, cold and warm, whatever the task and the length. With --cpu, seconds are
those of the process on its core, which other work on the machine lengthens less; a GPU's are not among them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.log.events import Placed
from penstock.log.reader import read
from penstock.trial import Config

GOAL = 1.05
Clock = Callable[[], float]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Tiny(ps.Task):
    """A small multilayer perceptron: most of a step is Python, and many trials fuse for little."""

    batch_size = 32
    unit_steps = 8

    def data(self, config: Config) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1280, 64, generator=generator)
        y = (x[:, :10] + 0.3 * torch.randn(1280, 10, generator=generator)).argmax(1)
        return (x[:1024], y[:1024]), (x[1024:], y[1024:])

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y)}


class Wide(Tiny):
    """Layers so wide that one trial's products fill a core: fusing pays little or nothing."""

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class Convolutional(Tiny):
    """Convolutions that fill a core."""

    def model(self, config: Config) -> nn.Module:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 24, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1536, 10))


class Transformer(Tiny):
    """A small encoder over eight places."""

    def model(self, config: Config) -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Unflatten(1, (8, 8)), nn.Linear(8, 32), body, nn.Flatten(), nn.Linear(256, 10))


class Function(Tiny):
    """A model of two numbers, trained as one would minimize a function: there is hardly a step to save."""

    def data(self, config: Config) -> Any:
        x = torch.linspace(-1, 1, 32)[:, None]
        return (x, 3 * x + 1), (x, 3 * x + 1)

    def model(self, config: Config) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"loss": F.mse_loss(model(x), y)}


class Unlike(Tiny):
    """Every trial has a width of its own: no two can be fused."""

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(64, config["width"]), nn.ReLU(), nn.Linear(config["width"], 10))


class Branching(Tiny):
    """A loss that looks at its value: trials that go different ways are computed in parts."""

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        loss = super().loss(model, batch, config)
        return 2 * loss if loss > 2 else loss


LR = {"lr": ps.loguniform(1e-3, 0.1)}
TASKS: dict[str, tuple[ps.Task, dict[str, Any]]] = {
    "tiny": (Tiny(), LR),
    "wide": (Wide(), LR),
    "convolutional": (Convolutional(), LR),
    "transformer": (Transformer(), LR),
    "function": (Function(), LR),
    "unlike": (Unlike(), {**LR, "width": ps.randint(16, 512)}),
    "branching": (Branching(), LR),
}
TRIALS = {16: 2, 64: 4, 256: 8, 1024: 8, 2048: 8, 4096: 16, 16384: 16}  # how many trials share the steps


def run(name: str, steps: int, sharing: str, dir: Path, label: str, clock: Clock) -> tuple[float, str]:
    """The seconds of one study, and how its trials were placed last."""
    task, space = TASKS[name]
    trials = TRIALS[steps]
    budget = steps // (8 * trials)
    study = ps.Study(
        task, space, metric="loss", mode="min", algorithm=ps.Random(budget=budget), trials=trials, dir=dir, name=label
    )
    began = clock()
    study.run(progress=False, sharing=sharing)
    took = clock() - began
    last = {event.trial: event.mode for event in read(dir / label / "log.jsonl") if isinstance(event, Placed)}
    shutil.rmtree(dir / label)
    return took, Counter(last.values()).most_common(1)[0][0]


def compare(name: str, steps: int, pairs: int, clock: Clock) -> dict[str, Any]:
    """Interleaved studies of one task and length; the first pair warms up and is left out."""
    solo, cold, warm, modes = [], [], [], Counter[str]()
    for pair in range(pairs + 1):
        with tempfile.TemporaryDirectory() as folder:
            alone, fresh = Path(folder) / "solo", Path(folder) / "auto"
            took: dict[str, tuple[float, str]] = {}
            for sharing in ("solo", "auto") if pair % 2 else ("auto", "solo"):
                dir = alone if sharing == "solo" else fresh
                took[sharing] = run(name, steps, sharing, dir, "cold", clock)
            second, mode = run(name, steps, "auto", fresh, "warm", clock)
        if pair:
            solo.append(took["solo"][0])
            cold.append(took["auto"][0] / solo[-1])
            warm.append(second / solo[-1])
            modes[f"{took['auto'][1]}/{mode}"] += 1
    return {
        "bench": "auto",
        "task": name,
        "device": DEVICE,
        "steps": steps,
        "trials": TRIALS[steps],
        "solo": median(solo),
        "cold": median(cold),
        "warm": median(warm),
        "worst": max(*cold, *warm),
        "modes": dict(modes),
        "reached": median(cold) <= GOAL and median(warm) <= GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all where none is given")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--steps", type=int, nargs="+", choices=sorted(TRIALS), default=sorted(TRIALS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore", ps.SoloWarning)
    rows = []
    if not args.json:
        heads = ("steps", "trials", "solo", "cold", "warm", "worst")
        print(f"{'task':14}", *(f"{head:>{width}}" for head, width in zip(heads, (6, 6, 9, 6, 6, 6), strict=True)))
    for name in args.tasks or TASKS:
        for steps in args.steps:
            row = compare(name, steps, args.pairs, time.process_time if args.cpu else time.perf_counter)
            rows.append(row)
            said = f"{name:14} {steps:6} {row['trials']:6} {row['solo']:8.3f}s {row['cold']:6.2f} {row['warm']:6.2f} "
            said += f"{row['worst']:6.2f}  {', '.join(f'{mode} × {n}' for mode, n in row['modes'].items())}"
            print(json.dumps(row) if args.json else said, flush=True)
    missed = [row for row in rows if not row["reached"]]
    last = {"bench": "auto", "task": "all", "rows": len(rows), "missed": len(missed), "goal": GOAL}
    last["reached"] = not missed
    print(json.dumps(last) if args.json else f"{len(missed)} of {len(rows)} rows above {GOAL}", flush=True)


if __name__ == "__main__":
    main()
