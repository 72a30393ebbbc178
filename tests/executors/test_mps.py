"""The daemon of MPS, which is a script here: refused, private, and stopped even if its driver is killed."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.executors.processes.mps import Daemon, Refused

CONTROL = """#!/bin/sh
read -r word
echo "${1:-$word} $CUDA_VISIBLE_DEVICES" >> "$CALLS"
"""
DRIVER = """
import signal
from penstock.executors.processes.mps import Daemon
daemon = Daemon("GPU-1", None)
print(daemon._watcher.pid, daemon._folder, flush=True)
signal.pause()
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    script = tmp_path / "bin" / "nvidia-cuda-mps-control"
    script.parent.mkdir()
    script.write_text(CONTROL)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return lambda: (tmp_path / "calls").read_text().splitlines()


def test_it_is_stopped_where_its_driver_is_killed(calls):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    pid, folder = driver.stdout.readline().split()
    watcher = os.pidfd_open(int(pid))
    assert Path(folder, "pipe").is_dir()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert select.select([watcher], [], [], 60)[0], "the watcher outlived its driver"
    os.close(watcher)
    assert calls() == ["-d GPU-1", "get_server_list GPU-1", "quit GPU-1"]
    assert not Path(folder).exists()


def test_it_is_stopped_where_its_watcher_was_killed(calls):
    daemon = Daemon("", None)
    daemon._watcher.kill()
    daemon.close()
    assert [line.split()[0] for line in calls()] == ["-d", "get_server_list", "quit"]
    assert not daemon._folder.exists()


def test_it_is_stopped_where_a_process_that_was_forked_holds_its_pipe(calls):
    daemon = Daemon("", None)
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    daemon.close()
    assert daemon._watcher.returncode == 0
    os.close(theirs)
    os.close(ours)
    os.wait()


def test_a_machine_without_it_refuses(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(Refused, match="nvidia-cuda-mps-control is not on PATH"):
        Daemon("", None)
