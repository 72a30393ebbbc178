"""States that are no longer needed: found by the log's lines, and deleted once these lines are durable."""

from __future__ import annotations

from penstock.errors import StudyError
from penstock.log.events import Log
from penstock.log.history import History
from penstock.log.states import States, needed
from penstock.trial import StateRef


class Collecting:
    """The files of a study's states, and which of them are needless."""

    def __init__(self, history: History, states: States, log: Log) -> None:
        self._history, self._states, self._log = history, states, log
        self._files: dict[int, set[str]] = {}  # the state files that are still needed, by trial
        self._needless: set[str] = set()
        self._successors: set[str] = set()  # the states that took the place of needless ones

    def find(self) -> None:
        """List the states; delete those that were cut short, and those whose trial the log does not know."""
        unknown = []
        for name in self._states.names():
            if name.endswith(".pt") and _owner(name) < len(self._history.trials):
                self._files.setdefault(_owner(name), set()).add(name)
            else:
                unknown.append(name)
        if unknown:
            self._states.delete(*unknown)
        for number in list(self._files):
            self.look(number)

    def add(self, number: int, state: StateRef) -> None:
        """A trial has one more state."""
        self._files.setdefault(number, set()).add(state.file)
        self.look(number)

    def release(self) -> None:
        """Look at the trials whose states are no longer donors since the last line."""
        while self._history.released:
            self.look(_owner(self._history.released.pop()))

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
        """Delete needless states, once the lines and the states that made them needless are durable."""
        if not self._needless or self._log.tick() is not None:
            return
        for file in self._successors - self._needless:
            self._states.sync(file)
        try:
            self._states.delete(*self._needless)
        except StudyError:  # the place cannot be reached now: needless states are no reason to end a study
            return
        self._needless.clear()
        self._successors.clear()

    def intact(self, state: StateRef) -> bool:
        """Whether a state is there and whole."""
        return self._states.size(state.file) == state.bytes


def _owner(file: str) -> int:
    return int(file.split("-")[0])
