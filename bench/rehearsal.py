"""How well a rehearsal predicts a real study: five tasks on two worker processes, and simulated from their profiles.

    python bench/rehearsal.py [--json] [TASK ...]

Each study runs for real first, on two workers of this machine, without earlier measurements. Its rehearsal then runs on
a simulated cluster made of the profiles that the study left. The goal is a duration within 15% of the real one, at the
median of the tasks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "2"

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import penstock as ps
from penstock.algorithms.base import Algorithm
from penstock.cli.rehearse import rehearsal
from penstock.log.events import Ended
from penstock.log.reader import read
from penstock.trial import Config

GOAL = 0.15


class Digits(ps.Task):
    """A multilayer perceptron on digits."""

    batch_size = 64
    eval_batch_size = 256

    def data(self, config: Config) -> Any:
        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
        return (x[:1400], y[:1400]), (x[1400:], y[1400:])

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y)}


class Wide(Digits):
    """Layers so wide that trials gain little by fusing."""

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10))


class Convolutional(Digits):
    """Convolutions and pooling."""

    def model(self, config: Config) -> nn.Module:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 24, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(384, 10)]
        return nn.Sequential(*layers)


class Attentive(Digits):
    """A small transformer over the rows of a digit."""

    def model(self, config: Config) -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        body: list[nn.Module] = [nn.Unflatten(1, (8, 8)), nn.Linear(8, 32), nn.TransformerEncoder(layer, 2)]
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(256, 10))


class Widths(Digits):
    """Three widths, which cannot be fused with each other."""

    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(nn.Linear(64, config["width"]), nn.ReLU(), nn.Linear(config["width"], 10))


STUDIES: dict[str, tuple[ps.Task, Algorithm, int | None]] = {
    "digits": (Digits(), ps.SuccessiveHalving(max_budget=81), 27),
    "wide": (Wide(), ps.Random(budget=12), 12),
    "convolutional": (Convolutional(), ps.Hyperband(max_budget=27), None),
    "attentive": (Attentive(), ps.SuccessiveHalving(max_budget=27), 18),
    "widths": (Widths(), ps.PBT(population=12, max_budget=48, interval=8), None),
}


def seconds(dir: Path) -> float:
    """The seconds that a study took, by its own clock."""
    return next(event.clock for event in read(dir / "log.jsonl") if isinstance(event, Ended))


def compare(name: str) -> dict[str, Any]:
    """Run one study for real, then rehearse it; gives both durations."""
    task, algorithm, trials = STUDIES[name]
    space = {"lr": ps.loguniform(1e-3, 0.3)} | ({"width": ps.choice([32, 64, 128])} if name == "widths" else {})
    with tempfile.TemporaryDirectory() as dir:
        settings: dict[str, Any] = {"metric": "loss", "mode": "min", "algorithm": algorithm, "trials": trials}
        real = ps.Study(task, space, name="real", dir=dir, **settings)
        took = seconds(real.run(workers=2, progress=False).dir)
        again = ps.Study(task, space, name="rehearsed", dir=dir, **settings)
        cluster, _ = rehearsal(again, 2)
        foretold = seconds(again.run(on=cluster, progress=False).dir)
    return {"bench": "rehearsal", "task": name, "real": took, "foretold": foretold, "ratio": foretold / took}


def main(arguments: list[str]) -> None:
    as_json = "--json" in arguments
    rows = [compare(name) for name in [name for name in arguments if name in STUDIES] or list(STUDIES)]
    off = median(abs(row["ratio"] - 1) for row in rows)
    for row in rows:
        said = (
            f"{row['task']:16} real {row['real']:7.2f} s  foretold {row['foretold']:7.2f} s  ratio {row['ratio']:.2f}"
        )
        print(json.dumps(row) if as_json else said, flush=True)
    last = {"bench": "rehearsal", "task": "median", "off": off, "goal": GOAL, "reached": off <= GOAL}
    print(
        json.dumps(last) if as_json else f"off by {off:.0%} at the median, goal {GOAL:.0%}: {off <= GOAL}", flush=True
    )


if __name__ == "__main__":
    main(sys.argv[1:])
