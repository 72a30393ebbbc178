"""Processes forked from one that has already imported what they need.

Importing torch takes seconds; forking a process that has imported it takes milliseconds. The driver therefore starts a
program once, the fork server, which imports and then forks a child at each request (``server.py``). A child has the
driver's streams, folder, environment and path as they are when it is asked for.

The fork server of ``multiprocessing`` does not do: it runs the user's script again in each child, and a child has the
streams and the environment of the server's start.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

# Libraries read these variables while they are loaded, so a server serves as long as none of them changes.
READ_ON_IMPORT = (
    "GOMP_",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TRITON_INTERPRET",
)


class Forked:
    """A process that the fork server forks for this driver.

    The server tells its pid, then its exit status, by a socket of its own, ``told``; it closes if the server dies.
    """

    def __init__(self, connection: Connection[Any, Any], told: socket.socket, server: subprocess.Popen[bytes]) -> None:
        self.connection = connection
        self.told = told
        self._server = server
        self._pid: int | None = None
        self.status: int | None = None  # of its exit; minus the signal that killed it

    @property
    def known(self) -> int | None:
        """Its number, where that was heard already: any thread may ask."""
        return self._pid

    @property
    def pid(self) -> int | None:
        """Its number; None where the server ended before it could fork."""
        if self._pid is None:
            self.hear()
        return self._pid

    def hear(self) -> bool:
        """Wait until something is told, and say whether that was the last."""
        message = self.told.recv(32)
        if message and self._pid is None:
            self._pid = int(message)
            return False
        if message:
            self.status = int(message)
        return True

    def wait(self) -> int | None:
        """Its exit status when it has ended; None where the server is gone."""
        while not self.hear():
            pass
        if self.status is None:
            self._server.wait()  # it closes its sockets one by one, and must not be asked again between two of them
        return self.status

    def kill(self) -> None:
        """End it at once."""
        with suppress(OSError):  # it has ended, or the server has
            self.told.shutdown(socket.SHUT_WR)
            if self._pid is not None:  # else it is not born yet, and ends as soon as it is
                self.wait()
        self.close()

    def close(self) -> None:
        self.told.close()
        self.connection.close()


class _Server:
    """The fork server of a program, seen from the driver that started it."""

    def __init__(self, program: str) -> None:
        self._driver = os.getpid()
        self._environment = _read_on_import(os.environ)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the driver alone
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(_path()),
                    "PYTHONUNBUFFERED": "1",  # what a child prints is seen even if it is killed
                },
            )

    def serves(self) -> bool:
        """Whether it is there, has this process as its driver, and would import the same again."""
        ours = self._driver == os.getpid()
        return ours and self.process.poll() is None and self._environment == _read_on_import(os.environ)

    def fork(self, environment: Mapping[str, str]) -> Forked:
        connection, theirs = Pipe()
        told, tells = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = os.open(".", os.O_PATH)
        with theirs, tells:
            try:
                socket.send_fds(self._control, [b"!"], [theirs.fileno(), tells.fileno(), folder, *_streams()])
            finally:
                os.close(folder)
        with suppress(OSError):  # it died at birth, as the next wait will tell
            connection.send(({**os.environ, **environment}, _path()))
        return Forked(connection, told, self.process)

    def retire(self) -> None:
        """Ask for no more children; the server ends with its last one."""
        self._control.close()

    def end(self) -> None:
        if self._driver == os.getpid():
            self._control.close()
            self.process.kill()
            self.process.wait()


def _read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_ON_IMPORT)}


def _path() -> list[str]:
    return [folder or os.getcwd() for folder in sys.path]


def _streams() -> tuple[int, int]:
    """Where the driver's output and errors go; a stream that it has closed goes to the other."""
    there = [fd for fd in (1, 2) if os.path.exists(f"/proc/self/fd/{fd}")]
    return (there[0], there[-1])


_servers: dict[str, _Server] = {}
_retired: list[_Server] = []
_lock = threading.Lock()  # studies may run in several threads


def fork(program: str, environment: Mapping[str, str] | None = None) -> Forked:
    """A new process of a program: a module that, when run, calls ``fork_on_request`` and goes on with its answer.

    It has the driver's environment, with the variables of ``environment`` in place of the driver's.
    """
    with _lock:
        _retired[:] = [server for server in _retired if server.process.poll() is None]
        while True:
            server = _servers.get(program)
            if server is None or not server.serves():
                if server is not None:
                    server.retire()
                    _retired.append(server)
                server = _servers[program] = _Server(program)
            with suppress(BrokenPipeError, ConnectionResetError):  # it has just died
                return server.fork(environment or {})


@atexit.register
def _end() -> None:
    for server in [*_servers.values(), *_retired]:
        server.end()
