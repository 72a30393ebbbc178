"""A recurring job: a model that is trained again and again, each time to the same target, at less and less cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from penstock.algorithms.base import check_count
from penstock.algorithms.recurring import Ended, Phase, PolicyName, Recurrences, Scaling, scaled
from penstock.arguments import as_folder, as_target
from penstock.domains import choice, randint
from penstock.dry_steps import Found, look_up, measure
from penstock.energy.cost import Draw, Objective, fraction
from penstock.errors import StudyError
from penstock.executors.simulated.settings import Simulated
from penstock.log import reader
from penstock.log.events import Asked, Event, Limited, Opened, Reported
from penstock.log.events import Ended as LogEnded
from penstock.numeric import finite, shown
from penstock.saying import say
from penstock.speed.profiles import batch_size
from penstock.study import Study
from penstock.task import as_task
from penstock.trial import Config, Mode

if TYPE_CHECKING:
    from torch import nn

    from penstock.result import Result, Trial


class Recurrence:
    """One recurrence of a job, with all of its runs."""

    def __init__(self, number: int, runs: Sequence[Ended], result: Result) -> None:
        self.number = number
        """Its number, from 0, which ``config["recurrence"]`` was."""
        self.runs = tuple(runs)
        """Its runs in their order; each has its ``size``, ``units``, ``cost``, ``stake`` and ``verdict``."""
        self._result = result

    @property
    def size(self) -> int:
        """The batch size of its last run, which reached the target unless the recurrence missed it."""
        return self.runs[-1].size

    @property
    def reached(self) -> bool:
        """Whether it reached the target."""
        return self.runs[-1].verdict == "reached"

    @property
    def cost(self) -> float:
        """The cost of all its runs (Zeus eq. 2): joules weighed by eta, or seconds where nothing counts joules."""
        return sum(run.cost for run in self.runs)

    @property
    def seconds(self) -> float:
        """The device seconds of all its runs."""
        return sum(run.seconds for run in self.runs)

    @property
    def joules(self) -> float | None:
        """The joules of all its runs; None where they are not known."""
        known = [run.joules for run in self.runs if run.joules is not None]
        return sum(known) if len(known) == len(self.runs) else None

    @property
    def trial(self) -> Trial:
        """The trial of its last run."""
        return self._result.trials[self.runs[-1].trial]

    def model(self) -> nn.Module:
        """Its trained model, on the CPU, ready to evaluate; the job keeps that of its last recurrence."""
        return self.trial.model()

    def __repr__(self) -> str:
        tries = "" if len(self.runs) == 1 else f" in {len(self.runs)} runs"
        return (
            f"Recurrence({self.number}, batch_size={self.size}, {self.runs[-1].verdict}{tries}, cost={self.cost:.4g})"
        )


class Recurring:
    """Train a model again and again, each time to the same target, and learn which batch size costs least.

    >>> import penstock as ps
    >>> def train(trial):
    ...     for step in range((trial.state or 0) + 1, 31):
    ...         trial.report(step, state=step, accuracy=step / 10)
    >>> job = ps.Recurring(train, {"lr": 0.1}, batch_sizes=[16, 32], default=32, metric="accuracy", target=0.97,
    ...                    max_budget=60, recurrences=90)

    Args:
        task: a ``Task``, or a function of one trial. ``config["batch_size"]`` is the size, and
            ``config["recurrence"]`` counts from 0, so that ``data`` can take the day's.
        config: the config of every run.
        batch_sizes: the sizes that may be used.
        default: the size that is used today. It must reach the target.
        metric: the name of the metric that the target is a value of.
        target: the value that a recurrence trains to.
        max_budget: the most units of a run; one that has not reached the target by then has missed it.
        recurrences: about how many there will be in all: the more, the more is worth trying.
        mode: as in ``Study``.
        eta: how much energy counts against time, from 0 (time alone) to 1 (energy alone).
        risk: the part of what the default would cost in all that may be lost beyond what is sure to be saved. With 0
            nothing is tried before something is saved, as by a better power limit.
        policy: "staked", "zeus", "grid" or "default".
        beta: a run of a known size is stopped at so many times the least cost.
        scaling: how ``config["lr"]`` follows the size: with its root ("sqrt"), in proportion ("linear"), or not (None).
        name: the name of the folder in ``dir`` that keeps the job's log; a job of an existing name goes on.
        dir: the folder that holds studies and jobs.
        seed: decides everything that is random.
    """

    def __init__(
        self,
        task: object,
        config: Mapping[str, Any],
        *,
        batch_sizes: Sequence[int],
        default: int,
        metric: str,
        target: float,
        max_budget: int,
        recurrences: int,
        mode: Mode | None = None,
        eta: float = 0.5,
        risk: float = 0.0,
        policy: PolicyName = "staked",
        beta: float = 2.0,
        scaling: Scaling | None = "sqrt",
        name: str | None = None,
        dir: str | Path = ".penstock",
        seed: int = 0,
    ) -> None:
        if not isinstance(batch_sizes, Sequence) or isinstance(batch_sizes, str) or not batch_sizes:
            raise StudyError(
                f"batch_sizes must be a list of batch sizes such as [16, 32, 64], got {shown(batch_sizes)}."
            )
        if not isinstance(config, Mapping) or "batch_size" in config or "recurrence" in config:
            raise StudyError(
                f"config must be a dict without batch_size and recurrence, which the job sets, got {shown(config)}."
            )
        if (goal := as_target(target, metric)) is None:
            raise StudyError(f"target must be a finite value of {metric!r}, got None.")
        times = finite(beta)
        if times is None or times < 1:
            raise StudyError(f"beta must be a number of at least 1, got {shown(beta)}.")
        self.task, self.config = as_task(task), dict(config)
        self.name, self.dir = name, as_folder(dir)
        self._settings: dict[str, Any] = {
            "config": self.config,
            "sizes": list(batch_sizes),
            "default": default,
            "target": goal,
            "max_budget": max_budget,
            "recurrences": recurrences,
            "eta": fraction("eta", eta),
            "risk": fraction("risk", risk),
            "policy": policy,
            "beta": float(times),
            "scaling": scaling,
        }
        self._algorithm()
        self._study: dict[str, Any] = {"metric": metric, "mode": mode, "seed": seed}
        self._recurrences: list[Recurrence] = []
        self._made(1, [Phase()])

    @property
    def recurrences(self) -> list[Recurrence]:
        """All recurrences that have ended, as the last ``run`` saw them."""
        return list(self._recurrences)

    def _algorithm(self) -> Recurrences:
        return Recurrences(**self._settings)

    def _made(self, total: int, phases: Sequence[Phase]) -> Study:
        algorithm = self._algorithm()
        algorithm.keep(phases)
        return Study(
            self.task,
            {**self.config, "batch_size": choice(algorithm.sizes), "recurrence": randint(0, 2**31)},
            algorithm=algorithm,
            trials=total,
            objective=self._settings["eta"],
            name=self.name,
            dir=self.dir,
            **self._study,
        )

    @overload
    def run(
        self,
        count: None = None,
        *,
        workers: int = 1,
        on: str | Simulated = "local",
        power: str | None = None,
        progress: bool | None = None,
    ) -> Recurrence: ...
    @overload
    def run(
        self,
        count: int,
        *,
        workers: int = 1,
        on: str | Simulated = "local",
        power: str | None = None,
        progress: bool | None = None,
    ) -> list[Recurrence]: ...
    def run(
        self,
        count: int | None = None,
        *,
        workers: int = 1,
        on: str | Simulated = "local",
        power: str | None = None,
        progress: bool | None = None,
    ) -> Recurrence | list[Recurrence]:
        """Run the next recurrence, repeats of stopped runs included; or the next ``count`` of them.

        A call that was cut off is finished by the next one, in place of new recurrences.

        Args:
            count: how many recurrences; with None one, which is given back alone.
            workers: how many recurrences may be under way at once, each on a device of its own.
            on: where they run, as in ``Study.run``.
            power: what to do about power limits, as in ``Study.run``.
            progress: whether to show progress, as in ``Study.run``.
        """
        many, workers = 1 if count is None else check_count("count", count), check_count("workers", workers)
        past = self._past()
        if many > 1 and not _done(past):  # the first tells whether the default reaches the target at all
            self._run(1, 1, on, power, progress, past)
            past, many = self._past(), many - 1
            made = [self._recurrences[0], *self._run(many, workers, on, power, progress, past)]
        else:
            made = self._run(many, workers, on, power, progress, past)
        return made[-1] if count is None else made

    def _run(
        self, many: int, workers: int, on: str | Simulated, power: str | None, progress: bool | None, past: list[Event]
    ) -> list[Recurrence]:
        done, asked = _done(past), _asked(past)
        total = asked if asked > done else done + many
        phases = _phases(past)
        if asked == done:
            phases = self._next_phase(phases, done, workers, on, power, past)
        study = self._made(total, phases)
        result = study.run(
            on,
            sharing="solo",
            scheduler="fifo",
            workers=None if isinstance(on, Simulated) else workers,
            power=power,
            progress=False if progress is None else progress,
        )
        self.name = result.dir.name
        assert isinstance(study.algorithm, Recurrences)
        return self._take(study.algorithm, result, done)

    def _take(self, algorithm: Recurrences, result: Result, done: int) -> list[Recurrence]:
        runs: dict[int, list[Ended]] = {}
        for run in algorithm.ended:
            runs.setdefault(run.recurrence, []).append(run)
        self._recurrences = [Recurrence(number, runs[number], result) for number in sorted(runs)]
        made = self._recurrences[done:]
        if missed := next((one for one in made if not one.reached), None):
            raise StudyError(self._missed(missed))
        return made

    def _missed(self, missed: Recurrence) -> str:
        """That a recurrence missed the target, and how far each size got."""
        metric, target = self._study["metric"], self._settings["target"]
        got = {run.size: run for run in missed.runs}
        each = ", ".join(
            f"{size} " + ("failed" if run.verdict == "failed" else f"got to {shown(run.best)} in {run.units} units")
            for size, run in sorted(got.items())
        )
        last = missed.runs[-1]
        if last.verdict == "failed":
            error = (missed.trial.error or "").strip().splitlines()[-1:]
            return f"Recurrence {missed.number} failed with the default batch size {last.size}: {''.join(error)}"
        none = "the default batch size misses it" if len(got) == 1 else "no batch size that was tried reaches it"
        return (
            f"Recurrence {missed.number} did not reach {metric}={target}: {none} (of batch sizes, {each}). Give a "
            "default that reaches it, a larger max_budget, or another target, under another name."
        )

    def _past(self) -> list[Event]:
        file = None if self.name is None else self.dir / self.name / "log.jsonl"
        return [] if file is None or not file.is_file() else list(reader.read(file))

    def _next_phase(
        self,
        phases: list[Phase],
        done: int,
        workers: int,
        on: str | Simulated,
        power: str | None,
        past: Sequence[Event],
    ) -> list[Phase]:
        """The phases, with a new one from the next recurrence on where something has changed."""
        found = self._find(phases, on, power, past)
        phase = Phase(done, workers, found.unit_costs, found.default_cost, found.max_power, found.device, found.dry)
        if not phases and found.max_power is None and self._settings["eta"] > 0:
            say(f"The cost is time alone, and eta has no effect: {found.reason or 'nothing counts joules here'}.")
        if phases and replace(phases[-1], since=done) == phase:
            return phases
        return [*(one for one in phases if one.since < done), phase]

    def _find(self, phases: list[Phase], on: str | Simulated, power: str | None, past: Sequence[Event]) -> Found:
        algorithm = self._algorithm()
        configs: dict[int, Config] = {
            size: scaled(self.config, algorithm.default, size, algorithm.scaling) | {"recurrence": 0}
            for size in algorithm.sizes
        }
        if isinstance(on, Simulated):
            return look_up(self.task, configs, algorithm.default, algorithm.eta, on, limits=power == "limit")
        from penstock.executors.local import find_devices

        known = next((one for one in reversed(phases) if one.device == find_devices()[0].type), None)
        if known is not None:  # dry steps are made once a type of device
            costs = dict(known.unit_costs or {})
            before = known.default_cost
            if before is None and known.max_power is not None:
                before = unlimited_cost(past, algorithm.default, Objective(algorithm.eta, known.max_power))
            return Found(costs, before, known.max_power, known.device, known.dry)
        return measure(self.task, configs if algorithm.learns else {}, self._study["seed"], self._study["metric"])

    def __repr__(self) -> str:
        of = {k: v for k, v in self._settings.items() if k in ("sizes", "default", "target", "eta", "risk", "policy")}
        return f"Recurring({', '.join(f'{k}={v!r}' for k, v in of.items())}, name={self.name!r})"


def unlimited_cost(past: Sequence[Event], default: int, objective: Objective) -> float | None:
    """The cost of a unit of the default size at the greatest power limit; None where nothing tells it.

    It follows from units that were trained at the limit that was found to be best, and from what that limit saves: so
    what is saved by it is known, and an untried size can be staked that much.
    """
    sizes: dict[int, int] = {}
    table: Mapping[int, tuple[float, float]] = {}
    more, costs, new, found = 0.0, list[float](), False, None
    for event in past:
        if isinstance(event, Asked):
            sizes[event.trial] = event.config["batch_size"]
        elif isinstance(event, Opened):
            more = 0.0  # this driver may have set no limit
        elif isinstance(event, Limited) and event.set and batch_size(event.signature) == default:
            draws = {limit: Draw(*both) for limit, both in event.table.items()}
            more = objective.unit_cost(draws[max(draws)]) / objective.unit_cost(draws[round(event.limit)])
            if event.table != table:
                table, costs, new = event.table, [], True
        elif isinstance(event, Reported) and more and sizes[event.trial] == default and event.usage.joules is not None:
            if not new:  # the unit in which the limit was found began at others
                costs.append(objective.cost(event.usage.device_seconds, event.usage.joules))
                found = more * sum(costs) / len(costs)
            new = False
    return found


def _asked(past: Sequence[Event]) -> int:
    """How many recurrences earlier calls were to run, in all."""
    totals = [event.settings["trials"] for event in past if isinstance(event, Opened)]
    return totals[-1] if totals else 0


def _done(past: Sequence[Event]) -> int:
    """How many recurrences have ended: all that were asked for, unless the last call was cut off."""
    totals = [0]
    for event in past:
        if isinstance(event, Opened):
            asked = event.settings["trials"]
        elif isinstance(event, LogEnded) and event.reason in ("done", "failed"):
            totals.append(asked)
    return totals[-1]


def _phases(past: Sequence[Event]) -> list[Phase]:
    kept = [event.settings.get("kept", {}) for event in past if isinstance(event, Opened)]
    return [Phase.of(one) for one in kept[-1]["phases"]] if kept else []
