"""The command line: run a file's study, go on with one, measure a trial, and look at the studies there are.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from penstock.cli import looking, planning, running, surrogate
from penstock.cli.ending import FAILED, end_at_once, steady_streams

app = typer.Typer(
    help="Tune PyTorch models: the answer of training every trial alone, in a fraction of the device time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The ``penstock`` command."""
    end_at_once()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try it once more at its end
        print(f"penstock: Cannot write to standard output ({error.strerror}).", file=sys.stderr)
        sys.exit(FAILED)


def _version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    steady_streams()


for command in (
    running.run,
    running.resume,
    looking.show,
    looking.list_,
    looking.export,
    running.profile,
    planning.plan,
    surrogate.surrogate,
    looking.report,
    looking.dashboard,
):
    app.command(command.__name__.rstrip("_"))(command)
