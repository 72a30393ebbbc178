"""The event log: what survives, what is noticed, who may write."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.log import events
from penstock.log.events import (
    Asked,
    Devices,
    Dropped,
    Ended,
    Failed,
    Log,
    LogReader,
    Measured,
    Opened,
    Placed,
    Reported,
    Saved,
    Wrote,
    read,
)
from penstock.log.history import History
from penstock.log.timeline import available
from penstock.task import fingerprint
from penstock.trial import StateRef, Usage
from tests.tasks import Blobs

VERSION_1 = Path(__file__).with_name("version-1.jsonl")  # of a study that was killed, as version 1 wrote it
STATE = StateRef("000001-1-9.pt", 1, 9, 100)
ALL = [
    Opened({"log": events.VERSION, "name": "s", "trials": None}),
    Wrote(None, "key", {"a": [1, 2.5]}),
    Asked(0, {"lr": 0.1 + 0.2, "widths": [3, 4]}, 3, "rung 0", None),
    Asked(1, {"lr": 1e-300}, 9, "rung 1", (0, 3)),
    Devices(({"name": "cpu", "type": "cpu", "memory": 8, "node": "local", "price": None, "market": "spot"},), 1.25),
    Placed(1, 1, ("cpu",), "solo", STATE, 1.5),
    Measured("5f", "cpu", "scaling", {1: 0.5, 2: 0.25}, 2, "2 devices pay", "", 1.75),
    Saved(1, 1, STATE, 2.0),
    Reported(1, 1, 1, {"loss": float("inf"), "b": 0.1}, STATE, Usage(1.25, 9, None), 2.5),
    Failed(1, 1, "it broke\nbadly", True, 3.0),
    Dropped((0, 1)),
    Ended("done", 4.0),
]


def write(dir, *lines):
    log = Log.open(dir)
    for line in lines:
        log.append(line)
    log.close()
    return dir / "log.jsonl"


def test_every_event_comes_back_as_it_was(tmp_path):
    assert list(read(write(tmp_path / "s", *ALL))) == ALL


def test_nan_comes_back(tmp_path):
    path = write(tmp_path / "s", Reported(0, 1, 1, {"loss": float("nan")}, None, Usage(), 0.0))
    (event,) = read(path)
    assert event.metrics["loss"] != event.metrics["loss"]


def test_a_line_is_with_the_operating_system_before_append_returns(tmp_path):
    log = Log.open(tmp_path / "s")
    log.append(ALL[0])
    assert list(read(log.path)) == ALL[:1]  # though neither closed nor synced
    log.close()


def test_a_line_that_only_half_of_could_be_written_does_not_spoil_the_next(tmp_path, monkeypatch):
    log = Log.open(tmp_path / "s")
    log.append(ALL[0])
    with monkeypatch.context() as full:
        write = os.write
        full.setattr("penstock.log.events.os.write", lambda fd, line: write(fd, line[:9]))
        with pytest.raises(ps.LogError, match="make room, then resume"):
            log.append(ALL[1])
    log.append(ALL[-1])  # there is room again
    log.close()
    assert list(read(log.path)) == [ALL[0], ALL[-1]]


def test_no_line_waits_longer_than_a_second_for_its_sync(tmp_path, monkeypatch):
    clock, synced = [100.0], []
    monkeypatch.setattr("penstock.log.events.time.monotonic", lambda: clock[0])
    log = Log.open(tmp_path / "s")
    fsync = os.fsync
    monkeypatch.setattr("penstock.log.events.os.fsync", lambda fd: (synced.append(clock[0]), fsync(fd)))
    log.append(ALL[0])
    assert synced == [100.0]
    assert log.tick() is None
    clock[0] = 100.4
    log.append(ALL[1])
    assert log.tick() == pytest.approx(0.6)
    clock[0] = 101.5
    assert log.tick() is None
    assert synced == [100.0, 101.5]
    log.close()


def test_a_torn_last_line_is_cut(tmp_path):
    path = write(tmp_path / "s", *ALL)
    whole = path.read_bytes()
    for cut in (1, 5, len(ALL) + 20):
        path.write_bytes(whole[:-cut])
        assert list(read(path)) == ALL[:-1]
        log = Log.open(tmp_path / "s")
        assert log.past == ALL[:-1]
        log.append(ALL[-1])
        log.close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines[:3] + [lines[3][:10] + b"\n"] + lines[4:],
        lambda lines: lines[:3] + lines[4:],
        lambda lines: lines[:3] + [lines[4], lines[3]] + lines[5:],
        lambda lines: lines[:3] + [b'{"n":3,"event":"sang"}\n'] + lines[4:],
        lambda lines: lines[:3] + [b"\xff\xfe\n"] + lines[4:],
        lambda lines: lines[:3] + [b"[]\n"] + lines[4:],
    ],
)
def test_a_damaged_line_inside_is_a_clear_error(tmp_path, damage):
    path = write(tmp_path / "s", *ALL)
    damaged = b"".join(damage(path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(damaged)
    with pytest.raises(ps.LogError, match=r"Line 4 of .*log.jsonl is damaged .*restore the file"):
        list(read(path))
    with pytest.raises(ps.LogError, match="Line 4"):
        Log.open(tmp_path / "s")
    assert path.read_bytes() == damaged
    path.write_bytes(b"")
    Log.open(tmp_path / "s").close()  # the lock was let go


def test_a_log_of_a_newer_version_is_refused(tmp_path):
    path = write(tmp_path / "s", Opened({"log": events.VERSION + 1}))
    with pytest.raises(ps.LogError, match=r"newer Penstock \(log version 3; this one reads up to 2\): upgrade"):
        list(read(path))


def test_a_log_of_the_first_version_is_read():
    past = list(read(VERSION_1))
    assert past[0].settings["log"] == 1
    assert past[1].devices == ({"name": "cpu:0", "type": "cpu"}, {"name": "cpu:1", "type": "cpu"})
    assert past[2] == Asked(0, {"lr": 0.23625342661697485}, 8, "random")
    scaling = {1: 0.000471160000074633, 2: 0.00972984949999045}
    assert past[10] == Measured(
        "513936236b73ec6e5cfb96b2", "cpu:0", "scaling", scaling, 1, past[10].reason, "distributed", 4.412707152999928
    )
    assert past[11].state == StateRef("000000-2-29.pt", 4, 29, 9243)
    history = History.of(past)
    assert [record.reported for record in history.trials] == [4]
    assert history.measured.keys() == {("513936236b73ec6e5cfb96b2", "cpu", "scaling")}
    assert available(past).keys() == {"cpu:0", "cpu:1"}


def test_what_the_first_version_measured_of_sharing_is_read():
    line = """{"n":0,"event":"measured","signature":"51","device":"cpu","way":"native","size":512,"seconds":{"1":0.5,
        "2":0.75},"bytes":null,"reason":"4 trials together train at 3795 steps/s","clock":1.125,"scaling":{}}"""
    said = "4 trials together train at 3795 steps/s"
    assert events.decode(line, 0) == Measured("51", "cpu", "sharing", {1: 0.5, 2: 0.75}, 512, said, "native", 1.125)


def test_a_study_of_the_first_version_goes_on(tmp_path):
    lines = VERSION_1.read_text().replace("be0e9cb3544b", fingerprint(Blobs()))
    (tmp_path / "spread").mkdir()
    (tmp_path / "spread" / "log.jsonl").write_text(lines)
    before = list(read(tmp_path / "spread" / "log.jsonl"))
    study = ps.Study(
        Blobs(),
        {"lr": ps.loguniform(1e-3, 1)},
        metric="loss",
        mode="min",
        algorithm=ps.Random(budget=8),
        trials=1,
        name="spread",
        dir=tmp_path,
    )
    result = study.run(progress=False)
    assert (result.ended, [row["budget"] for row in result.best.curve]) == ("done", list(range(1, 9)))
    after = list(read(tmp_path / "spread" / "log.jsonl"))
    assert after[: len(before)] == before
    opened = [event.settings["log"] for event in after if isinstance(event, Opened)]
    assert opened == [1, events.VERSION]
    assert [event.unit for event in after if isinstance(event, Reported)] == list(range(1, 9)), "none is told twice"


def test_a_reader_follows_a_log_that_is_being_written(tmp_path):
    log = Log.open(tmp_path / "s")
    reader = LogReader(log.path)
    seen = []
    for event in ALL:
        log.append(event)
        seen += reader.new()
    log.close()
    assert seen == ALL
    assert list(reader.new()) == []


def test_one_writer_in_one_process(tmp_path):
    log = Log.open(tmp_path / "s")
    with pytest.raises(ps.LogError, match="already being run by this process"):
        Log.open(tmp_path / "s")
    log.append(ALL[0])
    log.close()
    Log.open(tmp_path / "s").close()


def test_one_writer_among_processes(tmp_path):
    log = Log.open(tmp_path / "s")
    log.append(ALL[0])
    code = "import sys, pathlib; from penstock.log.events import Log; Log.open(pathlib.Path(sys.argv[1]))"
    other = subprocess.run([sys.executable, "-c", code, tmp_path / "s"], capture_output=True, text=True)
    assert f"is being run by process {os.getpid()}: wait for it" in other.stderr
    log.close()
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "s"]).returncode == 0


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ps.LogError, match=r"Cannot write the study's folder .*: choose another with dir="):
        Log.open(tmp_path / "file" / "s")


def test_a_full_disk_is_said_and_costs_no_earlier_line():
    log = Log(Path("/dev"), _fd=os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(ps.LogError, match="Everything before is safe: make room, then resume"):
        log.append(ALL[0])
    os.close(log._fd)


def test_a_missing_log_is_said(tmp_path):
    with pytest.raises(ps.LogError, match="found none: check the name and --dir"):
        list(read(tmp_path / "log.jsonl"))


def test_a_study_that_never_began_leaves_no_trace(tmp_path):
    Log.open(tmp_path / "s").close()
    assert not (tmp_path / "s").exists()


def test_lines_are_json_for_any_other_tool(tmp_path):
    path = write(tmp_path / "s", *ALL)
    kinds = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert kinds == [type(event).__name__.lower() for event in ALL]
