"""The speed of a trial of each signature on 1, 2, 4, … devices, its units' seconds, and which trials can be fused.

The speed is measured by training a trial on each number of devices in turn; the signatures come from a sample of the
space.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from penstock.bundle import Bundle, Device, Measured, Parted, Placement, TrialFailed, TrialFinished, TrialStopped
from penstock.cli.units import time_units
from penstock.engine.clocking import Shelf
from penstock.engine.decisions import Decider
from penstock.errors import PenstockError, StudyError, TaskError, trace
from penstock.executors.base import Executor
from penstock.executors.ray.address import is_ray
from penstock.log.events import Asked
from penstock.log.states import States
from penstock.report.groups import group
from penstock.report.scaling import Scaling
from penstock.running import executor_of
from penstock.scheduling.nodes import arrange
from penstock.settings import RunSettings
from penstock.speed.curve import doublings, measured
from penstock.speed.profiles import Profiles
from penstock.task import FunctionTask, Task, fingerprint, shards, task_name
from penstock.trial import Config

if TYPE_CHECKING:
    from penstock.study import Study

SAMPLE = 32  # configs that are grouped by their signatures
UNITS = 10  # units for each number of devices: enough steps to time, where a unit has at least two
NEVER = "never on several devices"
NAME = "profile"  # of the study that the executor knows
TOO_GOOD = 1.2  # a speedup above this × the number of devices is more than caches can explain


def count_workers(study: Study, on: str, workers: int | None) -> int | None:
    """How many workers are to be started, None for all of a cluster; a StudyError where nothing can be profiled."""
    name = task_name(study.task)
    if isinstance(study.task, FunctionTask):
        raise StudyError(f"{name} is a function, which has a loop of its own: only a Task trains on several devices.")
    if not isinstance(study.task, Task):
        raise StudyError(f"The trials of {name} are looked up and not trained: there is nothing to measure.")
    if shards(study.task) > 1:
        raise StudyError(f"{name} has shards = {shards(study.task)}: its trials have no other number of devices.")
    if on != "local" and not is_ray(on):
        raise StudyError(f"--on must be local, ray or ray://host:port, where devices can be measured, got {on!r}.")
    if workers == 1 and on != "local":
        raise StudyError("Expected several devices of the cluster, got --workers 1: use --on local to profile one.")
    if on != "local" or workers is not None:
        return workers
    from penstock.executors.local import find_devices

    found = find_devices()
    return len(os.sched_getaffinity(0)) if found[0].type == "cpu" else len(found)


def profile(study: Study, on: str, workers: int | None) -> Scaling:
    """Train a trial of each signature a few steps on 1, 2, 4, … devices, and some units on one.

    The times are kept as a study would. The trials' states are thrown away, and the study's own log and folder are not
    touched.
    """
    first = first_config(study)
    with TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as scratch:
        how = RunSettings(on, workers)
        executor = executor_of(study, how, States.of(Path(scratch) / "states"), NAME)
        try:
            found = _profile(study, executor, first, 0)
            sample = configs_of(study)
            described = executor.describe(sample, train=False, trials=range(len(sample)), study=NAME)
            kinds: dict[str, Config] = {}
            for config, one in zip(sample, described, strict=True):
                kinds.setdefault(one.signature or "", config)
            by_kind = {
                kind: found if config == first else _other(study, executor, config, number)
                for number, (kind, config) in enumerate(kinds.items(), 1)
            }
            steps = {kind: one.seconds.get(1, 0.0) for kind, one in by_kind.items()}
            units = time_units(study, executor, sample, described, steps, NAME)
        finally:
            executor.close()
    rest = tuple(one for one in by_kind.values() if one is not found)
    return replace(found, others=rest, units=tuple(units), groups=tuple(group(described)))


def _other(study: Study, executor: Executor, config: Config, number: int) -> Scaling:
    """The speed of a trial of another signature; a trial that fails costs the others nothing."""
    try:
        return _profile(study, executor, config, number)
    except (StudyError, TaskError) as error:
        return Scaling(task_name(study.task), config, executor.devices()[0].type, {}, 1, str(error), None)


def configs_of(study: Study) -> list[Config]:
    """The first configs that a study asks for; where it asks for few at a time, with others of its space."""
    asked = Decider(study.algorithm, study._search(study.trials)).opened(study.trials)
    sample = [event.config for event in asked if isinstance(event, Asked)][:SAMPLE]
    if study.algorithm.samples:
        wanted = min(SAMPLE, study.trials or SAMPLE)
        sample += [study.space.draw(study.seed, number) for number in range(len(sample), wanted)]
    return sample


def first_config(study: Study) -> Config:
    """The config of trial 0, as the study draws it."""
    asked = Decider(study.algorithm, study._search(study.trials)).opened(study.trials)
    return next(event.config for event in asked if isinstance(event, Asked) and event.trial == 0)


def _profile(study: Study, executor: Executor, config: Config, number: int) -> Scaling:
    devices, said = _alike(executor.devices())
    if len(devices) < 2:
        raise StudyError(
            f"Expected several devices of one type, found {len(devices)}: use a larger cluster, or --workers N on a "
            "machine that has N."
        )
    if "distributed" not in executor.modes:
        raise StudyError("The workers there cannot train one trial together: use --on local, with --workers N.")
    name, type = task_name(study.task), devices[0].type
    try:
        (description,) = executor.describe([config], train=True, study=NAME)
    except PenstockError:
        raise
    except Exception as error:
        raise TaskError(f"The task failed in a dry batch with {config}:\n{trace(error)}") from None
    if description.signature is None:  # a study would not spread this trial either
        return Scaling(name, config, type, {}, 1, f"{NEVER}: {description.reason}", None)
    if description.batch_size < len(devices):
        said.append(f"a batch has {description.batch_size} samples, so it has no more devices")
    count = min(len(devices), description.batch_size)
    if count < 2:
        return Scaling(name, config, type, {}, 1, f"{NEVER}: a batch has one sample", None)
    there = {device.name: device for device in devices}
    names = arrange(there, {}, {0: count})[0]
    placed = (Placement(number, 1, config, UNITS * len(doublings(count)), share=float(count)),)
    why = "; ".join(said)
    bundle = Bundle(
        f"{NAME} {number}", names, placed, "distributed", description.signature, reason=why, measure=True, study=NAME
    )
    found = _measure(executor, bundle)
    shelf = Shelf(Profiles.open(study.dir / "profiles.jsonl"), fingerprint(study.task))
    shelf.measured(found, there[names[0]])
    again = Shelf(Profiles.open(shelf.profiles.path), shelf.task).get(found.signature, there[names[0]], "scaling")
    kept = None if again is None or again.table != found.table else shelf.profiles.path
    curve, cut = measured({}, found.table)
    seconds = found.table if len(found.table) > 1 else {}  # a trial that cannot be spread has no times
    cut += _doubts(seconds)
    return Scaling(name, config, type, seconds, curve.widest, "; ".join((found.reason, *cut)), kept)


def _alike(devices: Sequence[Device]) -> tuple[list[Device], list[str]]:
    """The devices of the commonest type, and a remark where there are others."""
    types = Counter(device.type for device in devices)
    if len(types) < 2:
        return list(devices), []
    ((type, count),) = types.most_common(1)
    alike = [device for device in devices if device.type == type]
    return alike, [f"of {len(devices)} devices, {count} are alike and were used"]


def _doubts(seconds: Mapping[int, float]) -> list[str]:
    """Remarks on times that cannot be true.

    >>> _doubts({1: 0.02, 2: 0.006}), _doubts({1: 0.02, 2: 0.011})
    (['2 devices cannot be 3.3 times as fast as 1, so something else ran: profile again'], [])
    """
    return [
        f"{count} devices cannot be {seconds[1] / t:.1f} times as fast as 1, so something else ran: profile again"
        for count, t in seconds.items()
        if seconds[1] / t > TOO_GOOD * count
    ]


def _measure(executor: Executor, bundle: Bundle) -> Measured:
    """Train a bundle until it is measured, and then stop it: the devices are free afterwards."""
    executor.place(bundle)
    found: Measured | None = None
    while True:
        for event in executor.wait():
            if isinstance(event, Measured) and found is None:
                found = event
                executor.place(replace(bundle, placements=()))
            if isinstance(event, TrialFinished | TrialStopped) and found is not None:
                return found
            if isinstance(event, TrialFailed):
                raise StudyError(f"The trial failed with {bundle.placements[0].config}: {event.error}")
            if isinstance(event, Parted):
                raise StudyError(f"{event.error} Check that {', '.join(event.devices)} reach each other.")
            if isinstance(event, TrialFinished):
                raise StudyError(
                    "Expected units of several steps, got so short ones that no step could be timed: give the task "
                    "more steps a unit, as in unit_steps = 20, or smaller batches."
                )
            if isinstance(event, TrialStopped):
                raise StudyError("The trial was stopped before it was measured, as a device went: try again.")
