"""The algorithm's decisions as events; and resuming as their replay.

Decisions are a function of the order of reports in the log (invariant 4): after each report the algorithm is told,
then asked, and nothing else reaches it. So a log is resumed by telling a fresh algorithm the logged reports in their
order, and checking that its decisions equal the decisions in the log (invariant 5).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from penstock.algorithms.base import Algorithm
from penstock.algorithms.sampling import Search
from penstock.algorithms.transfer import searched
from penstock.errors import StudyError
from penstock.log.events import Asked, Dropped, Event, Failed, Opened, Reported, Wrote, encode
from penstock.log.history import History
from penstock.numeric import shown
from penstock.trial import Config, Later, Report, plain


class Decider:
    """An algorithm and its search, told about reports and answering with events to log."""

    def __init__(self, algorithm: Algorithm, search: Search) -> None:
        self.algorithm, self.search = algorithm, search
        self._wrote: list[Event] = []
        self._later: dict[str, tuple[Later, ...]] = {}  # the rungs that follow each group
        search.write = self._wrote.append
        algorithm.begin(search)

    def opened(self, trials: int | None) -> list[Event]:
        """The decisions when a driver takes the study up, with a total of trials that may have grown."""
        self.search.trials = trials
        return self._ask([])

    def after(self, report: Report) -> list[Event]:
        """The decisions after one more report."""
        self.algorithm.tell(report)
        dropped = self.algorithm.drops()
        return self._ask([Dropped(tuple(dropped))] if dropped else [])

    def later(self, group: str) -> tuple[Later, ...]:
        """The known rungs that follow a group once all of its members are done."""
        return self._later.get(group, ())

    def _ask(self, events: list[Event]) -> list[Event]:
        groups = self.algorithm.ask()
        self._later.update({group.name: group.later for group in groups if group.later})
        asked = [
            Asked(
                m.trial, m.config, m.budget, group.name, m.start_from, m.priority, group.weight, group.open, m.variant
            )
            for group in groups
            for m in group.members
        ]
        numbers = self.search.numbers
        wrote = self._wrote if numbers is None else [numbers.outward(event) for event in self._wrote]
        events = [*events, *wrote, *asked]
        self._wrote.clear()
        return events


def told(event: Event, history: History) -> Report | None:
    """The report that an algorithm is told for an event; for a failed trial it is empty, at its granted budget."""
    if isinstance(event, Reported):
        return Report(event.trial, event.unit, event.metrics, event.attempt, event.state, event.usage)
    if isinstance(event, Failed) and event.final:
        return Report(event.trial, history.trials[event.trial].granted, {}, event.attempt)
    return None


def replay(past: Sequence[Event], history: History, decider: Decider, given: int = 0) -> list[Event]:
    """Replay a log; gives the decisions that were made but not yet logged when its driver died.

    The configs of the first ``given`` events come from the log and not from the search, which has changed since; so do
    the attributes that a sampler wrote then. All other attributes are computed again.
    """
    if written := [event for event in past[:given] if isinstance(event, Wrote)]:
        from penstock.algorithms.pickles import check

        check(written)
    for variant, number, config in drawn(past[:given], decider.search):
        decider.search.replay(number, config, variant)
    expected: deque[Event] = deque()
    for number, event in enumerate(past):
        if isinstance(event, Asked | Dropped) or (isinstance(event, Wrote) and number >= given):
            event = _agree(expected.popleft() if expected else None, event)
        history.apply(event)
        decider.search.apply(event)
        if isinstance(event, Opened):
            expected.extend(decider.opened(event.settings["trials"]))
        if (report := told(event, history)) is not None:
            expected.extend(decider.after(report))
    return list(expected)


def drawn(past: Sequence[Event], search: Search) -> list[tuple[str, int, Config]]:
    """The trials that a search has drawn: their variant, their numbers within it, and their configs."""
    asked = [event for event in past if isinstance(event, Asked)]
    if search.numbers is None:
        return [("", event.trial, event.config) for event in asked]
    first = {event.trial: event for event in reversed(asked)}
    of: dict[str, list[Config]] = {}  # a search that began again has trials of another variant
    for _, event in sorted(first.items()):
        if searched(event.group):
            of.setdefault(event.variant, []).append(event.config)
    return [(variant, number, config) for variant, configs in of.items() for number, config in enumerate(configs)]


def _agree(decided: Event | None, logged: Event) -> Event:
    """The decision, where the log agrees with it; its config holds real objects where the log has their text."""
    if isinstance(decided, Asked) and isinstance(logged, Asked):
        same = (decided.trial, decided.budget, decided.start_from) == (logged.trial, logged.budget, logged.start_from)
        if same and plain(decided.config) == logged.config:
            return decided
        if same:
            raise StudyError(
                f"The space and the log disagree: trial {logged.trial} was drawn as {logged.config}, and now comes out "
                f"as {plain(decided.config)}. Resume with the space, sampler and versions the study began with."
            )
    elif isinstance(decided, Wrote) and isinstance(logged, Wrote):
        same = (decided.trial, decided.key) == (logged.trial, logged.key)
        if same and (encode(decided, 0) == encode(logged, 0) or (_opaque(decided.value) and _opaque(logged.value))):
            return decided  # the log's value is only compared: it may be a pickle, whose reader runs it
        if same:
            raise StudyError(
                f"The sampler and the log disagree: it wrote {shown(logged.value)} in {logged.key!r}, and now writes "
                f"{shown(decided.value)}. Resume with the sampler and versions the study began with."
            )
    elif decided == logged:
        return logged
    raise StudyError(
        f"The algorithm and the log disagree: the log has {logged}, and the algorithm decides {decided}. Resume with "
        "the algorithm and settings the study began with, or start a new study under another name."
    )


def _opaque(value: object) -> bool:
    """Whether a value is a pickle in hex. Two of the same may differ: CMA-ES pickles memory that it never set."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]+", value) is not None
