"""Descriptions of trials, made by workers before any training: the trial's signature and its memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

from penstock.bundle import Description
from penstock.errors import SoloWarning
from penstock.log.history import TrialRecord
from penstock.trial import Config

ALL_UNLIKE = 8  # so many trials, no two of which can be fused, are no accident: the user is warned

NOTHING = Description()


class Descriptions:
    """The descriptions of a study's trials, each asked for once; ``warns`` says that trials are meant to be fused."""

    def __init__(
        self, describe: Callable[[Sequence[Config], Sequence[int]], list[Description]], *, warns: bool
    ) -> None:
        self._describe, self._warns = describe, warns
        self._known: dict[int, tuple[Config, Description]] = {}
        self._said: set[str] = set()
        self._new: list[str] = []

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
            self._known[record.number] = (record.config, description)
            if description.signature is None:
                self.say(description.reason)
        found = [one.signature for _, one in self._known.values() if one.signature is not None]
        if len(found) >= ALL_UNLIKE and len(set(found)) == len(found):
            self.say(
                "no two of them are alike: their modules' attributes differ, or the values that loss, metrics or data "
                "read from the config"
            )
        return [record.number for record in new]

    def say(self, reason: str, *, logged: bool = False) -> None:
        """Warn once for each reason that trials train solo: they cost more than the user may expect."""
        if self._warns and reason and reason not in self._said:
            self._said.add(reason)
            if not logged:
                self._new.append(reason)
            warnings.warn(f"Trials that cannot be fused train solo: {reason.rstrip('.')}.", SoloWarning, stacklevel=2)

    def refusals(self) -> list[str]:
        """New reasons why trials train solo, since the last call."""
        new, self._new = self._new, []
        return new
