"""A study in a fresh process, from its start to its answer, against Optuna's pruned loop over the same.

    python bench/fresh.py [--json] [--pairs N] [--load N] [--sides NAME ...]

64 trials of ASHA on scikit-learn's digits, 1 to 27 epochs: Penstock's program against the loop that Optuna's users
write, with its SuccessiveHalvingPruner, over a DataLoader and over indexed tensors; and ``penstock run`` of the
example, the same study. The programs take turns, each in a process of its own, imports and its end included. ``--load``
starts so many busy processes beside them. The CPU seconds of a program, with its threads, are told too: other programs
on the machine weigh less on these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRIALS, EPOCHS, WIDTHS = 64, 27, (32, 64, 128)
COMMAND, EXAMPLE = "penstock run", Path(__file__).parents[1] / "examples" / "digits.py"
SIDES = ("Penstock", "Optuna, DataLoader", "Optuna, tensors indexed", COMMAND)


def penstock() -> tuple[int, float]:
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn

    import penstock as ps

    class Digits(ps.Task):
        def data(self, config):  # type: ignore[no-untyped-def]
            images, labels = load_digits(return_X_y=True)
            x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
            return (x[:1437], y[:1437]), (x[1437:], y[1437:])

        def model(self, config):  # type: ignore[no-untyped-def]
            return network(nn, config["width"], config["dropout"])

        def optimizer(self, params, config):  # type: ignore[no-untyped-def]
            return torch.optim.SGD(params, lr=config["lr"], momentum=config["momentum"], nesterov=True)

        def loss(self, model, batch, config):  # type: ignore[no-untyped-def]
            x, y = batch
            return F.cross_entropy(model(x), y)

        def metrics(self, model, batch, config):  # type: ignore[no-untyped-def]
            x, y = batch
            return {"accuracy": (model(x).argmax(-1) == y).float().mean()}

    space = {
        "lr": ps.loguniform(1e-3, 1),
        "momentum": ps.uniform(0.1, 0.99),
        "dropout": ps.uniform(0, 0.5),
        "width": ps.choice(list(WIDTHS)),
    }
    with tempfile.TemporaryDirectory() as dir:
        algorithm = ps.ASHA(max_budget=EPOCHS)
        study = ps.Study(Digits(), space, metric="accuracy", algorithm=algorithm, trials=TRIALS, dir=dir)
        result = study.run(progress=False)
        return sum(len(trial.curve) for trial in result.trials), result.best.metrics["accuracy"]


def optunas(loader: bool) -> tuple[int, float]:
    import optuna
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    (x, x_valid), (y, y_valid) = (x[:1437], x[1437:]), (y[:1437], y[1437:])
    batches = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    valid = DataLoader(TensorDataset(x_valid, y_valid), batch_size=256)
    trained = 0

    def objective(trial):  # type: ignore[no-untyped-def]
        nonlocal trained
        lr = trial.suggest_float("lr", 1e-3, 1, log=True)
        momentum = trial.suggest_float("momentum", 0.1, 0.99)
        dropout = trial.suggest_float("dropout", 0, 0.5)
        model = network(nn, trial.suggest_categorical("width", WIDTHS), dropout)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
        accuracy = 0.0
        for epoch in range(EPOCHS):
            model.train()
            indexed = ((x[rows], y[rows]) for rows in torch.split(torch.randperm(len(x)), 64))
            for xs, ys in batches if loader else indexed:
                optimizer.zero_grad()
                F.cross_entropy(model(xs), ys).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            model.eval()
            with torch.no_grad():
                pieces = valid if loader else zip(torch.split(x_valid, 256), torch.split(y_valid, 256), strict=True)
                right = sum((model(xs).argmax(-1) == ys).sum().item() for xs, ys in pieces)
            accuracy = right / len(y_valid)
            trained += 1
            trial.report(accuracy, epoch + 1)
            if trial.should_prune():
                raise optuna.TrialPruned
        return accuracy

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    study.optimize(objective, n_trials=TRIALS)
    return trained, study.best_value


def network(nn: Any, width: int, dropout: float) -> Any:
    first, second = (nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout)), (nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*first, *second, nn.Linear(width, 10))


def timed(side: str) -> dict[str, float]:
    """One program's wall and CPU seconds; its epochs and its best accuracy, where it tells them."""
    command = [sys.executable, str(Path(__file__).resolve()), "--side", side]
    if side == COMMAND:
        command = [str(Path(sys.executable).with_name("penstock")), "run", str(EXAMPLE.resolve())]
    with tempfile.TemporaryDirectory() as folder:
        before, began = os.times(), time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
        seconds, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "cpu": cpu, **({} if side == COMMAND else json.loads(done.stdout.splitlines()[-1]))}


@contextmanager
def loaded(count: int) -> Iterator[None]:
    """So many processes beside, each busy with one core."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def median(runs: list[dict[str, float]], what: str) -> float:
    return statistics.median(run[what] for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--load", type=int, default=0)
    given = parser.parse_args()
    if given.side:
        epochs, best = penstock() if given.side == SIDES[0] else optunas(given.side == SIDES[1])
        print(json.dumps({"epochs": epochs, "best": best}))
        return
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in given.sides}
    with loaded(given.load):
        for _ in range(given.pairs):
            for side, of in runs.items():
                of.append(timed(side))
                print(f"{side}: {of[-1]['seconds']:.1f} s, {of[-1]['cpu']:.1f} s of CPU", file=sys.stderr, flush=True)
    for side, of in runs.items():
        row = {what: median(of, what) for what in of[0]}
        for what in ("seconds", "cpu"):
            pairs = zip(of, runs.get(SIDES[0], of), strict=True)
            row[f"{what}, times Penstock's"] = statistics.median(one[what] / ours[what] for one, ours in pairs)
        if given.json:
            print(json.dumps({"side": side, "load": given.load, **row}), flush=True)
        else:
            print(f"{side:24}", "  ".join(f"{what} {value:.4g}" for what, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
