"""The search for the plan that ends first: over deadlines, then over what single trials are given and their order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.scheduling.lookahead.layout import BETTER, Job, Option, Plan, Site, Wish, lay

LEVELS, HALVINGS = 32, 6  # deadlines that are tried, and how often the last step between two is halved
SOONER = (0.999, 0.95, 0.88)  # deadlines that are tried, as parts of the makespan so far
STEPS = 3000  # changes that are tried, times jobs: each takes as long as there are jobs


def plan_of(site: Site, jobs: Sequence[Job]) -> Plan:
    """The best plan that is found; where nothing can be shared or spread, the longest first."""
    if all(len(job.options) == 1 for job in jobs):
        return lay(site, jobs, _longest_first(jobs), [Wish(job.options) for job in jobs])
    steps = STEPS // len(jobs)
    best = None
    for strict in (False, True):
        found = force(site, jobs, fill(site, jobs, strict), steps, strict)
        found = improve(site, jobs, found, steps, strict)
        best = found if best is None or found.beats(best) else best
    assert best is not None
    return best


def fill(site: Site, jobs: Sequence[Job], strict: bool = False) -> Plan:
    """The water level: the earliest deadline by which all end, each with the least area that keeps it.

    A deadline that is kept from here is kept as well from any later point on the way, so that planning anew does not
    lose what was found. One that is not kept says nothing about earlier ones: they are gone through.
    """
    order = _longest_first(jobs)
    best = lay(site, jobs, order, [Wish(job.options[:1]) for job in jobs], strict)
    areas = sum(held.end * held.share for held in site.held)
    areas += sum(min(option.area for option in job.options) for job in jobs)
    bottom = max(areas / len(site.free), *(job.options[-1].seconds for job in jobs))
    top = best.makespan
    if not bottom < top < math.inf:
        return best
    thrifty = _thrifty(jobs)
    tried = [bottom * (top / bottom) ** (i / LEVELS) for i in range(LEVELS)]
    for deadline in tried:
        plan = lay(site, jobs, order, _by(deadline, thrifty), strict)
        best = plan if plan.beats(best) else best
    low = max((deadline for deadline in tried if deadline < best.makespan), default=bottom)
    for _ in range(HALVINGS):
        deadline = (low + best.makespan) / 2
        plan = lay(site, jobs, order, _by(deadline, thrifty), strict)
        low = low if plan.beats(best) else deadline
        best = plan if plan.beats(best) else best
    return best


def _longest_first(jobs: Sequence[Job]) -> list[int]:
    return sorted(range(len(jobs)), key=lambda i: (-jobs[i].demand.priority, -jobs[i].runtime))


def _thrifty(jobs: Sequence[Job]) -> list[tuple[Option, ...]]:
    return [tuple(sorted(job.options, key=lambda option: option.area)) for job in jobs]


def _by(deadline: float, thrifty: Sequence[tuple[Option, ...]]) -> list[Wish]:
    return [Wish(ours, deadline * (1 + BETTER)) for ours in thrifty]


def force(site: Site, jobs: Sequence[Job], plan: Plan, tries: int, strict: bool = False) -> Plan:
    """Give one trial after another something else than the least that keeps a deadline, if all end sooner so."""
    order, thrifty = _longest_first(jobs), _thrifty(jobs)
    forced: dict[int, Wish] = {}
    best, improved = plan, True
    while improved:
        improved = False
        late = [s.job for s in sorted(best.starts, key=lambda s: -s.time - s.option.seconds)]
        for job, option, part in ((j, o, part) for j in late for o in jobs[j].options for part in SOONER):
            if tries <= 0:
                return best
            tries -= 1
            new = {**forced, job: Wish((option,))}
            wishes = _by(best.makespan * part, thrifty)
            for one, wish in new.items():
                wishes[one] = wish
            found = lay(site, jobs, order, wishes, strict)
            if found.beats(best):
                best, forced, improved = found, new, True
                break
    return best


def improve(site: Site, jobs: Sequence[Job], plan: Plan, tries: int, strict: bool = False) -> Plan:
    """Change one share, or one or two places in the order, as long as that helps; the last to end come first."""
    given = [option for _, option in sorted((start.job, start.option) for start in plan.starts)]
    order = [start.job for start in plan.starts]
    best, left = plan, tries
    improved = True
    while improved and left > 0:
        improved = False
        for new_given, new_order in _near(jobs, best, given, order):
            left -= 1
            found = lay(site, jobs, new_order, [Wish((option,)) for option in new_given], strict)
            if found.beats(best):
                best, given, order, improved = found, new_given, new_order, True
                break
            if left <= 0:
                break
    return best


def _near(
    jobs: Sequence[Job], plan: Plan, given: list[Option], order: list[int]
) -> Iterator[tuple[list[Option], list[int]]]:
    late = [s.job for s in sorted(plan.starts, key=lambda s: -s.time - s.option.seconds)]
    for job in late:
        for option in jobs[job].options:
            if option.share != given[job].share:
                yield [*given[:job], option, *given[job + 1 :]], order
    for job in late:
        rest = [other for other in order if other != job]
        for place, other in enumerate(order):
            if other != job:
                yield given, [*rest[:place], job, *rest[place:]]
    for job in late:
        for other in late:
            if other == job:
                continue
            for option in jobs[job].options:
                for another in jobs[other].options:
                    if option.share > given[job].share and another.share < given[other].share:
                        new = list(given)
                        new[job], new[other] = option, another
                        yield new, order
