"""What reports tell the speed model, by the study's clock, and what is kept of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.bundle import Device, Limited, Measured, limited_as
from penstock.engine.clocking import Pace, Shelf, device_kind
from penstock.speed.curve import Curve
from penstock.speed.model import SpeedModel
from penstock.speed.profiles import Profiles
from penstock.speed.sizes import LARGEST, UNKNOWN_SIZE

DEVICES = {name: Device(name, "h200", 8) for name in ("gpu 0", "gpu 1")}


FREE = (1.0,) * UNKNOWN_SIZE


def pace(shelf=None, sharing="measured"):
    made = Pace(SpeedModel(sharing), shelf)
    made.look(DEVICES)
    for trial in range(3):
        made.know(trial, "a")
    return made


def shelf(task="task"):
    return Shelf(Profiles.open(Path("profiles.jsonl")), task)


def measured(**changes):
    """What a worker that measured sharing says."""
    found = {"signature": "a", "device": "gpu 0", "kind": "sharing", "table": {1: 2.0, 2: 2.2}, "size": 2, **changes}
    return Measured(**found, reason="so", way="native")


def spread(**changes):
    """What a worker that measured several devices says."""
    return measured(**{"kind": "scaling", "table": {1: 2.0, 2: 1.2}, **changes})


def kept(signature="a"):
    """The lines of the file about a signature, by kind of measurement."""
    lines = map(json.loads, Path("profiles.jsonl").read_text().splitlines())
    return {line["kind"]: line for line in lines if line["signature"] == signature}


def test_what_nobody_gives_a_model_or_a_shelf_learns_all_the_same_and_keeps_nothing():
    made = Pace()
    made.look(DEVICES)
    made.know(0, "a")
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 3.0)
    made.stopped(0, 4.0)
    made.left(0, [], 4.0)
    made.keep()
    assert made.speed().unit(0) == 3
    assert made.measured(measured()) == []
    assert made.speed().curve(0).sharing == pytest.approx((1, 1.1))
    assert made.reason("a", "gpu 0") == "so"
    assert not Path("profiles.jsonl").exists()


def test_a_step_takes_what_its_device_computes_with_and_not_what_that_holds():
    one = Device("gpu 0", "h200", 8, threads=1)
    alike = (Device("gpu 0", "h200", 4, threads=1), replace(one, name="gpu 1", node="another", price=2.0))
    assert {device_kind(device) for device in alike} == {device_kind(one)}
    others = (replace(one, type="k80"), replace(one, threads=2), replace(one, threads=None))
    assert len({device_kind(device) for device in (one, *others)}) == 4


def test_what_paid_at_one_batch_size_is_the_first_guess_at_another():
    first = pace(shelf())
    first.measured(measured(signature="64.abc", table={1: 1.0, 8: 2.0, 16: 3.0}, size=512))
    first.measured(measured(signature="32.abc", table={1: 1.0, 2: 3.0}, size=1))
    second = Pace(SpeedModel(), shelf())
    second.look(DEVICES)
    for signature, guess in {"64.abc": 0, "32.abc": 16, "128.abc": 8, "2048.abc": 1, "64.other": 0, "": 0}.items():
        second.know(0, signature)
        assert second.guess(signature, "gpu 0") == guess
    assert second.size("128.abc", "gpu 0") is None, "it is measured all the same"


def test_what_was_measured_on_a_device_serves_one_with_less_memory():
    pace(shelf()).measured(measured())
    second = Pace(SpeedModel(), shelf())
    second.look({name: replace(device, memory=device.memory // 2) for name, device in DEVICES.items()})
    second.know(0, "a")
    assert second.speed().curve(0).sharing == pytest.approx((1, 1.1))


def test_a_bundle_is_as_large_as_was_measured_and_it_is_said_where_that_comes_from():
    first = pace(shelf())
    assert (first.size("a", "gpu 0"), first.reason("a", "gpu 0")) == (None, ""), "its first bundle is to measure it"
    first.measured(measured())
    assert first.size("a", "gpu 1") == 2, "which is a device of the same type"
    second = pace(shelf())
    assert (second.size("a", "gpu 0"), second.reason("a", "gpu 0")) == (2, "measured before: so")
    second.measured(Measured("a", "gpu 0", "sharing", {1: 2.0, 2: 2.2}, 2, "measured before: so", "native"))
    assert pace(shelf()).reason("a", "gpu 0") == "measured before: so"
    forced = pace(shelf(), "forced")
    assert (forced.size("b", "gpu 0"), forced.reason("b", "gpu 0")) == (LARGEST, 'asked for by sharing="fused"')
    assert pace(shelf(), "never").size("a", "gpu 0") == 1


def test_what_was_measured_holds_for_the_devices_of_its_type():
    made = pace()
    made.look({**DEVICES, "old": Device("old", "k80", 8)})
    assert made.alike("gpu 0") == ["gpu 0", "gpu 1"]
    assert made.alike("old") == ["old"]


def test_a_unit_takes_the_time_between_two_reports_and_starting_what_the_first_took_longer():
    made = pace()
    made.entered(0, "gpu 0", [0], 10.0)
    made.reported(0, 1.0, 15.0)
    assert made.speed().unit(0) == 5
    made.reported(0, 1.0, 18.0)
    assert made.speed().unit(0) == 4
    assert made.speed().moving == 2 + 2, "a stop costs as much as a start until one was seen"
    made.reported(0, 1.0, 21.0)
    assert made.speed().moving == 2 + 2, "a start is seen once"
    made.stopped(0, 22.0)
    assert made.speed().moving == 2 + 1


def test_the_first_unit_is_counted_without_what_starting_was_seen_to_take():
    made = pace()
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 5.0)
    made.reported(0, 1.0, 8.0)
    made.entered(1, "gpu 0", [1], 8.0)
    made.reported(1, 1.0, 13.0)
    assert made.speed().unit(1) == 3


def test_a_unit_during_which_somebody_came_or_left_says_nothing():
    made = pace(sharing="never")
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
    assert first.measured(spread()) == []
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
    assert second.speed().unit(0) == pytest.approx(first.speed().unit(2)), "as long as the others of its signature"
    assert second.speed().timed
    assert pace(shelf("another task")).speed().moving == float("inf")


TWO_TYPES = {"gpu 0": Device("gpu 0", "h200", 8), "old": Device("old", "k80", 8)}


def test_measurements_are_kept_for_the_type_that_they_were_made_on():
    first = pace(shelf())
    first.look(TWO_TYPES)
    first.measured(measured())
    first.measured(spread())
    first.measured(measured(device="old", table={1: 9.0, 2: 9.9, 4: 11.0}, size=4))
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
    assert made.speed().curve(0) == Curve(FREE)
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


def test_what_was_seen_is_kept_and_of_sharing_only_what_was_measured():
    made = pace(shelf())
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 3.0)
    made.reported(0, 1.0, 5.0)
    made.keep()
    assert {kind: line["table"] for kind, line in kept().items()} == {
        "unit": {"1": 2.5},
        "moving": {"0": 1.0, "1": 1.0},
    }
    again = pace(shelf())
    assert again.size("a", "gpu 0") is None
    assert (again.speed().curve(0).sharing, again.speed().unit(0), again.speed().moving) == (FREE, 2.5, 2)


def test_where_nothing_was_seen_nothing_is_kept():
    made = pace(shelf())
    made.keep()
    assert not Path("profiles.jsonl").exists()
    made.know(5, "")
    made.entered(5, "gpu 0", [5], 0.0)
    made.reported(5, 1.0, 3.0)
    made.keep()
    assert kept() == {}, "the trial that was seen has no signature"
    assert sorted(kept("")) == ["opening"], "and nobody could find its units again"


def test_how_long_it_takes_until_the_first_trial_is_placed_is_kept():
    made = pace(shelf())
    made.open(10.0)
    made.entered(0, "gpu 0", [0], 12.5)
    made.entered(1, "gpu 1", [1], 20.0)
    made.keep()
    assert shelf().get("", DEVICES["gpu 0"], "opening").table == {0: 2.5}


def test_a_bundle_of_which_only_a_size_was_found_is_measured_again_by_the_next_study():
    made = pace(shelf())
    made.measured(measured(table={}, size=4))
    made.keep()
    assert made.size("a", "gpu 0") == 4
    assert not Path("profiles.jsonl").exists()


def test_measurements_of_two_kinds_by_two_studies_at_once_are_both_kept():
    first, second = pace(shelf()), pace(shelf())
    first.measured(measured())
    second.measured(spread())  # that study has not seen what the first one measured
    for made, seconds in ((first, 3.0), (second, 4.0)):
        made.entered(0, "gpu 0", [0], 0.0)
        made.reported(0, 1.0, seconds)
        made.reported(0, 1.0, 2 * seconds - 1)
    second.keep()
    first.keep()
    assert sorted(kept()) == ["moving", "scaling", "sharing", "unit"]
    third = pace(shelf())
    assert third.speed().curve(0) == Curve((1.0, 1.1), (1.0, 0.6))
    assert (third.size("a", "gpu 0"), third.reason("a", "gpu 0")) == (2, "measured before: so")


def test_a_refined_curve_keeps_the_words_that_its_measurement_came_with():
    refined(pace(shelf())).keep()
    line = kept()["sharing"]
    assert line["table"] == {"1": 2.0, "2": pytest.approx(2.4)}
    assert (line["size"], line["way"], line["reason"]) == (2, "native", "so")


def test_what_moving_takes_is_kept_where_several_devices_alone_were_measured():
    made = pace(shelf())
    made.measured(Measured("a", "gpu 0", "scaling", {1: 2.0, 2: 1.0}, 2, "so", "distributed"))
    made.entered(0, "gpu 0", [0], 0.0)
    made.reported(0, 1.0, 3.0)
    made.reported(0, 1.0, 5.0)
    made.stopped(0, 5.25)
    made.keep()
    assert kept()["moving"]["table"] == {"0": 1.0, "1": 0.25}
    assert kept()["scaling"]["table"] == {"1": 2.0, "2": 1.0}
    assert pace(shelf()).speed().moving == 1.25


@pytest.mark.parametrize("seconds", ["2.5", "0"])
def test_a_profile_keeps_what_moving_takes(seconds):
    made = shelf()
    made.put("a", DEVICES["gpu 0"], "moving", {0: 1.5, 1: 1.0})
    text = Path("profiles.jsonl").read_text()
    Path("profiles.jsonl").write_text(text.replace('"0":1.5', f'"0":{seconds}'))
    assert pace(shelf()).speed().moving == float(seconds) + 1


@pytest.mark.parametrize("seconds", ["-1", "Infinity", '"soon"', "null"])
def test_a_profile_whose_moving_cannot_be_is_passed_over(seconds):
    shelf().put("a", DEVICES["gpu 0"], "moving", {0: 1.5, 1: 1.0})
    text = Path("profiles.jsonl").read_text()
    Path("profiles.jsonl").write_text(text.replace('"0":1.5', f'"0":{seconds}'))
    assert shelf().get("a", DEVICES["gpu 0"], "moving") is None
    assert pace(shelf()).speed().moving == float("inf")


def test_why_devices_have_no_power_limit_is_said_once_for_all_of_them():
    told = pace()
    lines = [Limited(f"cuda:{i}", "", 0, 700.0, False, 1.0, 1.0, reason="not permitted") for i in range(3)]
    assert [told.limited(line) for line in lines] == ["cuda:0: not permitted", "", ""]
    assert told.limited(replace(lines[0], reason="it is gone")) == "cuda:0: it is gone"
    so_far = Limited("cuda:0", "a", 1, 300.0, False, 1.1, 0.8, table={700: (1.0, 500.0)}, reason="of 2 limits so far")
    assert not told.limited(so_far)


def test_what_limits_gave_is_kept_for_the_trials_own_signatures_alone():
    kept = pace(shelf())
    for signature in ("a", limited_as("a", 2), "a x1 + a x2"):
        kept.limited(Limited("gpu 0", signature, 1, 300.0, True, 1.1, 0.8, table={700: (1.0, 500.0)}))
    assert [bool(kept.limits(one, "gpu 0")) for one in ("a", "a on 2", "a x1 + a x2")] == [True, True, False]
