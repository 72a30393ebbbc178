"""The command line: run a file's study, go on with one, measure a trial, and look at the studies there are.

Nothing heavy is imported before a command needs it.
Exit codes: 0 done, 1 the study failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.loading import load, origin
from penstock.errors import PenstockError, StudyError
from penstock.executors.ray.cluster import is_ray

if TYPE_CHECKING:
    from penstock.executors.simulated.executor import Simulated
    from penstock.result import Result
    from penstock.study import Study

HOME = Path(".penstock")
FAILED, BAD_USAGE = 1, 2  # typer makes a KeyboardInterrupt 130

app = typer.Typer(
    help="Tune PyTorch models: the answer of training every trial alone, in a fraction of the device time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The study's name, as `penstock list` shows it.")]
Dir = Annotated[Path, typer.Option(help="The folder that holds the studies.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and no progress.")]
Trials = Annotated[int | None, typer.Option(min=1, help="How many trials in all, resumes included.")]
Deadline = Annotated[str | None, typer.Option(help="Time the study may use in all: 90s, 10m, 2h.")]
Target = Annotated[float | None, typer.Option(help="Stop once the metric reaches this.")]
Workers = Annotated[int | None, typer.Option(min=1, help="How many devices, with a process each; on Ray at most.")]
Weight = Annotated[float, typer.Option(min=0.001, help="The study's part of a Ray cluster beside other studies.")]
States = Annotated[str | None, typer.Option(help="Where states are kept: a folder, or a URL such as s3://bucket/path.")]
AllowChanges = Annotated[bool, typer.Option("--allow-changes", help="Go on although task, space or algorithm changed.")]


class Sharing(StrEnum):
    """How trials share a device."""

    auto = "auto"
    solo = "solo"
    fused = "fused"
    distributed = "distributed"


class Scheduler(StrEnum):
    """Who gets how much of the devices."""

    waterfill = "waterfill"
    dynamic_fluid = "dynamic_fluid"
    static_fluid = "static_fluid"
    fifo = "fifo"


class Growing(StrEnum):
    """Who grows onto idle devices first."""

    best = "best"
    evenly = "evenly"


class Format(StrEnum):
    """What a log can be exported to."""

    csv = "csv"
    tensorboard = "tensorboard"


HowShared = Annotated[
    Sharing, typer.Option(help="solo: one trial a device. fused: many as one model. auto: what is measured to pay.")
]


On = Annotated[
    str,
    typer.Option(
        metavar="local|ray|ray://HOST:PORT|simulated",
        help="local: this machine. ray: a Ray cluster. simulated: devices that are not there, in no time.",
    ),
]
Devices = Annotated[int | None, typer.Option(min=1, help="How many simulated devices; 8 unless given.")]
HowScheduled = Annotated[
    Scheduler, typer.Option(help="Who gets how much of the devices; fifo: one trial a device, in the order of asking.")
]


WhoGrows = Annotated[
    Growing, typer.Option(help="Who has idle devices first, where several pay: the best trial, or who has fewest.")
]
MixedTypes = Annotated[bool, typer.Option("--mixed-types", help="Let a trial's devices be of several types.")]


def main() -> None:
    """The ``penstock`` command."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A Python file whose module has a `study`.")],
    name: Annotated[str | None, typer.Option(help="Of a new study, or of one to go on with.")] = None,
    trials: Trials = None,
    seed: Annotated[int | None, typer.Option(help="Decides all that is random.")] = None,
    deadline: Deadline = None,
    target: Target = None,
    workers: Workers = None,
    weight: Weight = 1.0,
    sharing: HowShared = Sharing.auto,
    scheduler: HowScheduled = Scheduler.waterfill,
    growing: WhoGrows = Growing.best,
    mixed_types: MixedTypes = False,
    on: On = "local",
    devices: Devices = None,
    dir: Annotated[Path | None, typer.Option(help="The folder that holds the studies.")] = None,
    states: States = None,
    json: Json = False,
    allow_changes: AllowChanges = False,
) -> None:
    """Run the study of a Python file."""
    given = {"name": name, "trials": trials, "seed": seed, "deadline": deadline, "target": target}
    changes = {**given, "dir": dir, "states": states}
    with _apart(json):
        with _refused(BAD_USAGE):
            study = load(file).replace(**{key: value for key, value in changes.items() if value is not None})
        how = {"sharing": sharing, "scheduler": scheduler, "growing": growing, "mixed_types": mixed_types}
        result = _run(study, on, devices, json, workers=workers, weight=weight, allow_changes=allow_changes, **how)
    _show_result(study, result, json)


@app.command()
def resume(
    name: Name,
    dir: Dir = HOME,
    trials: Trials = None,
    deadline: Deadline = None,
    target: Target = None,
    workers: Workers = None,
    weight: Weight = 1.0,
    sharing: HowShared = Sharing.auto,
    scheduler: HowScheduled = Scheduler.waterfill,
    growing: WhoGrows = Growing.best,
    mixed_types: MixedTypes = False,
    on: On = "local",
    devices: Devices = None,
    states: States = None,
    json: Json = False,
    allow_changes: AllowChanges = False,
) -> None:
    """Go on with a study that was interrupted, or with more trials or time."""
    from penstock.report.summary import history_of, study_dir

    with _refused(BAD_USAGE):
        place = study_dir(dir, name)
    with _refused(FAILED):
        settings = history_of(place).settings
    given = {"trials": trials, "deadline": deadline, "target": target, "states": states}
    changes = {key: settings.get(key) if value is None else value for key, value in given.items()}
    with _apart(json):
        with _refused(BAD_USAGE):
            study = load(origin(name, settings)).replace(name=name, dir=dir, seed=settings["seed"], **changes)
        how = {"sharing": sharing, "scheduler": scheduler, "growing": growing, "mixed_types": mixed_types}
        result = _run(study, on, devices, json, workers=workers, weight=weight, allow_changes=allow_changes, **how)
    _show_result(study, result, json)


@app.command()
def show(
    name: Name,
    dir: Dir = HOME,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    top: Annotated[int, typer.Option(min=0, help="How many of the best trials.")] = 10,
    curves: Annotated[bool, typer.Option("--curves", help="With the courses of their metric.")] = False,
) -> None:
    """Show where a study stands, and its best trials."""
    from penstock.report import summary

    with _refused(BAD_USAGE):
        place = summary.study_dir(dir, name)
    with _refused(FAILED):
        history = summary.history_of(place)
    facts = {**summary.study_facts(place, history), **summary.device_facts(place)}
    best = summary.ranked(history)[:top]
    if json:
        typer.echo(summary.to_json({**facts, "top": [summary.trial_facts(trial, curves) for trial in best]}))
        return
    from penstock.report import tables

    console = tables.console()
    console.print(tables.study_summary(facts))
    if (measured := tables.measured(facts)) is not None:
        console.print()
        console.print(measured)
    if top:
        console.print()
        console.print(tables.best_trials(history, best, console))
    if best and curves:
        console.print()
        console.print(tables.curves(history, best))
    if failed := tables.failures(history):
        console.print()
        console.print(failed)


@app.command("list")
def list_(
    dir: Dir = HOME, json: Annotated[bool, typer.Option("--json", help="One JSON list on stdout.")] = False
) -> None:
    """List the studies of a folder, the latest first."""
    from penstock.report import summary

    with _refused(BAD_USAGE):
        if dir != HOME and not dir.is_dir():
            raise StudyError(f"There is no folder {dir}: give the one that holds the studies with --dir.")
    studies: list[dict[str, Any]] = []
    for name in summary.study_names(dir):
        try:
            studies.append(summary.study_facts(dir / name, summary.history_of(dir / name)))
        except PenstockError as error:  # one damaged log does not hide the others
            studies.append({"name": name, "dir": str(dir / name), "error": str(error)})
    if json:
        typer.echo(summary.to_json(studies))
    elif not studies:
        typer.echo(f"No studies in {dir} yet: start one with `penstock run FILE`.")
    else:
        from penstock.report import tables

        tables.console().print(tables.study_list(studies))


@app.command()
def export(
    name: Name,
    to: Annotated[Format, typer.Option(help="What to write.")],
    out: Annotated[Path | None, typer.Option(help="The folder to write to; one in the study's unless given.")] = None,
    dir: Dir = HOME,
) -> None:
    """Write a study's trials and curves for other tools."""
    from penstock.report.export import write_csv, write_tensorboard
    from penstock.report.summary import study_dir

    with _refused(BAD_USAGE):
        place = study_dir(dir, name)
    out = out or place / to.value
    with _refused(FAILED):
        if to is Format.csv:
            typer.echo("\n".join(f"Wrote {path}" for path in write_csv(place, out)))
        else:
            runs = write_tensorboard(place, out)
            look = f"tensorboard --logdir {shlex.quote(str(out))}"
            typer.echo(f"Wrote {len(runs)} runs to {out}; look at them with: {look}")


@app.command()
def profile(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A Python file whose module has a `study`.")],
    workers: Annotated[
        int | None, typer.Option(min=1, help="How many devices at most; all unless given, or a CPU's cores.")
    ] = None,
    on: Annotated[
        str, typer.Option(metavar="local|ray|ray://HOST:PORT", help="local: this machine. ray: a Ray cluster.")
    ] = "local",
    dir: Annotated[Path | None, typer.Option(help="The folder that holds the studies.")] = None,
    json: Json = False,
) -> None:
    """Measure what 1, 2, 4, … devices give one trial of a file's study."""
    from penstock.cli.profile import count_workers, profile
    from penstock.report import scaling, summary, tables

    with _apart(json):
        with _refused(BAD_USAGE):
            study = load(file)
            study = study if dir is None else study.replace(dir=dir)
            workers = count_workers(study, on, workers)
        if not json:
            typer.echo("Training one trial for a few steps on 1, 2, 4, … devices.", err=True)
        with _refused(FAILED):
            facts = scaling.scaling_facts(profile(study, on, workers))
    if json:
        typer.echo(summary.to_json(facts))
        return
    console = tables.console()
    console.print(scaling.what(facts), soft_wrap=True)
    if facts["rows"]:
        console.print()
        console.print(scaling.scaling_table(facts))
        console.print()
    console.print(scaling.verdict(facts), soft_wrap=True)


@app.command()
def report(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The latest study unless given.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page to write; report.html in the study's folder.")] = None,
    dir: Dir = HOME,
) -> None:
    """Draw who had which device when, and write a page with it."""
    from penstock.log.events import read
    from penstock.log.history import History
    from penstock.report.page import study_page
    from penstock.report.summary import ranked, study_dir, study_names

    with _refused(BAD_USAGE):
        place = study_dir(dir, name if name is not None else next(iter(study_names(dir)), ""))
    with _refused(FAILED):
        events = list(read(place / "log.jsonl"))
        best = ranked(History.of(events))[:10]
        out = out or place / "report.html"
        page = study_page(place.name, events, [trial.row() for trial in best])
        try:
            out.write_text(page, encoding="utf-8")
        except OSError as error:
            raise StudyError(f"Cannot write {out} ({error.strerror}): choose another file with --out.") from None
    typer.echo(f"Wrote {out}")


@app.command()
def dashboard(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The latest study unless given.")] = None,
    dir: Dir = HOME,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")] = 8080,
) -> None:
    """Look at a study in a browser, while it runs or after."""
    from penstock.report.dashboard import make_dashboard
    from penstock.report.summary import study_dir, study_names

    with _refused(BAD_USAGE):
        place = study_dir(dir, name if name is not None else next(iter(study_names(dir)), ""))
    with _refused(FAILED), make_dashboard(place, port) as server:
        where = f"http://127.0.0.1:{server.server_port}/dashboard/studies/0"
        typer.echo(f"{place.name} is at {where}, until Ctrl-C.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("Closed.")


# How a command ends


@contextmanager
def _refused(code: int) -> Iterator[None]:
    """Errors that a user can mend become one message and an exit code."""
    try:
        yield
    except PenstockError as error:
        typer.echo(f"penstock: {error}", err=True)
        raise typer.Exit(code) from None


@contextmanager
def _apart(json: bool) -> Iterator[None]:
    """With --json stdout is for the one object: what a task prints, in worker processes too, goes to stderr."""
    if not json:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _place(study: Study, on: str, devices: int | None) -> str | Simulated:
    with _refused(BAD_USAGE):
        if on not in ("local", "simulated") and not is_ray(on):
            raise StudyError(f"--on must be local, ray, ray://host:port or simulated, got {on!r}.")
        if on == "simulated":
            from penstock.cli.rehearse import rehearsal

            cluster, said = rehearsal(study, devices or 8)
            typer.echo(said, err=True)
            return cluster
        if devices is not None:
            raise StudyError("--devices says how many are simulated: give it with --on simulated, or use --workers.")
    return on


def _run(study: Study, on: str, devices: int | None, json: bool, **settings: Any) -> Result:
    place = _place(study, on, devices)
    given: dict[str, Any] = {n: value.value if isinstance(value, StrEnum) else value for n, value in settings.items()}
    with _refused(FAILED):
        return study.run(place, progress=not json, **given)


def _show_result(study: Study, result: Result, json: bool) -> None:
    from penstock.report import summary

    history = summary.history_of(result.dir)
    facts = {**summary.study_facts(result.dir, history), **summary.device_facts(result.dir)}
    if json:
        typer.echo(summary.to_json(facts))
    else:
        from penstock.report import tables

        console = tables.console()
        console.print()
        console.print(tables.best_trials(history, summary.ranked(history)[:5], console))
        if failed := tables.failures(history):
            console.print()
            console.print(failed)
    with _refused(FAILED):
        best = result.best
    if not json:
        console.print()
        console.print(tables.busy(facts))
        console.print(tables.how_to_go_on(facts, best.config), soft_wrap=True)
