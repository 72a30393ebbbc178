"""A log that is taken away while its study runs: noticed within a second, and its events are written beside."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.app import app
from penstock.log.events import Ended
from penstock.log.history import History
from penstock.log.reader import read
from penstock.log.writer import Log
from tests.log.lines import ALL
from tests.studies import studies


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log of three lines, and a clock that is a second further at each look."""
    clock = iter(range(100, 10**6))
    monkeypatch.setattr("penstock.log.writer.time.monotonic", lambda: float(next(clock)))
    log = Log.open(tmp_path / "home" / "studies" / "s")
    for event in ALL[:3]:
        log.append(event)
    return log


def found_gone(log):
    """The message of the next look."""
    with pytest.raises(ps.LogError) as error:
        log.look()
    return str(error.value)


def test_a_log_that_is_there_is_looked_at_once_a_second(tmp_path, monkeypatch):
    clock, looks = [100.0], []
    monkeypatch.setattr("penstock.log.writer.time.monotonic", lambda: clock[0])
    log = Log.open(tmp_path / "s")
    log.append(ALL[0])
    stat = os.stat

    def looked_at(path, **how):
        if path == log.path:
            looks.append(clock[0])
        return stat(path, **how)

    monkeypatch.setattr("penstock.log.writer.os.stat", looked_at)
    for now, left in ((100.25, 0.75), (100.5, 0.5), (101.5, 1.0), (102.25, 0.25), (102.5, 1.0)):
        clock[0] = now
        assert log.look() == left
    assert looks == [101.5, 102.5]
    log.close()


def test_a_log_that_another_program_writes_to_gets_no_further_line(log):
    with log.path.open("a") as other:
        other.write("mine\n")
    before = log.path.read_bytes()
    with pytest.raises(ps.LogError, match=r"Another program wrote .*restore the file from a copy, or cut it"):
        log.append(ALL[3])
    assert log.path.read_bytes() == before


def test_a_study_whose_lock_is_gone_ends_before_another_driver_writes(log):
    (log.dir / "lock").unlink()
    assert "lock was removed while the study ran, so another driver may have started" in found_gone(log)
    before = log.path.read_bytes()
    with pytest.raises(ps.LogError, match="lock was removed"):
        log.append(ALL[3])
    assert log.path.read_bytes() == before


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_log_that_is_gone_is_written_beside(how, log):
    gone = log.path
    gone.unlink()
    if how == "replaced":
        gone.write_text("mine\n")
    said = found_gone(log)
    rescued = log.dir / "log.rescued.jsonl"
    assert f"{gone} was removed, moved or replaced while the study ran, so the study ended. All its events" in said
    assert said.endswith(f"go on with: mv {rescued} {gone} && penstock resume s --dir {log.dir.parent}")
    log.append(ALL[-1])  # the driver goes on to its end
    log.sync()
    log.close()
    assert list(read(rescued)) == [*ALL[:3], ALL[-1]]
    assert not gone.exists() or gone.read_text() == "mine\n"


def test_an_earlier_rescue_is_left_alone(log):
    log.path.unlink()
    (log.dir / "log.rescued.jsonl").write_text("earlier")
    assert "log.rescued-2.jsonl" in found_gone(log)
    log.close()
    assert (log.dir / "log.rescued.jsonl").read_text() == "earlier"


@pytest.mark.parametrize("above", [0, 1, 2])
def test_where_the_folder_is_gone_the_events_go_above_it_as_a_study_of_their_own(above, log):
    removed = (log.dir, *log.dir.parents)[above]
    shutil.rmtree(removed)
    said = found_gone(log)
    assert said.endswith(f"go on with: penstock resume s-rescued --dir {removed.parent}")
    log.append(ALL[-1])
    log.close()
    assert list(read(removed.parent / "s-rescued" / "log.jsonl")) == [*ALL[:3], ALL[-1]]


def test_the_last_sync_looks_too(log):
    log.path.unlink()
    with pytest.raises(ps.LogError, match="was removed"):
        log.sync()
    log.close()


def test_a_log_that_was_cut_takes_no_further_line(log):
    os.truncate(log.path, 9)
    with pytest.raises(ps.LogError, match=r"log.jsonl .* 9 bytes and not \d+.*restore the file from a copy"):
        log.look()
    for use in (lambda: log.append(ALL[-1]), log.sync, log.close):
        with pytest.raises(ps.LogError, match="restore the file from a copy"):
            use()
    assert log.path.stat().st_size == 9
    log.close()  # the lock was let go


def test_events_that_can_be_written_nowhere_are_said_to_be_lost(log, monkeypatch):
    monkeypatch.setattr("penstock.log.writer.rescue", lambda gone, fd: None)
    log.path.unlink()
    assert "the study ended, and is lost" in found_gone(log)
    with pytest.raises(ps.LogError, match="and is lost"):
        log.close()


def takes_away(trial):
    """Removes its study's folder, or log, at unit 3 of the first run."""
    trial.report(1, loss=trial.config["x"], state=1)
    trial.report(2, loss=trial.config["x"], state=2)
    marker = Path("taken")
    if not marker.exists():
        marker.touch()
        gone = Path(trial.config["gone"])
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    for unit in range(3, 6):
        trial.report(unit, loss=trial.config["x"] / unit, state=unit)


FILE = """
import penstock as ps
from tests.log.test_rescue import takes_away
space = {"x": ps.uniform(1, 4), "gone": GONE}
study = ps.Study(takes_away, space, metric="loss", mode="min", algorithm=ps.Random(budget=5), trials=3, name="s")
"""


@pytest.mark.parametrize("gone", [".penstock/s/log.jsonl", ".penstock/s"])
def test_a_study_whose_log_is_taken_away_ends_and_goes_on_where_its_message_says(gone, monkeypatch):
    monkeypatch.setattr("penstock.log.writer.LOOK", 0.0)
    Path("tune.py").write_text(FILE.replace("GONE", repr(gone)))
    ended = CliRunner().invoke(app, ["run", "tune.py"])
    assert ended.exit_code == 1
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("penstock: ")]
    *move, resume = said.partition("go on with: ")[2].split(" && ")
    for command in move:
        subprocess.run(command, shell=True, check=True)
    _, _, name, *where = resume.split()
    *_, last = read(Path(".penstock") / name / "log.jsonl")
    assert (type(last), last.reason) == (Ended, "failed")
    done = CliRunner().invoke(app, ["resume", name, *where])
    assert done.exit_code == 0, done.output
    space = {"x": ps.uniform(1, 4), "gone": gone}
    whole = studies(takes_away, space, algorithm=ps.Random(budget=5), trials=3)(name="whole").run(progress=False)
    found = History.of(read(Path(".penstock") / name / "log.jsonl"))
    assert [trial.curve for trial in found.trials] == [trial.curve for trial in whole.trials]
