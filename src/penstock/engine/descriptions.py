"""Descriptions of trials, made by workers before any training: the trial's signature and its memory.

Trials that are not fused cost more than the user may expect, so one line says how many they are, why, and what would
change it: as a warning when a reason is new, and in the log.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from penstock.bundle import Description
from penstock.errors import SoloWarning
from penstock.log.history import TrialRecord
from penstock.trial import Config

NOTHING = Description()
SHOWN = 2  # differences between signatures that a line tells
UNLIKE = "each has a signature of its own"


class Descriptions:
    """The descriptions of a study's trials, each asked for once; ``warns`` says that trials are meant to be fused."""

    def __init__(
        self, describe: Callable[[Sequence[Config], Sequence[int]], list[Description]], *, warns: bool
    ) -> None:
        self._describe, self._warns = describe, warns
        self._known: dict[int, tuple[Config, Description]] = {}
        self._trials: dict[str, set[int]] = {}  # by signature
        self._variants: dict[int, str] = {}  # of the task, by trial
        self._refused: dict[str, set[int]] = {}  # trials without a signature, by reason
        self._failed: dict[str, str] = {}  # by signature: why fusing was tried in vain
        self._said: set[str] = set()
        self._logged: tuple[frozenset[str], int] = frozenset(), 0  # the reasons that were logged, and for how many

    def of(self, trial: int) -> Description:
        """The description of a trial; an empty one where it was not asked for."""
        return self._known[trial][1] if trial in self._known else NOTHING

    def learn(self, records: Iterable[TrialRecord]) -> list[int]:
        """Ask for the descriptions of trials whose configs are new; gives the numbers of these trials."""
        new = [r for r in records if r.number not in self._known or self._known[r.number][0] != r.config]
        if not new:
            return []
        made = self._describe([record.config for record in new], [record.number for record in new])
        for record, description in zip(new, made, strict=True):
            self._forget(record.number)
            self._known[record.number] = (record.config, description)
            self._variants[record.number] = record.variant
            if description.signature is not None:
                self._trials.setdefault(description.signature, set()).add(record.number)
            elif description.reason:
                self._refused.setdefault(description.reason, set()).add(record.number)
        for reason in self._refused:
            self._warn(reason)
        alike = sum(map(len, self._trials.values()))
        if 2 <= len(self._single()) >= alike / 2:  # fewer may yet find others like them
            self._warn(UNLIKE)
        return [record.number for record in new]

    def _forget(self, trial: int) -> None:
        old = self.of(trial)
        for kept, name in ((self._trials, old.signature), (self._refused, old.reason)):
            if name in kept:
                kept[name].discard(trial)
                if not kept[name]:
                    del kept[name]

    def failed(self, signature: str, reason: str) -> None:
        """Trials of a signature were tried together in vain, and train solo."""
        self._failed[signature] = reason
        self._warn(reason)

    def alike(self, signature: str) -> int:
        """How many trials of a signature there are."""
        return len(self._trials.get(signature, ()))

    def _single(self) -> list[int]:
        """The trials whose signature no other trial has, where there are others of their variant."""
        several = Counter(self._variants.values())
        alone = (trials for signature, trials in self._trials.items() if signature not in self._failed)
        single = [trial for trials in alone if len(trials) == 1 for trial in trials]
        return [trial for trial in single if several[self._variants[trial]] > 1]

    def _solo(self) -> dict[str, int]:
        """How many trials train solo, by reason; the last one is that their signatures differ."""
        counts = Counter({reason: len(trials) for reason, trials in self._refused.items()})
        for signature, reason in self._failed.items():
            counts[reason] += len(self._trials.get(signature, ())) or 1
        if len(single := self._single()) > 1:
            counts[UNLIKE] = len(single)
        return counts

    def _warn(self, reason: str) -> None:
        """Warn once for each reason that trials train solo: they cost more than the user may expect."""
        if self._warns and reason not in self._said:
            self._said.add(reason)
            warnings.warn(self._line({reason: self._solo().get(reason, 1)}), SoloWarning, stacklevel=2)

    def _line(self, solo: dict[str, int]) -> str:
        """How many trials train solo and why, on one line."""
        reasons = {reason: (self._differences() if reason == UNLIKE else reason).rstrip(".") for reason in solo}
        count, known = sum(solo.values()), max(len(self._known), sum(solo.values()))
        said = f"{count} of {known} trials {'trains' if count == 1 else 'train'} solo"
        if len(solo) == 1:
            return f"{said}: {next(iter(reasons.values()))}."
        return f"{said}: {'; '.join(f'{solo[reason]}, as {text}' for reason, text in reasons.items())}."

    def _differences(self) -> str:
        """The parts in which signatures that no two trials share differ, the most frequent first."""
        parts = [part for trial in self._single() if (part := self.of(trial).unlike)[0]]
        if not parts:
            return UNLIKE
        often = Counter(name for name, _ in parts).most_common()
        clauses = dict(reversed(parts))
        shown = "; ".join(clauses[name] for name, _ in often[:SHOWN])
        more = f"; and {len(often) - SHOWN} more parts differ" if len(often) > SHOWN else ""
        return f"{UNLIKE}, as {shown}{more}. To fuse them, fix it or draw it from a few values"

    def news(self, *, last: bool = False) -> str:
        """One line about the trials that train solo, where it says more than the one before.

        A line comes with each new reason, and when there are twice as many trials: not with each trial.
        """
        solo = self._solo() if self._warns else {}
        reasons, count = frozenset(solo), sum(solo.values())
        if (reasons, count) == self._logged or not (last or reasons - self._logged[0] or count >= 2 * self._logged[1]):
            return ""
        if last and UNLIKE in solo:
            self._warn(UNLIKE)
        self._logged = reasons, count
        return self._line(solo) if solo else ""
