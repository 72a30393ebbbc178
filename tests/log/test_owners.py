"""Copies and moves of a study whose states lie elsewhere: no study deletes the states of another."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.log import owners
from penstock.log.events import Opened, Placed
from penstock.log.states import Folder, States
from tests.disk import Disk
from tests.log.test_states import files, raising, run
from tests.studies import log
from tests.test_crash import found


@pytest.fixture
def resting(tmp_path):
    """A study that rests, with its states elsewhere; gives what the undisturbed study finds."""
    whole = found(run(name="whole"))
    run(states=f"disk://{tmp_path}/shared", dir="one", target=10.0)
    assert files("shared/s")
    return whole


def go_on(tmp_path, dir, **settings):
    return found(run(states=f"disk://{tmp_path}/shared", dir=dir, **settings))


def test_a_copy_goes_on_with_states_of_its_own_and_leaves_the_originals_alone(resting, tmp_path, caplog):
    shutil.copytree("one", "two")
    before = {name: Path("shared/s", name).read_bytes() for name in os.listdir("shared/s")}
    assert go_on(tmp_path, "two") == resting
    (said,) = [record.message for record in caplog.records]
    assert "two/s/log.jsonl is a copy of" in said
    assert {name: Path("shared/s", name).read_bytes() for name in os.listdir("shared/s")} == before
    assert any(e.state is not None for e in log(dir="two") if isinstance(e, Placed)), "it read the original's states"
    (opened,) = [e.settings for e in log(dir="two") if isinstance(e, Opened)][1:]
    (kept,) = files(Path("shared", opened["home"]))
    assert sum(path.stat().st_size for path in Path("shared", opened["home"]).glob("*.pt")) > 0
    assert go_on(tmp_path, "two") == resting, "once more: it stays where it is"
    assert files("shared") == sorted(["s", opened["home"]])
    assert go_on(tmp_path, "one") == resting
    assert any(e.state is not None for e in log(dir="one") if isinstance(e, Placed))
    assert log(dir="one")[-1].reason == "done"
    assert [e.settings["home"] for e in log(dir="one") if isinstance(e, Opened)] == [None, None]
    assert files(Path("shared", opened["home"])) == [kept]


def test_a_copy_of_another_name_reads_the_originals_states_too(resting, tmp_path):
    shutil.copytree("one/s", "one/t")
    assert go_on(tmp_path, "one", name="t") == resting
    assert any(e.state is not None for e in log("t", "one") if isinstance(e, Placed))
    assert go_on(tmp_path, "one") == resting


def test_a_copy_whose_original_went_on_meanwhile_trains_the_lost_states_again(resting, tmp_path):
    shutil.copytree("one", "two")
    assert go_on(tmp_path, "one") == resting
    assert go_on(tmp_path, "two") == resting


@pytest.mark.parametrize("to", ["two/s", "one/t"])
def test_a_study_that_was_moved_keeps_its_states(to, resting, tmp_path, caplog):
    Path(to).parent.mkdir(exist_ok=True)
    Path("one/s").rename(to)
    assert go_on(tmp_path, Path(to).parts[0], name=Path(to).name) == resting
    assert files("shared") == ["s"]
    assert not caplog.records


def test_which_owners_are_one_study(tmp_path):
    log, other = tmp_path / "log.jsonl", tmp_path / "other.jsonl"
    log.touch()
    other.touch()
    mine, theirs = owners.Owner.of(log), owners.Owner.of(other)
    assert mine.is_same(mine)
    assert not theirs.is_same(mine)
    assert replace(mine, log=str(other)).is_same(mine), "moved: the inode is the same"
    assert replace(mine, inode=0).is_same(mine), "brought back from a copy: the path is the same"
    assert replace(theirs, log="/gone").is_same(mine), "moved to another disk"
    elsewhere = replace(mine, machine="another")
    assert replace(elsewhere, device=0).is_same(mine), "a shared disk"
    assert not replace(elsewhere, inode=0).is_same(mine)
    assert not replace(elsewhere, log="/gone").is_same(mine)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"machine": 1}', b"\xff"])
def test_a_place_whose_owner_cannot_be_read_is_taken(content, resting, tmp_path):
    Path("shared/s", owners.FILE).write_bytes(content)
    assert go_on(tmp_path, "one") == resting
    assert owners.Owner.read(States.of("shared/s")) == owners.Owner.of(Path("one/s/log.jsonl"))


def test_an_owner_that_cannot_be_read_is_one_message(resting, tmp_path, monkeypatch):
    monkeypatch.setattr(Disk, "cat_file", raising(PermissionError("Access Denied")))
    with pytest.raises(ps.StudyError, match=r"Access Denied.*choose another place with states= or --states\."):
        go_on(tmp_path, "one")
    monkeypatch.setattr(Folder, "read", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(ps.StudyError, match=r"Cannot read .*/owner.json .*which says whose states these are"):
        run(states="shared", dir="one")
