"""Events as lines of a log, and reading them: what is noticed, and what older versions wrote."""

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.log import events
from penstock.log.events import Asked, Measured, Opened, Reported
from penstock.log.history import History
from penstock.log.reader import LogReader, read
from penstock.log.timeline import available
from penstock.log.writer import Log
from penstock.task import fingerprint
from penstock.trial import StateRef, Usage
from tests.log.lines import ALL, write
from tests.tasks import Blobs

VERSION_1 = Path(__file__).with_name("version-1.jsonl")  # of a study that was killed, as version 1 wrote it


def test_every_event_comes_back_as_it_was(tmp_path):
    assert list(read(write(tmp_path / "s", *ALL))) == ALL


def test_nan_comes_back(tmp_path):
    report = Reported(0, 1, 1, {"loss": float("nan")}, None, Usage(), 0.0)
    *_, event = read(write(tmp_path / "s", *ALL[:3], report))
    assert event.metrics["loss"] != event.metrics["loss"]


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
    path = write(tmp_path / "s", Opened({"log": events.VERSION + 1, "unheard": "of"}))
    with pytest.raises(ps.LogError, match=r"newer Penstock \(log version 7; this one reads up to 6\): upgrade"):
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
    assert opened == [1, events.PLAIN]
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


def test_a_missing_log_is_said(tmp_path):
    with pytest.raises(ps.LogError, match="found none: check the name and --dir"):
        list(read(tmp_path / "log.jsonl"))


def test_lines_are_json_for_any_other_tool(tmp_path):
    path = write(tmp_path / "s", *ALL)
    kinds = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert kinds == [type(event).__name__.lower() for event in ALL]
