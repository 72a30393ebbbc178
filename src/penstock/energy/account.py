"""The joules of a device, divided among whoever used it: each has its part by device time, and the rest is idle.

Two readings of a meter give a bucket: some seconds of the device, and their joules. Whoever used the device claims
seconds of the buckets in its window, which goes from its last claim to this one. The seconds are taken from all of
these buckets alike, as far as they are left, with their part of the joules. What is left of a bucket that no window
reaches any more is idle. So the parts and what is idle add up to the device's joules, whatever is claimed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from penstock.energy.meter import Meter, MeterError

STEADY = 0.3  # seconds over which the power is taken: a counter's ticks are no power
GRAIN = 0.005  # seconds of a bucket at least, where no reading ends it
MOST = 1000  # buckets, before neighbours become one


@dataclass(slots=True)
class _Bucket:
    begin: float
    end: float
    seconds: float  # that nobody has claimed
    joules: float  # of these seconds
    parts: dict[Hashable, float] | None = None  # joules of users that have not claimed, where their work is known


class Ledger:
    """Divides a meter's joules. ``devices`` are how many devices it counts for together.

    ``beside`` says that each user claims all seconds of its window, however many others are there: these divide a
    device by their work, where that is told by ``weigh``, and else by their presence.

    >>> ledger = Ledger(0.0)
    >>> ledger.enter("one", 0.0); ledger.enter("other", 0.0)
    >>> ledger.count(10.0, 1000.0)
    >>> ledger.claim("one", 10.0, 6.0), ledger.claim("other", 10.0, 2.0)
    (600.0, 200.0)
    >>> ledger.leave("one"); ledger.leave("other")
    >>> ledger.total, ledger.idle()
    (1000.0, 200.0)
    """

    def __init__(self, now: float, devices: int = 1, *, beside: bool = False) -> None:
        self.total = now * 0  # joules that were counted; of the type that the caller counts in
        self.watts = now * 0  # of the last seconds, once there are readings enough
        self._devices, self._beside = devices, beside
        self._at = now  # the end of the last bucket
        self._since, self._over = now, now * 0  # the time from which on the power is taken, and the joules since
        self._ahead = now * 0  # joules that buckets have beyond the last reading
        self._idle = now * 0
        self._buckets: list[_Bucket] = []
        self._windows: dict[Hashable, float] = {}
        self._weights: Mapping[Hashable, int] = {}

    @property
    def users(self) -> list[Hashable]:
        """Whoever may claim."""
        return list(self._windows)

    def count(self, now: float, joules: float) -> None:
        """Take a reading: the joules since the reading before it."""
        self._over += joules
        if now - self._since >= STEADY:
            self.watts, self._since, self._over = self._over / (now - self._since), now, now * 0
        left = joules - self._ahead
        self._ahead = -min(left, now * 0)  # foreseen too high: later readings pay for it
        if now <= self._at and self._buckets:
            self._add(self._buckets[-1], max(left, now * 0))
        else:
            self._cut(now, max(left, now * 0))
        self.total += joules

    def share(self, now: float, devices: int) -> None:
        """From now on the meter counts for so many devices."""
        self._foresee(now)
        self._devices = devices

    def weigh(self, weights: Mapping[Hashable, int]) -> None:
        """How much each user worked since the last reading; it is taken for the time after the next one, too."""
        self._weights = weights

    def enter(self, user: Hashable, now: float) -> None:
        """From now on a user may claim."""
        self._foresee(now)
        self._windows.setdefault(user, self._at)

    def claim(self, user: Hashable, now: float, seconds: float) -> float:
        """The joules of so many seconds of the device since the user's last claim."""
        self._foresee(now)
        begin = self._windows[user]
        self._windows[user] = self._at
        there = [bucket for bucket in self._buckets if bucket.end > begin and bucket.seconds > 0]
        reached, joules = [bucket for bucket in there if bucket.parts is None], now * 0
        for bucket in there:
            if bucket.parts is not None:
                taken = bucket.parts.pop(user, now * 0)
                bucket.joules -= taken
                joules += taken
        free = sum((self._free(bucket) for bucket in reached), start=now * 0)
        if free < (every := sum((self._free(bucket) for bucket in there), start=now * 0)):
            seconds = seconds * free / every
        for bucket in reached:
            part = min(self._free(bucket) * seconds / free / bucket.seconds, 1 + now * 0)
            taken = bucket.joules * part
            joules += taken
            bucket.joules -= taken
            bucket.seconds -= bucket.seconds * part
        return joules

    def _free(self, bucket: _Bucket) -> float:
        """The seconds of a bucket among which a claim is spread."""
        return bucket.end - bucket.begin if self._beside else bucket.seconds

    def present(self, user: Hashable, now: float) -> float:
        """An equal part of the seconds since a user's last claim: for one that cannot tell how many it used."""
        self._foresee(now)
        begin = self._windows[user]
        free = sum((self._free(bucket) for bucket in self._buckets if bucket.end > begin), start=now * 0)
        return free if self._beside else free / len(self._windows)

    def leave(self, user: Hashable) -> None:
        """A user has made its last claim."""
        self._windows.pop(user, None)

    def idle(self) -> float:
        """The joules that nobody used so far, without buckets that someone may still claim.

        Where the last claims were foreseen too high, what was idle bears that in the end.
        """
        reached = min(self._windows.values(), default=self._at)
        while self._buckets and self._buckets[0].end <= reached:
            self._idle += self._buckets.pop(0).joules
        return self._idle if self._windows else self._idle - self._ahead

    @property
    def open(self) -> float:
        """The joules that may still be claimed; those that are foreseen are not counted yet."""
        ahead = self._ahead if self._windows else self.total * 0
        return sum((bucket.joules for bucket in self._buckets), start=self.total * 0) - ahead

    def _foresee(self, now: float) -> None:
        """End a bucket here without a reading, at the power between the last two."""
        if now - self._at >= GRAIN:
            joules = self.watts * (now - self._at)
            self._ahead += joules
            self._cut(now, joules)

    def _cut(self, now: float, joules: float) -> None:
        there = max(1, len(self._windows)) if self._beside else self._devices
        if now > self._at or joules or not self._buckets:
            known = self._beside and self._windows.keys() <= self._weights.keys() and any(self._shares().values())
            made = _Bucket(self._at, now, (now - self._at) * there, now * 0, {} if known else None)
            self._add(made, joules)
            self._buckets.append(made)
        self._at = now
        if len(self._buckets) > MOST:
            self._merge()

    def _shares(self) -> dict[Hashable, int]:
        return {user: self._weights.get(user, 0) for user in self._windows}

    def _add(self, bucket: _Bucket, joules: float) -> None:
        """Add joules to a bucket, and to its users' parts, where their work is known."""
        bucket.joules += joules
        if bucket.parts is not None:
            whole = sum((shares := self._shares()).values())
            for user, share in shares.items() if whole else ():
                bucket.parts[user] = bucket.parts.get(user, joules * 0) + joules * share / whole

    def _merge(self) -> None:
        """Make pairs of neighbours one bucket, but for those between which a window begins."""
        begins, merged = set(self._windows.values()), list[_Bucket]()
        joined = True  # whether the last one is a pair already
        for bucket in self._buckets:
            if joined or bucket.begin in begins:
                merged.append(bucket)
                joined = False
                continue
            last = merged[-1]
            last.end, joined = bucket.end, True
            last.seconds, last.joules = last.seconds + bucket.seconds, last.joules + bucket.joules
            if last.parts is None or bucket.parts is None:
                last.parts = None
            else:
                both = last.parts.keys() | bucket.parts.keys()
                last.parts = {one: last.parts.get(one, 0) + bucket.parts.get(one, 0) for one in both}
        self._buckets = merged


class Metered:
    """A meter with its ledger: read now and then, until it fails. Reading may take milliseconds, and nobody waits."""

    def __init__(self, meter: Meter, now: float, devices: int = 1, *, beside: bool = False) -> None:
        self.meter, self.ledger = meter, Ledger(now, devices, beside=beside)
        self.failed = ""  # why it cannot be read any more
        self._last, self._at = meter.read(), now
        self._reading = threading.Lock()

    def read(self) -> float | None:
        """The meter's joules; None where it cannot be read any more."""
        with self._reading:
            try:
                return None if self.failed else self.meter.read()
            except MeterError as error:
                self.failed = str(error)
                return None

    def fail(self, why: str) -> None:
        """Nobody can read it any more."""
        self.failed = why

    def take(self, now: float, joules: float | None) -> None:
        """Count a reading, unless a later one was counted."""
        if joules is not None and joules >= self._last and now >= self._at:
            self.ledger.count(now, joules - self._last)
            self._last, self._at = joules, now
