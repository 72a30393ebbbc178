"""The kernels that a step needs, compiled beside training by a process of their own (``side.py``).

Compiling takes seconds, in which training goes on without kernels. A process has one ``Compiling``. If its side process
dies or cannot compile, that is said once, and training goes on as it is.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from threading import Thread

from penstock.training.kernels.needed import Job, folder, lies_there, name_parts

PROGRAM = "penstock.training.kernels.side"
READ = 1 << 16  # bytes

logger = logging.getLogger("penstock")


class Compiling:
    """The side process, seen from training. No method waits for it."""

    def __init__(self) -> None:
        self.failed: str | None = None  # why a kernel was not compiled, the first time
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[tuple[str, Job], int] = {}  # by Triton's folder; the number of the request
        self._there: set[tuple[str, Job]] = set()
        self._unsent = self._unread = b""

    def prepare(self) -> None:
        """Get ready beside other work, as a step will soon need kernels: all that takes seconds and needs no step."""
        self.start()
        Thread(target=name_parts, daemon=True).start()

    def start(self) -> None:
        """Start the side process. The first job starts it too, but it takes seconds to import torch."""
        if self._process is not None or self.failed is not None:
            return
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "CUDA_VISIBLE_DEVICES": "",  # it has no use for a device, and must not take memory there
            "TRITON_INTERPRET": "0",
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches the driver alone
            )
        except OSError as error:
            self._fail(f"Kernels cannot be compiled beside training: {error}.")
            return
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]

    def ask(self, jobs: Iterable[Job]) -> None:
        """Have kernels compiled, unless they lie in Triton's cache or were asked for before."""
        where = folder()
        for job in jobs:
            if (where, job) in self._there or (where, job) in self._asked:
                continue
            if lies_there(job):
                self._there.add((where, job))
                continue
            self.start()
            number = self._asked[where, job] = len(self._asked)
            self._unsent += json.dumps([number, where, job]).encode() + b"\n"
        self._exchange()

    def ready(self, jobs: Iterable[Job]) -> bool:
        """Whether all these kernels lie in Triton's cache. A kernel that was not asked for is asked for now."""
        jobs, where = list(jobs), folder()
        self.ask(jobs)
        return all((where, job) in self._there for job in jobs)

    def close(self) -> None:
        """End the side process and its children."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def _exchange(self) -> None:
        """Send what the pipe takes, and read the answers that have come."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return
        with suppress(BlockingIOError, BrokenPipeError):  # it reads later, or is dead, which its answers tell
            while self._unsent:
                self._unsent = self._unsent[os.write(process.stdin.fileno(), self._unsent) :]
        with suppress(BlockingIOError):
            while came := os.read(process.stdout.fileno(), READ):
                *lines, self._unread = (self._unread + came).split(b"\n")
                for line in lines:
                    self._hear(*json.loads(line))
            self._fail(f"The process that compiles kernels beside training ended with {process.wait()}.")
            self.close()

    def _hear(self, number: int, error: str | None) -> None:
        where, job = list(self._asked)[number]
        if error is None:
            self._there.add((where, job))
        else:
            self._fail(f"Kernel {job.module}.{job.name} was not compiled: {error}.")

    def _fail(self, message: str) -> None:
        if self.failed is None:
            self.failed = message
            logger.warning("%s Training goes on without it.", message)

    def forget(self) -> None:
        """In a forked process: leave the side process to the process that started it."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()  # a copy, or the side process would wait for its end
            process.stdout.close()
            process.returncode = 0  # so that nothing here waits for it
        self._asked, self._unsent, self._unread = {}, b"", b""


@cache
def compiling() -> Compiling:
    """This process's own."""
    made = Compiling()
    atexit.register(made.close)
    os.register_at_fork(after_in_child=made.forget)
    return made
