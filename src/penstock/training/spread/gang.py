"""The workers of a trial on several devices: how they meet, talk to each other, and hear of each other's errors."""

from __future__ import annotations

import fcntl
import io
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from os import environ
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import StateError, TaskError
from penstock.training.runs.base import out_of_memory
from penstock.training.spread.meeting import Meeting, is_loopback

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


KINDS: dict[str, type[Exception]] = {"spread": Unspreadable, "state": StateError}  # errors that keep their type


class Gang:
    """The workers of a trial, as one of them sees it. The first has the store that they meet at.

    Values between workers are tensors, or bytes that torch loads without running any code in them.
    """

    def __init__(
        self, meeting: Meeting, rank: int, count: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self.meeting, self.store = meeting, meeting.store
        self.rank, self.count, self.device, self.group = rank, count, device, group
        self.present = True  # whether this worker's part of the batch counts

    @classmethod
    def open(cls, host: str, count: int, device: torch.device) -> tuple[Gang, str]:
        """The gang as the first worker sees it, and the address that the others come to."""
        meeting = Meeting.open(host, MEETING)
        return cls(meeting, 0, count, device), meeting.address

    @classmethod
    def join(cls, address: str, rank: int, count: int, device: torch.device) -> Gang:
        """The gang as another worker sees it."""
        try:
            return cls(Meeting.join(address, MEETING), rank, count, device)
        except (dist.DistError, OSError, EOFError, AuthenticationError) as error:
            raise Apart(str(error)) from error

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
            if is_loopback(host):
                environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            wait = timedelta(seconds=PATIENCE)
            # Torch names groups by a count, which must be the same everywhere: an attempt that failed has counted too.
            dist.distributed_c10d._world.group_count = 0
            dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.count, timeout=wait)
            # Nobody goes on before all are connected: a worker that fails at once would take its end away half-way.
            self.store.set(f"connected {self.rank}", "")
            self.store.wait([f"connected {rank}" for rank in range(self.count)], timedelta(seconds=MEETING))
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
        return Gang(self.meeting, self.rank, count, self.device, group)

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
        """The values of all workers: numbers, strings, tensors and containers of them."""
        data = _packed(value).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=self.device), group=self.group)
        most = max(int(size) for size in sizes)
        found = [data.new_empty(most) for _ in sizes]
        dist.all_gather(found, torch.cat([data, data.new_zeros(most - len(data))]), group=self.group)
        return [_unpacked(one[: int(size)]) for one, size in zip(found, sizes, strict=True)]

    def hand_on(self, value: Any) -> Any:
        """The first worker's value, of the same kinds as for ``gather``."""
        data = _packed(value if self.rank == 0 else None).to(self.device)
        (size,) = self.hear(len(data))
        data = data if self.rank == 0 else data.new_empty(size)
        dist.broadcast(data, 0, group=self.group)
        return value if self.rank == 0 else _unpacked(data)

    def blame(self, error: Exception, text: str) -> None:
        """Leave word of an error here, unless it says that another worker has gone."""
        if not gone(error):
            with suppress(dist.DistError):  # the first worker has gone, and nobody reads it
                kind = "memory" if out_of_memory(error) else "failed"
                kind = next((name for name, one in KINDS.items() if isinstance(error, one)), kind)
                self.store.set(ERROR, f"{kind} {text}")
                self.store.set(f"here {self.rank}", "")

    def behind(self, error: Exception) -> Exception:
        """The cause of an error: the word that another worker left before it went, or that it went without one."""
        if not gone(error):
            return error
        if not self.store.check([ERROR]):
            return Gone(f"one of its {self.count} workers died ({error})")
        kind, _, text = self.store.get(ERROR).decode().partition(" ")
        return MemoryError(text) if kind == "memory" else KINDS.get(kind, Theirs)(text)

    def leave(self) -> None:
        """Part. A worker that still waits for this one hears that it has gone, once nothing holds the connection."""
        self.group = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self.meeting.close()


def gone(error: BaseException) -> bool:
    """Whether an error says only that another worker has gone."""
    return isinstance(error, dist.DistError | Gone) or "gloo" in str(error)


def _packed(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)


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
