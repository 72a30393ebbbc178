"""Logs of other people's making: no file of theirs is run unasked, and no text of theirs commands the terminal."""

from __future__ import annotations

import io
import os
import pty
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.app import app
from penstock.cli.loading import origin
from penstock.errors import StudyError
from penstock.log.events import Asked, Ended, Event, Failed, Opened
from penstock.log.history import History
from penstock.report.format import visible
from penstock.report.progress import Lasting, Progress
from tests.report.studies import SETTINGS, ended, reported, write

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\x08\x7f\u202etxt.exe"
SHOWN = "]0;title[2J31mtxt.exe"
OBEYED = "\x1b\x07\x9b\x08\x7f\u202e"


def penstock(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file outside of the folder that commands are started from; the log of the study "s" there names it."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    file = there / "code.py"
    file.write_text("import pathlib; pathlib.Path('ran').touch(); study = 1")
    write(Path(".penstock"), "s", ended(file=str(file)))
    return file


def test_a_file_outside_of_this_folder_is_not_run_unasked(elsewhere: Path) -> None:
    said = penstock("resume", "s", code=2).stderr
    assert f"names the file {elsewhere}, which lies outside of this folder" in said
    assert "--trust" in said
    assert not Path("ran").exists()
    assert "Expected code.py to have a `study`" in penstock("resume", "s", "--trust", code=2).stderr
    assert Path("ran").exists()


def test_a_link_in_this_folder_to_a_file_outside_of_it_is_outside(elsewhere: Path) -> None:
    Path("link.py").symlink_to(elsewhere)
    write(Path(".penstock"), "t", ended(file=str(Path("link.py").absolute())))
    assert "--trust" in penstock("resume", "t", code=2).stderr


def test_a_file_that_may_have_come_with_its_log_is_asked_for(elsewhere: Path) -> None:
    inside = Path(".penstock/t/code.py")
    write(Path(".penstock"), "t", ended(file=str(inside.absolute())))
    elsewhere.rename(inside)
    assert "which lies among the studies" in penstock("resume", "t", code=2).stderr
    assert not Path("ran").exists()


def test_studies_beside_their_file_need_no_trust(elsewhere: Path) -> None:
    write(Path(), "t", ended(file=str(Path("code.py").absolute())))
    elsewhere.rename("code.py")
    assert "Expected code.py to have a `study`" in penstock("resume", "t", "--dir", ".", code=2).stderr
    assert Path("ran").exists()


@pytest.mark.parametrize(("typed", "runs"), [(b"y\n", True), (b"n\n", False), (b"\n", False)])
def test_on_a_terminal_it_is_asked_for(
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: bytes,
    runs: bool,
) -> None:
    terminal, ours = pty.openpty()
    os.write(terminal, typed)
    with os.fdopen(ours) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        if runs:
            assert origin("s", {"file": str(elsewhere)}, Path(".penstock")) == elsewhere
        else:
            with pytest.raises(StudyError, match="--trust"):
                origin("s", {"file": str(elsewhere)}, Path(".penstock"))
    os.close(terminal)
    assert f"names the file {elsewhere}" in capsys.readouterr().err


# Text for terminals


def evil() -> Iterator[Event]:
    yield Opened({**SETTINGS, "task": EVIL, "algorithm": EVIL, "sampler": EVIL, "metric": EVIL})
    yield Asked(0, {EVIL: EVIL}, 3, "rung 0")
    yield reported(0, 1, 1.0, **{EVIL: 0.5})
    yield Asked(1, {EVIL: EVIL}, 3, "rung 0")
    yield Failed(1, 1, EVIL, True, 2.0)
    yield Ended("done", 3.0)


@pytest.mark.parametrize("command", [("list",), ("show", "s"), ("show", "s", "--curves")])
def test_tables_hold_nothing_that_a_terminal_obeys(command: tuple[str, ...]) -> None:
    write(Path(".penstock"), "s", evil())
    said = penstock(*command).output
    assert not set(OBEYED) & set(said)
    assert "[2J31mtxt" in said.replace("\n", "")


def test_names_and_errors_hold_nothing_that_a_terminal_obeys() -> None:
    folder = Path(".penstock") / "a\x1b[2Jb"
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("{}\n")
    for result in (penstock("list"), penstock("show", "other", code=2), penstock("show", folder.name, code=1)):
        assert "\x1b" not in result.output
        assert "a[2Jb" in result.output


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_holds_no_escape_but_its_own(terminal: bool) -> None:
    shown = io.StringIO()
    console = Lasting(file=shown, force_terminal=terminal, color_system=None, width=300)
    with Progress(4, console=console) as progress:
        progress(History.of(evil()))
    said = shown.getvalue()
    assert SHOWN in said
    assert not [one for one in ("\x1b]0", "\x1b[2J", "\x9b", "\x07", "\u202e") if one in said]


def test_half_a_pair_and_plain_text() -> None:
    assert visible("\ud800") == "\ufffd"
    assert visible("Grüße, 世界\n\t✓") == "Grüße, 世界\n\t✓"
