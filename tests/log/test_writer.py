"""The writer of a log: what is durable, what Ctrl-C may cut off, who may write, and disks that fail."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import penstock as ps
from penstock.log.reader import read
from penstock.log.writer import Log
from tests.log.lines import ALL


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
        full.setattr("penstock.log.writer.os.write", lambda fd, line: write(fd, line[:9]))
        with pytest.raises(ps.LogError, match="make room, then resume"):
            log.append(ALL[1])
    log.append(ALL[-1])  # there is room again
    log.close()
    assert list(read(log.path)) == [ALL[0], ALL[-1]]


def test_no_line_waits_longer_than_a_second_for_its_sync(tmp_path, monkeypatch):
    clock, synced = [100.0], []
    monkeypatch.setattr("penstock.log.writer.time.monotonic", lambda: clock[0])
    log = Log.open(tmp_path / "s")
    fsync = os.fsync
    monkeypatch.setattr("penstock.log.writer.os.fsync", lambda fd: (synced.append(clock[0]), fsync(fd)))
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
    code = "import sys, pathlib; from penstock.log.writer import Log; Log.open(pathlib.Path(sys.argv[1]))"
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


def test_a_study_that_never_began_leaves_no_trace(tmp_path):
    Log.open(tmp_path / "s").close()
    assert not (tmp_path / "s").exists()


# Ctrl-C


class Interrupt:
    """Raises KeyboardInterrupt before the n-th instruction that the writer's or the lock's module executes."""

    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.endswith(("log/writer.py", "log/lock.py")):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def cut_off(n, work):
    """Do some work until its n-th instruction; gives whether it was done before that.

    It has a thread of its own: Python's record of the exception at hand is not mended after such an interrupt.
    """
    interrupt = Interrupt(n)

    def worked():
        sys.settrace(interrupt)
        try:
            work()
        except (KeyboardInterrupt, ps.LogError):
            pass
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=worked)
    thread.start()
    thread.join()
    return interrupt.left > 0


def half(fd, line, write=os.write):
    return write(fd, line[: len(line) // 2])


@pytest.mark.parametrize("full", [False, True])
def test_an_append_that_is_cut_off_anywhere_leaves_a_log_that_reads_back_whole(full, tmp_path, monkeypatch):
    """Once where the line is written, and once where the disk is full in its middle."""
    monkeypatch.setattr("penstock.log.writer.os.fsync", lambda fd: None)  # its cost is not its effect here
    done, n = 0, 0
    while done < 2:  # every instruction, and one past the last
        n += 1
        log = Log.open(tmp_path / str(n))
        log.append(ALL[0])
        with monkeypatch.context() as disk:
            if full:
                disk.setattr("penstock.log.writer.os.write", half)
            done += cut_off(n, lambda log=log: log.append(ALL[1]))
        log.append(ALL[-1])  # as a driver does at its end
        log.close()
        found = list(read(log.path))
        assert found in ([ALL[0], ALL[-1]], [ALL[0], ALL[1], ALL[-1]]), n
        if full:
            assert len(found) == 2, "half a line is no line"
    assert n > 50


@pytest.mark.parametrize("method", ["sync", "close", "tick", "look"])
def test_another_method_that_is_cut_off_anywhere_leaves_the_log_and_no_lock(method, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.log.writer.os.fsync", lambda fd: None)
    done, n = 0, 0
    while done < 2:
        n += 1
        log = Log.open(tmp_path / str(n))
        log.append(ALL[0])
        log._synced, log._looked = (0.0, 0), 0.0  # so that each of them has something to do
        done += cut_off(n, getattr(log, method))
        if method != "close":
            log.append(ALL[1])
            log.close()
        path = log.path
        del log
        assert list(read(path)) == ALL[: 1 if method == "close" else 2], n
        Log.open(tmp_path / str(n)).close()  # by this process too


@pytest.mark.parametrize("before", [0, 1])
def test_opening_that_is_cut_off_anywhere_leaves_the_log_and_no_lock(before, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.log.writer.os.fsync", lambda fd: None)
    done, n = 0, 0
    while done < 2:
        n += 5
        dir = tmp_path / str(n)
        if before:
            log = Log.open(dir)
            log.append(ALL[0])
            log.close()
            os.truncate(log.path, log.path.stat().st_size + 3)  # zeros, as after a power loss
        done += cut_off(n, lambda dir=dir: Log.open(dir).close())
        again = Log.open(dir)
        assert again.past == ALL[:before]
        again.close()


INTERRUPTED = """
import os, random, signal, sys, threading
from pathlib import Path
from penstock.log.writer import Log
from tests.log.lines import ALL

def storm():
    while True:
        for _ in range(random.randrange(3000)):
            pass
        if armed:
            os.kill(os.getpid(), signal.SIGINT)

def interrupt(*_):
    if armed:
        armed.clear()
        raise KeyboardInterrupt

armed = []
signal.signal(signal.SIGINT, interrupt)
sys.setswitchinterval(1e-5)
log = Log.open(Path(sys.argv[1]))
log.append(ALL[0])
threading.Thread(target=storm, daemon=True).start()
for _ in range(100):
    try:
        armed.append(True)
        while True:
            log.append(ALL[1])
    except KeyboardInterrupt:
        pass
log.append(ALL[-1])
log.close()
"""


def test_a_storm_of_real_interrupts_leaves_a_log_that_reads_back_whole(tmp_path):
    subprocess.run([sys.executable, "-c", INTERRUPTED, tmp_path / "s"], cwd=Path(__file__).parents[2], check=True)
    events = list(read(tmp_path / "s" / "log.jsonl"))
    assert events == [ALL[0], *[ALL[1]] * (len(events) - 2), ALL[-1]]


# Disks that fail


def _append_and_sync(log, event):
    log.append(event)
    log.sync()


@pytest.mark.parametrize("call", ["fsync", "ftruncate", "write"])
def test_a_failing_disk_is_one_message(call, tmp_path, monkeypatch):
    log = Log.open(tmp_path / "s")
    log.append(ALL[0])

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as disk:
        disk.setattr(f"penstock.log.writer.os.{call}", fails)
        if call == "ftruncate":
            disk.setattr("penstock.log.writer.os.write", half)
        with pytest.raises(ps.LogError, match=r"Cannot write .*log.jsonl \(Input/output error\).*then resume"):
            _append_and_sync(log, ALL[1])
    log.append(ALL[-1])
    log.close()
    assert list(read(log.path)) in ([ALL[0], ALL[-1]], [ALL[0], ALL[1], ALL[-1]])


@pytest.mark.parametrize("call", ["fsync", "unlink"])
def test_a_disk_that_fails_at_the_end_lets_the_lock_go(call, tmp_path, monkeypatch):
    log = Log.open(tmp_path / "s")
    with monkeypatch.context() as disk:

        def fails(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        disk.setattr(f"penstock.log.writer.os.{call}", fails)
        if call == "fsync":
            with pytest.raises(ps.LogError, match="Input/output error"):
                log.close()
        else:
            log.close()  # a file that stays behind empty is no reason for an error
    Log.open(tmp_path / "s").close()
