"""The account of a worker: everything that trials use of its device is counted here, whatever runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.trial import Usage


@dataclass
class Entry:
    """The use of a device by one trial since its last report, which came after ``step`` steps."""

    step: int
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count more seconds."""
        self.seconds += seconds

    def close(self, step: int, peak: int | None) -> Usage:
        """The usage up to a report after so many steps; the next one begins here."""
        usage = Usage(self.seconds, step - self.step, peak)
        self.seconds, self.step = 0.0, step
        return usage


class Account:
    """Charges trials for the seconds of a device, and makes the usage that each of their reports tells.

    >>> account = Account("cpu")
    >>> one, other = account.open(0), account.open(5)
    >>> account.charge([one, other], 3.0)
    >>> usage = account.usage(other, 7, None)
    >>> usage.device_seconds, usage.steps
    (1.5, 2)
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._own: Callable[[], float] | None = None  # the seconds of the part of a pack that trains now
        self._charged = time.perf_counter()  # when trials were charged last

    def charge_by(self, own: Callable[[], float] | None) -> None:
        """From now on charge the seconds that ``own`` gives: those of one part of a pack since its last charge."""
        self._own = own

    def since(self) -> float:
        """The seconds for which no trial was charged yet."""
        return time.perf_counter() - self._charged

    def open(self, step: int) -> Entry:
        """Begin to count for a trial that has trained so many steps."""
        self._charged = time.perf_counter()
        return Entry(step)

    def charge(self, entries: Sequence[Entry], seconds: float) -> None:
        """Divide the seconds equally among trials that used the device together.

        In a pack the caller's seconds are not its own, as other bundles trained meanwhile: its part of them counts.
        """
        self._charged = time.perf_counter()
        share = (seconds if self._own is None else self._own()) / max(1, len(entries))
        for entry in entries:
            entry.add(share)

    def usage(self, entry: Entry, step: int, peak: int | None) -> Usage:
        """The usage since a trial's last report, for a report after so many steps."""
        return entry.close(step, peak)

    def watch_peak(self) -> int:
        """The memory in use now; from here on the peak of it is watched."""
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak_since(self, before: int) -> int:
        """The most memory that came to be in use beyond what was in use before."""
        import torch

        return max(0, torch.cuda.max_memory_allocated(self._device) - before)

    def peak_bytes(self, graphs: int = 0) -> int | None:
        """The most memory that was in use since the last call, with the bytes that CUDA graphs hold; None on a CPU."""
        if not self._device.startswith("cuda"):
            return None
        import torch

        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak + graphs
