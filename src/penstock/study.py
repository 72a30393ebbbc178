"""A study: a task, a space and a goal, run to a result and resumed from its log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from penstock.algorithms.base import Algorithm
from penstock.algorithms.sampling import Search
from penstock.arguments import (
    as_folder,
    as_keep,
    as_max_failures,
    as_name,
    as_objective,
    as_seed,
    as_surrogate,
    as_target,
    as_trials,
    check_flags,
    seconds,
)
from penstock.energy.cost import joules
from penstock.errors import StudyError
from penstock.executors.simulated.settings import Simulated
from penstock.goal import choose_mode
from penstock.log import reader
from penstock.log.messages import said_mode
from penstock.log.naming import check_length
from penstock.log.states import States
from penstock.log.timeline import Row, timeline
from penstock.numeric import legible, shown
from penstock.opening import main_file
from penstock.planning.plan import Plan
from penstock.plans import UnitSeconds, as_plan, plan_of
from penstock.result import Result
from penstock.running import run_study
from penstock.settings import RunSettings, TuneOptions, check_task
from penstock.space import Space
from penstock.surrogate.settings import Surrogate
from penstock.task import as_task, task_name
from penstock.trial import Mode

if TYPE_CHECKING:
    import optuna


class Study:
    """Tune a task over a space.

    >>> import penstock as ps
    >>> def train(trial):
    ...     trial.report(1, loss=(trial.config["x"] - 2) ** 2)
    >>> study = ps.Study(train, {"x": ps.uniform(0, 4)}, metric="loss", mode="min",
    ...                  algorithm=ps.Random(budget=1), trials=20)

    Args:
        task: a ``Task``, or a function of one trial.
        space: a dict of ``uniform``, ``loguniform``, …, of Optuna distributions and of constants; or a function that
            takes an Optuna trial.
        metric: the name of a metric that the task reports.
        mode: whether to make the metric as large ("max") or as small ("min") as possible. It may be left out where the
            metric's name says it, as "val_loss" and "accuracy" do.
        algorithm: decides which trials run and how far.
        trials: the number of trials in all, resumes included; left out where the algorithm fixes it.
        sampler: any Optuna sampler; independent draws without one.
        seed: decides weights, data order, draws and everything else that is random.
        name: the name of the folder in ``dir`` that keeps the log and the states; a study of an existing name goes on.
        states: another place for the states: a folder, or a URL that fsspec reaches, such as "s3://bucket/penstock".
            The study's states lie in a folder of its name there.
        deadline: seconds the study may use in all, or text such as "90s", "10m", "2h".
        target: a value of the metric at which to stop.
        keep: how many of the best trials keep the state of their best report; ``result.kept`` gives these trials.
        max_failures: the most trials that may fail; one more, and the study ends as "failed". None: no limit.
        surrogate: tune narrow twins of the model, as in ``ps.Surrogate(scale=8)``, and train the best configs at full
            width. ``trials`` counts the twins, and the result has the models of full width.
        objective: what is to be small: "time", "energy", or a number between 0 (time) and 1 (energy) that weighs them.
            Trials share devices as that is best, and with ``run(power="limit")`` it chooses the power limit.
        max_energy: joules that the study's devices may use in all, or text such as "500kJ" or "2kWh".
    """

    def __init__(
        self,
        task: object,
        space: Mapping[str, Any] | Callable[..., Any],
        *,
        metric: str,
        mode: Mode | None = None,
        algorithm: Algorithm,
        trials: int | None = None,
        sampler: optuna.samplers.BaseSampler | None = None,
        seed: int = 0,
        name: str | None = None,
        dir: str | Path = ".penstock",
        states: str | Path | None = None,
        deadline: float | str | None = None,
        target: float | None = None,
        keep: int = 1,
        max_failures: int | None = None,
        surrogate: Surrogate | None = None,
        objective: str | float = "time",
        max_energy: float | str | None = None,
    ) -> None:
        if not isinstance(metric, str) or not metric or metric != legible(metric):
            raise StudyError(f"metric must be the name of a metric that the task reports, got {shown(metric)}.")
        if not isinstance(algorithm, Algorithm):
            raise StudyError(f"algorithm must be one such as ASHA(max_budget=27), got {shown(algorithm)}.")
        self.task = as_task(task)
        self.space = Space.of(space)
        self.name, self.dir = as_name(name), as_folder(dir)
        if self.name is not None:
            check_length(self.name)
        log = None if self.name is None else self.dir / self.name / "log.jsonl"
        self.metric, self.seed = metric, as_seed(seed)
        self.mode, self.mode_from = choose_mode(metric, mode, log)
        self.algorithm, self.sampler = algorithm, sampler
        self.states = None if states is None else str(States.of(states))
        self.deadline, self.target = seconds(deadline), as_target(target, metric)
        self.keep, self.max_failures = as_keep(keep), as_max_failures(max_failures)
        self.surrogate = as_surrogate(surrogate, self.task, algorithm)
        self.eta, self.max_energy = as_objective(objective), joules(max_energy)
        self.file = main_file()  # `penstock resume` loads it again
        self.trials = self._total(as_trials(trials))
        self.ran: Path | None = None  # the folder of its last run
        self._given: dict[str, Any] = {
            "task": task,
            "space": space,
            "metric": metric,
            "mode": mode,
            "algorithm": algorithm,
            "trials": trials,
            "sampler": sampler,
            "seed": seed,
            "name": name,
            "dir": dir,
            "states": states,
            "deadline": deadline,
            "target": target,
            "keep": keep,
            "max_failures": max_failures,
            "surrogate": surrogate,
            "objective": objective,
            "max_energy": max_energy,
        }

    def replace(self, **changes: Any) -> Study:
        """An equal study with some arguments changed: ``study.replace(trials=128, seed=1)``."""
        arguments = {**self._given, **changes}
        other = Study(arguments.pop("task"), arguments.pop("space"), **arguments)
        other.file = self.file
        return other

    def _total(self, trials: int | None) -> int | None:
        fixed = self.algorithm.trials(self._search(trials))
        if fixed is None and trials is None:
            raise StudyError(f"{type(self.algorithm).__name__} needs trials=: how many to try in all, as in trials=64.")
        if fixed is not None and trials not in (None, fixed):
            raise StudyError(
                f"{self.algorithm!r} runs {fixed} trials, got trials={trials}: leave it out or give {fixed}."
            )
        return trials if fixed is None else fixed

    def _search(self, trials: int | None) -> Search:
        sampler, own = self.sampler, self.algorithm.default_sampler()
        if own is not None:
            if sampler is not None:
                raise StudyError(f"{type(self.algorithm).__name__} brings its own sampler: leave sampler= out.")
            sampler = own
        if sampler is not None and not self.algorithm.samples:
            raise StudyError(f"{type(self.algorithm).__name__} draws nothing: leave sampler= out.")
        return Search(self.space, self.metric, self.mode, seed=self.seed, trials=trials, sampler=sampler)

    def run(
        self,
        on: str | Simulated = "local",
        *,
        sharing: str = "auto",
        scheduler: str = "waterfill",
        workers: int | None = None,
        weight: float = 1.0,
        growing: str = "best",
        mixed_types: bool = False,
        deterministic: bool = False,
        packing: str | None = None,
        similarity: float | None = None,
        active_threads: float | None = None,
        plan: Plan | str | Path | None = None,
        late: str = "finish",
        power: str | None = None,
        allow_changes: bool = False,
        progress: bool | None = None,
    ) -> Result:
        """Run to the end, going on from the log where there is one.

        Args:
            on: where the study runs: "local"; "ray", the Ray cluster that runs here or a new one; "ray://host:port"; or
                ``ps.Simulated(devices=64)``, a simulated cluster on a virtual clock. On a cluster with an autoscaler
                "ray?market=spot&idle=30" takes nodes of one market, and gives idle nodes back after 30 seconds instead
                of 60.
            sharing: how trials share devices. "solo": one trial a device. "fused": many trials as one model, in bundles
                as large as possible. "packed": unlike trials on one device too, as many as its memory holds; trials
                that are alike are fused inside the pack. "processes": a worker process for each trial, several on a
                device of this machine, on a GPU under MPS where its daemon starts. "distributed": never several trials
                on a device, and one trial on several devices where that pays. "auto": whichever of "solo", "fused",
                "packed" and "distributed" is measured to pay.
            scheduler: how devices are divided among trials: "waterfill", "dynamic_fluid", "static_fluid", or "fifo",
                one trial a device.
            workers: the most devices to use, each with a worker of its own. The default is 1 on this machine, which
                trains in this process, and all devices on a cluster.
            weight: the weight by which the study shares a Ray cluster with other studies.
            growing: which trial gets idle devices first, while no trial waits and as far as several devices pay:
                "best", the best trial, or "evenly", the trial that has fewest.
            mixed_types: whether one trial's devices may be of several types; the slowest of them sets its pace.
            deterministic: decide nothing by measured times, so that one seed gives one result on one worker. Bundles
                have a fixed size then, and no step is compiled.
            packing: which trials join a pack first: "nearest", whose configs are most like its first trial's (the
                default), "random", or "batch_size", trials of its batch size alone.
            similarity: how far a config may be from that of its pack's first trial: a step of a number counts 1, and
                so does another category. Without it any trial may join.
            active_threads: the most percent of a GPU's threads that each process of sharing="processes" may use, which
                MPS calls the active thread percentage. Without it each may use all.
            plan: a plan to follow, as ``study.plan`` makes it, or the file that it was saved in. It decides which nodes
                there are, and how many devices each trial has. A study that is taken up again goes on with its plan.
            late: what to do once a plan's deadline cannot be kept any more: "finish" as cheaply as possible, "stop", or
                "pay" for as much speed as the plan's ``max_cost`` allows.
            power: what to do about the power limits of GPUs, by ``objective``. "observe" tells which limit would be
                best, and sets none. "limit" tries limits for a few seconds each while trials train, keeps what it
                finds, and sets the best; the prior limit returns at the end. Without it joules are counted alone.
            allow_changes: go on although the task, the space or the algorithm changed since the log was written.
            progress: whether to show progress: a live block on a terminal, a live line in a notebook, and elsewhere a
                line on stderr now and then. None is as True.
        """
        check_flags(allow_changes=allow_changes, progress=True if progress is None else progress)
        sharing_how = sharing, scheduler, growing, mixed_types, deterministic, packing, similarity, active_threads
        how = RunSettings(on, workers, weight, *sharing_how, late, power)
        if self.surrogate is not None and plan is not None:
            raise StudyError("A plan says nothing of surrogates: leave plan= or surrogate= out.")
        followed_plan = None if plan is None else as_plan(plan)
        self.task = as_task(self.task)  # its settings may have changed since the study was made
        check_task(how, self.task, self.states, narrow=self.surrogate is not None)
        from penstock.report.console import warnings_shown

        with warnings_shown():
            return run_study(self, how, allow_changes, progress, followed_plan)

    def plan(
        self,
        *,
        deadline: float | str | None = None,
        max_cost: float | None = None,
        instances: Sequence[str] | None = None,
        spot: bool = False,
        confidence: float = 0.95,
        catalogue: str | Path | None = None,
        unit_seconds: UnitSeconds | None = None,
        log: str | None = None,
        most: int | None = None,
    ) -> Plan:
        """The cheapest nodes that keep a deadline, or the quickest that keep a cost: a plan, which ``run`` can follow.

        A unit's seconds come from what earlier runs of the task measured, or ``penstock profile``, as far as nothing
        else is given.

        Args:
            deadline: seconds that the study may take in all, or text such as "90s", "10m", "2h".
            max_cost: the most that it may cost, in the catalogue's money.
            instances: the types of nodes to choose from, by their names in the catalogue; those on whose devices
                something was measured, if None.
            spot: whether nodes of the spot market may be used, which can be taken away.
            confidence: the probability with which the deadline, or the cost, is to hold.
            catalogue: a TOML file of instances and prices of your own, over the one that Penstock brings.
            unit_seconds: the seconds of a unit alone on a device, or their mean and deviation; by instance if they
                differ.
            log: the name of a study that has run, whose units' times are taken.
            most: the most nodes that there may be at once.
        """
        self.task = as_task(self.task)
        if self.surrogate is not None:
            raise StudyError(
                "A study with surrogate= cannot be planned, as its targets are not known before: leave it out."
            )
        return plan_of(
            self,
            deadline=deadline,
            max_cost=max_cost,
            instances=instances,
            spot=spot,
            confidence=confidence,
            catalogue=catalogue,
            unit_seconds=unit_seconds,
            log=log,
            most=most,
        )

    def timeline(self) -> list[Row]:
        """Which trial had how much of which device, as rows of device, trial, start, end, share and mode."""
        dir = self.ran if self.name is None else self.dir / self.name
        if dir is None or not (dir / "log.jsonl").is_file():
            raise StudyError("There is no timeline before the study has run: run it first.")
        return timeline(reader.read(dir / "log.jsonl"))

    @property
    def _goal(self) -> str:
        return said_mode({"metric": self.metric, "mode": self.mode, "mode_from": self.mode_from})

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}, "
        return f"Study({name}{task_name(self.task)}, {self.algorithm!r}, {self._goal})"

    def _repr_html_(self) -> str:
        from penstock.report.notebook import facts_html

        facts = {"space": self.space.describe(), "algorithm": repr(self.algorithm), "metric": self._goal}
        return facts_html(f"{self.name or 'Study'}: {task_name(self.task)}", facts)


OTHERS = {"num_samples": "trials", "n_trials": "trials", "direction": "mode"}  # names in Ray Tune and in Optuna


def tune(task: object, space: Mapping[str, Any] | Callable[..., Any], **options: Unpack[TuneOptions]) -> Result:
    """``Study(task, space, ...).run(...)`` in one call, with the options of both.

    >>> import penstock as ps
    >>> def train(trial):
    ...     trial.report(1, loss=(trial.config["x"] - 2) ** 2)
    >>> space, algorithm = {"x": ps.uniform(0, 4)}, ps.Random(budget=1)
    >>> len(ps.tune(train, space, metric="loss", mode="min", algorithm=algorithm, trials=9).trials)
    9
    """
    given: dict[str, Any] = {**options}
    known = [name for name in signature(tune).parameters if name not in ("task", "space")]
    for name in given:
        if name not in known:
            close = [OTHERS[name]] if name in OTHERS else get_close_matches(name, known, n=1)
            meant = f"use {close[0]}=" if close else "leave it out"
            raise TypeError(f"tune expected options among {', '.join(known)}, got {name}=: {meant}.")
    how = {name: given.pop(name) for name in signature(Study.run).parameters if name in given}
    return Study(task, space, **given).run(**how)


def _sign_tune() -> None:
    """Show the options of ``Study`` and ``Study.run`` where Python shows the signature of ``tune``, as in ``help``."""
    of_run = [one for name, one in signature(Study.run).parameters.items() if name != "self"]
    options = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in of_run]
    both = [*signature(Study).parameters.values(), *options]
    tune.__signature__ = signature(tune).replace(parameters=both)  # type: ignore[attr-defined]


_sign_tune()
