from dataclasses import replace

import pytest

import penstock as ps
from penstock.planning.draws import Draws
from penstock.planning.spec import Job, Times, times_of, work_of, works
from penstock.trial import Stage
from tests.contracts.algorithms import FakeSearch, Play
from tests.planning.jobs import instance, job


def rungs(algorithm, trials=None, learns=False):
    made, _ = work_of(algorithm, trials, learns=learns)
    return [(work.bracket, work.number, work.trials, work.units, work.at_once) for work in made]


def test_budgets_are_cumulative_and_units_are_their_differences():
    assert rungs(ps.SuccessiveHalving(max_budget=50, additive=True), 32) == [
        (0, 0, 32, 1, None),
        (0, 1, 10, 3, None),
        (0, 2, 3, 9, None),
        (0, 3, 1, 37, None),
    ]
    assert rungs(ps.PBT(population=4, max_budget=5, interval=2)) == [
        (0, 0, 4, 2, None),
        (0, 1, 4, 2, None),
        (0, 2, 4, 1, None),
    ]
    assert rungs(ps.Random(budget=7), 20) == rungs(ps.Grid(budget=7), 20) == [(0, 0, 20, 7, None)]


def test_brackets_run_at_once_and_follow_one_another_where_draws_learn():
    at_once = rungs(ps.Hyperband(max_budget=3))
    assert at_once == [(0, 0, 3, 1, None), (0, 1, 1, 2, None), (1, 0, 2, 3, None)]
    assert rungs(ps.SyncBOHB(max_budget=3), learns=True) == [(0, 0, 3, 1, 8), (0, 1, 1, 2, None), (0, 2, 2, 3, 8)]


def test_rungs_without_barriers_are_expected_and_said_to_be():
    made, said = work_of(ps.ASHA(max_budget=9), 20)
    assert [(work.trials, work.budget, work.at_once) for work in made] == [(20, 1, 64), (6, 3, 64), (2, 9, 64)]
    assert said == ("ASHA has no barriers: its rungs are planned as stages of the trials expected there",)
    made, said = work_of(ps.BOHB(max_budget=9), 20, learns=True)
    assert sum(work.trials for work in made if work.units == work.budget) == 20
    assert {work.bracket for work in made} == {0}
    assert said


@pytest.mark.parametrize("trials", [1, 9, 20])
def test_as_many_trials_are_expected_as_asha_promotes_of_equal_results(trials):
    game = Play(ps.ASHA(max_budget=9), FakeSearch(trials)).finish(lambda number: 0.0)
    budgets = [member.budget for _, member in game.asked]
    expected = {stage.budget: stage.trials for stage in ps.ASHA(max_budget=9).expected(trials)}
    assert {budget: budgets.count(budget) for budget in expected} == expected


def test_what_is_left_of_a_job_is_a_job():
    whole = job((9, 1), (3, 3), (1, 9))
    rest = whole.rest({0: (1, [2.0, 0.5])})
    assert [(work.trials, work.units, work.left) for work in rest.stages] == [(2, 2.0, (2.0, 0.5)), (1, 6, ())]
    assert whole.rest({0: (2, [])}).stages == whole.stages[2:]
    assert whole.rest({}) is None


def test_a_job_needs_trials_times_and_stages():
    times = {"gpu": (Times(Draws(1.0)),)}
    with pytest.raises(ps.StudyError, match="no trials to plan"):
        Job((), times)
    with pytest.raises(ps.StudyError, match="trials must be at least 1, got 0"):
        work_of(ps.Random(budget=1), 0)
    with pytest.raises(ps.StudyError, match="Nothing says how long a unit takes: run `penstock profile FILE`"):
        Job(works([Stage(2, 1)]), {})
    with pytest.raises(ps.StudyError, match=r"on small \(type cpu\): there are times of gpu"):
        job((2, 1)).on(replace(instance("small"), type="cpu"))
    with pytest.raises(ps.StudyError, match="Random does not say how many trials"):
        work_of(ps.Random(budget=1), None)


def test_what_was_not_measured_is_said():
    times, said = times_of("a v100", Draws(10.0), scaling={1: 2.0, 2: 1.0, 4: 1.4}, sharing={1: 1.0, 2: 1.3})
    assert times.curve.scaling == (1.0, 0.5)
    assert said == (
        "on a v100, scaling stops to pay at 2 devices, of 4 tried",
        "on a v100 every unit is taken to last the same: its spread was not measured",
    )
    _, said = times_of("a v100", Draws(10.0, 1.0))
    assert [line.split(" is taken ")[0].split(" are taken ")[0] for line in said] == [
        "on a v100 a trial",
        "on a v100 trials",
    ]


def test_times_that_are_not_above_0_are_refused():
    with pytest.raises(ps.StudyError, match="unit's seconds must be above 0"):
        Times(Draws(0.0))
    with pytest.raises(ps.StudyError, match="mean of 0 or more"):
        Draws(-1.0)
