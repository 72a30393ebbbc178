"""One writer a study: who holds its lock, and names that studies started together get."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import LogError
from penstock.log.lock import Lock, holder
from penstock.log.naming import open_new
from penstock.log.writer import Log
from tests.studies import studies
from tests.tasks import trivial

HOLDER = """
import sys
from pathlib import Path
from penstock.log.lock import Lock
lock = Lock.take(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""
OTHER = "import sys; from pathlib import Path; from penstock.log.lock import Lock; Lock.take(Path(sys.argv[1]))"
STARTED = """
import sys
from pathlib import Path
from penstock.log.naming import open_new
from penstock.log.events import Opened
print("ready", flush=True)
sys.stdin.readline()  # all begin together
logs = [open_new(Path(sys.argv[1]), "Digits", lambda folder: False) for _ in range(20)]
for log in logs:
    log.append(Opened({}))
    print(log.dir.name, flush=True)
    log.close()
"""

study = studies(trivial, {"x": ps.uniform(0, 4)}, algorithm=ps.Random(budget=1), trials=2)


def started(code, dir):
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(dir)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_holder_is_the_process_that_has_the_lock(tmp_path):
    assert holder(tmp_path) is None
    other = started(HOLDER, tmp_path)
    (tmp_path / "lock").write_text("1\n")  # the number in the file may be anybody's
    assert holder(tmp_path) == other.pid
    other.kill()
    other.wait()
    assert (tmp_path / "lock").read_text() == "1\n"
    assert holder(tmp_path) is None
    other.stdin.close()
    other.stdout.close()


def test_to_ask_who_holds_a_lock_does_not_let_it_go(tmp_path):
    lock = Lock.take(tmp_path)
    assert holder(tmp_path) == os.getpid()
    refused = subprocess.run([sys.executable, "-c", OTHER, tmp_path], capture_output=True, text=True)
    assert f"being run by process {os.getpid()}" in refused.stderr
    lock.release()
    assert holder(tmp_path) is None
    assert subprocess.run([sys.executable, "-c", OTHER, tmp_path]).returncode == 0


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_on_the_new_file(tmp_path, monkeypatch):
    """A study that never began removes its lock's file just when another process has opened that file."""
    removed = []
    take = Lock.__init__

    def opened(lock, dir):
        take(lock, dir)
        if not removed:
            removed.append((dir / "lock").unlink())

    monkeypatch.setattr(Lock, "__init__", opened)
    lock = Lock.take(tmp_path)
    refused = subprocess.run([sys.executable, "-c", OTHER, tmp_path], capture_output=True, text=True)
    assert "being run by process" in refused.stderr
    lock.release()


def test_a_link_in_place_of_the_lock_is_refused_and_its_file_left_alone(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "lock").symlink_to(precious)
    with pytest.raises(LogError, match="Cannot write the study's folder"):
        Log.open(tmp_path / "s")
    assert precious.read_text() == "mine"


def test_studies_that_start_together_get_a_name_each(tmp_path):
    others = [started(STARTED, tmp_path) for _ in range(8)]
    for other in others:
        print(file=other.stdin, flush=True)
    names = [name for other in others for name in other.communicate()[0].split()]
    assert [other.returncode for other in others] == [0] * 8
    assert sorted(names) == sorted(f"digits-{number}" for number in range(1, 161))


def test_a_new_name_passes_over_folders_that_are_taken(tmp_path):
    (tmp_path / "digits-2").mkdir()
    taken = [tmp_path / "digits-1"]
    log = open_new(tmp_path, "Digits", taken.__contains__)
    assert log.dir.name == "digits-3"
    log.close()
    assert not log.dir.exists(), "a study that never began leaves no trace"


def test_a_long_task_name_gives_a_name_that_fits(tmp_path):
    log = open_new(tmp_path, "Ä" * 500, lambda folder: False)
    assert log.dir.name == "ä" * 40 + "-1"
    log.close()


@pytest.mark.parametrize("name", ["x" * 256, "ä" * 128])
def test_a_name_that_no_file_system_takes_is_refused_early(name):
    with pytest.raises(ps.StudyError, match=r"name must have at most 255 bytes, got 256 .*choose a shorter one"):
        study(name=name)
    assert study(name=name[:-1]).run(progress=False).ended == "done"


def test_a_folder_for_new_studies_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ps.LogError, match=r"Cannot write the folder .*file \(File exists\): choose another with"):
        study(name=None, dir=tmp_path / "file").run(progress=False)
