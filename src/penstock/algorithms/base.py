"""The contract of a tuning algorithm: ask, tell, stages; and the account of grants that Penstock's algorithms keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Any

from penstock.errors import StudyError
from penstock.numeric import shown, whole
from penstock.trial import Course, Later, Member, Report, Stage, TrialGroup, score

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from penstock.algorithms.sampling import Search


AHEAD = 10_000  # trials under way at most: enough for any cluster, and a study of ten million trials starts at once


class Algorithm(ABC):
    """Decides which trials run and how far.

    An instance holds its settings; ``begin`` gives it a search (space, goal, seed, number of trials) and forgets any
    earlier one. From then on the engine calls, in this order and for every report: ``tell``, ``drops``, ``ask``. The
    algorithm's answers depend on nothing but its settings, the search and the order of these reports: no clock, no
    global random state, no set iteration. So a study can be resumed by replaying its log.

    - Trials are numbered 0, 1, 2, … in the order in which they are first asked for.
    - A member's budget is the trial's total number of units; it is larger than the number already reported. A trial
      goes no further than its granted budget until asked for again, and is not asked for again before it has reported
      that budget.
    - A report below the granted budget changes no decision, except in algorithms that say so.
    - A report of the metric that trials train ``until`` is one at the granted budget: the trial goes no further.
    - A failed trial is told as a report at its granted budget without metrics; ``self.score`` makes it worst of all.
    - ``search.trials`` may grow between two asks, when a study is taken up again with a larger total. An algorithm that
      needs this number reads it at each ``ask``. An algorithm whose stages are made from it fixes it in ``begin``
      (SuccessiveHalving: ``Study`` refuses the change).
    - The search is over when ``ask`` gives nothing and no member is running.
    - An ask takes little time, however many trials there are to be: members beyond ``AHEAD`` under way wait inside the
      algorithm, and are drawn when it is their turn. Between two asks the engine looks at the study's limits.
    """

    max_budget: int
    samples = True  # whether configs are drawn; only then is a sampler of use
    grows = True  # whether a study that is taken up again may have more trials
    search: Search

    @property
    def until(self) -> float | None:
        """The metric at which a trial ends before its budget, where it trains alone; None where there is none."""
        return None

    @abstractmethod
    def begin(self, search: Search) -> None:
        """Start a new search."""

    @abstractmethod
    def ask(self) -> list[TrialGroup]:
        """The groups ready to start; each member is given out once."""

    @abstractmethod
    def tell(self, report: Report) -> None:
        """Take a result."""

    def drops(self) -> list[int]:
        """Trials that will not be asked for again, each named once, as soon as that is certain."""
        return []

    def trials(self, search: Search) -> int | None:
        """How many trials the settings fix for this search, or None where ``Study(trials=...)`` says."""
        return None

    def stages(self, trials: int | None = None) -> list[Stage] | None:
        """The stages, where they are known beforehand; ``trials`` is their number where the settings do not fix it."""
        return None

    def expected(self, trials: int | None = None) -> list[Stage] | None:
        """The stages, or the ones to be expected where there are no barriers; None where nothing is expected."""
        return self.stages(trials)

    def outlook(self) -> list[Course] | None:
        """The trials still to be asked for, as far as they can be expected by now; None where nothing is expected.

        Only people are told: no decision follows from it.
        """
        return None

    def default_sampler(self) -> BaseSampler | None:
        """The sampler that the algorithm brings, used where the user gives none; None where it brings none."""
        return None

    def settings(self) -> dict[str, object]:
        """The arguments that make an equal algorithm; the log keeps them to notice a change."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_") and k != "search"}

    def kept(self) -> dict[str, Any]:
        """What the log keeps beside the settings, each time that a driver takes the study up."""
        return {}

    def score(self, report: Report) -> float:
        """The report's metric as a number that is larger for a better trial; minus infinity where it is not finite."""
        return score(report.metrics, self.search.metric, self.search.mode)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.settings().items())})"


class Granting(Algorithm):
    """The base of Penstock's own algorithms: an account of the budgets granted and the trials dropped.

    Only the first report at its trial's granted budget is taken.
    """

    def begin(self, search: Search) -> None:
        self.search = search
        self._granted: dict[int, int] = {}  # the budget of each trial under way
        self._dropped: list[int] = []

    def tell(self, report: Report) -> None:
        if report.unit >= self._granted.get(report.trial, inf):
            del self._granted[report.trial]
            self._take(report)

    def drops(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def _room(self) -> int:
        """How many more trials may be under way."""
        return max(0, AHEAD - len(self._granted))

    def _grant(
        self, name: str, members: Iterable[Member], *, open: bool = False, later: tuple[Later, ...] = ()
    ) -> TrialGroup:
        group = TrialGroup(name, tuple(members), open=open, later=later)
        self._granted.update((member.trial, member.budget) for member in group.members)
        return group

    def _take(self, report: Report) -> None:
        """Take a result at its granted budget; the trial is dropped, unless an algorithm overrides this."""
        self._dropped.append(report.trial)


def needed_trials(algorithm: Algorithm, search: Search) -> int:
    """How many trials there are in all: the settings fix it, or else ``Study(trials=...)`` must give it."""
    trials = algorithm.trials(search)
    trials = search.trials if trials is None else trials
    if trials is None:
        raise StudyError(
            f"{type(algorithm).__name__} needs trials=: how many configurations to try in all, "
            "e.g. Study(..., trials=64)."
        )
    return trials


def check_count(name: str, value: object, least: int = 1) -> int:
    """A setting as a plain whole number; refused where it is not one of at least ``least``."""
    made = whole(value)
    if made is None or made < least:
        raise StudyError(f"{name} must be a whole number of at least {least}, got {shown(value)}.")
    return made
