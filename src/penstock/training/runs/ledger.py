"""The memory of a pack: what each part took at most, and whether there is room for all of them at once."""

from __future__ import annotations

from collections.abc import Hashable

MARGIN = 0.1  # the part of the free memory that a pack leaves alone
FIRST = 3  # steps of a newcomer, while the others rest, that show how much memory it takes


class Ledger:
    """The peaks of a pack's parts, in bytes, by name; and those of each kind of part that ever was there.

    >>> ledger = Ledger()
    >>> ledger.enter("a", 40), ledger.enter("b", 40)
    (None, None)
    >>> ledger.fits(100), ledger.fits(80)
    (True, False)
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._kinds: dict[Hashable, int] = {}

    def enter(self, name: str, peak: int, kind: Hashable = None) -> None:
        """Take the measured peak of a part, with the memory that its captured steps hold."""
        self.peaks[name] = peak
        if kind is not None:
            self._kinds[kind] = max(peak, self._kinds.get(kind, 0))

    def enter_alike(self, name: str, kind: Hashable, free: int) -> bool:
        """Take a part in at the peak of its kind; False where that is not known, or would not fit."""
        if (peak := self._kinds.get(kind)) is None:
            return False
        self.peaks[name] = peak
        if not self.fits(free):
            del self.peaks[name]
            return False
        return True

    def leave(self, name: str) -> None:
        """A part has gone."""
        self.peaks.pop(name, None)

    def fits(self, free: int) -> bool:
        """Whether all parts at their peaks at once leave the margin of the memory that no other program has."""
        return sum(self.peaks.values()) <= (1 - MARGIN) * free
