"""The search for the plan that ends first: over deadlines, then over what single trials are given and their order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from penstock.scheduling.lookahead.layout import Plan, Policy, Site, Work
from penstock.scheduling.lookahead.rollout import follow, urgency

STARTS = 450  # starts of trials that are laid out for one decision: they are what it takes time for
MORE = 4000  # where few trials wait, none follow and none can move: then no later decision makes up for this one
OVERHEAD = 4  # starts that a plan takes as long as, besides those in it
LEVELS = 12  # deadlines that are tried at most
HALVINGS = 3  # how often the last step between two deadlines is halved
SOONER = (0.999, 0.95, 0.88)  # deadlines that are tried, as parts of the makespan so far
FINE = 24  # trials whose shares and order are changed one by one
NONE = Plan(math.inf, math.inf, ())


@dataclass(frozen=True)
class Found:
    """A plan, and the policy that it came of."""

    plan: Plan
    policy: Policy


class Search:
    """Plans for one decision, as many as there is time for."""

    def __init__(self, site: Site, jobs: Sequence[Work], part: float = 1.0) -> None:
        self.site, self.jobs = site, jobs
        self.later = sum(len(rung) for crew in site.crews for rung in crew.rungs)
        self.overhead = OVERHEAD + len(site.held)
        final = not self.later and len(jobs) <= FINE and site.moving == math.inf
        self.starts = round(part * (MORE if final else STARTS))  # that are left to lay out
        self.order = in_order(jobs)

    def best(self) -> Found:
        """The best plan that is found."""
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
        """Trials that are alike go together, whatever their groups, if all end sooner so."""
        first = {job.signature: i for i, job in reversed(list(enumerate(self.jobs)))}
        order = sorted(self.order, key=lambda i: (-self.jobs[i].priority, first[self.jobs[i].signature]))
        found = self._try(Policy(order=tuple(order)))
        if not found.plan.beats(best.plan):
            return best
        self.order = tuple(order)
        return found

    def _levels(self, best: Found) -> Found:
        """The water level: the earliest deadline by which all end, each with the least area that keeps it.

        A deadline that is kept from here is kept as well from any later point on the way, so that planning anew does
        not lose what was found. One that is not kept says nothing about earlier ones: they are gone through.
        """
        bottom, top = self._bottom(), best.plan.makespan
        if not bottom < top < math.inf:
            return best
        each = self.overhead + len(self.jobs) + self.later
        count = min(LEVELS, max(2, self.starts // each - HALVINGS - 2))
        tried = [bottom * (top / bottom) ** (i / count) for i in range(count)]
        for deadline in (0.0, *tried):  # a deadline that nobody keeps: each is given all that it can use
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
        """No plan ends before all areas fit, nor before the longest trial and the rungs after it."""
        later = [job for crew in self.site.crews for rung in crew.rungs for job in rung]
        areas = sum(held.end * held.share for held in self.site.held)
        areas += sum(job.options[0].area for job in (*self.jobs, *later))
        ends = [held.end for held in self.site.held]
        return max(areas / len(self.site.free), *ends, *(job.options[-1].seconds + job.after for job in self.jobs))

    def _force(self, best: Found) -> Found:
        """Give one trial after another something else than the least that keeps a deadline, if all end sooner so."""
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
        """Change one share or two, or a place in the order, as long as that helps; the last to end come first."""
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
    """The places of jobs, the most urgent first; of equally urgent ones, the like that share a device come together."""
    first: dict[str, int] = {}
    for job in jobs:
        first[job.signature] = min(job.asked, first.get(job.signature, job.asked))

    def key(place: int) -> tuple[float, ...]:
        job = jobs[place]
        *most, asked = urgency(job)
        return *most, first[job.signature] if job.options[0].share < 1 else asked, asked

    return tuple(sorted(range(len(jobs)), key=key))


def _last(plan: Plan) -> list[int]:
    """The jobs of the list, the last to end first."""
    late = sorted(plan.starts, key=lambda start: -start.time - start.option.seconds)
    return [start.job for start in late if start.job >= 0]
