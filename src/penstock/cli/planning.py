"""The command that plans: the cheapest nodes that keep a study's deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.ending import BAD_USAGE, FAILED, apart, refused
from penstock.cli.loading import load
from penstock.cli.options import File, Json, OwnDir, Trials
from penstock.errors import StudyError
from penstock.report.format import visible


def plan(
    file: File,
    deadline: Annotated[str | None, typer.Option(help="Time the study may take in all: 90s, 10m, 2h.")] = None,
    max_cost: Annotated[float | None, typer.Option(help="The most that it may cost, in the catalogue's money.")] = None,
    instances: Annotated[
        str | None, typer.Option(metavar="A,B", help="Types of nodes to choose from; those that were measured.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Use nodes of the spot market, too.")] = False,
    confidence: Annotated[float, typer.Option(help="The probability with which the limit is to hold.")] = 0.95,
    catalogue: Annotated[Path | None, typer.Option(help="A TOML file of instances and prices of your own.")] = None,
    unit_seconds: Annotated[
        str | None, typer.Option(metavar="S|A=S,B=S", help="Seconds of a unit alone on a device, if not measured.")
    ] = None,
    log: Annotated[str | None, typer.Option(metavar="NAME", help="A study whose units' times are taken.")] = None,
    most: Annotated[int | None, typer.Option(min=1, help="The most nodes that there may be at once.")] = None,
    trials: Trials = None,
    dir: OwnDir = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to a file, for `penstock run --plan`.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the plan as an HTML page.")] = None,
    json: Json = False,
) -> None:
    """Plan the cheapest nodes with which the study of a file keeps a deadline."""
    from penstock.report import plans, summary, tables
    from penstock.report.export import writing

    with apart(json), refused(BAD_USAGE):
        changes = {"trials": trials, "dir": dir}
        study = load(file).replace(**{key: value for key, value in changes.items() if value is not None})
        made = study.plan(
            deadline=deadline,
            max_cost=max_cost,
            instances=None if instances is None else list(filter(None, map(str.strip, instances.split(",")))),
            spot=spot,
            confidence=confidence,
            catalogue=catalogue,
            unit_seconds=None if unit_seconds is None else _unit_seconds(unit_seconds),
            log=log,
            most=most,
        )
    with refused(FAILED):
        drawn = plans.plan_page(file.stem, made) if page else ""
        for path, text, option in ((save, made.to_json(), "--save"), (page, drawn, "--page")):
            if path is not None:
                with writing(path, option):
                    path.write_text(text, encoding="utf-8")
    if json:
        typer.echo(summary.to_json(plans.plan_facts(made)))
        return
    tables.console().print(plans.shown(made))
    if save is not None:
        typer.echo(visible(f"\nWrote {save}; follow it with: penstock run {file} --plan {save}"))
    if page is not None:
        typer.echo(visible(f"Wrote {page}"))


def _unit_seconds(text: str) -> float | dict[str, float | tuple[float, float]]:
    """Seconds, or seconds by instance.

    >>> _unit_seconds("60"), _unit_seconds("p3.8xlarge=60,g5.12xlarge=40.5")
    (60.0, {'p3.8xlarge': 60.0, 'g5.12xlarge': 40.5})
    """
    try:
        if "=" not in text:
            return float(text)
        return {name.strip(): float(number) for name, number in (one.split("=") for one in text.split(","))}
    except ValueError:
        raise StudyError(
            f"--unit-seconds must be seconds, or seconds by instance as in p3.8xlarge=60,g5.12xlarge=40, got {text!r}."
        ) from None
