"""NVIDIA's MPS for the worker processes of one device: a daemon of the study's own, which ends with the study.

Without MPS, processes on a GPU take turns of some milliseconds; under MPS their kernels run side by side. The daemon
has folders of its own, so that it neither meets nor stops another one on the machine, and sees its device alone. The
device's compute mode stays as it is: that is for the machine's owner to set, and processes need no other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PATIENCE = 30.0  # seconds in which the control program answers
QUIT = "quit\n"
WATCH = f'read -r word; echo quit | {CONTROL}; ended=$?; rm -rf "$0"; exit $ended'
"""The watcher, a shell: it reads until the driver says a word, or is gone without one, and then stops the daemon."""


class Refused(Exception):
    """MPS cannot be used here, and why."""


class Daemon:
    """The MPS daemon of one device; ``environment`` is what its clients need.

    ``uuid`` names the device to CUDA; with "" the daemon sees the devices that this process sees. ``active_threads`` is
    the most percent of the device's threads that one client may use.
    """

    def __init__(self, uuid: str, active_threads: float | None) -> None:
        # A socket's path has at most 107 characters, and TMPDIR may be long.
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-mps-", dir="/tmp" if os.path.isdir("/tmp") else None))
        pipe, log = self._folder / "pipe", self._folder / "log"
        pipe.mkdir()
        log.mkdir()
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
        if uuid:
            self.environment["CUDA_VISIBLE_DEVICES"] = uuid
        if active_threads is not None:
            self.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{active_threads:g}"
        self._surroundings = {**os.environ, **self.environment}
        self._watcher = subprocess.Popen(
            ["sh", "-c", WATCH, str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._surroundings,
            start_new_session=True,  # Ctrl-C reaches the driver alone
        )
        try:
            self._ask("-d")
            self._ask(say="get_server_list\n")
        except BaseException:
            self.close()
            raise

    def _ask(self, *arguments: str, say: str = "") -> None:
        """Run the control program; what it says goes to a file, because the daemon keeps the file open."""
        with open(self._folder / "said", "w+") as said:
            try:
                done = subprocess.run(
                    [CONTROL, *arguments],
                    input=say,
                    stdout=said,
                    stderr=said,
                    env=self._surroundings,
                    text=True,
                    timeout=PATIENCE,
                )
            except FileNotFoundError:
                raise Refused(f"{CONTROL} is not on PATH") from None
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Refused(f"{CONTROL} failed: {error}") from None
            if done.returncode:
                said.seek(0)
                lines = said.read().strip().splitlines() or [f"it ended with status {done.returncode}"]
                raise Refused(f"{CONTROL} refused: {lines[-1]}")

    def close(self) -> None:
        """Stop the daemon, and remove its folders."""
        assert self._watcher.stdin is not None
        with suppress(OSError):
            self._watcher.stdin.write(b"end\n")  # a process forked from the driver may hold the pipe open
            self._watcher.stdin.close()
        try:
            ended = self._watcher.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            ended = self._watcher.wait()
        if ended < 0:  # it was killed, and has stopped nothing
            with suppress(Refused):
                self._ask(say=QUIT)
        shutil.rmtree(self._folder, ignore_errors=True)


def under_mps(environment: Mapping[str, str]) -> bool:
    """Whether a process of this environment is a client of MPS, so that a fault of another client may end it."""
    return "CUDA_MPS_PIPE_DIRECTORY" in environment
