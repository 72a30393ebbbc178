"""The fold of a log: who is best, which state holds its weights, and what donors are still needed for."""

from dataclasses import replace

import pytest

from penstock.log.events import Asked, Dropped, Ended, Failed, Opened, Placed, Reported, Saved
from penstock.log.history import History
from penstock.log.ranking import leading, no_best, ranks
from penstock.report.ranks import said_fallback
from penstock.trial import StateRef, Usage

OPENED = Opened({"metric": "loss", "mode": "min", "max_budget": 9})


NAN = float("nan")


def asked(trial, budget=9, start_from=None, **config):
    return Asked(trial, config or {"lr": 1.0}, budget, "g", start_from)


def state(trial, unit, step=None):
    return StateRef(f"{trial:06d}-1-{unit}.pt", unit, step or unit, 10)


def reported(trial, unit, loss, saved=True):
    return Reported(trial, 1, unit, {"loss": loss}, state(trial, unit) if saved else None, Usage(1.0, 1), 0.0)


def history(*events):
    return History.of([OPENED, *events])


def test_the_best_is_the_lowest_loss_of_any_report_and_the_first_of_equals():
    found = history(asked(0), asked(1), asked(2), reported(0, 1, 3.0), reported(1, 1, 2.0), reported(2, 1, 2.0))
    assert found.best.number == 1
    assert found.best.metrics == {"loss": 2.0}


def test_a_surrogate_is_never_the_best():
    twin = replace(asked(1), variant="surrogate 8")
    found = history(asked(0), twin, reported(0, 1, 3.0), reported(1, 1, 2.0), Dropped((1,)))
    assert found.best.number == 0
    assert [record.number for record in found.kept] == [0]
    assert [record.number for record in found.kept_surrogates] == [1]
    assert {record.number for record in found.kept_or_next} == {0, 1}, "each kind keeps the states of its best"
    assert ([one.number for one in found.targets], [one.number for one in found.surrogates]) == ([0], [1])
    assert [one.number for one in leading(found)] == [0, 1]
    assert found.surrogates[0].row()["scale"] == 8
    assert "scale" not in found.targets[0].row()


def test_a_search_that_began_again_is_said():
    def at(trial, variant, group="random"):
        return replace(asked(trial), variant=variant, group=group)

    wider = [at(0, "surrogate 8"), at(1, "surrogate 4", "rank check"), at(2, "surrogate 4")]
    assert said_fallback(history(*wider[:2])) == ""
    assert said_fallback(history(*wider)) == "8 times narrower foretold too little: begun again 4 times narrower"
    direct = history(*wider, at(3, "", "targets rung 0"), at(4, ""))
    assert said_fallback(direct) == "8 and 4 times narrower foretold too little: the target is tuned"


def test_a_later_state_holds_the_best_weights_too():
    found = history(asked(0), reported(0, 1, 1.0), reported(0, 2, 5.0), reported(0, 3, 5.0, saved=False))
    assert found.best.best_unit == 1
    assert found.best.best_state == state(0, 2)


def test_a_state_of_a_trial_that_trains_again_may_come_before_its_best_report():
    trained = [asked(0), reported(0, 1, 3.0), reported(0, 2, 2.0, saved=False), reported(0, 3, 1.0, saved=False)]
    again = history(*trained, OPENED, Saved(0, 2, state(0, 2), 0.0))  # it began again from unit 1
    assert again.trials[0].state == state(0, 2)
    assert again.trials[0].best_state is None
    assert history(*trained, OPENED, Saved(0, 2, state(0, 3), 0.0)).trials[0].best_state == state(0, 3)


def test_a_state_from_after_a_take_over_does_not_hold_the_best_weights_from_before():
    before = [asked(0, 2, lr=1.0), asked(1, 2, lr=2.0), reported(0, 2, 0.1), reported(1, 2, 9.0)]
    copied = [asked(1, 4, (0, 2), lr=3.0), reported(1, 4, 0.5)]
    found = history(*before, *copied).trials[1]
    assert (found.best_unit, found.best_state, found.best_config) == (4, state(1, 4), {"lr": 3.0})
    worse = [asked(0, 4, (1, 2), lr=4.0), reported(0, 4, 5.0)]
    found = history(*before, *worse).trials[0]
    assert (found.best_unit, found.best_state, found.best_config) == (2, state(0, 2), {"lr": 1.0})
    assert found.state == state(0, 4)


def test_a_donors_state_is_needed_until_its_heir_has_one_of_its_own():
    before = [asked(0, 2), asked(1, 2), reported(0, 2, 0.1), reported(1, 2, 9.0), asked(1, 4, (0, 2))]
    waiting = history(*before, asked(0, 4, (0, 2)), reported(0, 3, 0.1))
    assert waiting.donors[state(0, 2).file] == 1
    assert waiting.trials[1].start == state(0, 2)
    begun = history(*before, Saved(1, 2, state(1, 3), 0.0))
    assert begun.donors[state(0, 2).file] == 0
    assert begun.trials[1].start is None


def test_a_trial_that_diverges_gives_way_to_the_next_best():
    events = [asked(0), asked(1), asked(2), reported(0, 1, 2.0), reported(1, 1, 1.0), reported(2, 1, 3.0)]
    assert history(*events).best.number == 1
    assert history(*events, reported(1, 2, float("nan"))).best.number == 0
    assert history(*events, reported(1, 2, float("-inf"))).best.number == 0


def test_a_diverged_trial_that_takes_over_a_state_is_judged_by_its_later_reports_alone():
    first = [asked(0, 3), asked(1, 3), reported(0, 2, 0.1), reported(0, 3, NAN), reported(1, 3, 2.0)]
    copied = history(*first, asked(0, 6, (1, 3), lr=3.0))
    assert (copied.best.number, ranks(copied.trials)) == (1, {1: 1})
    found = history(*first, asked(0, 6, (1, 3), lr=3.0), reported(0, 4, 5.0), reported(0, 6, 4.0))
    again = found.trials[0]
    assert (again.best_unit, again.metrics, again.measured) == (6, {"loss": 4.0}, {"lr": 3.0})
    assert again.best_state == state(0, 6)
    assert (found.best.number, ranks(found.trials)) == (1, {1: 1, 0: 2})


def test_ranks_are_those_of_trials_that_can_be_the_best():
    values = [reported(0, 1, 3.0), reported(1, 1, 1.0), reported(1, 2, NAN), reported(2, 1, 2.0)]
    found = history(asked(0), asked(1), asked(2), asked(3), *values)
    assert ranks(found.trials) == {2: 1, 0: 2}


SAYS = "No trial reported a finite 'loss', so none is best: "
BOTH = [asked(0), asked(1)]
BROKE = Failed(0, 1, "Traceback:\nValueError: no luck", True, 0.0)


@pytest.mark.parametrize(
    ("events", "ended", "said"),
    [
        (
            BOTH,
            "deadline",
            SAYS + "the study ended at its deadline before any report. Go on with it, with a later dead",
        ),
        (BOTH, "interrupted", SAYS + "the study was interrupted before any report. Go on with it."),
        ([*BOTH, reported(0, 1, NAN), reported(1, 1, NAN)], "done", SAYS + "all 2 trials diverged. Leave the configs"),
        ([asked(0), reported(0, 1, 1.0), reported(0, 2, NAN)], "done", "No trial can be the best: its only trial dive"),
        ([asked(0), BROKE], "failed", SAYS + "its only trial failed. Mend the error"),
        (
            [*BOTH, asked(2), BROKE, reported(2, 1, NAN)],
            "deadline",
            SAYS + "of 3 trials 1 failed, 1 diverged, 1 had not reported, and the study ended at its deadline. Mend",
        ),
    ],
)
def test_without_a_best_trial_the_reason_is_known(events, ended, said):
    found = history(*events, Ended(ended, 5.0))
    assert found.best is None
    assert no_best(found).startswith(said)
    assert no_best(found).endswith("The error of trial 0: ValueError: no luck") == (BROKE in events)


def test_without_a_target_the_reason_is_not_that_its_surrogates_diverged():
    narrow = [replace(one, variant="surrogate 8") for one in BOTH]
    found = history(*narrow, reported(0, 1, 1.0), Ended("deadline", 5.0))
    assert no_best(found) == (
        "No model of full width was trained, so none is best: the study ended at its deadline while its 2 surrogates "
        "were. Go on with it, with a later deadline."
    )
    found = history(*narrow, BROKE, reported(1, 1, 1.0), Ended("failed", 5.0))
    assert "of 2 trials 1 failed, 1 had not reported at full width, and the study ended" in no_best(found)
    found = history(*narrow, reported(0, 1, NAN), reported(1, 1, NAN), Ended("done", 5.0))
    assert "all 2 trials diverged" in no_best(found)


def test_a_study_that_has_not_ended_may_have_a_best_trial_later():
    assert no_best(history(asked(0))).startswith("No trial has reported a finite 'loss' yet")


def test_the_best_that_has_ended_is_known_beside_the_best():
    events = [asked(0), asked(1), reported(0, 9, 2.0), Dropped((0,)), reported(1, 3, 1.0)]
    found = history(*events)
    assert [record.number for record in found.kept_or_next] == [1, 0]
    assert [t.status for t in found.trials] == ["finished", "waiting"]


def test_a_trial_that_failed_without_its_weights_is_not_best():
    lost = history(asked(0), reported(0, 1, 1.0, saved=False), Failed(0, 1, "broke", True, 0.0))
    assert lost.best is None
    kept = history(asked(0), reported(0, 1, 1.0), Failed(0, 1, "broke", True, 0.0))
    assert kept.best.number == 0


def test_what_a_driver_left_unfinished_waits_for_the_next_one():
    run = [asked(0), asked(1, 1), Placed(0, 1, ("cpu",), "solo", None, 1.0), reported(1, 1, 1.0), reported(0, 3, 1.0)]
    killed = history(*run, OPENED)
    assert [t.status for t in killed.trials] == ["waiting", "paused"]
    ended = history(*run, Ended("interrupted", 5.0))
    assert [t.status for t in ended.trials] == ["paused", "paused"]
    assert ended.clock == 5.0
    assert sum(ended.counts.values()) == 2
    assert [t.status for t in history(*run, Ended("interrupted", 5.0), OPENED).trials] == ["waiting", "paused"]


def test_a_metric_called_like_a_column_keeps_its_value():
    event = Reported(0, 1, 1, {"loss": 1.0, "error": 0.25, "state": 3.0}, None, Usage(1.0, 1), 0.0)
    row = history(asked(0), event).trials[0].row()
    assert (row["metrics.error"], row["metrics.state"], row["loss"]) == (0.25, 3.0, 1.0)
    assert (row["state"], row["error"], row["config.lr"]) == ("waiting", None, 1.0)


def test_a_column_that_is_added_comes_after_the_number_and_keeps_its_name():
    event = Reported(0, 1, 1, {"loss": 1.0, "rank": 7.0}, None, Usage(1.0, 1), 0.0)
    row = history(asked(0), event).trials[0].row(rank=1)
    assert list(row)[:3] == ["number", "rank", "state"]
    assert (row["rank"], row["metrics.rank"]) == (1, 7.0)


def test_a_trial_that_is_paused_in_a_study_that_is_done_is_stopped_in_its_row():
    run = [asked(0, 1), reported(0, 1, 1.0)]
    states = [history(*run, Ended(reason, 5.0)).trials[0].row()["state"] for reason in ("done", "deadline")]
    assert states == ["stopped", "paused"]
    assert history(*run, Ended("done", 5.0), OPENED).trials[0].row()["state"] == "paused"


def test_trials_given_up_below_the_greatest_budget_are_stopped():
    found = history(asked(0, 3), asked(1, 9), reported(0, 3, 1.0), reported(1, 9, 1.0), Dropped((0, 1)))
    assert [t.status for t in found.trials] == ["stopped", "finished"]
