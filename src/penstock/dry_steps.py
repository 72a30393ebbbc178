"""The cost of a unit at each batch size before any run: a few steps that are thrown away, or a table's numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from penstock.bundle import Bundle, Job, Placement, TrialFailed
from penstock.energy.cost import Draw, Objective
from penstock.energy.meter import Unmetered, meter_of
from penstock.errors import TaskError
from penstock.executors.simulated.settings import Simulated
from penstock.log.states import States
from penstock.tabulated import TabulatedTask
from penstock.task import AnyTask, Task
from penstock.trial import Config

if TYPE_CHECKING:
    from penstock.training.worker import Worker

WARM, STEPS, SECONDS = 3, 20, 0.5  # steps before the clock, and steps or seconds that are timed
NAME = "dry"


@dataclass(frozen=True)
class Found:
    """The cost of a unit of each size, or with ``dry`` the seconds of its steps alone; ``default_cost`` is that of a
    unit of the default size at the greatest power limit, None where it is not known.

    ``max_power`` is None where no joules are counted, and ``reason`` says why: then costs are seconds.
    """

    unit_costs: Mapping[int, float]
    default_cost: float | None
    max_power: float | None
    device: str
    dry: bool = False
    reason: str = ""


def look_up(
    task: AnyTask, configs: Mapping[int, Config], default: int, eta: float, on: Simulated, *, limits: bool
) -> Found:
    """What the tables of simulated runs say; ``limits`` says that each run has its best power limit."""
    first = next(iter(on.cluster()), None)
    kind = on.type if first is None else first.type
    why = "simulated devices count joules with Simulated(watts=...)"
    if not isinstance(task, TabulatedTask):
        return Found({}, None, None, kind, reason=why)
    tables = {size: task.look_up(config) for size, config in configs.items()}
    draws: dict[int, dict[float, Draw]] = {}
    for size, table in tables.items():
        seconds, known = table.seconds[0], table.limits or on.limits  # type: ignore[index]
        if on.watts is None:
            break
        if known:
            draws[size] = {limit: Draw(seconds * slower, watts) for limit, (watts, slower) in known.items()}
        elif on.watts is not None:
            draws[size] = {0.0: Draw(seconds, on.watts_of(kind) if table.watts is None else table.watts)}
    if len(draws) < len(tables):
        seconds_alone = {size: table.seconds[0] for size, table in tables.items()}  # type: ignore[index]
        return Found(seconds_alone, None, None, kind, reason=why)
    most = max(limit for of in draws.values() for limit in of) or max(of[0.0].watts for of in draws.values())
    objective = Objective(eta, most)
    full = {size: objective.unit_cost(of[max(of)]) for size, of in draws.items()}
    costs = {size: objective.epoch_cost(of) for size, of in draws.items()} if limits else full
    return Found(costs, full[default], most, kind)


def measure(task: AnyTask, configs: Mapping[int, Config], seed: int, metric: str) -> Found:
    """Train some steps of each size on this machine's device, and throw them away; a function's steps are unknown."""
    from penstock.executors.local import find_devices
    from penstock.executors.metering import uuids
    from penstock.training.random.generators import own_randomness
    from penstock.training.worker import Worker

    device = find_devices()[0]
    meter = meter_of(uuids([device])[device.name])
    span = None if isinstance(meter, Unmetered) else meter.range
    why = meter.reason if isinstance(meter, Unmetered) else "" if span else "its greatest power is not known"
    most = None if span is None else span[1]
    if not isinstance(task, Task):
        return Found({}, None, most, device.type, reason=why)
    with TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as scratch, own_randomness():
        states = States.of(Path(scratch) / "states")
        worker = Worker(Job(task, seed, metric, "max", states, NAME), device.name)
        try:
            seconds = {size: _unit(worker, number, config) for number, (size, config) in enumerate(configs.items())}
        finally:
            worker.close()
    return Found(seconds, None, most, device.type, dry=True, reason=why)


def _unit(worker: Worker, number: int, config: Config) -> float:
    """The seconds of a unit's steps, without its evaluation."""
    steps = max(1, worker.describe(config, train=False, trial=number).steps)
    placed = Placement(number, 1, config, -(-(WARM + STEPS + 1) // steps))
    bundle = Bundle(f"dry {number}", (worker.device,), (placed,), "solo", study=NAME)
    worker.place(bundle)
    run = worker.training
    assert run is not None
    since, before = time.perf_counter(), 0
    while not worker.idle:
        event = worker.advance()
        if isinstance(event, TrialFailed):
            raise TaskError(f"The first steps with {config} failed:\n{event.error}")
        if before == 0 and run.steps >= min(WARM, steps):
            run.wait()
            since, before = time.perf_counter(), run.steps
        elif before and (run.steps - before >= STEPS or time.perf_counter() - since > SECONDS) and run.steps > before:
            break
    run.wait()
    each = (time.perf_counter() - since) / max(1, run.steps - before)
    worker.place(Bundle(bundle.name, bundle.devices, (), "solo", study=NAME))
    while not worker.idle:
        worker.advance()
    return each * steps
