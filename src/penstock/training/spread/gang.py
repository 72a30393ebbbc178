"""The workers of a trial on several devices: how they meet, what they say to each other, how one hears of an error."""

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
MOMENT = 0.002  # seconds between two looks whether all have come
PATIENCE = 600.0  # seconds that one waits for another's part of a step; of one that died it hears at once
ERROR = "error"  # where a worker leaves word of what went wrong in its part


class Unspreadable(TaskError):
    """The trial cannot be spread, and why."""


class Apart(TaskError):
    """The workers did not meet."""


class Torn(TaskError):
    """Another worker has gone."""


class Theirs(TaskError):
    """The error of another worker, as text."""


class Gang:
    """The workers of a trial, from one of them: what they say to each other. The first has the store they meet at."""

    def __init__(self, store: Any, rank: int, count: int, device: torch.device) -> None:
        self.store, self.rank, self.count, self.device = store, rank, count, device
        self.present = True  # whether this worker's part of the batch counts
        self.group: Any = None

    @classmethod
    def open(cls, host: str, count: int, device: torch.device) -> tuple[Gang, str]:
        """The first worker's, and the address where the others come to."""
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEETING))
        return cls(store, 0, count, device), f"{host}:{store.port}"

    @classmethod
    def join(cls, address: str, rank: int, count: int, device: torch.device) -> Gang:
        """Another worker's. The first listens before it says where: a store would wait there long after it has gone."""
        host, _, port = address.rpartition(":")
        wait = timedelta(seconds=MEETING)
        try:
            socket.create_connection((host, int(port)), MEETING).close()
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=wait)
        except (dist.DistError, OSError) as error:
            raise Apart(str(error)) from error
        return cls(store, rank, count, device)

    def waits(self) -> Iterator[None]:
        """Come to the meeting, and wait there a moment at a time until all have come."""
        self.store.set(f"here {self.rank}", "")
        end, all = perf_counter() + MEETING, [f"here {rank}" for rank in range(self.count)]
        while not self.store.check(all):
            if perf_counter() > end:
                raise Apart(f"The {self.count} workers of a trial did not meet within {MEETING:.0f} seconds.")
            sleep(MOMENT)
            yield
        if self.store.check([ERROR]):
            raise Torn

    def connect(self, host: str) -> None:
        """Be connected with all of them, who are there."""
        try:
            environ["GLOO_SOCKET_IFNAME"] = _interface(host)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            wait = timedelta(seconds=PATIENCE)
            dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.count, timeout=wait)
        except (dist.DistError, RuntimeError) as error:
            raise Apart(f"The {self.count} workers of a trial could not be connected: {error}") from error
        self.group = dist.group.WORLD

    def first(self, count: int) -> Gang | None:
        """The first ``count`` of them, from one that may not be of them; every worker asks for the same at once."""
        if count == self.count:
            return self
        group = dist.new_group(list(range(count)))
        if self.rank >= count:
            return None
        part = Gang(self.store, self.rank, count, self.device)
        part.group = group
        return part

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def hear(self, *values: int) -> list[int]:
        """What the first says: whole numbers, as many as the others give."""
        told = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.broadcast(told, 0, group=self.group)
        heard: list[int] = told.tolist()
        return heard

    def gather(self, value: Any) -> list[Any]:
        """What each of them has."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found

    def hand_on(self, value: Any) -> Any:
        """What the first has."""
        held = [value]
        dist.broadcast_object_list(held, 0, group=self.group)
        return held[0]

    def blame(self, error: Exception, text: str) -> None:
        """Leave word of what went wrong here, unless it is that another has gone."""
        if not torn(error):
            with suppress(dist.DistError):  # nobody reads it any more
                kind = "memory" if out_of_memory(error) else "spread" if isinstance(error, Unspreadable) else "failed"
                self.store.set(ERROR, f"{kind} {text}")
                self.store.set(f"here {self.rank}", "")

    def behind(self, error: Exception) -> Exception:
        """What is behind an error: what another worker said before it went, or that it went without a word."""
        if not torn(error):
            return error
        if not self.store.check([ERROR]):
            return Torn(f"one of its {self.count} workers died ({error})")
        kind, _, text = self.store.get(ERROR).decode().partition(" ")
        return {"spread": Unspreadable, "memory": MemoryError}.get(kind, Theirs)(text)

    def leave(self) -> None:
        """Part; who still waits for this one is told that it is gone, once nothing holds the connection."""
        self.group = None
        if dist.is_initialized():
            dist.destroy_process_group()


def torn(error: BaseException) -> bool:
    """Whether an error says that another worker has gone, and nothing of this one's part."""
    return isinstance(error, dist.DistError | Torn) or "gloo" in str(error)


def _interface(host: str) -> str:
    """The network interface that has an address: gloo is told its name."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            try:
                found = fcntl.ioctl(one, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
        if socket.inet_ntoa(found[20:24]) == host:
            return name
    return "lo"
