"""The cost of the engine, against the real alternatives, as ratios within one run.

    python bench/engine.py [--json] [control] [memory] [training] [start] [whole] [fused]

control   2,000 trials that do nothing, ASHA, one process: reports a second; trials a second against Optuna with SQLite
memory    the memory of 20,000 trials beyond that of 2,000, and the part of it that the trials themselves take
training  one trial through Penstock, checkpoints included, against the same loop in plain PyTorch
start     importing penstock, and `penstock --help`
whole     64 trials of ASHA on digits against Optuna's loop with its SuccessiveHalvingPruner, per epoch trained
fused     the same study fused against solo, and the cost of measuring and of trials that enter and leave
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps
from penstock.study import Study
from penstock.trial import Config

Row = dict[str, Any]


def nothing(trial: Any) -> None:
    for unit in range(9):
        trial.report(unit + 1, loss=trial.config["x"])


def trivial_study(trials: int, dir: str) -> Study:
    algorithm = ps.ASHA(max_budget=9)
    return ps.Study(
        nothing, {"x": ps.uniform(0, 1)}, metric="loss", mode="min", algorithm=algorithm, trials=trials, dir=dir
    )


def optuna_sqlite(trials: int, dir: str) -> None:
    """Ask, report and tell, as a user of Optuna's storage would."""
    storage = f"sqlite:///{dir}/optuna.db"
    study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(trials):
        trial = study.ask()
        x = trial.suggest_float("x", 0, 1)
        trial.report(x, 1)
        study.tell(trial, x)


def control() -> list[Row]:
    with tempfile.TemporaryDirectory() as dir:
        trivial_study(50, dir).run(progress=False)
        began, used = time.perf_counter(), time.process_time()
        result = trivial_study(2000, dir).run(progress=False)
        ours, used = time.perf_counter() - began, time.process_time() - used
        began = time.perf_counter()
        optuna_sqlite(100, dir)
        theirs = time.perf_counter() - began
    reports = sum(len(trial.curve) for trial in result.trials)
    ratio = (2000 / ours) / (100 / theirs)
    return [
        row("control plane", "reports a second", reports / ours, "at least 1,000", reports / ours >= 1000),
        row("", "CPU microseconds a report", 1e6 * used / reports),  # other programs weigh less on it
        row("", "trials a second", 2000 / ours),
        row("", "Optuna with SQLite, trials a second", 100 / theirs),
        row("", "ratio", ratio, "at least 20", ratio >= 20),
    ]


def deep_size(value: object, seen: set[int]) -> int:
    if id(value) in seen:
        return 0
    seen.add(id(value))
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        size += sum(deep_size(k, seen) + deep_size(v, seen) for k, v in value.items())
    elif isinstance(value, list | tuple):
        size += sum(deep_size(v, seen) for v in value)
    elif hasattr(value, "__dict__"):
        size += deep_size(vars(value), seen)
    return size


def hold(trials: int) -> None:
    """Run in a process of its own: print the memory that a study of so many trials adds, and its trials' part."""
    with tempfile.TemporaryDirectory() as dir:
        trivial_study(10, dir).run(progress=False)
        before = resident()
        result = trivial_study(trials, dir).run(progress=False)
        print(json.dumps({"held": resident() - before, "trials": deep_size(result._history.trials, set())}))


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def memory() -> list[Row]:
    small, large = (json.loads(run_self("--hold", str(n))) for n in (2000, 20000))
    growth = (large["held"] - small["held"]) / 2**20
    trials = (large["trials"] - small["trials"]) / 2**20
    return [
        row("memory", "20,000 over 2,000 trials, MiB", growth),
        row("", "of which the trials themselves, MiB", trials),
        row("", "the rest, bytes a trial", (growth - trials) * 2**20 / 18000),
    ]


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Digits(ps.Task):
    eval_batch_size = 360  # all at once, as by hand

    def data(self, config: Config) -> Any:
        return DATA

    def model(self, config: Config) -> nn.Module:
        return mlp()

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=config["momentum"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(-1) == y).float().mean()}


def epochs_by_hand(lr: float, momentum: float, epochs: int, loader: bool = False) -> Any:
    """The same training as a plain PyTorch loop, over indexed tensors or a DataLoader; yields each epoch's accuracy."""
    (x, y), (x_valid, y_valid) = DATA
    batches: DataLoader[Any] = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for _ in range(epochs):
        model.train()
        indexed = ((x[rows], y[rows]) for rows in torch.split(torch.randperm(len(x)), 64))
        for xs, ys in batches if loader else indexed:
            optimizer.zero_grad()
            F.cross_entropy(model(xs), ys).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            yield (model(x_valid).argmax(-1) == y_valid).float().mean().item()


DATA = digits()
SPACE = {"lr": ps.loguniform(1e-3, 1), "momentum": ps.uniform(0, 0.99)}


def one_trial(dir: str, epochs: int) -> None:
    space = {"lr": ps.choice([0.1]), "momentum": 0.9}
    algorithm = ps.Random(budget=epochs)
    ps.Study(Digits(), space, metric="accuracy", algorithm=algorithm, trials=1, dir=dir).run(progress=False)


def training(pairs: int = 11, epochs: int = 200) -> list[Row]:
    with tempfile.TemporaryDirectory() as dir:
        one_trial(dir, 2)

        def ours() -> None:
            one_trial(dir, epochs)

        def theirs() -> None:
            for _ in epochs_by_hand(0.1, 0.9, epochs):
                pass

        times = interleaved([ours, theirs], pairs)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    return [
        row("training", f"{epochs} epochs of one trial, seconds", statistics.median(times[0])),
        row("", "the same by hand, seconds", statistics.median(times[1])),
        row("", "ratio, median of interleaved pairs", ratio, "at most 1.03", ratio <= 1.03),
    ]


def start(runs: int = 9) -> list[Row]:
    penstock = str(Path(sys.executable).with_name("penstock"))
    commands = [[sys.executable, "-c", ""], [sys.executable, "-c", "import penstock"], [penstock, "--help"]]
    starts = [partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True) for command in commands]
    bare, imported, helped = map(statistics.median, interleaved(starts, runs))
    return [
        row("start", "python -c '', seconds", bare),
        row("", "import penstock, seconds", imported, "under 0.3", imported < 0.3),
        row("", "penstock --help, seconds", helped, "under 0.5", helped < 0.5),
    ]


def whole(pairs: int = 9) -> list[Row]:
    epochs: dict[str, list[int]] = {"Penstock": [], "Optuna, tensors indexed": [], "Optuna, DataLoader": []}
    bests: dict[str, list[float]] = {name: [] for name in epochs}

    def penstock() -> None:
        seed = len(epochs["Penstock"])
        with tempfile.TemporaryDirectory() as dir:
            algorithm = ps.ASHA(max_budget=27)
            study = ps.Study(Digits(), SPACE, metric="accuracy", algorithm=algorithm, trials=64, seed=seed, dir=dir)
            result = study.run(progress=False, sharing="solo")
        epochs["Penstock"].append(sum(len(trial.curve) for trial in result.trials))
        bests["Penstock"].append(result.best.metrics["accuracy"])

    def optunas(name: str, loader: bool) -> None:
        trained = 0

        def objective(trial: optuna.Trial) -> float:
            nonlocal trained
            accuracy = 0.0
            lr = trial.suggest_float("lr", 1e-3, 1, log=True)
            momentum = trial.suggest_float("momentum", 0, 0.99)
            for epoch, accuracy in enumerate(epochs_by_hand(lr, momentum, 27, loader)):
                trained += 1
                trial.report(accuracy, epoch + 1)
                if trial.should_prune():
                    raise optuna.TrialPruned
            return accuracy

        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        study = optuna.create_study(direction="maximize", pruner=pruner)
        study.optimize(objective, n_trials=64)
        epochs[name].append(trained)
        bests[name].append(study.best_value)

    others = [partial(optunas, name, "DataLoader" in name) for name in list(epochs)[1:]]
    times = interleaved([penstock, *others], pairs)
    rows, per_epoch = [], []
    for (name, counts), seconds in zip(epochs.items(), times, strict=True):
        per_epoch.append([s / n for s, n in zip(seconds, counts, strict=True)])
        what = f"{name}: {statistics.median(counts):.0f} epochs, best {statistics.median(bests[name]):.3f}, ms an epoch"
        rows.append(row("", what, 1000 * statistics.median(per_epoch[-1])))
    rows[0]["bench"] = "the whole"
    for name, theirs in zip(list(epochs)[1:], per_epoch[1:], strict=True):
        ratio = statistics.median(a / b for a, b in zip(per_epoch[0], theirs, strict=True))
        rows.append(row("", f"ratio to {name}", ratio, "at most 1.0", ratio <= 1.0))
    return rows


def fused(pairs: int = 7) -> list[Row]:
    """The same study solo and fused, and the cost of measuring and of trials that enter and leave in a longer one."""
    seeds = {sharing: iter(range(pairs + 1)) for sharing in ("solo", "auto")}

    def digits_study(dir: str, max_budget: int, **settings: Any) -> ps.Study:
        algorithm = ps.ASHA(max_budget=max_budget)
        return ps.Study(Digits(), SPACE, metric="accuracy", algorithm=algorithm, trials=64, dir=dir, **settings)

    def run(sharing: str) -> None:
        with tempfile.TemporaryDirectory() as dir:
            digits_study(dir, 27, seed=next(seeds[sharing])).run(progress=False, sharing=sharing)

    for sharing in seeds:
        run(sharing)  # a first run, because torch imports many modules with the first optimizer
    solo, together = interleaved([partial(run, sharing) for sharing in seeds], pairs)
    ratio = statistics.median(a / b for a, b in zip(solo, together, strict=True))
    with tempfile.TemporaryDirectory() as dir:
        digits_study(dir, 243).run(progress=False)  # this study leaves a profile in the folder
        numbers = count()

        def longer(known: bool) -> None:
            with tempfile.TemporaryDirectory() as fresh:
                digits_study(dir if known else fresh, 243, name=f"s{next(numbers)}").run(progress=False)

        profiling = statistics.median(measuring(partial(longer, False)) for _ in range(pairs))
        spent, whole = moving(partial(longer, True))
    moved = spent / whole
    return [
        row("fused", "64 trials of ASHA, 1 to 27 epochs, solo, seconds", statistics.median(solo)),
        row("", "the same with sharing auto, seconds", statistics.median(together)),
        row("", "ratio, median of interleaved pairs", ratio, "at least 4", ratio >= 4),
        row("", "measuring, share of 64 trials of 1 to 243 epochs", profiling, "at most 0.008", profiling <= 0.008),
        row("", "coming and going, share of the same", moved, "at most 0.033", moved <= 0.033),
    ]


def measuring(run: Callable[[], None]) -> float:
    """The fraction of a run that measuring costs: the time of its steps, less that of as many at the chosen size.

    Steps that a trial takes alone, ahead of the bundle, are counted in full. Finding a way to fuse is not counted: a
    bundle whose size is known does that too.
    """
    from penstock.training.fused.bundle import Fused
    from penstock.training.fused.stepping import Stepping

    steps: list[tuple[bool, int, float]] = []  # whether the step is part of a measurement, its trials, its seconds
    alone, finding = 0.0, 0.0
    plain, plain_alone, plain_find = Fused.step, Fused.step_alone, Stepping._find_way

    def step(self: Fused, measuring: Any = None) -> None:
        trials, began = len(self.behind()), time.perf_counter()
        plain(self, measuring)
        steps.append((measuring is not None, trials, time.perf_counter() - began))

    def step_alone(self: Fused, trial: Any) -> None:
        nonlocal alone
        began = time.perf_counter()
        plain_alone(self, trial)
        alone += time.perf_counter() - began

    def find_way(self: Stepping, *args: Any) -> Any:
        nonlocal finding
        began = time.perf_counter()
        way = plain_find(self, *args)
        finding += time.perf_counter() - began
        return way

    finds = mock.patch.object(Stepping, "_find_way", find_way)
    with mock.patch.multiple(Fused, step=step, step_alone=step_alone), finds:
        began = time.perf_counter()
        run()
        whole = time.perf_counter() - began
    most = max(trials for measured, trials, _ in steps if measured)
    # Later steps with nearly as many trials as the largest measured one give the time of a step per trial.
    later = [seconds / trials for measured, trials, seconds in steps if not measured and trials >= 0.9 * most]
    each = statistics.median(later) if later else 0.0  # without a step of that size, all measuring counts as lost
    extra = sum(seconds - trials * each for measured, trials, seconds in steps if measured)
    return (alone + extra - finding) / whole


def moving(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds that a run spends on moving trials into and out of bundles, and its seconds in all."""
    from penstock.training.fused.bundle import Fused

    spent, plain = 0.0, {name: getattr(Fused, name) for name in ("enter", "leave", "_arrange")}

    def timed(move: Callable[..., None], *args: Any) -> None:
        nonlocal spent
        began = time.perf_counter()
        move(*args)
        spent += time.perf_counter() - began

    for name, move in plain.items():
        setattr(Fused, name, lambda *args, move=move: timed(move, *args))
    began = time.perf_counter()
    try:
        run()
    finally:
        for name, move in plain.items():
            setattr(Fused, name, move)
    return spent, time.perf_counter() - began


def interleaved(things: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """The seconds of each callable in each round; they alternate, so that a slow machine slows all of them."""
    times: list[list[float]] = [[] for _ in things]
    for _ in range(rounds):
        for thing, spent in zip(things, times, strict=True):
            began = time.perf_counter()
            thing()
            spent.append(time.perf_counter() - began)
    return times


def row(bench: str, what: str, value: float, goal: str = "", reached: bool | None = None) -> Row:
    return {"bench": bench, "what": what, "value": value, "goal": goal, "reached": reached}


def run_self(*args: str) -> str:
    return subprocess.run([sys.executable, __file__, *args], check=True, capture_output=True, text=True).stdout


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--hold"]:
        hold(int(arguments[1]))
        return
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    benches = {
        "control": control,
        "memory": memory,
        "training": training,
        "start": start,
        "whole": whole,
        "fused": fused,
    }
    wanted = [name for name in arguments if name in benches] or list(benches)
    print(f"torch {torch.__version__}, optuna {optuna.__version__}, {torch.get_num_threads()} threads", file=sys.stderr)
    for name in wanted:
        for line in benches[name]():
            if "--json" in arguments:
                print(json.dumps(line), flush=True)
            else:
                mark = {True: "yes", False: "NO", None: ""}[line["reached"]]
                print(
                    f"{line['bench']:14} {line['what']:58} {line['value']:>10.4g}  {line['goal']:15} {mark}", flush=True
                )


if __name__ == "__main__":
    main(sys.argv[1:])
