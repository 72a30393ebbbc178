"""The fork server's part of a program: fork a child at each request of the driver, and tell how each one ends.

The server has one thread, computes nothing and never touches CUDA, because locks, thread pools and CUDA contexts do not
survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass
class _Child:
    """A child, seen from the server. The driver holds the other end of ``tells``, and lets the child go with it."""

    pid: int
    ended: int  # a pidfd: readable once the child has ended
    tells: socket.socket
    held: bool = True

    def tell(self, number: int) -> None:
        with suppress(OSError):  # the driver is gone
            self.tells.send(str(number).encode())

    def kill(self) -> None:
        self.held = False
        os.kill(self.pid, signal.SIGKILL)

    def bury(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.tell(os.waitstatus_to_exitcode(status))
        self.close()

    def close(self) -> None:
        self.tells.close()
        os.close(self.ended)


def fork_on_request(fd: int) -> Connection[Any, Any]:
    """Fork a child for each request of the driver; returns in each child, with its connection to the driver.

    The server kills a child that the driver lets go, and ends when its driver asks for no more and no child is left.
    """
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it shares with the server
    control, asked = socket.socket(fileno=fd), True
    children: list[_Child] = []
    while asked or children:
        ends, held = [child.ended for child in children], [child.tells for child in children if child.held]
        ready = wait([*([control] if asked else []), *ends, *held])
        for child in list(children):
            if child.ended in ready:
                child.bury()
                children.remove(child)
            elif child.tells in ready:
                child.kill()
        if control in ready:
            _, fds, _, _ = socket.recv_fds(control, 1, 5)
            if not fds:
                asked = False
                continue
            connection, tells, *surroundings = fds
            pid = os.fork()
            if pid == 0:
                control.close()
                os.close(tells)
                for child in children:
                    child.close()
                return _settle(connection, *surroundings)
            for passed in (connection, *surroundings):
                os.close(passed)
            children.append(_Child(pid, os.pidfd_open(pid), socket.socket(fileno=tells)))
            children[-1].tell(pid)
    os._exit(0)


def _settle(connection: int, folder: int, output: int, errors: int) -> Connection[Any, Any]:
    """Take over the driver's surroundings, in a session of its own: Ctrl-C reaches the driver alone."""
    os.setsid()
    os.fchdir(folder)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for passed in (folder, output, errors):
        os.close(passed)
    driver: Connection[Any, Any] = Connection(connection)
    try:
        environment, path = driver.recv()
    except (EOFError, OSError):
        os._exit(0)  # the driver is gone
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    importlib.invalidate_caches()
    return driver
