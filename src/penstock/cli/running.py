"""The commands that train: run a file's study, go on with one, measure a trial on several devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.defining import check_defines_study
from penstock.cli.ending import BAD_USAGE, FAILED, apart, refused
from penstock.cli.loading import load, origin
from penstock.cli.options import (
    HOME,
    ActiveThreads,
    AllowChanges,
    Deadline,
    Deterministic,
    Devices,
    Dir,
    File,
    Growing,
    HowGrown,
    HowPacked,
    HowPowered,
    HowScheduled,
    HowShared,
    Json,
    Late,
    Lateness,
    MaxEnergy,
    MaxFailures,
    MixedTypes,
    Name,
    On,
    OwnDir,
    PlanFile,
    Scale,
    Scheduler,
    Sharing,
    Similarity,
    States,
    Target,
    Trials,
    Trust,
    Weight,
    Workers,
)
from penstock.errors import StudyError
from penstock.executors.ray.address import is_ray
from penstock.executors.simulated.settings import Simulated
from penstock.surrogate.settings import Surrogate

if TYPE_CHECKING:
    from penstock.log.events import Planned
    from penstock.planning.plan import Plan
    from penstock.result import Result
    from penstock.study import Study


def run(
    context: typer.Context,
    file: File,
    name: Annotated[str | None, typer.Option(help="The name of a new study, or of a study to go on with.")] = None,
    trials: Trials = None,
    seed: Annotated[int | None, typer.Option(help="The seed of everything that is random.")] = None,
    deadline: Deadline = None,
    max_energy: MaxEnergy = None,
    target: Target = None,
    max_failures: MaxFailures = None,
    surrogate: Scale = None,
    workers: Workers = None,
    weight: Weight = 1.0,
    sharing: HowShared = Sharing.auto,
    scheduler: HowScheduled = Scheduler.waterfill,
    growing: HowGrown = Growing.best,
    mixed_types: MixedTypes = False,
    deterministic: Deterministic = False,
    packing: HowPacked = None,
    similarity: Similarity = None,
    active_threads: ActiveThreads = None,
    plan: PlanFile = None,
    late: Late = Lateness.finish,
    power: HowPowered = None,
    on: On = "local",
    devices: Devices = None,
    dir: OwnDir = None,
    states: States = None,
    json: Json = False,
    allow_changes: AllowChanges = False,
) -> None:
    """Run the study of a Python file."""
    given = {"name": name, "trials": trials, "seed": seed, "deadline": deadline, "target": target}
    changes: dict[str, Any] = {**given, "max_failures": max_failures, "dir": dir, "states": states}
    changes["max_energy"] = max_energy
    with apart(json):
        with refused(BAD_USAGE):
            changes["surrogate"] = None if surrogate is None else Surrogate(scale=surrogate)
            study = load(file).replace(**{key: value for key, value in changes.items() if value is not None})
        result = _run(study, context.params)
    _show_result(result, json)


def resume(
    context: typer.Context,
    name: Name,
    dir: Dir = HOME,
    trials: Trials = None,
    deadline: Deadline = None,
    max_energy: MaxEnergy = None,
    target: Target = None,
    max_failures: MaxFailures = None,
    workers: Workers = None,
    weight: Weight = 1.0,
    sharing: HowShared = Sharing.auto,
    scheduler: HowScheduled = Scheduler.waterfill,
    growing: HowGrown = Growing.best,
    mixed_types: MixedTypes = False,
    deterministic: Deterministic = False,
    packing: HowPacked = None,
    similarity: Similarity = None,
    active_threads: ActiveThreads = None,
    late: Late = Lateness.finish,
    power: HowPowered = None,
    on: On = "local",
    devices: Devices = None,
    states: States = None,
    json: Json = False,
    trust: Trust = False,
    allow_changes: AllowChanges = False,
) -> None:
    """Go on with a study that was interrupted, or with more trials or time."""
    from penstock.report.summary import history_of, study_dir

    with refused(BAD_USAGE):
        place = study_dir(dir, name)
    with refused(FAILED):
        history = history_of(place)
        settings = history.settings
    given = {"trials": trials, "deadline": deadline, "target": target, "states": states, "max_failures": max_failures}
    given["max_energy"] = max_energy
    changes = {key: settings.get(key) if value is None else value for key, value in given.items()}
    if (kept := settings.get("surrogate")) is not None:
        changes["surrogate"] = Surrogate.of(kept)
    with apart(json):
        with refused(BAD_USAGE):
            _refuse_recurring(name, settings)
            file = origin(name, settings, dir, trust)
            check_defines_study(file)
            study = load(file).replace(name=name, dir=dir, seed=settings["seed"], **changes)
        result = _run(study, {**context.params, "plan": None}, logged=history.given)
    _show_result(result, json)


def _refuse_recurring(name: str, settings: Mapping[str, Any]) -> None:
    if str(settings.get("algorithm")).startswith("Recurrences("):
        raise StudyError(
            f"{name} is a recurring job, and not a study that resume goes on with: run the program that made it. "
            "Its job.run() finishes a recurrence that was cut off, and then begins the next."
        )


def profile(
    file: File,
    workers: Annotated[
        int | None, typer.Option(min=1, help="How many devices at most; all unless given, or a CPU's cores.")
    ] = None,
    on: Annotated[
        str, typer.Option(metavar="local|ray|ray://HOST:PORT", help="local: this machine. ray: a Ray cluster.")
    ] = "local",
    dir: OwnDir = None,
    json: Json = False,
) -> None:
    """Measure the speed of a file's study: of a trial on 1, 2, 4, … devices, or of trials that share one device.

    It says how long a unit takes, and which trials can be fused, too.
    """
    from penstock.cli.profile import count_workers, profile
    from penstock.report import groups, scaling, sharing, summary, tables, units

    with apart(json):
        with refused(BAD_USAGE):
            study = load(file)
            study = study if dir is None else study.replace(dir=dir)
            workers = count_workers(study, on, workers)
        alone, how = workers == 1, "alone, fused and packed" if workers == 1 else "on 1, 2, 4, … devices"
        if not json:
            typer.echo(f"Training for a few steps {how}, and for a few units.", err=True)
        with refused(FAILED):
            if alone:
                from penstock.cli.sharing import profile_one

                facts = sharing.sharing_facts(profile_one(study))
            else:
                facts = scaling.scaling_facts(profile(study, on, workers))
    if json:
        typer.echo(summary.to_json(facts))
        return
    console = tables.console()
    console.print(sharing.what(facts) if alone else scaling.what(facts), soft_wrap=True)
    if facts["rows"]:
        console.print()
        console.print(sharing.sharing_table(facts) if alone else scaling.scaling_table(facts))
        console.print()
    console.print(sharing.verdict(facts) if alone else scaling.verdict(facts), soft_wrap=True)
    console.print()
    for text in (
        units.said([units.Unit(**one) for one in facts["units"]]),
        groups.said([groups.Group(**one) for one in facts["groups"]]),
    ):
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def _run(study: Study, options: Mapping[str, Any], logged: Planned | None = None) -> Result:
    """Run a study by the options of a command; each field of ``RunSettings`` is an option of that name.

    ``logged`` is the plan that the study has followed so far.
    """
    from penstock.engine.following import of_log
    from penstock.plans import as_plan
    from penstock.settings import RunSettings

    with refused(BAD_USAGE):
        plan = None if options["plan"] is None else as_plan(options["plan"])
        rehearsed = plan or (None if logged is None else of_log(logged))
        on = _place(study, options["on"], options["devices"], rehearsed)
    names = [one.name for one in fields(RunSettings) if one.name != "on"]
    how: dict[str, Any] = {name: str(v) if isinstance(v := options[name], StrEnum) else v for name in names}
    with refused(FAILED):
        return study.run(on, **how, plan=plan, allow_changes=options["allow_changes"], progress=not options["json"])


def _place(study: Study, on: str, devices: int | None, plan: Plan | None = None) -> str | Simulated:
    if on not in ("local", "simulated") and not is_ray(on):
        raise StudyError(f"--on must be local, ray, ray://host:port or simulated, got {on!r}.")
    if on == "simulated" and plan is not None:
        if devices is not None:
            raise StudyError("A plan says how many devices are simulated: leave --devices out.")
        return Simulated.of(plan)
    if on == "simulated":
        from penstock.cli.rehearse import rehearsal

        cluster, said = rehearsal(study, devices or 8)
        typer.echo(said, err=True)
        return cluster
    if devices is not None:
        raise StudyError("--devices says how many are simulated: give it with --on simulated, or use --workers.")
    return on


def _show_result(result: Result, json: bool) -> None:
    from penstock.log.ranking import leading
    from penstock.report import summary

    with refused(FAILED):
        history = summary.history_of(result.dir)
        facts = {**summary.study_facts(result.dir, history), **summary.device_facts(result.dir)}
    if json:
        typer.echo(summary.to_json(facts))
    else:
        from penstock.report import tables

        console = tables.console()
        console.print()
        console.print(tables.best_trials(history, leading(history)[:5], console))
        if failed := tables.failures(history):
            console.print()
            console.print(failed)
    with refused(FAILED):
        best = result.best
        if result.ended == "failed":
            raise StudyError(
                f"The study failed: {len(result.failed)} of its trials failed, and at most "
                f"{facts['max_failures']} may. Go on with a larger --max-failures."
            )
    if not json:
        console.print()
        console.print(tables.busy(facts))
        console.print(tables.how_to_go_on(facts, best.config), soft_wrap=True)
