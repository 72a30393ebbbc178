"""Tuning by narrow twins (Hydro §4.3): an algorithm around one, whose trials are surrogates of the study's model.

Eager transfer has no clock: once a part of the surrogates have done all that was asked of them, the best of them are
asked for at full width, with weight 0, so that they get what surrogates leave idle. These targets race in rungs. A
target whose config is no longer among the best is granted no more.

Before that, some configs are trained at twice the width too, as far as that is cheap. How well one order foretells the
other says how many targets race. Where it foretells too little, the search begins again at twice the width, or with the
target itself where the order there cannot be looked at either. Where surrogates had fewer blocks, rows or pixels too,
it first begins again without that: the twins of twice the width have all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, pairwise
from math import ceil, inf, isfinite

from penstock.algorithms.base import Algorithm
from penstock.algorithms.sampling import Numbers, Search
from penstock.algorithms.spearman import interval, needed, spearman
from penstock.algorithms.successive_halving import rung_budgets
from penstock.trial import Config, Course, Member, Report, StartFrom, TrialGroup, variant_of

REDUCTION = 3  # of the race
ASSUMED = 0.8  # the correlation, where none is measured; it must be possible for reduced surrogates, or they are plain
LEAST = 0.5  # the correlation that must be possible, or surrogates say too little
CHECKED = 4  # the least scale whose order can be compared with that of narrow twins of twice the width
CHECK, RACE = "rank check", "targets rung"  # names of groups


def searched(group: str) -> bool:
    """Whether a group's trials are the search's own, and neither of the rank check nor of the race.

    >>> searched("asha rung 0"), searched("rank check"), searched("targets rung 1")
    (True, False, False)
    """
    return group != CHECK and not group.startswith(RACE)


class Transfer(Algorithm):
    """``inner`` searches by surrogates that are ``scale`` times narrower; then the best configs are trained as targets.

    ``best`` is how many, where the user says it. ``eager`` is the part of the surrogates after which targets begin, and
    ``pairs`` how many configs are trained at twice the width too. ``reduced`` says that surrogates have fewer blocks,
    rows or pixels, as long as the rank check admits that.
    """

    def __init__(
        self,
        inner: Algorithm,
        scale: int,
        *,
        best: int | None = None,
        eager: float = 0.5,
        pairs: int = 0,
        reduced: bool = False,
    ) -> None:
        self.inner, self.first, self.best, self.eager, self.pairs = inner, scale, best, eager, pairs
        self.first_reduced = reduced
        self.max_budget, self.samples, self.grows = inner.max_budget, inner.samples, inner.grows

    def begin(self, search: Search) -> None:
        self.search = search
        self._next = 0  # the number of the next trial
        self._dropped: list[int] = []
        self._gone: set[int] = set()  # trials that were dropped
        self._given_up: dict[int, int] = {}  # trials of a search that was given up, until they have done their budget
        self._begin_at(self.first, reduced=self.first_reduced)

    def _begin_at(self, scale: int, *, reduced: bool = False) -> None:
        """Begin the search at a scale."""
        self.scale, self.reduced = scale, reduced
        self._numbers = Numbers(variant_of(scale, reduced=reduced))
        self._granted: dict[int, int] = {}  # the budget of each trial under way
        self._configs: dict[int, Member] = {}  # surrogates, as they were asked for first
        self._seen: dict[int, float] = {}  # of each trial, its best so far
        self._scores: dict[int, float] = {}  # the same, when it had last done all that was asked of it
        self._at: dict[tuple[int, int], float] = {}  # by trial and the budget that it had then
        self._reached: dict[int, int] = {}  # the budget that a trial has reported
        self._failed: set[int] = set()
        self._order: list[tuple[float, int]] = []  # surrogates that can race, from the best, as `_place` has them
        self._pairs: dict[int, int] = {}  # by surrogate: the trial of its config at twice the width
        self._targets: dict[int, int] = {}  # by surrogate: the trial of its config at full width
        self.search.restart(self._numbers)
        self.inner.begin(self.search)

    def ask(self) -> list[TrialGroup]:
        if self._foretells_too_little():
            self._given_up |= self._granted
            self._dropped += [n for n in (*self._configs, *self._pairs.values()) if n not in self._granted]
            wider = self.scale // 2 if self.scale >= 2 * CHECKED else 1
            self._begin_at(self.scale if self.reduced else wider)
        groups = [self._outward(group) for group in self.inner.ask()]
        if self.scale == 1:
            return groups
        groups += self._checks()
        return [*groups, *self._race()]

    def tell(self, report: Report) -> None:
        number = report.trial
        if report.unit >= self._given_up.get(number, inf):
            del self._given_up[number]
            self._dropped.append(number)
        if number not in self._scores:
            return  # of a search that was given up
        score = self.score(report)
        self._seen[number] = max(self._seen.get(number, -inf), score)
        if report.unit >= self._granted.get(number, inf):
            self._leave(number)
            self._scores[number] = self._seen[number]
            self._at[number, self._granted[number]] = score
            self._reached[number] = self._granted.pop(number)
            if not report.metrics:
                self._failed.add(number)
            elif number in self._configs and isfinite(self._scores[number]) and number not in self._failed:
                insort(self._order, self._place(number))
        if (inner := self._numbers.inner.get(number)) is not None:
            self.inner.tell(replace(report, trial=inner))

    def drops(self) -> list[int]:
        dropped = [self._numbers.outer[number] for number in self.inner.drops()]
        dropped += [number for number in self._pairs.values() if number in self._reached]
        dropped += [number for number in self._targets.values() if self._reached.get(number, 0) >= self.max_budget]
        new = [number for number in [*self._dropped, *dropped] if number not in self._gone]
        self._gone.update(new)
        self._dropped.clear()
        return new

    def trials(self, search: Search) -> int | None:
        return self.inner.trials(search)

    def outlook(self) -> list[Course] | None:
        return self.inner.outlook()

    # Numbers: the trials of the inner algorithm, of the rank check and of the race are numbered in one order

    def _new(self) -> int:
        self._next += 1
        self._scores[self._next - 1] = -inf
        return self._next - 1

    def _outward(self, group: TrialGroup) -> TrialGroup:
        """A group of the inner algorithm, with the numbers and the variant that the study has for its trials."""
        members = []
        for member in group.members:
            if member.trial == len(self._numbers.outer):
                self._configs[self._numbers.add(self._new())] = member
            number = self._numbers.outer[member.trial]
            start = member.start_from
            if start is not None:
                start = StartFrom(self._numbers.outer[start.trial], start.unit)
            members.append(replace(member, trial=number, start_from=start, variant=self._numbers.variant))
        return self._grant(replace(group, members=tuple(members)))

    def _grant(self, group: TrialGroup) -> TrialGroup:
        self._granted.update((member.trial, member.budget) for member in group.members)
        return group

    # The rank check

    def _checks(self) -> list[TrialGroup]:
        """The first configs once more, at twice the width."""
        first = next(iter(self._configs.values()), None)
        if self.scale < CHECKED or first is None:
            return []
        alike = [number for number, one in self._configs.items() if one.budget == first.budget][: self.pairs]
        members = []
        for number in alike:
            if number not in self._pairs:
                self._pairs[number] = self._new()
                config = self._configs[number].config
                variant = variant_of(self.scale // 2)
                members.append(Member(self._pairs[number], config, first.budget, variant=variant))
        return [self._grant(TrialGroup(CHECK, tuple(members)))] if members else []

    @property
    def _awaits_check(self) -> bool:
        """Whether pairs of the rank check are still to come, which may be fewer than were planned."""
        if not self.pairs or self.scale < CHECKED:
            return False
        coming = len(self._pairs) < self.pairs and len(self._configs) < self._total
        first = next(iter(self._configs.values()), None)
        budget = 0 if first is None else first.budget
        told = [(n, budget) in self._at for pair in self._pairs.items() for n in pair]
        return coming or not all(told)

    def correlation(self) -> tuple[float, tuple[float, float]] | None:
        """How well surrogates foretell twins of twice the width, and where the true value lies; None if not known."""
        budgets = {number: self._configs[number].budget for number in self._pairs}
        scores = [
            (self._at[number, unit], self._at[other, unit])
            for number, other in self._pairs.items()
            for unit in (budgets[number],)
            if (number, unit) in self._at and (other, unit) in self._at
        ]
        if len(scores) < 4 or self._awaits_check:
            return None
        known = spearman(*zip(*scores, strict=True))
        return known, interval(known, len(scores))

    def _foretells_too_little(self) -> bool:
        known = self.correlation() if self.scale > 1 else None
        return known is not None and known[1][1] < (ASSUMED if self.reduced else LEAST)

    # The race

    @property
    def _total(self) -> int:
        """How many surrogates there are to be."""
        return self.inner.trials(self.search) or self.search.trials or 0

    @property
    def racing(self) -> int:
        """How many targets race at once."""
        if self.best is not None:
            return self.best
        known = self.correlation()
        return needed(ASSUMED if known is None else round(max(known[1][0], 0.0), 2), self._total)

    def _race(self) -> list[TrialGroup]:
        under_way = sum(number in self._configs for number in self._granted)
        if len(self._configs) - under_way < self.eager * self._total or self._awaits_check:
            return []
        able = (number for _, number in self._order if not self._is_lost(self._targets.get(number)))
        best = list(islice(able, self.racing))
        budgets = rung_budgets(self.max_budget, max(1, self.max_budget // REDUCTION**2), REDUCTION)
        new = []
        for number in best:
            if number not in self._targets:
                self._targets[number] = self._new()
                new.append(Member(self._targets[number], self._configs[number].config, budgets[0]))
        groups = [self._grant(TrialGroup(f"{RACE} 0", tuple(new), weight=0.0))] if new else []
        field = [self._targets[number] for number in best]
        for rung, (below, budget) in enumerate(pairwise(budgets), 1):
            if any(self._reached.get(number, 0) < below for number in field):
                break
            field = self._best(field)[: max(1, ceil(len(best) / REDUCTION**rung))]
            up = [n for n in field if self._reached[n] == below and n not in self._granted]
            members = [Member(n, self._config_of(n), budget, StartFrom(n, below)) for n in up]
            if members:
                groups.append(self._grant(TrialGroup(f"{RACE} {rung}", tuple(members), weight=0.0)))
        return groups

    def _is_lost(self, target: int | None) -> bool:
        """Whether a target has failed, or has reported nothing finite."""
        if target is None:
            return False
        return target in self._failed or (target in self._reached and not isfinite(self._scores[target]))

    def _config_of(self, target: int) -> Config:
        return next(self._configs[number].config for number, one in self._targets.items() if one == target)

    def _best(self, numbers: Iterable[int]) -> list[int]:
        """Trials in order from the best; trials that failed or reported nothing finite are left out."""
        left = [number for number in numbers if number not in self._failed and isfinite(self._scores[number])]
        return sorted(left, key=self._place)

    def _place(self, number: int) -> tuple[float, int]:
        return -self._scores[number], number

    def _leave(self, number: int) -> None:
        """Take a surrogate out of the order, whose score may change."""
        at = bisect_left(self._order, self._place(number))
        if at < len(self._order) and self._order[at][1] == number:
            del self._order[at]
