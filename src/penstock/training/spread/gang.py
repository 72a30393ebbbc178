"""The workers of a trial on several devices: how they meet, talk to each other, and hear of each other's errors."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from os import environ
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from penstock.errors import TaskError
from penstock.training.runs.base import out_of_memory

MEETING = float(environ.get("PENSTOCK_MEETING", "30"))  # seconds that the workers of a trial have to meet
MOMENT = 0.002  # seconds between two looks at whether all have come
PATIENCE = 600.0  # seconds that a worker waits for another's part of a step; it hears at once of one that died
ERROR = "error"  # where a worker leaves word of an error in its part


class Unspreadable(TaskError):
    """The trial cannot be spread; the message says why."""


class Apart(TaskError):
    """The workers did not meet."""


class Gone(TaskError):
    """Another worker has gone."""


class Theirs(TaskError):
    """The error of another worker, as text."""


class Gang:
    """The workers of a trial, as one of them sees it. The first has the store that they meet at."""

    def __init__(
        self, store: TCPStore, rank: int, count: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self.store, self.rank, self.count, self.device, self.group = store, rank, count, device, group
        self.present = True  # whether this worker's part of the batch counts

    @classmethod
    def open(cls, host: str, count: int, device: torch.device) -> tuple[Gang, str]:
        """The gang as the first worker sees it, and the address that the others come to."""
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEETING))
        return cls(store, 0, count, device), f"{host}:{store.port}"

    @classmethod
    def join(cls, address: str, rank: int, count: int, device: torch.device) -> Gang:
        """The gang as another worker sees it.

        The first worker listens before it gives its address. So a worker that finds nobody there does not wait, as a
        store would, for one that has gone.
        """
        host, _, port = address.rpartition(":")
        wait = timedelta(seconds=MEETING)
        try:
            socket.create_connection((host, int(port)), MEETING).close()
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=wait)
        except (dist.DistError, OSError) as error:
            raise Apart(str(error)) from error
        return cls(store, rank, count, device)

    def waits(self) -> Iterator[None]:
        """Come to the meeting, and wait there, a moment at a time, until all have come."""
        self.store.set(f"here {self.rank}", "")
        end, all = perf_counter() + MEETING, [f"here {rank}" for rank in range(self.count)]
        while not self.store.check(all):
            if perf_counter() > end:
                raise Apart(f"The {self.count} workers of a trial did not meet within {MEETING:.0f} seconds.")
            sleep(MOMENT)
            yield
        if self.store.check([ERROR]):
            raise Gone

    def connect(self, host: str) -> None:
        """Connect with all the others, once they are there."""
        try:
            environ["GLOO_SOCKET_IFNAME"] = _interface(host)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            wait = timedelta(seconds=PATIENCE)
            dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.count, timeout=wait)
        except (dist.DistError, RuntimeError) as error:
            raise Apart(f"The {self.count} workers of a trial could not be connected: {error}") from error
        self.group = dist.group.WORLD

    def first(self, count: int) -> Gang | None:
        """The first ``count`` workers, or None for a worker that is not among them; all ask for the same at once."""
        if count == self.count:
            return self
        group = dist.new_group(list(range(count)))
        if self.rank >= count:
            return None
        return Gang(self.store, self.rank, count, self.device, group)

    def count_part(self, present: bool) -> None:
        """Say whether this worker's part of the next batch counts."""
        self.present = present

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all workers, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def hear(self, *values: int) -> list[int]:
        """The first worker's numbers; each worker gives as many whole numbers."""
        told = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.broadcast(told, 0, group=self.group)
        heard: list[int] = told.tolist()
        return heard

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found

    def hand_on(self, value: Any) -> Any:
        """The first worker's value."""
        held = [value]
        dist.broadcast_object_list(held, 0, group=self.group)
        return held[0]

    def blame(self, error: Exception, text: str) -> None:
        """Leave word of an error here, unless it says that another worker has gone."""
        if not gone(error):
            with suppress(dist.DistError):  # the first worker has gone, and nobody reads it
                kind = "memory" if out_of_memory(error) else "spread" if isinstance(error, Unspreadable) else "failed"
                self.store.set(ERROR, f"{kind} {text}")
                self.store.set(f"here {self.rank}", "")

    def behind(self, error: Exception) -> Exception:
        """The cause of an error: the word that another worker left before it went, or that it went without one."""
        if not gone(error):
            return error
        if not self.store.check([ERROR]):
            return Gone(f"one of its {self.count} workers died ({error})")
        kind, _, text = self.store.get(ERROR).decode().partition(" ")
        return {"spread": Unspreadable, "memory": MemoryError}.get(kind, Theirs)(text)

    def leave(self) -> None:
        """Part. A worker that still waits for this one hears that it has gone, once nothing holds the connection."""
        self.group = None
        if dist.is_initialized():
            dist.destroy_process_group()


def gone(error: BaseException) -> bool:
    """Whether an error says only that another worker has gone."""
    return isinstance(error, dist.DistError | Gone) or "gloo" in str(error)


def _interface(host: str) -> str:
    """The name of the network interface that has an address, for gloo."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            try:
                found = fcntl.ioctl(one, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
        if socket.inet_ntoa(found[20:24]) == host:
            return name
    return "lo"
