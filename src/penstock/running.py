"""One run of a study: open and replay its log, make the executor, and let the engine go on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.algorithms.base import Algorithm
from penstock.bundle import Job
from penstock.engine.clocking import Pace, Shelf
from penstock.engine.decisions import Decider, replay
from penstock.engine.engine import Engine
from penstock.engine.following import Following
from penstock.engine.limits import Deadline, Energy, Failures, Limit, Target
from penstock.engine.observing import observed
from penstock.errors import StudyError
from penstock.executors.base import Executor
from penstock.executors.simulated.settings import Simulated
from penstock.log.changes import changes, check_configs, check_states, given
from penstock.log.events import VERSION, Limited, Opened
from penstock.log.history import History
from penstock.log.naming import open_new
from penstock.log.owners import home
from penstock.log.states import States
from penstock.log.writer import Log
from penstock.opening import check_place, nothing_left, settings_of
from penstock.planning.plan import Plan
from penstock.plans import able, followed
from penstock.result import Result
from penstock.saying import say
from penstock.scheduling.base import Scheduler
from penstock.scheduling.leftover import leftover
from penstock.scheduling.planned import planned
from penstock.scheduling.sharded import beside, sharded
from penstock.settings import RunSettings
from penstock.speed.model import Sharing, SpeedModel
from penstock.speed.profiles import Profiles
from penstock.stopping import say_how_to_resume, stoppable
from penstock.task import FunctionTask, Task, fingerprint, shards, task_name
from penstock.transferring import transferring

if TYPE_CHECKING:
    from penstock.study import Study


NO_VARIANTS: Mapping[str, Task] = {}


def run_study(study: Study, how: RunSettings, allow_changes: bool, progress: bool | None, plan: Plan | None) -> Result:
    """Take a study up at its log, and run it to the end."""
    log = _open(study)
    try:
        check_place(log.dir.name, log.past, how.on)
        settings = {**settings_of(study, log.dir.name, log.past), "run": how.plain()}
        made = transferring(study, log.past)
        settings["surrogate"] = made.settings
        settings["changed"] = changes(log.past, settings, study.algorithm.grows, allow_changes)
        if settings["changed"]:
            check_configs(log.past, study.space)
        history, decider = History(), Decider(made.algorithm, study._search(study.trials))
        pending = replay(log.past, history, decider, given=given(log.past, bool(settings["changed"])))
        pending += decider.opened(study.trials)
        settings["home"] = home(log, history, study.states)
        states = _states_of(study, log, history, allow_changes, settings["home"])
        placed = sum(record.attempt for record in history.trials)
        following = followed(study, plan, history, how)
        scheduler = _scheduler(study, how, following, narrow=bool(made.variants))
        executor = executor_of(study, how, states, log.dir.name, following, made.variants)
        try:
            following = able(following, plan, executor, how)
            _check_meters(study, executor)
            settings["log"] = VERSION if executor.metered else settings["log"]
            settings["unmetered"] = dict(executor.unmetered) or None
            pace = _pace(study, executor, how, log.dir, narrow=bool(made.variants))
            engine = Engine(
                log,
                history,
                decider,
                executor,
                leftover(scheduler) if made.variants else scheduler,
                states=states,
                limits=_limits(study),
                pace=pace,
                spreads=_spreads(study, executor, how) and following is None,
                growing=how.growth,
                packing=how.packs(study.task, study.space, study.seed, concurrent=executor.concurrent),
                shards=shards(study.task),
                following=following,
                observing=_observing(study, how, executor, pace),
            )
            with _progress(study, made.algorithm, progress) as engine.watch, stoppable(engine.interrupt):
                reason = engine.run(Opened(settings, history.clock), pending)
            if reason == "interrupted":
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            say_how_to_resume(log.dir, how, settings["file"], log.begun)
            raise
        finally:
            executor.close()
    finally:
        log.close()
    result = Result(history, study.task, log.dir, states)
    result.save_best()
    study.ran = log.dir
    if progress is not False and log.past and placed == sum(record.attempt for record in history.trials):
        say(nothing_left(log.dir.name, reason, len(history.trials), study.algorithm.grows))
    return result


@contextmanager
def _progress(study: Study, algorithm: Algorithm, wanted: bool | None) -> Iterator[Callable[[History], None] | None]:
    if wanted is False:
        yield None
        return
    from penstock.report.progress import Progress

    with Progress(study.trials, algorithm.outlook) as progress:
        yield progress


def _open(study: Study) -> Log:
    if study.name is not None:
        return Log.open(study.dir / study.name)

    def elsewhere(dir: Path) -> bool:
        """Whether a study of that name has states in a place that several machines share."""
        return study.states is not None and bool(States.of_study(dir, study.states).names())

    return open_new(study.dir, task_name(study.task), elsewhere)


def _states_of(study: Study, log: Log, history: History, allow_changes: bool, home: str | None) -> States:
    """The place of the states, tried before anything trains; the study's own folder needs no trial."""
    states = States.of_study(log.dir, study.states, home)
    if study.states is not None:
        states.probe()
    check_states(log.past, history, states, log.dir, study.states, allow_changes)
    return states


def _observing(
    study: Study, how: RunSettings, executor: Executor, pace: Pace
) -> Callable[[History], list[Limited]] | None:
    """What tells of power limits at the end; simulated devices tell it themselves."""
    return partial(observed, eta=study.eta, pace=pace) if how.power is not None and not executor.virtual else None


def _limits(study: Study) -> list[Limit]:
    limits: list[Limit] = [] if study.target is None else [Target(study.target)]
    limits += [] if study.max_failures is None else [Failures(study.max_failures)]
    limits += [] if study.max_energy is None else [Energy(study.max_energy)]
    return limits if study.deadline is None else [*limits, Deadline(study.deadline)]


def _check_meters(study: Study, executor: Executor) -> None:
    """Refuse a limit of energy that nobody could notice."""
    if study.max_energy is not None and not executor.metered:
        why = next(iter(executor.unmetered.values()), "nothing counts the joules of these devices")
        raise StudyError(f"max_energy= needs a device whose joules are metered, and {why}: leave it out.")


def _scheduler(study: Study, how: RunSettings, following: Following | None, *, narrow: bool) -> Scheduler:
    """The scheduler of a run; ``narrow`` says that there are surrogates, which train on one device each."""
    if following is not None:
        return planned(following.berth)
    if shards(study.task) == 1:
        return how.schedule
    return beside(how.schedule) if narrow else sharded


def executor_of(
    study: Study,
    how: RunSettings,
    states: States,
    name: str,
    following: Following | None = None,
    variants: Mapping[str, Task] = NO_VARIANTS,
) -> Executor:
    """The executor that a run's settings ask for; ``variants`` are the tasks beside the study's own."""
    how_trained = how.deterministic, variants, study.eta, how.power, study.algorithm.until
    job = Job(study.task, study.seed, study.metric, study.mode, states, name, *how_trained)
    if isinstance(how.on, Simulated):
        from penstock.executors.simulated.executor import SimulatedExecutor

        return SimulatedExecutor(job, how.on)
    if how.ray:
        from penstock.executors.ray.address import settings
        from penstock.executors.ray.cluster import code_of
        from penstock.executors.ray.executor import RayExecutor

        address, more = settings(how.on)
        folder, least = None if study.file is None else code_of(Path(study.file)), shards(study.task)
        first = () if following is None else following.first()
        return RayExecutor(
            job,
            address,
            workers=how.workers,
            least=least,
            weight=how.weight,
            folder=folder,
            first=first,
            **more,
        )
    if how.sharing == "processes":
        from penstock.executors.processes.sharing import TrialProcesses

        return TrialProcesses(job, how.workers or 1, how.active_threads)
    if how.workers is None or how.workers == 1:
        from penstock.executors.local import LocalExecutor

        return LocalExecutor(job)
    from penstock.executors.processes.executor import ProcessExecutor

    return ProcessExecutor(job, how.workers)


def _pace(study: Study, executor: Executor, how: RunSettings, dir: Path, *, narrow: bool) -> Pace:
    """The speed model of this run, with the profiles of earlier ones; it says whether trials may share devices."""
    together: Sharing = "forced" if how.sharing == "fused" else "fixed" if how.deterministic else "measured"
    alone = how.sharing in ("solo", "processes", "distributed") or how.scheduler == "fifo"
    whole = shards(study.task) > 1 and not narrow  # no trial is on one device
    if alone or isinstance(study.task, FunctionTask) or whole or "fused" not in executor.modes:
        together = "never"
    model = SpeedModel(together, spreads=_spreads(study, executor, how))
    if how.deterministic or how.sharing == "processes":  # a unit beside other processes says nothing of one alone
        return Pace(model, eta=study.eta)
    profiles = Profiles.open(dir.parent / "profiles.jsonl", kept=not isinstance(how.on, Simulated) or how.on.kept)
    return Pace(model, Shelf(profiles, fingerprint(study.task)), study.eta)


def _spreads(study: Study, executor: Executor, how: RunSettings) -> bool:
    """Whether one trial may have several devices."""
    return "distributed" in executor.modes and how.sharing in ("auto", "distributed") and shards(study.task) == 1
