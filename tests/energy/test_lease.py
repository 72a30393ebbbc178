"""A limit that is lent comes back, whatever ends its holder."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.energy.lease import FOLDER, Lease, folder
from penstock.energy.nvml import Gpu, NvmlError
from tests.energy.nvml import fake

HOLDER = """
import sys
from pathlib import Path
from penstock.energy.lease import Lease
from penstock.energy.nvml import Gpu
lease = Lease(Gpu("GPU-fake"))
lease.wish(float(sys.argv[1]))
print(lease.watchdog, flush=True)
input()
"""


def fails_inside():
    with Lease(Gpu("GPU-fake")) as lease:
        raise KeyError(lease.wish(300.0))


def limit(folder):
    return fake.look(folder)["limit"]


def test_the_prior_limit_returns_at_the_end_and_after_an_exception(gpus):
    fake.change(gpus, limit=650.0)
    with Lease(Gpu("GPU-fake")) as lease:
        assert lease.wish(400.0) == 400.0
        assert lease.wish(450.0) == 450.0
    assert limit(gpus) == 650.0
    with pytest.raises(KeyError):
        fails_inside()
    assert limit(gpus) == 650.0
    assert not list(folder().glob("*.json"))


def test_the_highest_wish_holds_until_its_holder_leaves(gpus):
    low, high = Lease(Gpu("GPU-fake")), Lease(Gpu("GPU-fake"))
    assert (low.wish(300.0), high.wish(500.0), low.wish(350.0)) == (300.0, 500.0, 500.0)
    high.close()
    assert limit(gpus) == 350.0
    low.close()
    assert limit(gpus) == 700.0


def test_after_a_kill_the_watchdog_brings_the_limit_back(gpus):
    """Another process holds it too, so the limit returns only once both are gone."""
    holders = []
    for watts in ("300", "400"):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, watts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        holders.append((holder, os.pidfd_open(int(holder.stdout.readline()))))
    assert limit(gpus) == 400.0
    for (holder, watchdog), left in zip(reversed(holders), (300.0, 700.0), strict=True):
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        select.select([watchdog], [], [], 60)
        os.close(watchdog)
        assert limit(gpus) == left


def test_where_the_watchdog_was_killed_too_the_next_holder_knows_the_prior_limit(gpus):
    fake.change(gpus, limit=300.0)
    folder().mkdir()
    left = {"prior": 700.0, "set": 300.0, "holders": {"999999999 1 0": 300.0}}
    (folder() / "GPU-fake.json").write_text(json.dumps(left))
    with Lease(Gpu("GPU-fake")) as lease:
        lease.wish(500.0)
    assert limit(gpus) == 700.0


def test_a_limit_that_somebody_set_by_hand_meanwhile_stays(gpus):
    with Lease(Gpu("GPU-fake")) as lease:
        lease.wish(500.0)
        fake.change(gpus, limit=600.0)
    assert limit(gpus) == 600.0


def test_without_its_watchdog_nothing_is_set(gpus, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with Lease(Gpu("GPU-fake")) as lease, pytest.raises(NvmlError, match="could not start"):
        lease.wish(300.0)
    assert fake.look(gpus)["sets"] == []


@pytest.mark.parametrize(
    ("changes", "wish", "why"),
    [
        ({"permission": False}, 300.0, "Insufficient Permissions"),
        ({}, 100.0, "from 200 to 700 W, got 100 W"),
        ({}, 701.0, "from 200 to 700 W"),
    ],
)
def test_a_limit_that_cannot_be_set_leaves_nothing_behind(gpus, changes, wish, why):
    fake.change(gpus, **changes)
    with Lease(Gpu("GPU-fake")) as lease, pytest.raises(NvmlError, match=why):
        lease.wish(wish)
    assert limit(gpus) == 700.0
    assert not list(folder().glob("*.json"))


def linked(place):
    place.symlink_to(place.parent)


def writable(place):
    place.mkdir()
    place.chmod(0o777)


def of_another(place):
    place.mkdir()
    if os.geteuid() == 0:
        os.chown(place, 12345, 12345)


@pytest.mark.parametrize("make", [linked, writable, of_another, Path.touch])
def test_where_another_user_could_say_what_a_limit_was_nothing_is_set(gpus, monkeypatch, make):
    make(folder())
    if make is of_another and os.geteuid() != 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with Lease(Gpu("GPU-fake")) as lease, pytest.raises(NvmlError, match=r"leases of power limits") as refused:
        lease.wish(300.0)
    assert refused.value.permission
    assert "PENSTOCK_LEASES" in str(refused.value)
    assert fake.look(gpus)["sets"] == []


def test_the_folder_of_leases_is_one_for_all_programs_whatever_their_temporary_folder(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert folder() == Path("/run/penstock-limits")
