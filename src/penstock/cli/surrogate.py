"""The command that shows a study's surrogates, before anything is spent on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.ending import BAD_USAGE, FAILED, apart, refused
from penstock.cli.loading import load
from penstock.cli.options import File, Json
from penstock.errors import StudyError
from penstock.report.format import visible
from penstock.task import Task, task_name


def surrogate(
    file: File,
    scale: Annotated[int, typer.Option(help="How many times narrower a surrogate is.")] = 8,
    depth: Annotated[int, typer.Option(help="Keep every so many-th block of a run of equal blocks.")] = 1,
    data: Annotated[float, typer.Option(help="The part of the training rows.")] = 1.0,
    resolution: Annotated[float, typer.Option(help="The part of an image's pixels along each side.")] = 1.0,
    page: Annotated[Path | None, typer.Option(help="Write what was found as an HTML page.")] = None,
    json: Json = False,
) -> None:
    """Show the narrow twins of a study's model: roles, widths, factors, the check, bytes and speed."""
    from penstock.report import summary, tables
    from penstock.report import surrogate as found_out
    from penstock.report.export import writing
    from penstock.surrogate.settings import Surrogate

    with apart(json), refused(BAD_USAGE):
        settings = Surrogate(scale=scale, depth=depth, data=data, resolution=resolution)
        study = load(file)
        if not isinstance(study.task, Task):
            raise StudyError(f"{task_name(study.task)} has no model of its own: only a penstock.Task has surrogates.")
    with apart(json), refused(FAILED):
        from penstock.executors.local import find_devices
        from penstock.surrogate.examine import examine

        examined = examine(study.task, study.space, settings, seed=study.seed, device=find_devices()[0].name)
        facts = found_out.surrogate_facts(examined)
        if page is not None:
            with writing(page, "--page"):
                page.write_text(found_out.surrogate_page(task_name(study.task), facts), encoding="utf-8")
    if json:
        typer.echo(summary.to_json(facts))
    else:
        tables.console().print(found_out.shown(facts))
        if page is not None:
            typer.echo(visible(f"\nWrote {page}"))
    if not facts["right"]:
        raise typer.Exit(FAILED)
