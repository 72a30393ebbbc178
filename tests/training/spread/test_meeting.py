"""Where workers meet: nothing of it is beyond loopback without a secret, and a stranger finds no way in."""

from __future__ import annotations

import pickle
import socket
from multiprocessing import AuthenticationError

import pytest
import torch
from torch.distributed.distributed_c10d import _world as world

from penstock.training.spread import gang as gangs
from penstock.training.spread import meeting as meetings
from penstock.training.spread.gang import Apart, Gang
from penstock.training.spread.meeting import Meeting
from tests.listening import listeners

CPU = torch.device("cpu")
WAIT = 10.0


@pytest.fixture
def guarded():
    """A meeting behind a door, as on a cluster; here its interface is loopback."""
    meeting = Meeting.open("127.0.0.1", WAIT, guarded=True)
    yield meeting
    meeting.close()


def test_on_one_machine_the_store_listens_on_loopback_alone():
    before = set(listeners())
    gang, address = Gang.open("127.0.0.1", 2, CPU)
    made = set(listeners()) - before
    assert [one.host for one in made] == ["127.0.0.1"]
    assert address == f"127.0.0.1:{made.pop().port}"
    gang.leave()


def test_a_worker_with_the_secret_comes_in_by_the_door_and_others_hear_it(guarded):
    others = [Meeting.join(guarded.address, WAIT) for _ in range(3)]
    for number, other in enumerate(others):
        other.store.set(f"here {number}", str(number))
    assert guarded.store.get("here 2") == b"2"
    guarded.store.set("told", b"x" * 300_000)  # more than one read
    assert others[0].store.get("told") == b"x" * 300_000
    for other in others:
        other.close()


@pytest.mark.parametrize("secret", ["", "#", "#" + "0" * 64])
def test_a_stranger_without_the_secret_writes_nothing(guarded, secret, monkeypatch):
    monkeypatch.setattr(gangs, "MEETING", 0.2)
    where = guarded.address.partition("#")[0]
    with pytest.raises(Apart):
        Gang.join(where + secret, 1, 2, CPU).store.set("error", "failed a stranger")
    assert not guarded.store.check(["error"])
    assert Meeting.join(guarded.address, WAIT).store.check(["error"]) is False  # and the door still opens


def test_strangers_that_say_nothing_keep_no_worker_out_for_long(guarded):
    host, _, port = guarded.address.partition("#")[0].rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(meetings.ASKED // 2)]
    assert Meeting.join(guarded.address, WAIT).store.check(["error"]) is False
    for one in silent:
        one.close()


def test_a_door_that_does_not_know_the_secret_itself_is_no_door():
    door = meetings.Door("127.0.0.1", lambda came: meetings.prove(came, "another", first=True))
    with pytest.raises((AuthenticationError, OSError)):
        Meeting.join(f"127.0.0.1:{door.port}#secret", WAIT)
    door.close()


def test_a_meeting_whose_first_worker_has_gone_is_refused_at_once(guarded):
    guarded.close()
    with pytest.raises(Apart):
        Gang.join(guarded.address, 1, 2, CPU)


def test_values_of_other_workers_run_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    with pytest.raises(pickle.UnpicklingError):
        gangs._unpacked(gangs._packed(Evil()))
    assert not (tmp_path / "ran").exists()


def test_a_worker_that_once_could_not_connect_meets_the_others_all_the_same():
    world.group_count = 3  # torch counts groups that failed, and names the next one by that
    gang, _ = Gang.open("127.0.0.1", 1, torch.device("cpu"))
    try:
        gang.connect("127.0.0.1")
        assert gang.group.group_name == "0"
    finally:
        gang.leave()
