"""Recurring jobs for tests: what runs of each size need and cost, and a driver that runs a policy on them."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from penstock.energy.batch_size import Past, Run, Terms


@dataclass(frozen=True)
class Job:
    terms: Terms
    means: dict  # the mean units of a run by size; None for a size that never reaches the target
    cv: float = 0.07

    def needed(self, size, generator):
        mean = self.means[size]
        return None if mean is None else max(1, round(mean * (1 + self.cv * generator.standard_normal())))


@st.composite
def jobs(draw):
    """Jobs of any shape: no law binds the units of one size to another's."""
    sizes = tuple(sorted(draw(st.sets(st.sampled_from([8, 16, 32, 64, 128, 256, 512]), min_size=2, max_size=6))))
    default = draw(st.sampled_from(sizes))
    costs = {size: draw(st.floats(0.5, 20)) for size in sizes}
    means = {size: draw(st.one_of(st.none(), st.floats(2, 60))) for size in sizes}
    means[default] = draw(st.floats(2, 40))
    before = costs[default] * draw(st.floats(1, 1.3))
    terms = Terms(sizes, default, 60, draw(st.integers(1, 60)), costs, before)
    return Job(terms, means, draw(st.sampled_from([0.0, 0.05, 0.2])))


def play(job, policy, recurrences, seed=0, workers=1, watch=lambda *seen: None):
    """Run a job's recurrences, up to ``workers`` at a time; ``watch`` sees the past before each choice, and the choice.

    The run that began first ends first. Gives the runs in the order in which they ended.
    """
    luck, past, begun, at, under_way = np.random.default_rng(seed), Past(), 0, 0, []

    def begin(recurrence, stopped):
        nonlocal begun
        choice = policy.choose(job.terms, past, stopped, np.random.default_rng([seed, begun]))
        watch(past, stopped, choice)
        begun += 1
        under_way.append((recurrence, choice, stopped))

    while at < recurrences or under_way:
        while at < recurrences and len(under_way) < workers:
            begin(at, ())
            past, at = replace(past, running=(*past.running, under_way[-1][1])), at + 1
        recurrence, choice, stopped = under_way.pop(0)
        paid = choice.units(job.terms.unit_costs[choice.size], job.terms.max_budget)
        needed = job.needed(choice.size, luck)
        reached = needed is not None and needed <= paid
        units = needed if reached else paid
        run = Run(choice, recurrence, units, units * job.terms.unit_costs[choice.size], reached)
        past = past.with_run(run)
        if not reached and len(stopped) < 20:
            begin(recurrence, (*stopped, run))
            past = replace(past, running=(*past.running, under_way[-1][1]))
    return past.runs
