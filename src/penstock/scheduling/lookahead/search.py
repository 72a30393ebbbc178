"""The search for the plan that ends first: over deadlines, then over the shares of single trials and their order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from penstock.scheduling.lookahead.layout import Plan, Policy, Site, Work
from penstock.scheduling.lookahead.rollout import follow, urgency

STARTS = 450  # starts that the plans of one decision may have together: a decision's time grows with them
MORE = 4000  # the same where few trials wait, none follow and none can move: no later decision can correct this one
OVERHEAD = 4  # laying out a plan takes as long as so many starts, besides its own starts
LEVELS = 12  # deadlines that are tried at most
HALVINGS = 3  # how often the step below the best deadline is halved
SOONER = (0.999, 0.95, 0.88)  # deadlines that are tried with each forced share, as parts of the best makespan
FINE = 24  # the shares and the order of more trials than this are not changed one by one
NONE = Plan(math.inf, math.inf, ())


@dataclass(frozen=True)
class Found:
    """A plan, and the policy that leads to it."""

    plan: Plan
    policy: Policy


class Search:
    """The plans of one decision, as many as its number of starts allows; it has a ``part`` of the usual number."""

    def __init__(self, site: Site, jobs: Sequence[Work], part: float = 1.0) -> None:
        self.site, self.jobs = site, jobs
        self.later = sum(len(rung) for crew in site.crews for rung in crew.rungs)
        self.overhead = OVERHEAD + len(site.held)
        final = not self.later and len(jobs) <= FINE and site.moving == math.inf
        self.starts = round(part * (MORE if final else STARTS))  # how many more starts may be laid out
        self.order = in_order(jobs)

    def best(self) -> Found:
        """The best plan found, with its policy."""
        found = self._try(Policy(order=self.order))
        if all(len(job.options) == 1 for job in self.jobs):
            return found
        if len({job.signature for job in self.jobs}) > 1:
            found = self._alike(found)
        found = self._levels(found)
        if len(self.jobs) <= FINE:
            found = self._change(self._force(found))
        return found

    def _try(self, policy: Policy, best: Plan = NONE) -> Found:
        plan = follow(self.site, self.jobs, policy, best.makespan)
        self.starts -= self.overhead + len(plan.starts)
        return Found(plan, policy)

    def _alike(self, best: Found) -> Found:
        """Put trials of one signature together in the order, whatever their groups, if that makes a better plan."""
        first = {job.signature: i for i, job in reversed(list(enumerate(self.jobs)))}
        order = sorted(self.order, key=lambda i: (-self.jobs[i].priority, first[self.jobs[i].signature]))
        found = self._try(Policy(order=tuple(order)))
        if not found.plan.beats(best.plan):
            return best
        self.order = tuple(order)
        return found

    def _levels(self, best: Found) -> Found:
        """The level of the water: the earliest deadline by which all trials end, each with the least area for it.

        A deadline that is kept from now on is kept from any later point of its plan too: a search that begins there can
        find it again. A deadline that is not kept does not rule out an earlier one, so deadlines are tried in turn.
        """
        bottom, top = self._bottom(), best.plan.makespan
        if not bottom < top < math.inf:
            return best
        each = self.overhead + len(self.jobs) + self.later
        count = min(LEVELS, max(2, self.starts // each - HALVINGS - 2))
        tried = [bottom * (top / bottom) ** (i / count) for i in range(count)]
        for deadline in (0.0, *tried):  # no trial keeps the deadline 0, so each gets its widest share
            if self.starts <= 0:
                return best
            found = self._try(Policy(deadline, self.order), best.plan)
            best = found if found.plan.beats(best.plan) else best
        low = max((deadline for deadline in tried if deadline < best.plan.makespan), default=bottom)
        for _ in range(HALVINGS if self.starts > 0 else 0):
            found = self._try(Policy((low + best.plan.makespan) / 2, self.order), best.plan)
            if found.plan.beats(best.plan):
                best = found
            else:
                low = found.policy.deadline
        return best

    def _bottom(self) -> float:
        """A time before which no plan ends: all areas must fit, and the longest trial and its later rungs must end."""
        later = [job for crew in self.site.crews for rung in crew.rungs for job in rung]
        areas = sum(held.end * held.share for held in self.site.held)
        areas += sum(job.options[0].area for job in (*self.jobs, *later))
        ends = [held.end for held in self.site.held]
        return max(areas / len(self.site.free), *ends, *(job.options[-1].seconds + job.after for job in self.jobs))

    def _force(self, best: Found) -> Found:
        """Force a share on single trials, in place of the least that keeps the deadline, while that makes better plans.

        Trials that end last come first.
        """
        half, improved = self.starts // 2, True
        while improved:
            improved = False
            late = [(place, option) for place in _last(best.plan) for option in self.jobs[place].options]
            for (place, option), part in product(late, SOONER):
                if self.starts <= half:
                    return best
                given = {**best.policy.given, place: option}
                found = self._try(Policy(best.plan.makespan * part, self.order, given), best.plan)
                if found.plan.beats(best.plan):
                    best, improved = found, True
                    break
        return best

    def _change(self, best: Found) -> Found:
        """Change one share, two shares or a place in the order, while that makes better plans."""
        given = {start.job: start.option for start in best.plan.starts if start.job >= 0}
        best = replace(best, policy=Policy(math.inf, tuple(given), given))
        improved = True
        while improved and self.starts > 0:
            improved = False
            for policy in self._near(best):
                if self.starts <= 0:
                    break
                found = self._try(policy, best.plan)
                if found.plan.beats(best.plan):
                    best, improved = found, True
                    break
        return best

    def _near(self, best: Found) -> Iterator[Policy]:
        """The policies that are one change away from the best; mostly, trials that end last are changed first.

        The changes are another share; a wider share and the first place; another place; a wider share for one trial and
        a narrower share for another.
        """
        given, order, late = best.policy.given, list(best.policy.order), _last(best.plan)
        for place in late:
            for option in self.jobs[place].options:
                if option.share != given[place].share:
                    yield replace(best.policy, given={**given, place: option})
        first = max(job.priority for job in self.jobs)
        for place in [place for place in reversed(late) if self.jobs[place].priority == first]:
            rest = [other for other in order if other != place]
            for option in self.jobs[place].options:
                if option.share > given[place].share:
                    yield replace(best.policy, order=(place, *rest), given={**given, place: option})
        for place in late:
            rest = [other for other in order if other != place]
            for i, other in enumerate(order):
                if other != place and self.jobs[other].priority == self.jobs[place].priority:
                    yield replace(best.policy, order=(*rest[:i], place, *rest[i:]))
        for place in late:
            for other in late:
                for option in self.jobs[place].options:
                    for another in self.jobs[other].options:
                        if option.share > given[place].share and another.share < given[other].share and place != other:
                            yield replace(best.policy, given={**given, place: option, other: another})


def in_order(jobs: Sequence[Work]) -> tuple[int, ...]:
    """The indices of jobs, the most urgent first.

    Equally urgent jobs of one signature come together where they can share a device.
    """
    first: dict[str, int] = {}
    for job in jobs:
        first[job.signature] = min(job.asked, first.get(job.signature, job.asked))

    def key(place: int) -> tuple[float, ...]:
        job = jobs[place]
        *most, asked = urgency(job)
        return *most, first[job.signature] if job.options[0].share < 1 else asked, asked

    return tuple(sorted(range(len(jobs)), key=key))


def _last(plan: Plan) -> list[int]:
    """The indices of the waiting jobs that a plan starts, the last to end first."""
    late = sorted(plan.starts, key=lambda start: -start.time - start.option.seconds)
    return [start.job for start in late if start.job >= 0]
