"""How long a trial pauses while the number of its workers changes: sections of bench/elastic.py.

Every process writes down when each of its steps began and ended, on the machine's monotonic clock. A pause lasts from
the end of the last step on any of the old workers to the beginning of the first step on the new ones.
"""

from __future__ import annotations

import io
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext, redirect_stdout
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clusters import Cluster  # isort: skip  # before ray
import ray
import torch
from ray import tune
from ray.tune.schedulers import ResourceChangingScheduler

from bench.images import CONFIG, Images, Row, row, taken
from penstock.bundle import Bundle, Job, Placement, TrialFailed, TrialStopped
from penstock.executors.base import Executor
from penstock.executors.processes.executor import ProcessExecutor
from penstock.executors.ray.executor import RayExecutor
from penstock.log.states import States
from penstock.trial import Config

SIZES = (1, 2, 4, 2)
STEPS = 8  # the least number of steps between two resizes
LONG = 10**6


# --- Penstock --------------------------------------------------------------------------------------------------------


def train(executor: Executor, attempt: int, devices: range, state: Any, folder: Path) -> Any:
    """Train some steps on these devices; gives the state that the trial left with."""
    began, size = time.monotonic(), len(devices)
    names, mode = tuple(executor.devices()[i].name for i in devices), "distributed" if size > 1 else "solo"
    placement = Placement(0, attempt, CONFIG, LONG, state)
    executor.place(Bundle(str(attempt), names, (placement,), mode, "images"))  # type: ignore[arg-type]
    events: list[Any] = []
    while len(taken(folder, began)) < STEPS * size and not any(isinstance(event, TrialFailed) for event in events):
        events = executor.wait(0.05)
    executor.place(Bundle(str(attempt), names, ()))
    while True:
        for event in events:
            if isinstance(event, TrialFailed):
                raise RuntimeError(event.error)
            if isinstance(event, TrialStopped):
                return event.state
        events = executor.wait()


def resized(make: Callable[[Job, int], Executor], rounds: int, *, warm: bool) -> list[tuple[str, float]]:
    """The pauses of 1 → 2 → 4 → 2 → 1 … workers; if ``warm`` they are there already, else started for each size."""
    boundaries, sizes = [], (*SIZES * rounds, 1)
    with TemporaryDirectory() as dir, ExitStack() as stack:
        folder, state = Path(dir), None
        job = Job(Images(dir), 0, "loss", "min", States.of(folder / "states"))
        executor = stack.enter_context(closing(make(job, max(SIZES)))) if warm else None
        if executor is not None:  # every worker has trained before it is timed
            for i in range(max(SIZES)):
                train(executor, -1 - i, range(i, i + 1), None, folder)
        for attempt, size in enumerate(sizes, 1):
            with nullcontext(executor) if executor is not None else closing(make(job, size)) as there:
                state = train(there, attempt, range(size), state, folder)
                boundaries.append(time.monotonic())
        steps = taken(folder)
    pauses = []
    for (one, other), boundary in zip(pairwise(sizes), boundaries, strict=False):
        before = max(ended for began, ended, _ in steps if began < boundary)
        after = min(began for began, _, _ in steps if began > boundary)
        pauses.append((f"{one} → {other}", 1000 * (after - before)))
    return pauses


# --- Ray Tune --------------------------------------------------------------------------------------------------------


def tune_images(config: Config) -> None:
    """The same training by hand, which saves its state with each report; its CPUs are threads."""
    held = tune.get_context().get_trial_resources().required_resources["CPU"]
    torch.set_num_threads(int(held))
    task = Images(config["times"])
    (x, y), valid = task.data(config)
    model = task.model(config)
    optimizer = task.optimizer(model.parameters(), config)
    checkpoint = tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as dir:
            weights, moments = torch.load(Path(dir) / "state.pt")
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    while True:
        for batch in zip(torch.split(x, 64), torch.split(y, 64), strict=True):
            optimizer.zero_grad()
            task.loss(model, batch, config).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            loss = task.metrics(model, valid, config)["loss"].item()
        with TemporaryDirectory() as dir:
            torch.save([model.state_dict(), optimizer.state_dict()], Path(dir) / "state.pt")
            tune.report({"loss": loss}, checkpoint=tune.Checkpoint.from_directory(dir))


def tuned(rounds: int, every: int = 3) -> list[tuple[str, float]]:
    """The pauses of one trial that Tune's own scheduler gives other resources, every few epochs."""
    sizes = (*SIZES * rounds, 1)

    def allocate(controller: Any, trial: Any, result: Any, scheduler: Any) -> Any:
        size = sizes[min(result["training_iteration"] // every, len(sizes) - 1)]
        return tune.PlacementGroupFactory([{"CPU": size}])

    with TemporaryDirectory() as dir:
        tuner = tune.Tuner(
            tune.with_resources(tune_images, {"cpu": 1}),
            param_space={**CONFIG, "times": dir},
            tune_config=tune.TuneConfig(
                metric="loss", mode="min", scheduler=ResourceChangingScheduler(None, allocate), reuse_actors=False
            ),
            run_config=tune.RunConfig(
                storage_path=f"{dir}/results", verbose=0, stop={"training_iteration": every * len(sizes)}
            ),
        )
        with redirect_stdout(io.StringIO()):
            results = tuner.fit()
        if results.errors:
            raise RuntimeError(f"Tune's trial failed: {results.errors}")
        steps = taken(Path(dir))
    moves = [(one, other) for one, other in pairwise(steps) if one[2] != other[2]]
    if len(moves) != len(sizes) - 1:
        raise RuntimeError(f"Tune has moved the trial {len(moves)} times and not {len(sizes) - 1}.")
    named = (f"{one} → {other}" for one, other in pairwise(sizes))
    return [(name, 1000 * (after[0] - before[1])) for name, (before, after) in zip(named, moves, strict=True)]


# --- rows ------------------------------------------------------------------------------------------------------------


def resize() -> Iterator[Row]:
    def started(job: Job, size: int) -> Executor:
        return ProcessExecutor(job, size)

    warm = resized(started, 6, warm=True)
    first, again = warm[0][1], warm[1:]  # the first gang checks, once a signature, whether batches can be divided
    ours = middle(again)
    for move, pause in by_move(again).items():
        yield row("resize", f"Penstock, warm workers, {move}, ms", pause, "at most 100", pause <= 100)
    yield row("resize", "Penstock, the very first, which checks that batches can be taken in parts, ms", first)
    cold = resized(started, 1, warm=False)
    for move, pause in by_move(cold).items():
        yield row("resize", f"workers stopped and started anew, {move}, ms", pause)
    yield row("resize", "ratio, started anew to Penstock, of the medians of all", middle(cold) / ours)
    with Cluster() as cluster:
        cluster.add_node(cpus=max(SIZES))
        on_ray = resized(lambda job, size: RayExecutor(job, f"ray://{cluster.address}", workers=size), 3, warm=True)
        for move, pause in by_move(on_ray[1:]).items():
            yield row("resize", f"Penstock on Ray, {move}, ms", pause)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        theirs = tuned(1)
        ray.shutdown()
    for move, pause in by_move(theirs).items():
        yield row("resize", f"Tune's ResourceChangingScheduler, {move} CPUs, ms", pause)
    yield row("resize", "ratio, Tune to Penstock, of the medians of all", middle(theirs) / ours)
    yield row("resize", "ratio, Tune to Penstock on Ray", middle(theirs) / middle(on_ray[1:]))


def middle(pauses: list[tuple[str, float]]) -> float:
    return statistics.median(pause for _, pause in pauses)


def by_move(pauses: list[tuple[str, float]]) -> dict[str, float]:
    moves = dict.fromkeys(move for move, _ in pauses)
    return {move: statistics.median(pause for name, pause in pauses if name == move) for move in sorted(moves)}
