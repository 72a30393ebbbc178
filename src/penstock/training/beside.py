"""A process beside training, seen from training: it is asked by JSON lines, and answers with them.

No method but ``wait`` waits for it. If it dies or cannot start, that is said once, and training goes on as it is.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from select import select
from typing import Any, Self

READ = 1 << 16  # bytes

logger = logging.getLogger("penstock")


class Beside(ABC):
    """The process that runs a ``program``, a module; ``work`` says in messages what it does."""

    program: str
    work: str

    def __init__(self) -> None:
        self.failed: str | None = None  # why something was not done, the first time
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = self._unread = b""

    @classmethod
    def own(cls) -> Self:
        """One for this process and none that is forked from it, which ends with it."""
        made = cls()
        atexit.register(made.close)
        os.register_at_fork(after_in_child=made.forget)
        return made

    @abstractmethod
    def _hear(self, number: int, error: str | None) -> None:
        """Take the answer to a request."""

    def _environment(self) -> dict[str, str]:
        """What the process has in its environment, besides this one's own."""
        return {}

    def start(self) -> None:
        """Start the process, unless it is there or failed. The first request starts it too."""
        if self._process is not None or self.failed is not None:
            return
        path = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | path | self._environment(),
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches the driver alone
            )
        except OSError as error:
            self._fail(f"The process that {self.work} beside training cannot start: {error}.")
            return
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]

    def wait(self) -> None:
        """Wait until there is something to read, or more can be sent; training never does."""
        process = self._process
        if process is not None and process.stdin is not None and process.stdout is not None:
            select([process.stdout], [process.stdin] if self._unsent else [], [])

    def close(self) -> None:
        """End the process and its children."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def _send(self, *request: Any) -> None:
        """Ask for something; the first of the request is its number."""
        self.start()
        self._unsent += json.dumps(request).encode() + b"\n"

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
            self._fail(f"The process that {self.work} beside training ended with {process.wait()}.")
            self.close()

    def _fail(self, message: str) -> None:
        if self.failed is None:
            self.failed = message
            logger.warning("%s Training goes on without it.", message)

    def forget(self) -> None:
        """In a forked process: leave the process to the one that started it."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()  # a copy, or the process would wait for its end
            process.stdout.close()
            process.returncode = 0  # so that nothing here waits for it
        self._unsent = self._unread = b""
