"""Function tasks: the user's own loop."""

import random
import sys
import threading

import numpy as np
import pytest

import penstock as ps
from tests.studies import studies
from tests.tasks import stateless, trivial

SPACE = {"x": ps.uniform(0, 4)}


study = studies(trivial, SPACE, algorithm=ps.Random(budget=3), trials=2, name=None)


def test_a_function_is_paused_at_its_grant_and_goes_on_from_its_state():
    began = []

    def train(trial):
        began.append((trial.number, trial.state))
        trivial(trial)

    algorithm = ps.SuccessiveHalving(max_budget=4, reduction=2)
    result = study(train, algorithm=algorithm, trials=4).run(progress=False)
    assert sorted(began, key=str) == sorted(
        [(n, None) for n in range(4)] + [(t.number, s) for t in result.trials for s in (1, 2) if len(t.curve) > s],
        key=str,
    )


def test_without_a_state_it_begins_again_and_is_not_reported_twice():
    algorithm = ps.SuccessiveHalving(max_budget=4, reduction=2)
    with_state = study(trivial, algorithm=algorithm, trials=4).run(progress=False)
    without = study(stateless, algorithm=algorithm, trials=4).run(progress=False)
    assert [list(t.curve) for t in with_state.trials] == [list(t.curve) for t in without.trials]


def test_a_state_with_every_other_unit_is_enough():
    began = set()

    def train(trial):
        began.add(trial.state and trial.state["unit"])
        saved = trial.state or {"unit": 0, "sum": 0.0, "noise": []}
        total, noise = saved["sum"], list(saved["noise"])
        kept = {"unit": saved["unit"], "sum": total, "noise": noise}
        for unit in range(saved["unit"], 9):
            total += random.random()
            noise.append(total)
            kept.update(unit=unit + 1, sum=total)  # an object that goes on changing
            trial.report(unit + 1, state=kept if unit % 2 else None, loss=total + len(noise))

    whole = study(train, algorithm=ps.Random(budget=8), trials=4).run(progress=False)
    halved = study(train, algorithm=ps.SuccessiveHalving(max_budget=6, min_budget=3, reduction=2), trials=4)
    for some, every in zip(halved.run(progress=False).trials, whole.trials, strict=True):
        assert list(some.curve) == list(every.curve)[: len(some.curve)]
    assert began == {None, 2}, "paused after unit 3, it goes on from the state of unit 2"


def test_the_best_trials_state_can_be_read():
    result = study(trivial, algorithm=ps.Random(budget=3), trials=3).run(progress=False)
    assert result.best.last_state() == 3
    with pytest.raises(ps.StudyError, match=r"is a function's: what it saved is in best_state\(\)"):
        result.best.model()


def test_a_metric_called_budget_is_refused():
    with pytest.raises(ps.StudyError, match="A metric cannot be called 'budget'"):
        study(lambda trial: trial.report(1, loss=1.0, budget=2.0)).run(progress=False)


def test_paused_unwinds_the_function_through_a_broad_except():
    unwound = []

    def train(trial):
        try:
            for unit in range(9):
                try:
                    trial.report(unit + 1, loss=1.0)
                except Exception:
                    unwound.append("swallowed")
        finally:
            unwound.append("unwound")

    study(train).run(progress=False)
    for one in threading.enumerate():
        if one.name.startswith("trial "):
            one.join()  # it may still be on its way out
    assert unwound == ["unwound", "unwound"]


def test_random_draws_of_a_function_go_on_where_they_stopped():
    def train(trial):
        for unit in range((trial.state or {"unit": 0})["unit"], 9):
            trial.report(unit + 1, state={"unit": unit + 1}, loss=random.random())

    whole = study(train, algorithm=ps.Random(budget=4), trials=2).run(progress=False)
    halves = study(train, algorithm=ps.PBT(population=2, max_budget=4, interval=2, quantile=0.5)).run(progress=False)
    winner = min(halves.trials, key=lambda t: t.curve[1]["loss"])  # the other one takes over its state after unit 2
    assert list(winner.curve) == list(whole.trials[winner.number].curve)


def test_a_function_that_returns_early_keeps_its_last_metrics():
    def train(trial):
        trial.report(1, loss=5.0)
        trial.report(2, loss=3.0)

    result = study(train, algorithm=ps.Random(budget=10), trials=1).run(progress=False)
    (trial,) = result.trials
    assert (trial.state, trial.metrics) == ("finished", {"loss": 3.0})


def test_a_function_that_never_reports_fails_with_what_to_do():
    result = study(lambda trial: None).run(progress=False)
    assert [t.state for t in result.trials] == ["failed", "failed"]
    assert "returned without reporting: call trial.report" in result.trials[0].error
    with pytest.raises(ps.StudyError, match="No trial reported a finite 'loss'"):
        _ = result.best


def test_a_metric_that_a_function_never_reports_is_said_at_its_first_report():
    with pytest.raises(ps.StudyError, match="metric 'accuracy' is not reported by the task, which reports loss"):
        study(trivial, metric="accuracy").run(progress=False)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([2], "expected step 1 after 0 reported units, got 2"),
        ([0], "got 0"),
        ([1, 3], "expected step 2"),
        ([1, 1], "expected step 2, got 1"),
    ],
)
def test_units_are_reported_once_in_order(steps, said):
    def train(trial):
        for step in steps:
            trial.report(step, loss=1.0)

    result = study(train).run(progress=False)
    assert said in result.trials[0].error


def test_a_metric_that_is_no_number():
    result = study(lambda trial: trial.report(1, loss="low")).run(progress=False)
    assert "expected a number for loss, got a str" in result.trials[0].error
    result = study(lambda trial: trial.report(1, loss=np.ones((2, 3)))).run(progress=False)
    assert "expected a number for loss, got a ndarray of shape (2, 3)" in result.trials[0].error


def test_a_state_that_no_checkpoint_can_hold_fails_the_trial():
    result = study(lambda trial: [trial.report(i + 1, state=object(), loss=1.0) for i in range(9)]).run(progress=False)
    assert "The last state of trial 0 cannot be kept in a checkpoint" in result.trials[0].error
    assert "said: it holds a object" in result.trials[0].error


def test_a_state_that_cannot_be_read_back_says_what_it_holds():
    def train(trial):
        for unit in (1, 2, 3):
            trial.report(unit, state={"best": None if unit == 1 else np.float32(1)}, loss=float(trial.number))

    result = study(train, algorithm=ps.SuccessiveHalving(max_budget=3, reduction=2), trials=4).run(progress=False)
    assert "multiarray.scalar): expected tensors" in result.trials[0].error


def test_an_exit_is_one_trials_end():
    def train(trial):
        if trial.number == 0:
            sys.exit(3)
        trial.report(np.int64(1), loss=1.0)

    result = study(train).run(progress=False)
    assert "ended by sys.exit(3)" in result.trials[0].error
    assert result.trials[1].state == "finished"


def test_an_exception_that_would_unwind_the_driver_is_one_trials_end():
    def train(trial):
        if trial.number == 0:
            raise GeneratorExit
        trial.report(1, loss=1.0)

    result = study(train).run(progress=False)
    assert "The function ended by raising GeneratorExit" in result.trials[0].error
    assert result.trials[1].state == "finished"


def test_an_error_keeps_its_traceback_and_the_study_goes_on():
    def train(trial):
        if trial.number == 0:
            raise KeyError("nothing there")
        trivial(trial)

    result = study(train).run(progress=False)
    assert "KeyError: 'nothing there'" in result.trials[0].error
    assert "in train" in result.trials[0].error
    assert result.trials[1].state == "finished"
