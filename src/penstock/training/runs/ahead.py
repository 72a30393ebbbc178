"""How far the host has run ahead of a device: it launches a run of steps while the device computes the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

AHEAD = 2  # runs of steps that may be launched and not yet computed
SPAN = 0.05  # seconds that one of them takes about: a device takes only so many launches ahead
SHORT = 0.0125  # the same while steps are timed, so that a few runs of steps do not take long
TIMED = 64  # runs of steps whose pace is kept
FIRST = 16  # steps of the first, whose pace is not known


class Ahead:
    """The work that a device has still to compute, on one stream of it."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._marks: deque[tuple[torch.cuda.Event, int]] = deque()
        self._before: torch.cuda.Event | None = None  # the end of the work that was computed last
        self._pace: float | None = None  # seconds of a step
        self._span = SPAN
        self._paces = deque[float](maxlen=TIMED)  # of the last runs of steps since they were timed anew

    @property
    def steps(self) -> int:
        """How many steps to launch next."""
        return FIRST if self._pace is None else max(1, int(self._span / self._pace))

    @property
    def busy(self) -> bool:
        """Whether the device has enough to do."""
        return len(self._marks) >= AHEAD and not self._marks[0][0].query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the device can do with more."""
        self._wait(AHEAD - 1)

    def drain(self) -> None:
        """Wait until the device has nothing left to do."""
        self._wait(0)

    def time_anew(self, short: bool) -> None:
        """Begin to time steps, in ``short`` runs of them or else in long ones."""
        self._before, self._span, self._paces = None, SHORT if short else SPAN, deque(maxlen=TIMED)

    def paces(self) -> Sequence[float]:
        """The seconds of a step of each run of steps that the device has computed; waits for none."""
        while self._marks and self._marks[0][0].query():  # type: ignore[no-untyped-call]
            self._computed(*self._marks.popleft())
        return self._paces

    def _wait(self, left: int) -> None:
        while len(self._marks) > left:
            mark, steps = self._marks.popleft()
            mark.synchronize()
            self._computed(mark, steps)

    def _computed(self, mark: torch.cuda.Event, steps: int) -> None:
        """Note work that the device has computed."""
        if self._before is not None and steps:
            self._pace = max(1e-6, self._before.elapsed_time(mark) / 1e3 / steps)
            self._paces.append(self._pace)
        self._before = mark

    def launched(self, steps: int) -> None:
        """Note that so many steps, or 0 where it is other work, were launched."""
        if not self._cuda:
            return
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        self._marks.append((mark, steps))
