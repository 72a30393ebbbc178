"""What ends a study before its algorithm is done."""

import pytest

import penstock as ps
from penstock.engine.limits import Deadline, Target, soonest
from penstock.log.events import Ended
from penstock.log.history import History
from penstock.log.reader import read


def run(**limits):
    """A study whose trial takes a second a unit, and reports 3, 2, 1."""
    task = ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [3.0, 2.0, 1.0]}, 1.0))
    study = ps.Study(
        task, {"x": ps.uniform(0, 1)}, metric="loss", mode="min", algorithm=ps.Random(budget=3), trials=1, **limits
    )
    result = study.run(on=ps.Simulated(1), progress=False)
    (ended,) = [event for event in read(result.dir / "log.jsonl") if isinstance(event, Ended)]
    return ended.reason, len(result.trials[0].curve)


@pytest.mark.parametrize(
    ("limits", "ended"),
    [
        ({}, ("done", 3)),
        ({"target": 2.0}, ("target", 2)),
        ({"deadline": 1.5}, ("deadline", 2)),  # the unit under way ends within the grace
        ({"target": 2.0, "deadline": 1.5}, ("deadline", 2)),
        ({"target": 2.0, "deadline": 2.0}, ("target", 2)),  # both at once: the target is asked first
        ({"target": 0.5, "deadline": 9.0}, ("done", 3)),
    ],
)
def test_the_first_limit_that_is_reached_ends_a_study(limits, ended):
    assert run(**limits) == ended


def test_nothing_is_reached_before_a_trial_has_reported():
    assert not Target(1.0).reached(History(), 1e9)


def test_the_engine_looks_again_by_the_first_limit_in_time():
    assert soonest([Deadline(9.0), Target(0.5), Deadline(4.0)], 1.0) == 3.0
    assert soonest([Target(0.5)], 1.0) is None
