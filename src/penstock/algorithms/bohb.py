"""BOHB: Hyperband's rungs, with configurations from a model of the results so far."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import TYPE_CHECKING, Any

from penstock.algorithms.asha import ASHA
from penstock.algorithms.hyperband import Hyperband, bracket_sizes
from penstock.algorithms.successive_halving import Rungs
from penstock.seeds import key
from penstock.trial import Config, Report

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import TPESampler
    from optuna.trial import FrozenTrial

    from penstock.algorithms.sampling import Search


class Model:
    """Draws configurations as BOHB does (Falkner et al., 2018, §4 and Algorithm 2).

    A third of all draws, ρ, is independent. The others come from TPE over D_b, the finite results at budget b. The
    budget b is the deepest with |D_b| ≥ N_min + 2, where N_min is one more than the number of tuned parameters. Where
    no budget has that many results yet, the draw is independent.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self._results: Counter[int] = Counter()  # |D_b| by b
        self._parameters = 0

    def take(self, budget: int, score: float) -> None:
        self._results[budget] += isfinite(score)

    def draw(self, number: int) -> Config:
        n_min = self._parameters + 1
        budget = max((b for b, count in self._results.items() if count >= n_min + 2), default=None)
        if budget is not None and key(self._search.seed, "model", number) % 3:
            return self._search.draw_at(number, budget)
        config = self._search.independent(number)
        self._parameters = self._parameters or len(config) - len(self._search.space.constants)
        return config


class ModelBased(Rungs):
    """The base of BOHB and SyncBOHB: new configurations come from a ``Model`` of the results so far."""

    def default_sampler(self) -> TPESampler:
        """The sampler that a study uses where the user gives none."""
        return tpe()

    def begin(self, search: Search) -> None:
        super().begin(search)
        self._model = Model(search)

    def _take(self, report: Report) -> None:
        self._model.take(report.unit, self.score(report))
        super()._take(report)

    def _draw(self, number: int) -> Config:
        return self._model.draw(number)


class BOHB(ModelBased, ASHA):
    """Asynchronous BOHB: ASHA over all of Hyperband's brackets, with configurations from TPE.

    >>> BOHB(max_budget=27)
    BOHB(max_budget=27, min_budget=1, reduction=3, concurrency=8)
    """

    def __init__(self, *, max_budget: int, min_budget: int = 1, reduction: int = 3, concurrency: int = 8) -> None:
        super().__init__(max_budget=max_budget, min_budget=min_budget, reduction=reduction, concurrency=concurrency)
        self.brackets = len(bracket_sizes(self.max_budget, self.min_budget, self.reduction))

    def settings(self) -> dict[str, object]:
        return {name: value for name, value in super().settings().items() if name != "brackets"}


class SyncBOHB(ModelBased, Hyperband):
    """Synchronous BOHB, as in its paper: Hyperband, with configurations from TPE. Fixes the number of trials.

    >>> SyncBOHB(max_budget=27)
    SyncBOHB(max_budget=27, min_budget=1, reduction=3, concurrency=8)
    """


def tpe() -> TPESampler:
    """TPE over all parameters jointly, from the first result on: ``Model`` decides when there are enough results.

    The best N_b,l = max(N_min, 15% of N_b) results count as good (BOHB, eq. 3). Optuna's own 10% would be a single
    result at a deep budget, which has few. The other results there, all good enough to be promoted, would count as
    bad, and draws would avoid the best region.
    """
    from optuna.samplers import TPESampler

    class TPE(TPESampler):
        def sample_relative(
            self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
        ) -> dict[str, Any]:
            n_min = len(search_space) + 1
            self._gamma = lambda n: max(n_min, 15 * n // 100)  # set here, because the argument gamma= is deprecated
            return super().sample_relative(study, trial, search_space)

    return TPE(multivariate=True, n_startup_trials=0)
