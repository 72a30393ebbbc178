"""Where the workers of a trial meet: torch's store on loopback, and doors to it for workers of other machines.

torch's store lets every program that reaches it read and write. So it listens on 127.0.0.1 alone. On a cluster the
first worker opens a door beside it, on the cluster's own interface. The door lets in whoever proves to know the
meeting's secret (an HMAC challenge, both ways), and passes bytes on to the store. The secret goes with the meeting's
address, from the first worker through the driver to the others. A worker that joins opens a door too, on loopback, for
torch to connect to.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from os import dup
from typing import Any

from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
ASKED = 64  # connections that may be at a door without having proved anything
PROOF = 5  # seconds that each of them has for its proof


class Meeting:
    """The store, and this worker's door to it where the workers are on several machines."""

    def __init__(self, store: TCPStore, address: str, door: Door | None = None) -> None:
        self.store, self.address, self._door = store, address, door

    @classmethod
    def open(cls, host: str, wait: float, *, guarded: bool | None = None) -> Meeting:
        """The meeting of the first worker, with the address that the others come to.

        It is ``guarded`` by a door where the others may be on other machines.
        """
        listener = socket.create_server((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        store = _store(port, wait, listener)
        if is_loopback(host) if guarded is None else not guarded:
            return cls(store, f"{LOOPBACK}:{port}")
        secret = secrets.token_hex(32)

        def enter(came: socket.socket) -> socket.socket:
            prove(came, secret, first=True)
            return socket.create_connection((LOOPBACK, port))

        door = Door(host, enter)
        return cls(store, f"{host}:{door.port}#{secret}", door)

    @classmethod
    def join(cls, address: str, wait: float) -> Meeting:
        """The meeting as another worker sees it; raises an OSError or AuthenticationError where it cannot enter."""
        where, _, secret = address.partition("#")
        host, _, port = where.rpartition(":")

        def enter(came: socket.socket | None = None) -> socket.socket:
            there = socket.create_connection((host, int(port)), wait)
            try:
                there.settimeout(None)
                if secret:
                    prove(there, secret, first=False)
            except BaseException:
                there.close()
                raise
            return there

        enter().close()  # the first worker listens before it gives its address: where it has gone, no one waits for it
        if not secret:
            return cls(_store(int(port), wait), address)
        door = Door(LOOPBACK, enter)
        return cls(_store(door.port, wait), address, door)

    def close(self) -> None:
        """Close the doors; the store itself goes with the last reference to it."""
        if self._door is not None:
            self._door.close()


class Door:
    """Listens, and joins each connection that comes with the connection that ``enter`` gives for it."""

    def __init__(self, host: str, enter: Callable[[socket.socket], socket.socket]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._enter = enter
        self._asked = threading.BoundedSemaphore(ASKED)
        self._open: set[socket.socket] = set()
        _thread(self._listen)

    def _listen(self) -> None:
        with suppress(OSError):  # the door was closed
            while True:
                came, _ = self._listener.accept()
                if self._asked.acquire(blocking=False):
                    _thread(self._ask, came)
                else:
                    came.close()

    def _ask(self, came: socket.socket) -> None:
        try:
            there = self._enter(came)
        except (OSError, EOFError, AuthenticationError):
            came.close()
            return
        finally:
            self._asked.release()
        self._open |= {came, there}
        _thread(_pass_on, there, came)
        _pass_on(came, there)
        self._open -= {came, there}

    def close(self) -> None:
        for one in [self._listener, *self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits at it
        self._listener.close()


def prove(one: socket.socket, secret: str, *, first: bool) -> None:
    """Prove to the other end that this one knows the secret, and let it prove the same, within a few seconds."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PROOF, 0))
    connection: Connection[Any, Any] = Connection(dup(one.fileno()))
    with connection:
        for step in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
            try:
                step(connection, secret.encode())
            except AssertionError:  # Python asserts that a challenge comes, and any bytes may
                raise AuthenticationError("expected a challenge") from None
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("10.0.0.1"), is_loopback("node-1")
    (True, False, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _store(port: int, wait: float, listener: socket.socket | None = None) -> TCPStore:
    fd = None if listener is None else listener.detach()
    return TCPStore(
        LOOPBACK,
        port,
        is_master=fd is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=wait),
        master_listen_fd=fd,
    )


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def _thread(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True, name="meeting").start()
