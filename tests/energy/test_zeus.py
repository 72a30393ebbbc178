"""Zeus's policy against an oracle in numpy that follows the paper line by line, as a loop and not as a function."""

from dataclasses import replace
from math import inf, isinf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.energy.batch_size import Choice, Past, Run, Terms
from penstock.energy.zeus import Zeus
from tests.energy.jobs import Job, jobs, play


def oracle(sizes, default, beta, prior, window, decide):
    """Algorithm 3; ``decide(size, threshold)`` runs a size and gives (cost, converged, generator of the next draw)."""
    costs, least = {size: np.array([]) for size in sizes}, np.inf
    kept, first, generator = np.array(sorted(sizes)), default, None
    for _ in range(2):
        converged = {}
        for direction in (kept[kept <= first][::-1], kept[kept > first]):
            for size in direction:
                cost, good, generator = decide(int(size), beta * least)
                costs[size] = np.append(costs[size], cost)
                if not good:
                    break
                converged[int(size)] = cost
                least = min(least, cost)
        if converged:
            alive, first = np.array(sorted(converged)), min(converged, key=converged.get)
        kept = alive
    while generator is not None:
        samples = []
        for size in kept:
            seen = costs[size] if window is None else costs[size][-window:]
            variance = np.var(seen)
            if variance == 0:
                mean, spread = seen.mean(), 0.0
            else:
                mu, tau = (0.0, np.inf) if prior is None else prior
                spread = (1 / tau + seen.size / variance) ** -1
                mean = spread * (mu / tau + seen.sum() / variance)
            samples.append(generator.normal(mean, np.sqrt(spread)))
        size = int(kept[np.argmin(samples)])
        cost, good, generator = decide(size, beta * least)
        costs[size] = np.append(costs[size], cost)
        least = min(least, cost) if good else least


@settings(max_examples=40, deadline=None)
@given(jobs(), st.sampled_from([1.5, 2.0, 5.0]), st.sampled_from([None, (50.0, 400.0)]), st.sampled_from([None, 2, 5]))
def test_zeus_is_algorithms_1_to_3(job, beta, prior, window):
    runs = list(play(job, Zeus(beta, prior, window), 40))
    replayed = iter(enumerate(runs, 1))

    def decide(size, threshold):
        number, run = next(replayed)
        assert (run.size, run.choice.stake) == (size, pytest.approx(threshold) if not isinf(threshold) else inf)
        cost = run.cost if run.units else threshold
        return cost, run.reached, np.random.default_rng([0, number]) if number < len(runs) else None

    try:
        oracle(job.terms.sizes, job.terms.default, beta, prior, window, decide)
    except StopIteration:
        assert len(runs) < 2 * len(job.terms.sizes), "only pruning ends with the job"


TERMS = Terms((8, 16, 32), 16, 10, 50, {8: 2.0, 16: 1.0, 32: 1.0}, 1.0)


def test_equal_costs_are_certain_and_divide_by_no_zero():
    assert Zeus().observe([5.0, 5.0]) == (5.0, 0.0)
    assert Zeus(prior=(50.0, 4.0)).observe([5.0, 5.0]) == (5.0, 0.0)
    assert {run.size for run in play(Job(TERMS, {8: 5, 16: 5, 32: 5}, 0.0), Zeus(), 30)[6:]} == {16}


def test_a_given_prior_draws_the_belief_to_itself():
    mean, variance = Zeus(prior=(50.0, 1.0)).observe([10.0, 12.0])
    assert variance == pytest.approx(1 / (1 + 2 / 1.0))
    assert mean == pytest.approx((50 + 22) / 3)
    assert Zeus().observe([10.0, 12.0]) == (11.0, 0.5)


def test_a_window_forgets_what_was_before_it():
    runs = [Run(Choice(8), 0, 1, cost, True) for cost in (1.0, 1.0, 90.0, 90.0)]
    runs += [Run(Choice(16), 0, 1, 50.0, True)] * 2
    draws = np.random.default_rng(0)
    assert Zeus(window=2).predict((8, 16), runs, draws) == 16
    assert Zeus(window=None).predict((8, 16), [*runs[:2], *runs[4:]], draws) == 8


def test_overlapping_runs_have_the_best_known_size_while_pruning():
    """§4.4: the default as long as none is known, then the cheapest, and the prune goes on one run at a time."""
    first = Choice(16, inf, pruning=True)
    assert Zeus().choose(TERMS, Past(), (), np.random.default_rng(0)) == first
    assert Zeus().choose(TERMS, Past(running=(first,)), (), np.random.default_rng(0)) == Choice(16, inf)
    past = Past((Run(first, 0, 4, 4.0, True), Run(Choice(8, 8.0, pruning=True), 1, 1, 2.0, True)))
    trying = Choice(32, 4.0, pruning=True)
    assert Zeus().choose(TERMS, past, (), np.random.default_rng(0)) == trying
    overlapping = Past(past.runs, running=(trying,))
    assert Zeus().choose(TERMS, overlapping, (), np.random.default_rng(0)) == Choice(8, 4.0)


@settings(max_examples=20, deadline=None)
@given(jobs(), st.integers(2, 4))
def test_overlapping_pruning_tries_every_size_as_one_after_another_does(job, workers):
    """Overlapping runs add costs, and take none from the pruning: its first round tries the same sizes."""
    job = replace(job, cv=0.0)
    alone = [run.size for run in play(job, Zeus(beta=1e9), 12) if run.choice.pruning]
    together = [run.size for run in play(job, Zeus(beta=1e9), 12 * workers, workers=workers) if run.choice.pruning]
    count = len({*alone})
    assert together[:count] == alone[:count]
