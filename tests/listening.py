"""The sockets that listen, and the processes that have them, as the kernel tells it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path

LISTENING = "0A"


@dataclass(frozen=True, order=True)
class Listener:
    """A TCP socket that listens."""

    host: str
    port: int
    pid: int
    command: str

    @property
    def loopback(self) -> bool:
        return ip_address(self.host).is_loopback


def listeners(pids: Iterable[int] | None = None) -> list[Listener]:
    """The sockets that listen in these processes, or in this one."""
    there = {**_table("tcp"), **_table("tcp6")}
    found = set()
    for pid in [os.getpid()] if pids is None else pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    inode = os.readlink(fd).removeprefix("socket:[").removesuffix("]")
                    if inode in there:
                        found.add(Listener(*there[inode], pid, command))
    return sorted(found)


def descendants(root: int) -> set[int]:
    """A process and all that came from it and still have it as an ancestor."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = set[int](), {root}
    while new:
        found |= new
        new = {pid for pid, parent in parents.items() if parent in found} - found
    return found


def _table(kind: str) -> dict[str, tuple[str, int]]:
    """Hosts and ports that listen, by the inode of their sockets."""
    try:
        lines = Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    except FileNotFoundError:  # a machine without IPv6
        return {}
    rows = (line.split() for line in lines)
    return {row[9]: _address(row[1]) for row in rows if row[3] == LISTENING}


def _address(text: str) -> tuple[str, int]:
    """An address as /proc/net has it: words of four bytes, each in the machine's order."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    found = socket.inet_ntop(family, b"".join(words))
    if family == socket.AF_INET6 and (mapped := IPv6Address(found).ipv4_mapped) is not None:
        found = str(mapped)
    return found, int(port, 16)
