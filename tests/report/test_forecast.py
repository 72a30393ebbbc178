"""The work and the time that a study has left, as they are shown while it runs on a virtual clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.log.events import Asked, Devices, Opened, Placed
from penstock.log.history import History
from penstock.log.reader import read
from penstock.report.forecast import Pace, time_left, units_left
from penstock.trial import Course, Later, StateRef
from tests.report.studies import SETTINGS, reported

UNIT = 30.0  # seconds


def look_up(config: ps.Config) -> ps.Tabulated:
    """A curve that falls at a pace of its own to a floor of its own, so that ranks change from rung to rung."""
    draw = random.Random(config["x"])
    floor, pace = draw.random(), 2 + 6 * draw.random()
    return ps.Tabulated({"loss": [floor + math.exp(-unit / pace) for unit in range(1, 28)]}, seconds=UNIT)


def stateless(trial: ps.FunctionTrial) -> None:
    """The same curve from a function that saves no state, so each placement begins at unit 1."""
    for unit, loss in enumerate(look_up(trial.config).metrics["loss"], 1):
        trial.report(unit, loss=loss)


def named(value: object) -> str:
    """A name that is the same in every process: the repr of a function or a task has an address in it."""
    return "stateless" if value is stateless else "table" if isinstance(value, ps.TabulatedTask) else repr(value)


@pytest.mark.parametrize(
    ("algorithm", "trials", "devices", "start", "task"),
    [
        (ps.ASHA(max_budget=27), 128, 1, 0, ps.TabulatedTask(look_up)),
        (ps.ASHA(max_budget=27), 128, 8, 0, ps.TabulatedTask(look_up)),
        (ps.ASHA(max_budget=27), 128, 32, 0, ps.TabulatedTask(look_up)),
        (ps.ASHA(max_budget=27), 128, 8, 2 * UNIT, ps.TabulatedTask(look_up)),
        (ps.ASHA(max_budget=27), 128, 16, 2 * UNIT, ps.TabulatedTask(look_up)),
        (ps.ASHA(max_budget=27), 128, 8, 2 * UNIT, stateless),
        (ps.Hyperband(max_budget=27), None, 1, 0, ps.TabulatedTask(look_up)),
        (ps.Hyperband(max_budget=27), None, 4, 0, ps.TabulatedTask(look_up)),
        (ps.Hyperband(max_budget=27), None, 16, 0, ps.TabulatedTask(look_up)),
        (ps.Hyperband(max_budget=27), None, 4, 2 * UNIT, ps.TabulatedTask(look_up)),
        (ps.Hyperband(max_budget=27), None, 8, 2 * UNIT, stateless),
        (ps.SuccessiveHalving(max_budget=27), 81, 4, 2 * UNIT, stateless),
    ],
    ids=named,
)
def test_the_time_left_is_within_30_percent_from_the_half_on(
    algorithm: ps.Algorithm,
    trials: int | None,
    devices: int,
    start: float,
    task: ps.Task | Callable[[ps.FunctionTrial], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pace, said, bars = Pace(), list[tuple[float, float]](), list[float]()

    def watch(history: History) -> None:
        pace.take(history)
        courses = algorithm.outlook()
        assert courses is not None
        bars.append(history.units / (history.units + units_left(history, courses)))
        if (left := time_left(history, courses, pace)) is not None:
            said.append((history.clock, left))

    plain_next = Engine.next

    def next(engine: Engine) -> object:
        engine.watch = watch
        return plain_next(engine)

    monkeypatch.setattr(Engine, "next", next)
    study = ps.Study(
        task,
        {"x": ps.uniform(0, 1)},
        metric="loss",
        mode="min",
        algorithm=algorithm,
        trials=trials,
        dir=tmp_path,
        name="s",
    )
    study.run(on=ps.Simulated(devices=devices, start=start, unit_seconds=UNIT), progress=False)
    end = History.of(read(tmp_path / "s" / "log.jsonl")).clock
    later = [(clock, left) for clock, left in said if clock >= end / 2]
    assert len(later) > 10
    # A unit is the finest step in which a study tells how far it is.
    assert all(abs(left - (end - clock)) <= 0.3 * (end - clock) + UNIT for clock, left in later)
    assert bars[0] == 0
    assert bars[-1] > 0.9


def test_a_study_that_has_trained_nothing_gives_no_estimate() -> None:
    pace, past = Pace(), solo(running=1, waiting=3)
    pace.take(past)
    assert time_left(past, [], pace) is None


def test_trials_with_a_device_each_take_a_unit_as_long_as_before_however_few_they_are() -> None:
    pace, past = Pace(), solo(running=2, waiting=0)
    pace.take(past)
    for trial in range(2):
        past.apply(reported(trial, 1, 10.0, accuracy=0.5))
    pace.take(past)
    # Each of the two has a unit to train. Then one trial goes on for three units, on one of the two devices.
    course = [Course(("rung 0", "rung 1"), (Later(0, 2), Later(1, 3)), waits=True)]
    assert units_left(past, course) == 5
    assert time_left(past, course, pace) == pytest.approx(10 + 30)


def test_trials_that_took_turns_on_a_device_are_faster_once_they_are_few() -> None:
    pace, past = Pace(), solo(running=4, waiting=0, devices=1)
    pace.take(past)
    for trial in range(4):
        past.apply(reported(trial, 1, 40.0, accuracy=0.5))
    pace.take(past)
    assert pace.unit_seconds(4) == pytest.approx(40)
    assert pace.unit_seconds(1) == pytest.approx(10)


def test_the_part_of_a_unit_since_the_last_report_counts() -> None:
    pace, past = Pace(), solo(running=1, waiting=0)
    pace.take(past)
    past.apply(reported(0, 1, 10.0, accuracy=0.5))
    pace.take(past)
    past.clock = 14.0
    assert time_left(past, [], pace) == pytest.approx(6)


def test_a_start_counts_once_a_placement_and_not_with_each_unit() -> None:
    pace, past = Pace(), solo(running=1, waiting=1, devices=1)
    pace.take(past)
    for unit, clock in enumerate((12.0, 14.0), 1):  # ten seconds of start, and two seconds a unit
        past.apply(reported(0, unit, clock, state=StateRef("000000-1-2.pt", unit, unit, 100), accuracy=0.5))
        pace.take(past)
    past.apply(Placed(1, 1, ("0",), "solo", None, 14.0))
    pace.take(past)
    past.clock = 20.0
    course = [Course(("rung 0", "rung 1"), (Later(0, 2), Later(1, 18)), waits=True)]
    assert time_left(past, course, pace) == pytest.approx((4 + 2 * 2) + (10 + 18 * 2))


@pytest.mark.parametrize(("saved", "units"), [(None, 5), (1, 4), (2, 3)])
def test_a_trial_trains_again_the_units_since_its_state(saved: int | None, units: int) -> None:
    pace, past = Pace(), solo(running=1, waiting=0, devices=1)
    pace.take(past)
    finish(past, saved)
    pace.take(past)
    past.apply(Asked(0, {"lr": 0.1}, 5, "rung 1", start_from=(0, 2)))
    assert time_left(past, [], pace) == pytest.approx(10 * units)
    past.apply(Placed(0, 2, ("0",), "solo", None, 20.0))
    pace.take(past)
    assert time_left(past, [], pace) == pytest.approx(10 * units)
    past.apply(reported(0, 3, 20.0 + 10 * (units - 2), accuracy=0.5))
    pace.take(past)
    assert pace.unit_seconds(1) == pytest.approx(10)
    assert time_left(past, [], pace) == pytest.approx(10 * 2)


@pytest.mark.parametrize(("saved", "units"), [(None, 5 + 9), (2, 3 + 4)])
def test_trials_of_rungs_to_come_train_all_units_again_where_no_trial_has_a_state(
    saved: int | None, units: int
) -> None:
    pace, past = Pace(), solo(running=1, waiting=0, devices=1)
    pace.take(past)
    finish(past, saved)
    pace.take(past)
    course = Course(("rung 0", "rung 1", "rung 2"), (Later(0, 2), Later(1, 3), Later(1, 4)), waits=True)
    assert time_left(past, [course], pace) == pytest.approx(10 * units)


def test_the_trials_of_a_bracket_to_come_begin_at_their_first_unit() -> None:
    pace, past = Pace(), solo(running=1, waiting=0, devices=1)
    pace.take(past)
    finish(past, None)
    pace.take(past)
    names = ("bracket 1 rung 0", "bracket 0 rung 0")
    past.trials[0].group = names[0]
    course = Course(names, (Later(0, 2), Later(2, 6)), waits=True)  # two trials follow one: another bracket
    assert time_left(past, [course], pace) == pytest.approx(10 * 2 * 6)


def test_on_several_devices_the_longest_trial_goes_first() -> None:
    pace, past = half_way(waiting=2)
    past.apply(Asked(4, {"lr": 0.1}, 4, "rung 0"))
    # After a unit of the two trials that run, one device trains four units, and the other two units twice.
    assert time_left(past, [], pace) == pytest.approx(10 + 40)


def test_the_only_trial_to_come_comes_with_the_middle_report() -> None:
    pace, past = half_way(waiting=2)
    course = Course(("rung 0", "rung 1"), (Later(0, 2), Later(1, 3)))
    # Once the two running trials have reported, the trial to come trains three units, beside two trials of two units.
    assert time_left(past, [course], pace) == pytest.approx(10 + 40)


def half_way(waiting: int) -> tuple[Pace, History]:
    """Two running trials on two devices, each after the first of its two units, which took ten seconds."""
    pace, past = Pace(), solo(running=2, waiting=waiting)
    pace.take(past)
    for trial in range(2):
        past.apply(reported(trial, 1, 10.0, accuracy=0.5))
    pace.take(past)
    return pace, past


def finish(past: History, saved: int | None) -> None:
    """Let trial 0 train its two units, with a state after one of them, or after none."""
    for unit in (1, 2):
        state = StateRef(f"000000-1-{unit}.pt", unit, unit, 100) if unit == saved else None
        past.apply(reported(0, unit, 10.0 * unit, state=state, accuracy=0.5))


def solo(running: int, waiting: int, devices: int = 2) -> History:
    """Trials of two units each on devices of their own, at the start."""
    past = History.of([Opened(SETTINGS), Devices(tuple({"name": str(n), "type": "cpu"} for n in range(devices)), 0.0)])
    for trial in range(running + waiting):
        past.apply(Asked(trial, {"lr": 0.1}, 2, "rung 0"))
    for trial in range(running):
        past.apply(Placed(trial, 1, (str(trial),), "solo", None, 0.0))
    return past
