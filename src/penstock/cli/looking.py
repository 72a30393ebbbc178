"""The commands that look: where studies stand, their trials for other tools, a page, and the dashboard."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.ending import BAD_USAGE, FAILED, refused
from penstock.cli.options import HOME, Dir, Format, Latest, Name, OneList, OneObject
from penstock.errors import PenstockError, StudyError
from penstock.report.format import visible


def show(
    name: Name,
    dir: Dir = HOME,
    json: OneObject = False,
    top: Annotated[int, typer.Option(min=0, help="How many of the best trials.")] = 10,
    curves: Annotated[bool, typer.Option("--curves", help="Show the curves of their metric, too.")] = False,
    carbon: Annotated[float | None, typer.Option(min=0.0, help="Grams of CO2 for a kWh, to show the study's.")] = None,
) -> None:
    """Show where a study stands, and its best trials."""
    from penstock.log.ranking import leading
    from penstock.report import recurring, summary

    with refused(BAD_USAGE):
        place = summary.study_dir(dir, name)
    with refused(FAILED):
        history = summary.history_of(place)
        facts = {**summary.study_facts(place, history), **summary.device_facts(place)}
        runs = recurring.run_facts(summary.events_of(place))
    best = leading(history)[:top]
    facts = {**facts, "runs": runs} if runs else facts
    if json:
        typer.echo(summary.to_json({**facts, "top": [summary.trial_facts(trial, curves) for trial in best]}))
        return
    from penstock.report import tables

    console = tables.console()
    console.print(tables.study_summary(facts, carbon))
    if (measured := tables.measured(facts)) is not None:
        console.print()
        console.print(measured)
    if runs:
        console.print(f"\n{recurring.summed(runs)}\n")
        console.print(recurring.shown(runs[-2 * top :] if top else runs[-1:], history.metric))
    elif top:
        console.print()
        console.print(tables.best_trials(history, best, console))
    if best and curves:
        console.print()
        console.print(tables.curves(history, best))
    if failed := tables.failures(history):
        console.print()
        console.print(failed)


def list_(dir: Dir = HOME, json: OneList = False) -> None:
    """List the studies of a folder, the latest first."""
    from penstock.report import summary

    with refused(BAD_USAGE):
        if dir != HOME and not dir.is_dir():
            raise StudyError(f"There is no folder {dir}: give the one that holds the studies with --dir.")
        names = summary.study_names(dir)
    studies: list[dict[str, Any]] = []
    for name in names:
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


def export(
    name: Name,
    to: Annotated[Format, typer.Option(help="What to write.")],
    out: Annotated[Path | None, typer.Option(help="The folder to write to; one in the study's unless given.")] = None,
    dir: Dir = HOME,
) -> None:
    """Write a study's trials and curves for other tools."""
    from penstock.report.export import write_csv, write_tensorboard
    from penstock.report.summary import study_dir

    with refused(BAD_USAGE):
        place = study_dir(dir, name)
    out = out or place / to.value
    with refused(FAILED):
        if to is Format.csv:
            typer.echo(visible("\n".join(f"Wrote {path}" for path in write_csv(place, out))))
        else:
            runs = write_tensorboard(place, out)
            look = f"tensorboard --logdir {shlex.quote(str(out))}"
            typer.echo(visible(f"Wrote {len(runs)} runs to {out}; look at them with: {look}"))


def report(
    name: Latest = None,
    out: Annotated[Path | None, typer.Option(help="The page to write; report.html in the study's folder.")] = None,
    dir: Dir = HOME,
) -> None:
    """Draw which trial had which device when, and write a page with it."""
    from penstock.log.ranking import leading
    from penstock.report.export import writing
    from penstock.report.page import best_rows, study_page
    from penstock.report.summary import events_of, history_of

    place = _latest(dir, name)
    with refused(FAILED):
        events = list(events_of(place))
        best = leading(history_of(place))[:10]
        out = out or place / "report.html"
        page = study_page(place.name, events, best_rows(best))
        with writing(out):
            out.write_text(page, encoding="utf-8", errors="backslashreplace")
    typer.echo(visible(f"Wrote {out}"))


def dashboard(
    name: Latest = None,
    dir: Dir = HOME,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")] = 8080,
) -> None:
    """Look at a study in a browser, while it runs or after."""
    from penstock.report.dashboard import make_dashboard

    place = _latest(dir, name)
    with refused(FAILED), make_dashboard(place, port) as server:
        where = f"http://127.0.0.1:{server.server_port}/dashboard/studies/0"
        typer.echo(visible(f"{place.name} is at {where}, until Ctrl-C."))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("Closed.")


def _latest(dir: Path, name: str | None) -> Path:
    """The folder of the study of that name, or of the latest one."""
    from penstock.report.summary import study_dir, study_names

    with refused(BAD_USAGE):
        return study_dir(dir, name if name is not None else next(iter(study_names(dir)), ""))
