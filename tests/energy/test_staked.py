"""The staked policy: nothing is lost that was not sure, and what is believed follows from the runs."""

from dataclasses import replace
from math import inf, sqrt
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.energy.batch_size import Choice, Default, Grid, Past, Run, Terms
from penstock.energy.epochs import CV, ROUNDING, SLOPES, believe
from penstock.energy.staked import Staked
from tests.energy.jobs import Job, jobs, play

TERMS = Terms((16, 32, 64, 128), 32, 100, 100, {16: 2.0, 32: 1.0, 64: 0.8, 128: 0.7}, 1.2)


def runs(*seen, stake=inf):
    """Runs of (size, units), each of a recurrence of its own, which reached the target."""
    return tuple(
        Run(Choice(size, stake), i, units, units * TERMS.unit_costs[size], True) for i, (size, units) in enumerate(seen)
    )


def could_be_lost(terms, past, risk):
    """What was sure, computed anew: saved by finished runs, by each run to come, and risked; less what is staked."""
    default = [run for run in past.runs if run.reached and run.size == terms.default]
    belief = believe(terms.default, past.runs)
    units = belief.reached[terms.default]
    mean = fmean(units)

    def off(size):
        seen = belief.reached[size]
        return sqrt(((belief.cv * fmean(seen)) ** 2 + ROUNDING) / len(seen))

    total = sum(run.units for run in default) * terms.default_cost
    others = [run for run in past.runs if run.reached and run.size != terms.default]
    total += len(others) * (mean - 2 * off(terms.default)) * terms.default_cost
    total -= sum(run.cost for run in past.runs) + sum(one.stake for one in past.running if one.stake < inf)
    each = [0.0, mean * (terms.default_cost - terms.unit_costs[terms.default])]
    for size in belief.reached.keys() - {terms.default}:
        unit = terms.unit_costs[size]
        apart = sqrt((off(terms.default) * terms.default_cost) ** 2 + (off(size) * unit) ** 2)
        each.append(mean * terms.default_cost - fmean(belief.reached[size]) * unit - 2 * apart)
    left = max(0, terms.recurrences - len(default) - len(others))
    return total + left * max(each) + risk * terms.recurrences * mean * terms.default_cost


@settings(max_examples=60, deadline=None)
@given(jobs(), st.sampled_from([0.0, 0.01, 0.1]), st.integers(0, 9), st.integers(1, 3))
def test_no_stake_exceeds_what_was_sure(job, risk, seed, workers):
    def watch(past, stopped, choice):
        belief = believe(job.terms.default, past.runs)
        if choice.size == job.terms.default or choice.size in belief.reached:
            return
        assert not stopped, "a stopped run is repeated with a size that is known"
        best = min(fmean(units) * job.terms.unit_costs[size] for size, units in belief.reached.items())
        assert choice.stake <= (1 + 2 * belief.cv) * best * (1 + 1e-9)
        assert choice.stake <= could_be_lost(job.terms, past, risk) * (1 + 1e-9)

    seen = play(job, Staked(risk), min(40, job.terms.recurrences), seed, workers, watch)
    assert all(run.reached for run in seen if run.size == job.terms.default), "the default is never stopped"
    stops = [run for run in seen if not run.reached]
    for run in stops:
        assert run.cost <= run.choice.stake * (1 + 1e-9)


def test_where_nothing_is_sure_nothing_is_tried():
    job = Job(Terms((8, 32, 128), 32, 100, 50, {8: 1.0, 32: 1.0, 128: 0.1}, 1.0), {8: 20, 32: 20, 128: 20})
    assert {run.size for run in play(job, Staked(), 50)} == {32}
    assert 128 in {run.size for run in play(job, Staked(risk=0.05), 50)}


def test_a_size_is_tried_for_the_sake_of_half_of_the_recurrences_left(monkeypatch):
    def least():
        past = Past(runs((32, 20), (32, 20), (32, 20)))
        for recurrences in range(4, 400):
            terms = replace(TERMS, sizes=(16, 32), unit_costs={16: 1.8, 32: 1.0}, recurrences=recurrences)
            if Staked(risk=9.0).choose(terms, past, (), np.random.default_rng(0)).size == 16:
                return recurrences
        return inf

    half = least()
    monkeypatch.setattr("penstock.energy.staked.LATER", 1.0)
    assert half - 4 == pytest.approx(2 * (least() - 4), abs=2)


def test_a_size_far_from_all_tried_ones_waits_until_one_between_is_known():
    terms = Terms((32, 128, 256), 32, 100, 100, {32: 1.0, 128: 0.9, 256: 0.1}, 1.2)
    draw = np.random.default_rng(0)
    assert Staked().choose(terms, Past(runs((32, 20))), (), draw).size == 128
    known = Past((*runs((32, 20)), Run(Choice(128), 1, 20, 18.0, True)))
    assert Staked().choose(terms, known, (), draw).size == 256


def test_a_size_that_may_cost_more_than_the_default_is_drawn_only_where_that_can_be_lost():
    terms = Terms((32, 64), 32, 100, 100, {32: 1.0, 64: 0.98}, 1.0)
    past = Past(tuple(Run(Choice(size), i, 20, 20 * terms.unit_costs[size], True) for i, size in enumerate((32, 64))))
    for seed in range(20):
        assert Staked().choose(terms, past, (), np.random.default_rng(seed)) == Choice(32)
    drawn = {Staked(risk=0.1).choose(terms, past, (), np.random.default_rng(seed)).size for seed in range(20)}
    assert drawn == {32, 64}


def test_a_stopped_run_is_repeated_with_the_best_and_then_with_the_default():
    past = Past(runs((32, 20), (64, 15), (64, 15)))
    stop = Run(Choice(128, 5.0), 3, 7, 4.9, False)
    draw = np.random.default_rng(0)
    again = Staked().choose(TERMS, past.with_run(stop), (stop,), draw)
    assert again == Choice(64, 2 * 15 * 0.8)
    more = Run(again, 3, 30, 24.0, False)
    assert Staked().choose(TERMS, past.with_run(stop).with_run(more), (stop, more), draw) == Choice(32)


def test_one_coefficient_of_variation_is_pooled_over_sizes():
    assert believe(32, runs((32, 20))).cv == CV
    belief = believe(32, runs((32, 20), (32, 30), (64, 10), (64, 15)))
    assert belief.cv == pytest.approx(sqrt((4 * CV**2 + 4 * 0.2**2) / 6))
    assert belief.freedom == 6


def test_every_run_weighs_the_slopes():
    belief = believe(32, runs((32, 20), (32, 20), (128, 40), (128, 40)))
    assert SLOPES[np.argmax(belief.slopes())] == pytest.approx(0.5), "four times the size needed twice the units"
    stop = Run(Choice(128, 30.0), 2, 40, 28.0, False)
    belief = believe(32, (*runs((32, 20), (32, 20)), stop))
    weights = belief.slopes()
    assert weights[SLOPES < 0.4].sum() < 0.05, "a run that was stopped at twice the units makes small slopes unlikely"
    needed, _, weight = belief.foresee(128)
    assert weight.sum() == pytest.approx(1)
    assert weight @ needed > 40


def test_two_surprises_in_a_row_forget_the_other_sizes():
    calm = runs((32, 20), (32, 21), (64, 15), (64, 15), (32, 20))
    assert believe(32, (*calm, *runs((32, 60)))).reached[32] == (20, 21, 20, 60), "once may be chance"
    assert believe(32, (*calm, *runs((32, 60), (32, 20)))).reached.keys() == {32, 64}
    assert believe(32, (*calm, *runs((32, 60), (32, 61)))).reached == {32: (60, 61)}
    stops = tuple(Run(Choice(64, 24.0), 9, 30, 24.0, False) for _ in range(2))
    changed = believe(32, (*calm, stops[0], *runs((32, 20)), stops[1]))
    assert changed.reached == {32: (20,)}, "what ran in between is of the new time"
    assert Staked().choose(TERMS, Past((*calm, *stops)), (), np.random.default_rng(0)) == Choice(32)


def test_a_window_of_ten_runs_counts():
    belief = believe(32, runs(*[(32, 20 + i % 3) for i in range(30)]))
    assert len(belief.reached[32]) == 10


def test_units_of_another_device_teach_what_to_try_and_cost_nothing():
    job = Job(TERMS, {16: 20, 32: 20, 64: 20, 128: 20}, 0.03)
    known = tuple(Run(run.choice, 0, run.units, 0.0, run.reached, elsewhere=True) for run in play(job, Staked(), 20))
    past = Past((*known, *runs((32, 20))))
    assert Staked().choose(TERMS, past, (), np.random.default_rng(0)).size == 128


def test_the_default_and_the_grid():
    job = Job(TERMS, {16: 20, 32: 20, 64: None, 128: 15}, 0.0)
    assert {run.size for run in play(job, Default(), 5)} == {32}
    sizes = [run.size for run in play(job, Grid(), 8)]
    assert sizes == [32, 16, 64, 32, 128, 128, 128, 128, 128], "a size that misses is repeated with the best so far"
    limits = [run.choice.limit for run in play(job, Grid((100.0, 250.0)), 3)]
    assert limits == [250.0, 100.0, 250.0]
