"""Trials that died together: each death halves them, until the trial that kills its worker is alone."""

from __future__ import annotations


class Suspects:
    """Trials that died together; at least one of them kills its worker.

    >>> suspects = Suspects()
    >>> for trial in (4, 7, 8):
    ...     suspects.fell("bundle 1", trial)
    >>> suspects.bisect()
    >>> [suspects.half(trial) for trial in (4, 7, 8, 9)]
    [1, 1, 2, 0]
    """

    def __init__(self) -> None:
        self._fallen: dict[str, list[int]] = {}  # trials by bundle, since the last bisection
        self._half: dict[int, int] = {}
        self._halves = 0

    def fell(self, bundle: str, trial: int) -> None:
        """A trial died in a bundle of several."""
        self._fallen.setdefault(bundle, []).append(trial)

    def bisect(self) -> None:
        """Divide the trials that fell with each bundle into halves; a half is not fused with trials outside it."""
        for trials in self._fallen.values():
            middle = (len(trials) + 1) // 2
            for half in (trials[:middle], trials[middle:]):
                self._halves += 1
                self._half.update(dict.fromkeys(half, self._halves))
        self._fallen.clear()

    def acquit(self, trial: int) -> None:
        """A trial has reported: it may be fused with any other again."""
        self._half.pop(trial, None)

    def half(self, trial: int) -> int:
        """The number of a trial's half; 0 where it is no suspect."""
        return self._half.get(trial, 0)
