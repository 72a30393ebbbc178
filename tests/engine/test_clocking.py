"""What reports tell the speed model, by the study's clock, and what is kept of it."""

from pathlib import Path

import pytest

from penstock.bundle import Device, Measured
from penstock.engine.clocking import Pace, Shelf
from penstock.speed.curve import Curve
from penstock.speed.model import UNKNOWN, SpeedModel
from penstock.speed.profiles import Profile, Profiles

DEVICES = {name: Device(name, "h200", 8) for name in ("gpu 0", "gpu 1")}


def pace(shelf=None):
    made = Pace(SpeedModel(), shelf)
    made.look(DEVICES)
    for trial in range(3):
        made.know(trial, "a")
    return made


def shelf(task="task"):
    return Shelf(Profiles.open(Path("profiles.jsonl")), task)


def measured(**changes):
    found = {"signature": "a", "device": "gpu 0", "seconds": {1: 2.0, 2: 2.2}, "scaling": {1: 2.0, 2: 1.2}, **changes}
    return Measured(way="native", size=2, bytes=None, reason="so", **found)


def test_without_a_model_nothing_is_learnt_and_nothing_is_assumed():
    made = Pace()
    made.look(DEVICES)
    made.know(0, "a")
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 3.0)
    made.stopped(0, 4.0)
    made.left(0, [], 4.0)
    made.keep()
    assert made.speed() is UNKNOWN
    assert made.measured(measured()) == []
    assert not made.learns


def test_a_unit_takes_the_time_between_two_reports_and_starting_what_the_first_took_longer():
    made = pace()
    made.entered(0, "gpu 0", [0], 10.0)
    made.reported(0, 1.0, 15.0)
    assert made.speed().unit(0) == 5
    made.reported(0, 1.0, 18.0)
    assert made.speed().unit(0) == 4
    assert made.speed().moving == 2
    made.reported(0, 1.0, 21.0)
    assert made.speed().moving == 2, "a start is seen once"


def test_the_first_unit_is_counted_without_what_starting_was_seen_to_take():
    made = pace()
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 5.0)
    made.reported(0, 1.0, 8.0)
    made.entered(1, "gpu 0", [1], 8.0)
    made.reported(1, 1.0, 13.0)
    assert made.speed().unit(1) == 3


def test_a_unit_during_which_somebody_came_or_left_says_nothing():
    made = pace()
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 3.0)
    made.entered(1, "gpu 0", [0, 1], 4.0)
    made.reported(0, 0.5, 9.0)
    assert made.speed().unit(0) == 3
    assert made.speed().moving == float("inf"), "nor does it tell what starting took"
    made.left(1, [0], 10.0)
    made.reported(0, 1.0, 30.0)
    assert made.speed().unit(0) == 3
    made.reported(0, 1.0, 33.0)
    assert made.speed().unit(0) == 3


def test_trials_that_enter_in_one_instant_are_together_from_their_start():
    made = pace()
    made.measured(measured())
    made.entered(0, "gpu 0", [0], 0.0)
    made.entered(1, "gpu 0", [0, 1], 0.0)
    made.reported(0, 0.5, 2.2)
    assert made.speed().unit(0) == pytest.approx(2)


def test_stopping_takes_what_passes_after_the_last_report():
    made = pace()
    made.entered(0, "gpu 0", [0], 0.0)
    made.stopped(0, 7.0)  # it had not begun
    made.reported(0, 1.0, 3.0)
    made.reported(0, 1.0, 6.0)
    made.stopped(0, 6.5)
    assert made.speed().moving == 0.5


def test_how_much_of_a_unit_is_done_by_now():
    made = pace()
    assert made.done(0, 1.0, 9.0) == 0.5, "where nothing is known"
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 5.0)
    made.reported(0, 1.0, 9.0)  # 4 a unit, and 1 to start; 4.5 on the average
    assert made.done(0, 1.0, 9.0) == 0
    assert made.done(0, 1.0, 10.125) == 0.25
    assert made.done(0, 1.0, 99.0) == 0.99, "it has not reported"
    made.entered(1, "gpu 0", [1], 10.0)
    assert made.done(1, 1.0, 10.5) == 0, "it starts"
    assert made.done(1, 1.0, 13.25) == 0.5


def test_a_unit_beside_unlike_trials_refines_no_curve():
    for unlike, refined in ((True, 1.1), (False, 1.2)):
        made = pace()
        made.measured(measured())
        made.entered(0, "gpu 0", [0], 0.0)
        made.reported(0, 1.0, 2.0)
        made.reported(0, 1.0, 4.0)
        made.entered(1, "gpu 0", [0, 1], 4.0)
        made.reported(0, 0.5, 6.6, unlike=unlike)
        assert made.speed().curve(0).sharing == pytest.approx((1, refined))


def test_what_was_measured_and_seen_serves_the_next_study():
    first = pace(shelf())
    assert first.measured(measured()) == []
    first.entered(0, "gpu 0", [0], 0.0)
    first.reported(0, 1.0, 5.0)
    first.reported(0, 1.0, 7.0)  # starting takes 3
    first.left(0, [], 7.0)
    first.entered(0, "gpu 0", [0, 1], 7.0)
    first.reported(0, 0.5, 10.0)
    first.reported(0, 0.5, 12.6)  # 1.3 times as long as alone, against 1.1 that were measured
    first.keep()
    second = pace(shelf())
    assert second.speed().curve(0).sharing == pytest.approx((1, 1.2))
    assert second.speed().curve(0).scaling == (1, 0.6)
    assert second.speed().moving == pytest.approx(first.speed().moving)
    assert pace(shelf("another task")).speed().moving == float("inf")


TWO_TYPES = {"gpu 0": Device("gpu 0", "h200", 8), "old": Device("old", "k80", 8)}


def test_measurements_are_kept_for_the_type_that_they_were_made_on():
    first = pace(shelf())
    first.look(TWO_TYPES)
    first.measured(measured())
    first.measured(measured(device="old", seconds={1: 9.0, 2: 9.9, 4: 11.0}, scaling={}))
    first.keep()
    second = pace(shelf())
    assert second.speed().curve(0) == Curve((1.0, 1.1), (1.0, 0.6))
    second.look(TWO_TYPES)
    types = second.speed().types
    assert types["h200"].curve(0) == Curve((1.0, 1.1), (1.0, 0.6))
    assert types["k80"].curve(0).most == 4
    second.look({"old": TWO_TYPES["old"]})
    assert second.speed().curve(0).most == 4


def refined(made):
    """What was measured as 1.1 is seen to be 1.3."""
    made.measured(measured())
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 2.0)
    made.reported(0, 1.0, 4.0)
    made.entered(1, "gpu 0", [0, 1], 4.0)
    made.reported(0, 0.5, 6.6)
    return made


def test_a_type_that_comes_back_is_as_it_was_when_it_left():
    pace(shelf()).measured(measured())
    made = refined(pace(shelf()))
    made.look({"old": TWO_TYPES["old"]})
    assert made.speed().curve(0) == Curve()
    made.look(DEVICES)
    assert made.speed().curve(0).sharing == pytest.approx((1, 1.2))


def test_what_was_seen_on_a_type_that_is_gone_is_kept():
    made = refined(pace(shelf()))
    made.look({"old": TWO_TYPES["old"]})
    made.keep()
    assert pace(shelf()).speed().curve(0).sharing == pytest.approx((1, 1.2))


def test_a_unit_is_timed_on_the_type_that_it_was_trained_on():
    made = pace()
    made.look(TWO_TYPES)
    made.entered(0, "gpu 0", [0], 0.0)
    made.entered(1, "old", [1], 0.0)
    made.reported(0, 1.0, 2.0)
    made.reported(1, 1.0, 8.0)
    types = made.speed().types
    assert (types["h200"].unit(2), types["k80"].unit(2)) == (2, 8)
    assert (made.done(0, 1.0, 3.0), made.done(1, 1.0, 10.0)) == (0.5, 0.25)
    made.left(0, [], 4.0)
    made.look({"old": TWO_TYPES["old"]})
    made.measured(measured(signature="b"))  # told by a device that is gone by now


def test_what_nobody_measured_is_not_kept():
    made = pace(shelf())
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 3.0)
    made.reported(0, 1.0, 5.0)
    made.keep()
    assert not Path("profiles.jsonl").exists()


def test_what_moving_takes_is_kept_where_several_devices_alone_were_measured():
    made = pace(shelf())
    made.measured(Measured("a", "gpu 0", "distributed", 1, {}, None, "so", scaling={1: 2.0, 2: 1.0}))
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 3.0)
    made.reported(0, 1.0, 5.0)
    made.keep()
    text = Path("profiles.jsonl").read_text()
    assert '"moving":1.0' in text.splitlines()[-1]
    assert '"scaling":{"1":2.0,"2":1.0}' in text.splitlines()[-1]


@pytest.mark.parametrize("moving", ["null", "2.5", "0"])
def test_a_profile_keeps_what_moving_takes(moving):
    profiles = Profiles.open(Path("profiles.jsonl"))
    profiles.put(Profile("t", "d", "s", "native", 2, {1: 1.0}, None, "so", {1: 1.0, 2: 0.5}, 1.5))
    text = Path("profiles.jsonl").read_text()
    Path("profiles.jsonl").write_text(text.replace('"moving":1.5', f'"moving":{moving}'))
    again = Profiles.open(Path("profiles.jsonl")).get("t", "d", "s")
    assert again is not None
    assert again.moving == {"null": None, "2.5": 2.5, "0": 0}[moving]
    assert again.scaling == {1: 1.0, 2: 0.5}


@pytest.mark.parametrize("moving", ["-1", "Infinity", '"soon"'])
def test_a_profile_whose_moving_cannot_be_is_passed_over(moving):
    Profiles.open(Path("profiles.jsonl")).put(Profile("t", "d", "s", "native", 2, {1: 1.0}, None, "so", {}, 1.5))
    text = Path("profiles.jsonl").read_text()
    Path("profiles.jsonl").write_text(text.replace('"moving":1.5', f'"moving":{moving}'))
    assert Profiles.open(Path("profiles.jsonl")).get("t", "d", "s") is None
