"""States that are no longer needed, and states that are lost.

Needless states are found by the log's lines, and deleted once these lines are durable. A lost state is gone, or is not
as it was written: its trial is trained again, and nothing else changes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress

from penstock.errors import StudyError
from penstock.log.history import History, TrialRecord
from penstock.log.owners import claim
from penstock.log.states import States, needed, prefix
from penstock.log.writer import Log
from penstock.trial import StateRef

SAID = 5  # messages about lost states, before one says that there are more

logger = logging.getLogger("penstock")


class Collecting:
    """The files of a study's states: which of them are needless, and which are lost."""

    def __init__(self, history: History, states: States, log: Log) -> None:
        self._history, self._states, self._log = history, states, log
        self._files: dict[int, set[str]] = {}  # the state files that are still needed, by trial
        self._needless: set[str] = set()
        self._successors: set[str] = set()  # the states that took the place of needless ones
        self._kept = 0  # how many needless states could not be deleted
        self._died: set[str] = set()  # how the state files begin that a dead worker may have been writing
        self._lost: set[str] = set()  # the state files that a worker could not read
        self._said: set[tuple[int, str]] = set()  # the trials and lost states that there was a message about

    def find(self) -> None:
        """List the states; delete states that were cut short, and states of trials that the log does not know.

        From here on the place is this study's.
        """
        claim(self._states, self._log)
        unknown = []
        for name in self._states.names():
            number = StateRef(name, 0, 0, 0).trial
            if name.endswith(".pt") and number < len(self._history.trials):
                self._files.setdefault(number, set()).add(name)
            else:
                unknown.append(name)
        if unknown:
            self._deleted(unknown)  # at once: a trial to come may write a state of the same name
        for number in list(self._files):
            self.look(number)

    def add(self, number: int, state: StateRef) -> None:
        """Take note of a trial's new state."""
        self._files.setdefault(number, set()).add(state.file)
        self._lost.discard(state.file)
        self.look(number)

    def release(self) -> None:
        """Look at the trials whose states another trial no longer waits to begin from."""
        while self._history.released:
            self.look(StateRef(self._history.released.pop(), 0, 0, 0).trial)

    def look(self, number: int) -> None:
        """Find the states of a trial that are no longer needed."""
        record, files = self._history.trials[number], self._files.get(number)
        if not files:
            return
        keep = {file for file in files if self._history.donors[file] > 0}
        keep.update(state.file for state in needed(record, self._history))
        if files - keep:
            self._needless |= files - keep
            self._successors |= files & keep
        self._files[number] = files & keep

    def delete(self) -> None:
        """Delete needless states, once the lines and the states that made them needless are durable.

        A place where this fails is tried again when there are twice as many: needless states are no reason to end a
        study, and a place that cannot be reached may be slow to say so.
        """
        if len(self._needless) < max(1, 2 * self._kept) or self._log.tick() is not None:
            return
        if self._deleted(self._needless, self._successors - self._needless):
            self._needless.clear()
            self._successors.clear()

    def died(self, number: int, attempt: int) -> None:
        """Take note of a trial's attempt whose worker died: it may have left a state that no line will name."""
        self._died.add(prefix(number, attempt))

    def sweep(self) -> None:
        """Delete what dead workers have left, at the end: until then an attempt's last words may still come."""
        if self._died:
            known = {file for files in self._files.values() for file in files}
            with suppress(StudyError):  # the next driver finds them too
                left = [name for name in self._states.names() if name.startswith(tuple(self._died))]
                self._deleted([name for name in left if name not in known])

    def _deleted(self, needless: Collection[str], successors: Collection[str] = ()) -> bool:
        """Delete some states, once others are durable; False where that cannot be done now."""
        try:
            for file in successors:
                with suppress(FileNotFoundError):  # somebody deleted it: its trial trains again
                    self._states.sync(file)
            self._states.delete(*needless)
        except StudyError as error:
            if not self._kept:
                logger.warning("%d needless states are not deleted, and the study goes on. %s", len(needless), error)
            self._kept = len(needless)
            return False
        self._kept = 0
        return True

    # Lost states

    def intact(self, state: StateRef) -> bool:
        """Whether a state is there and whole, as far as its size tells; a worker compares its content."""
        if state.file in self._lost:
            return False
        try:
            return self._states.size(state.file) == state.bytes
        except StudyError:
            return True  # nobody knows: a worker reads it, and repeats that

    def lose(self, file: str) -> None:
        """A worker found that a state is gone, or is not as it was written."""
        self._lost.add(file)

    def tell(self, record: TrialRecord, lost: StateRef, begins: str) -> None:
        """Say which trial lost its state, and how it goes on."""
        if (record.number, lost.file) in self._said:
            return  # the trial was stopped before it had another state
        self._said.add((record.number, lost.file))
        if len(self._said) <= SAID:
            logger.warning(
                "The state %s of trial %d, after unit %d, is gone or damaged. Trial %d %s. Reports are not repeated.",
                *(self._states.where(lost.file), lost.trial, lost.unit, record.number, begins),
            )
        elif len(self._said) == SAID + 1:
            logger.warning("More states are gone or damaged. Their trials are trained again in the same way.")
