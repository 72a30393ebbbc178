"""One power limit for all devices of a trial: its first worker decides, and the joules of all devices are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.bundle import Limited
from penstock.energy.meter import MeterError
from penstock.energy.nvml import NvmlError
from penstock.training.limiting import Limiter, OneDevice, unlimited

if TYPE_CHECKING:
    from penstock.training.runs.base import Run
    from penstock.training.spread.gang import Gang

END, SET, PRIOR, READ = range(4)  # orders of the first worker


class Together:
    """The devices of a gang, as one of its workers sees them; all of its workers make it at the same step.

    The first worker's ``boundary`` gives orders, and the others' one follows them. Where one of the devices cannot be
    limited, none is.
    """

    def __init__(self, gang: Gang, limiter: Limiter | None, device: str) -> None:
        self._gang, self._limiter, self._device = gang, limiter, device
        self.count = gang.count
        usable = limiter is not None and not limiter.over
        found = gang.gather(list(limiter.own.range) if limiter is not None and usable else [])
        self.able = all(found)
        self._why = "" if self.able else "one of the trial's devices cannot be limited"
        self.range = (max(one[0] for one in found), min(one[1] for one in found)) if self.able else (0.0, 0.0)
        self._wish: int | None = None  # whole watts, and 0 for each one's prior limit
        self._alone = True

    def boundary(self, run: Run, *, ends: bool = False) -> Limited | None:
        """Go on with the search, or set the limit; ``ends`` says that the run takes no more steps."""
        if not self.able or self._limiter is None:
            why, self._why = self._why, ""
            return unlimited(self._device, why) if why and self._gang.rank == 0 else None
        if self._gang.rank > 0:
            self._follow(self._limiter.own)
            return None
        found = (self._limiter.left if ends else self._limiter.boundary)(run, self)
        self._gang.hear(END, 0)
        return found

    # As the first worker's limiter has them

    def set(self, limit: float | None) -> bool:
        wish = 0 if limit is None else round(limit)
        if self._wish != wish:
            self._wish = None
            self._alone = self._order(SET if wish else PRIOR, wish) == 0
            self._wish = wish
        return self._alone

    def look(self) -> None:
        """Look anew whether others hold one of the devices."""
        self._wish = None

    def joules(self) -> float:
        return self._order(READ, 0)

    def _order(self, what: int, limit: int) -> float:
        assert self._limiter is not None
        self._gang.hear(what, limit)
        answers = self._gang.gather(_done(self._limiter.own, what, limit))
        if failed := [why for _, why in answers if why]:
            raise NvmlError(failed[0])
        return sum(float(number) for number, _ in answers)

    def _follow(self, own: OneDevice) -> None:
        while True:
            what, limit = self._gang.hear(0, 0)
            if what == END:
                return
            self._gang.gather(_done(own, what, limit))


def _done(own: OneDevice, what: int, limit: int) -> list[float | str]:
    """Carry an order out: gives the joules that were read, or whether others hold the device; and what failed."""
    try:
        if what == READ:
            return [own.joules(), ""]
        own.look()
        return [0.0 if own.set(None if what == PRIOR else float(limit)) else 1.0, ""]
    except (NvmlError, MeterError) as error:
        return [0.0, str(error)]
