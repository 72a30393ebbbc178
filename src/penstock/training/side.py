"""A program that works beside training: it reads requests as JSON lines, and has a child do each of them.

A child answers with a line once its work is done, and this program does where a child died. It gives way to training.
At the end of its input it ends, with all its children.
"""

from __future__ import annotations

import json
import os
import signal
from abc import ABC, abstractmethod
from collections import deque
from multiprocessing.connection import wait

NICE = 10
READ = 1 << 16  # bytes
SAID = 600  # characters of an error, of up to six bytes each in JSON


class Side(ABC):
    """The requests that wait, and the children at work; each is known by a pidfd, readable once it has ended."""

    def __init__(self, most: int) -> None:
        os.nice(NICE)
        self.answers = os.dup(1)
        os.dup2(2, 1)  # whatever libraries print is no answer
        self.most = most
        self.waiting: deque[bytes] = deque()
        self.children: dict[int, tuple[int, bytes]] = {}
        self._rest = b""

    @abstractmethod
    def start(self, request: bytes) -> int:
        """Start a child for a request; gives its pid."""

    def serve(self) -> None:
        """Do what is asked, until the end of the input."""
        while True:
            ready = wait([0, *self.children])
            for ended in ready:
                if ended != 0:
                    self._end(ended)  # type: ignore[arg-type]
            if 0 in ready and not self._read():
                os.killpg(0, signal.SIGKILL)  # this process too: it leads a session of its own
            while self.waiting and len(self.children) < self.most:
                request = self.waiting.popleft()
                pid = self.start(request)
                self.children[os.pidfd_open(pid)] = pid, request

    def _read(self) -> bool:
        """Take the requests that have come; False at the end of the input."""
        came = os.read(0, READ)
        *lines, self._rest = (self._rest + came).split(b"\n")
        self.waiting.extend(lines)
        return bool(came)

    def _end(self, ended: int) -> None:
        pid, request = self.children.pop(ended)
        _, status = os.waitpid(pid, 0)
        os.close(ended)
        if status:
            answer(self.answers, request, f"the compiler ended with {os.waitstatus_to_exitcode(status)}")


def answer(answers: int, request: bytes, error: str | None) -> None:
    """One write: a pipe keeps 4096 bytes together, so that answers of two children do not mix."""
    line = json.dumps([json.loads(request)[0], error and error[:SAID]])
    os.write(answers, line.encode() + b"\n")
