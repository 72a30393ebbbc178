"""A study: a task, a space and a goal, run to a result and resumed from its log."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.algorithms.base import Algorithm
from penstock.algorithms.sampling import Search
from penstock.bundle import Job
from penstock.engine.clocking import Pace, Shelf
from penstock.engine.decisions import Decider, replay
from penstock.engine.engine import Engine
from penstock.engine.limits import Deadline, Limit, Target
from penstock.errors import StudyError
from penstock.executors.base import Executor
from penstock.executors.simulated.executor import Simulated, SimulatedExecutor
from penstock.log import events
from penstock.log.changes import changes, check_configs, check_states, given
from penstock.log.events import Log, Opened
from penstock.log.history import History
from penstock.log.states import States
from penstock.log.timeline import Row, timeline
from penstock.result import Result
from penstock.scheduling.sharded import sharded
from penstock.settings import RunSettings, check_task
from penstock.space import Space
from penstock.speed.model import Sharing, SpeedModel
from penstock.speed.profiles import Profiles
from penstock.stopping import say_how_to_resume, stoppable
from penstock.task import FunctionTask, as_task, fingerprint, shards, task_name
from penstock.trial import Mode, plain

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
        metric, mode: what to make as large ("max") or as small ("min") as can be.
        algorithm: which trials run and how far.
        trials: how many in all, resumes included; left out where the algorithm fixes it.
        sampler: any Optuna sampler; independent draws without one.
        seed: decides weights, data order, draws and all else that is random.
        name: of the folder in ``dir`` that keeps the log and the states; a study of an existing name goes on.
        states: another place for the states: a folder, or a URL that fsspec reaches, such as "s3://bucket/penstock".
            The study's are in a folder of its name there.
        deadline: seconds the study may use in all, or text such as "90s", "10m", "2h".
        target: a value of the metric at which to stop.
    """

    def __init__(
        self,
        task: object,
        space: Mapping[str, Any] | Callable[..., Any],
        *,
        metric: str,
        mode: Mode = "max",
        algorithm: Algorithm,
        trials: int | None = None,
        sampler: optuna.samplers.BaseSampler | None = None,
        seed: int = 0,
        name: str | None = None,
        dir: str | Path = ".penstock",
        states: str | Path | None = None,
        deadline: float | str | None = None,
        target: float | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise StudyError(f'mode must be "min" or "max", got {mode!r}.')
        if not isinstance(metric, str) or not metric:
            raise StudyError(f"metric must be the name of a metric that the task reports, got {metric!r}.")
        if not isinstance(algorithm, Algorithm):
            raise StudyError(f"algorithm must be one such as ASHA(max_budget=27), got {algorithm!r}.")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise StudyError(f"seed must be a whole number, got {seed!r}.")
        if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 1):
            raise StudyError(f"trials must be a whole number above 0, got {trials!r}.")
        if name is not None and not (isinstance(name, str) and re.fullmatch(r"[\w\-+=@ ][\w.\-+=@ ]*", name)):
            raise StudyError(
                f"name must be one folder's name of letters, digits, spaces and . - _ + = @, got {name!r}: "
                "choose the folder above it with dir=."
            )
        if target is not None and not (isinstance(target, Real) and math.isfinite(target)):
            raise StudyError(f"target must be a finite value of {metric!r}, got {target!r}.")
        self.task = as_task(task)
        self.space = Space.of(space)
        self.metric, self.mode, self.seed = metric, mode, seed
        self.algorithm, self.sampler = algorithm, sampler
        self.name, self.dir = name, Path(dir)
        self.states = None if states is None else str(States.of(states))
        self.deadline, self.target = seconds(deadline), target
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        self.file = None if main is None else str(Path(main).absolute())  # `penstock resume` loads it again
        self.trials = self._total(trials)
        self._ran: Path | None = None
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
        allow_changes: bool = False,
        progress: bool | None = None,
    ) -> Result:
        """Run to the end, going on from the log where there is one.

        Args:
            on: where: "local"; "ray", the Ray cluster that runs here or a new one, or "ray://host:port"; or
                ``ps.Simulated(devices=64)``, a cluster that is not there, on a virtual clock. Of a cluster with an
                autoscaler "ray?market=spot&idle=30" takes nodes of one market, and gives idle ones back after 30
                seconds instead of 60.
            sharing: how trials share devices: "solo", one trial a device; "fused", as one model, in bundles as large as
                can be; "distributed", never several on a device, and one on several where that pays; or "auto", which
                measures what pays.
            scheduler: how devices are divided among trials: "waterfill", "dynamic_fluid", "static_fluid", or "fifo",
                one trial a device.
            workers: how many devices at most, each with a worker of its own: on this machine 1, which trains in this
                process, unless given; on a cluster all of them.
            weight: the study's part of a Ray cluster beside those of other studies.
            growing: which trial is given idle devices first, while no trial waits and as far as several pay: "best",
                the best one, or "evenly", the one that has fewest.
            mixed_types: whether one trial's devices may be of several types; the slowest of them sets its pace.
            allow_changes: go on although the task, the space or the algorithm changed since the log was written.
            progress: show it; None where a person is looking.
        """
        how = RunSettings(
            on=on,
            workers=workers,
            weight=weight,
            sharing=sharing,
            scheduler=scheduler,
            growing=growing,
            mixed_types=mixed_types,
        )
        check_task(how, self.task, self.states)
        log = self._open()
        try:
            settings = {**self._settings(log.dir.name), "run": how.plain()}
            settings["changed"] = changes(log.past, settings, self.algorithm.grows, allow_changes)
            if settings["changed"]:
                check_configs(log.past, self.space)
            history, decider = History(), Decider(self.algorithm, self._search(self.trials))
            pending = replay(log.past, history, decider, given=given(log.past, bool(settings["changed"])))
            pending += decider.opened(self.trials)
            states = self._states(log, history, allow_changes)
            executor = self._executor(how, log.dir)
            try:
                engine = Engine(
                    log,
                    history,
                    decider,
                    executor,
                    sharded if shards(self.task) > 1 else how.schedule,
                    states=states,
                    limits=self._limits(),
                    pace=self._pace(executor, how, log.dir),
                    spreads=self._spreads(executor, how),
                    growing=how.growth,
                    shards=shards(self.task),
                )
                with self._progress(progress) as engine.watch, stoppable(engine.interrupt):
                    reason = engine.run(Opened(settings, history.clock), pending)
                if reason == "interrupted":
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                say_how_to_resume(log.dir, how)
                raise
            finally:
                executor.close()
        finally:
            log.close()
        result = Result(history, self.task, log.dir, states)
        result.save_best()
        self._ran = log.dir
        return result

    def timeline(self) -> list[Row]:
        """Which trial had how much of which device, as rows of device, trial, start, end, share and mode."""
        dir = self._ran if self.name is None else self.dir / self.name
        if dir is None or not (dir / "log.jsonl").is_file():
            raise StudyError("There is no timeline before the study has run: run it first.")
        return timeline(events.read(dir / "log.jsonl"))

    def _open(self) -> Log:
        if self.name is not None:
            return Log.open(self.dir / self.name)
        stem = re.sub(r"\W+", "-", task_name(self.task).lower()).strip("-") or "study"
        number = 1
        while self._taken(f"{stem}-{number}"):
            number += 1
        return Log.open(self.dir / f"{stem}-{number}")

    def _taken(self, name: str) -> bool:
        """Whether there is a study of that name, here or, where several machines share a place for states, there."""
        if (self.dir / name).exists():
            return True
        return self.states is not None and bool(States.of_study(self.dir / name, self.states).names())

    def _states(self, log: Log, history: History, allow_changes: bool) -> States:
        """The place of the states, tried before anything trains; the study's own folder needs no trial."""
        states = States.of_study(log.dir, self.states)
        if self.states is not None:
            states.probe()
        check_states(log.past, history, log.dir, self.states, allow_changes)
        return states

    def _settings(self, name: str) -> dict[str, Any]:
        settings = {
            "log": events.VERSION,
            "penstock": __version__,
            "name": name,
            "file": self.file,
            "task": task_name(self.task),
            "source": fingerprint(self.task),
            "space": self.space.describe(),
            "metric": self.metric,
            "mode": self.mode,
            "algorithm": repr(self.algorithm),
            "max_budget": self.algorithm.max_budget,
            "sampler": None if self.sampler is None else type(self.sampler).__name__,
            "seed": self.seed,
            "trials": self.trials,
            "states": self.states,
            "deadline": self.deadline,
            "target": self.target,
        }
        kept: dict[str, Any] = plain(settings)
        return kept

    def _limits(self) -> list[Limit]:
        target: list[Limit] = [] if self.target is None else [Target(self.target)]
        return target if self.deadline is None else [*target, Deadline(self.deadline)]

    def _executor(self, how: RunSettings, dir: Path) -> Executor:
        job = Job(self.task, self.seed, self.metric, self.mode, States.of_study(dir, self.states))
        if isinstance(how.on, Simulated):
            return SimulatedExecutor(job, how.on)
        if how.ray:
            from penstock.executors.ray.cluster import code_of, settings
            from penstock.executors.ray.executor import RayExecutor

            address, more = settings(how.on)
            folder, least = None if self.file is None else code_of(Path(self.file)), shards(self.task)
            return RayExecutor(job, address, workers=how.workers, least=least, weight=how.weight, folder=folder, **more)
        if how.workers is None or how.workers == 1:
            from penstock.executors.local import LocalExecutor

            return LocalExecutor(job)
        from penstock.executors.processes.executor import ProcessExecutor

        return ProcessExecutor(job, how.workers)

    def _pace(self, executor: Executor, how: RunSettings, dir: Path) -> Pace:
        """What is learnt of the trials' speed; where trials share devices, as far as that pays."""
        together: Sharing = "forced" if how.sharing == "fused" else "measured"
        alone = how.sharing in ("solo", "distributed") or how.scheduler == "fifo" or isinstance(self.task, FunctionTask)
        if alone or shards(self.task) > 1 or "fused" not in executor.modes:
            together = "never"
        model = SpeedModel(together, spreads=self._spreads(executor, how))
        profiles = Profiles.open(dir.parent / "profiles.jsonl", kept=not isinstance(how.on, Simulated) or how.on.kept)
        return Pace(model, Shelf(profiles, fingerprint(self.task)))

    def _spreads(self, executor: Executor, how: RunSettings) -> bool:
        """Whether one trial may have several devices."""
        return "distributed" in executor.modes and how.sharing in ("auto", "distributed") and shards(self.task) == 1

    @contextmanager
    def _progress(self, wanted: bool | None) -> Iterator[Callable[[History], None] | None]:
        if not (sys.stderr.isatty() if wanted is None else wanted):
            yield None
            return
        from penstock.report.progress import Progress, stage_units

        with Progress(self.trials, stage_units(self.algorithm.stages(self.trials))) as progress:
            yield progress


def tune(task: object, space: Mapping[str, Any] | Callable[..., Any], **settings: Any) -> Result:
    """``Study(task, space, ...).run(on=..., sharing=..., scheduler=..., workers=...)`` in one call.

    >>> import penstock as ps
    >>> def train(trial):
    ...     trial.report(1, loss=(trial.config["x"] - 2) ** 2)
    >>> space, algorithm = {"x": ps.uniform(0, 4)}, ps.Random(budget=1)
    >>> len(ps.tune(train, space, metric="loss", mode="min", algorithm=algorithm, trials=9).trials)
    9
    """
    how = {one.name: settings.pop(one.name) for one in fields(RunSettings) if one.name in settings}
    return Study(task, space, **settings).run(**how)


def seconds(time: float | str | None) -> float | None:
    """Seconds from a number or from text such as "90s", "10m", "2h".

    >>> seconds("10m")
    600.0
    """
    if time is None:
        return None
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    match = re.fullmatch(r"\s*([\d.]+)\s*([smhd]?)\s*", str(time))
    try:
        value = float(match[1]) * units[match[2]] if match else math.nan
    except ValueError:
        value = math.nan
    if not value > 0:
        raise StudyError(f'deadline must be seconds above 0, or text such as "90s", "10m", "2h", got {time!r}.')
    return value
