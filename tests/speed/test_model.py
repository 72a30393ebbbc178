"""The speed model: learnt from measurements and reports."""

import pytest

from penstock.speed.curve import Curve
from penstock.speed.model import SIZES, UNKNOWN, SpeedModel
from penstock.speed.sizes import LARGEST, UNKNOWN_SIZE


def model(**settings):
    made = SpeedModel(**settings)
    for trial in range(4):
        made.know(trial, "a")
    return made


FREE = Curve((1.0,) * UNKNOWN_SIZE)


def test_where_nothing_is_measured_nothing_is_assumed():
    speed = model(sharing="never").speed(["gpu"])
    assert speed.curve(0) == UNKNOWN.curve(0) == Curve()
    assert speed.unit(0) == UNKNOWN.unit(0) == 1
    assert speed.moving == UNKNOWN.moving == float("inf")
    assert (speed.timed, speed.tried(0)) == (False, {})
    assert SpeedModel().speed(["gpu"]).curve(99) == Curve()


def test_a_signature_of_which_nothing_is_measured_shares_for_free_so_that_its_first_bundle_measures_itself():
    made = model()
    made.know(9, "")
    assert made.curve("gpu", 0) == FREE
    assert made.curve("gpu", 9) == Curve(), "a trial that cannot be fused has a device to itself"
    assert [made.size(signature, "gpu") for signature in ("a", "")] == [None, 1]
    assert not made.speed(["gpu"]).shared(0)
    made.shared("a", "gpu", {1: 1.0, 2: 1.1}, 2)
    assert made.speed(["gpu"]).shared(0)
    assert made.size("a", "gpu") == 2
    assert made.curve("k80", 0) == FREE, "another device type is another"


def test_several_devices_that_were_measured_say_nothing_of_sharing_one():
    made = model()
    made.spread("a", "gpu", {1: 1.0, 2: 0.5})
    assert made.curve("gpu", 0) == Curve(FREE.sharing, (1.0, 0.5))
    assert not made.speed(["gpu"]).shared(0)
    assert made.speed(["gpu"]).tried(0) == {1: 1.0, 2: 0.5}
    made.shared("a", "gpu", {1: 1.0, 2: 1.1}, 2)
    assert made.curve("gpu", 0) == Curve((1.0, 1.1), (1.0, 0.5))


def test_a_size_without_times_is_how_far_trials_share_for_free():
    made = model()
    made.shared("a", "gpu", {}, 8)
    assert made.curve("gpu", 0) == Curve((1.0,) * 8)
    assert made.size("a", "gpu") == 8
    made.shared("a", "gpu", {}, 1)
    assert made.curve("gpu", 0) == Curve()
    assert made.speed(["gpu"]).shared(0), "trials that cannot be fused have nothing to measure"


def test_a_measured_signature_has_its_curve_and_others_have_not():
    made = model()
    made.know(9, "b")
    assert made.shared("a", "gpu", {1: 3.0, 2: 3.3}, 2) == []
    assert made.spread("a", "gpu", {1: 3.0, 2: 1.5}) == []
    assert made.curve("gpu", 0) == Curve((1.0, 1.1), (1.0, 0.5))
    assert made.curve("gpu", 9) == FREE


def test_what_was_smoothed_or_cut_is_said():
    said = model().shared("a", "gpu", {1: 1.0, 2: 10.0}, 1)
    assert said == ["sharing stops to pay at 1 trial a device, of 2 tried"]
    said = model().spread("a", "gpu", {1: 1.0, 2: 0.6, 4: 0.9})
    assert said == ["scaling stops to pay at 2 devices, of 4 tried"]


def test_a_curve_ends_at_the_size_that_a_bundle_may_have_and_is_drawn_out_to_it():
    made = model()
    made.shared("a", "gpu", {1: 1.0, 2: 1.2, 4: 1.44}, 2)
    assert made.curve("gpu", 0).sharing == pytest.approx((1, 1.2)), "memory holds no more"
    made.shared("a", "gpu", {1: 1.0, 2: 1.2, 4: 1.44}, 16)
    assert [made.curve("gpu", 0).sharing[count - 1] for count in (4, 8, 16)] == pytest.approx([1.44, 1.728, 2.0736])
    made.shared("a", "gpu", {1: 1.0, 2: 1.2, 4: 1.44, 8: 30.0}, 16)
    assert made.curve("gpu", 0).most == 4, "more were tried, and did not pay"


def test_devices_that_may_not_be_shared_are_not():
    made = model(sharing="never")
    made.shared("a", "gpu", {1: 1.0, 2: 1.0}, 2)
    made.spread("a", "gpu", {1: 1.0, 2: 0.5})
    assert made.curve("gpu", 0) == Curve((1.0,), (1.0, 0.5))
    assert made.size("a", "gpu") == 1
    assert made.speed(["gpu"]).shared(0), "there is nothing to measure"


def test_devices_that_are_to_be_shared_are_whatever_that_costs():
    made = model(sharing="forced")
    assert made.size("a", "gpu") == made.curve("gpu", 0).most == LARGEST
    made.shared("a", "gpu", {1: 1.0, 2: 10.0}, 3)
    assert made.size("a", "gpu") == 3, "memory holds no more"
    assert made.curve("gpu", 0) == Curve((1.0,) * 3)
    assert made.size("", "gpu") == 1


def test_a_unit_takes_what_was_seen_of_the_trial_else_of_its_like_else_of_all():
    made = model()
    made.know(9, "b")
    made.observed(0, "gpu", 1.0, 4.0)
    made.observed(1, "gpu", 1.0, 8.0)
    assert [made.unit("gpu", trial) for trial in (0, 1, 2, 9)] == [4, 8, 6, 6]
    made.observed(9, "gpu", 1.0, 1.0)
    assert [made.unit("gpu", trial) for trial in (2, 9)] == [6, 1]


def test_what_a_shared_unit_took_tells_what_it_would_take_alone():
    made = model()
    made.shared("a", "gpu", {1: 1.0, 2: 1.25}, 2)
    made.spread("a", "gpu", {1: 1.0, 2: 0.5})
    made.observed(0, "gpu", 1 / 2, 5.0)
    made.observed(1, "gpu", 2.0, 2.0)
    assert [made.unit("gpu", trial) for trial in (0, 1)] == [4, 4]
    assert made.speed(["gpu"]).seconds(0, 1 / 2) == 5


def test_a_unit_on_more_devices_than_pay_tells_what_it_would_take_alone():
    made = model()
    made.spread("a", "gpu", {1: 1.0, 2: 0.6, 4: 0.7, 16: 1.5})
    assert made.curve("gpu", 0).widest == 2
    made.observed(0, "gpu", 16.0, 3.0)
    assert made.unit("gpu", 0) == pytest.approx(2.0), "by the time that was measured on so many"
    made.observed(1, "gpu", 17.0, 0.6)
    assert made.unit("gpu", 1) == pytest.approx(1.0), "where none was measured, more devices gain nothing"


def test_a_trial_that_moved_refines_the_curve():
    made = model()
    made.shared("a", "gpu", {1: 1.0, 2: 1.1}, 2)
    made.observed(0, "gpu", 1.0, 2.0)
    made.observed(0, "gpu", 1 / 2, 2.6)  # 1.3 times as long, against 1.1 that were measured
    assert made.curve("gpu", 0).sharing == pytest.approx((1, 1.2))
    made.observed(0, "gpu", 1 / 2, 2.6)
    assert made.curve("gpu", 0).sharing == pytest.approx((1, 1.2)), "one trial's comparison counts once"


def test_where_devices_are_not_meant_to_be_shared_four_trials_are_taken_for_four_times_as_slow():
    made = model(sharing="never")
    made.observed(0, "gpu", 1 / 4, 8.0)
    assert made.unit("gpu", 0) == 2


def test_where_sharing_is_to_be_measured_a_unit_takes_what_it_took():
    made = model()
    made.observed(0, "gpu", 1 / 4, 8.0)
    assert made.unit("gpu", 0) == 8


def test_units_that_took_no_time_and_trials_that_nobody_knows_are_passed_over():
    made = model()
    made.observed(0, "gpu", 1.0, 0.0)
    made.observed(77, "gpu", 1.0, 5.0)
    assert made.unit("gpu", 0) == 1


def test_moving_costs_what_starting_and_stopping_were_seen_to_take():
    made = model()
    made.stopped(1.0)
    assert made.speed(["gpu"]).moving == float("inf"), "nobody is moved before it was seen what starting costs"
    assert (made.start, made.stop) == (0, 1)
    made.started(2.0)
    made.started(4.0)
    assert made.speed(["gpu"]).moving == 4
    made.started(-5.0)  # the first unit was quicker than the next: starting took nothing
    assert made.speed(["gpu"]).moving == 3


def test_a_stop_is_taken_to_cost_as_much_as_a_start_until_one_was_seen():
    made = model()
    made.started(2.0)
    assert made.speed(["gpu"]).moving == 4
    made.stopped(0.5)
    assert made.speed(["gpu"]).moving == 2.5
    made.stopped(0.0)
    assert made.speed(["gpu"]).moving == 2.25


def test_what_an_earlier_study_saw_is_the_unit_of_trials_of_which_nothing_was_seen():
    made = model()
    made.know(9, "b")
    assert made.mean("a", "gpu") is None
    made.recall("a", "gpu", 4.0)
    assert (made.unit("gpu", 0), made.unit("gpu", 9), made.mean("a", "gpu")) == (4, 4, 4)
    assert made.mean("b", "gpu") is None, "of its own signature nothing was seen"
    assert made.speed(["gpu"]).timed
    made.observed(0, "gpu", 1.0, 8.0)
    assert [made.unit("gpu", trial) for trial in (0, 1)] == [8, 6]
    assert made.mean("a", "gpu") == 6


def test_a_new_config_begins_anew():
    made = model()
    made.observed(0, "gpu", 1.0, 4.0)
    made.observed(1, "gpu", 1.0, 8.0)
    made.know(0, "a")
    assert made.unit("gpu", 0) == 6
    made.shared("a", "gpu", {1: 1.0, 2: 1.1}, 2)
    made.observed(0, "gpu", 1 / 2, 99.0)
    assert made.curve("gpu", 0).sharing == (1, 1.1), "what its last config took alone compares with nothing"


def test_the_first_unit_after_a_start_compares_with_nothing():
    made = model()
    made.shared("a", "gpu", {1: 1.0, 2: 1.1}, 2)
    made.observed(0, "gpu", 1.0, 2.0)
    made.observed(0, "gpu", 1 / 2, 9.0, compare=False)
    assert made.curve("gpu", 0).sharing == (1, 1.1)
    made.observed(1, "gpu", 1.0, 2.0, compare=False)
    made.observed(1, "gpu", 1 / 2, 9.0)
    assert made.curve("gpu", 0).sharing == (1, 1.1)


def test_what_was_measured_on_one_device_type_says_nothing_of_another():
    made = model()
    made.shared("a", "h200", {1: 1.0, 2: 1.1}, 2)
    made.spread("a", "h200", {1: 1.0, 2: 0.5})
    made.shared("a", "k80", {1: 4.0, 2: 6.0}, 2)
    speed = made.speed(["h200", "k80", "cpu"])
    assert speed.types["h200"].curve(0) == Curve((1.0, 1.1), (1.0, 0.5))
    assert speed.types["k80"].curve(0) == Curve((1.0, 1.5))
    assert speed.types["cpu"].curve(0) == FREE, "its first bundle there is to measure that"
    assert speed.curve(0) == Curve(), "nothing is assumed"
    assert [speed.types[type].shared(0) for type in ("h200", "k80", "cpu")] == [True, True, False]
    assert made.speed(["k80"]).types == {}
    assert made.speed(["k80"]).curve(0) == Curve((1.0, 1.5))
    assert made.known("a", "k80") == ({1: 1.0, 2: 1.5}, {})
    assert made.known("a", "cpu") == ({}, {})


def test_a_unit_takes_on_a_type_what_was_seen_there():
    made = model()
    made.know(9, "b")
    made.observed(0, "h200", 1.0, 2.0)
    made.observed(0, "k80", 1.0, 10.0)
    made.observed(1, "k80", 1.0, 20.0)
    types = made.speed(["h200", "k80", "cpu"]).types
    assert [types["h200"].unit(trial) for trial in (0, 1, 9)] == [2, 2, 2]
    assert [types["k80"].unit(trial) for trial in (0, 1, 2, 9)] == [10, 20, 15, 15]
    assert types["cpu"].unit(0) == pytest.approx(32 / 3), "where nothing was seen, all the others are as good as any"


def test_a_trial_that_moved_to_another_type_compares_with_nothing_there():
    made = model()
    for type in ("h200", "k80"):
        made.shared("a", type, {1: 1.0, 2: 1.1}, 2)
    made.observed(0, "h200", 1.0, 2.0)
    made.observed(0, "k80", 1 / 2, 20.0)
    assert {made.curve(type, 0).sharing for type in ("h200", "k80")} == {(1, 1.1)}
    made.observed(0, "k80", 1.0, 10.0)
    made.observed(0, "k80", 1 / 3, 99.0)
    made.observed(1, "k80", 1.0, 10.0)
    made.observed(1, "k80", 1 / 2, 13.0)
    assert made.curve("k80", 0).sharing == pytest.approx((1, 1.2))
    assert made.curve("h200", 0).sharing == (1, 1.1)


# Whether an attempt to fuse is repaid


def asked(*steps, sharing="measured"):
    """A model that knows trials of one signature, each asked for so many steps."""
    model = SpeedModel(sharing)
    for trial, count in enumerate(steps):
        model.know(trial, "a")
        model.asked(trial, count)
    return model


@pytest.mark.parametrize(
    ("steps", "type", "size"), [(799, "cpu", 1), (800, "cpu", None), (199, "gpu", 1), (200, "gpu", None)]
)
def test_trials_share_no_device_before_their_steps_repay_an_attempt(steps, type, size):
    """Where steps are captured, each trial alone would have what most of an attempt costs."""
    model = asked(steps, steps)
    speed = model.speed([type])
    assert model.size("a", type) == size
    assert speed.curve(0).most == (1 if size == 1 else UNKNOWN_SIZE)
    assert speed.shared(0) is (size == 1), "there is nothing to measure"


def test_steps_that_are_trained_already_count_and_none_counts_twice():
    model = asked(500, 500)
    model.asked(0, 500)
    assert model.size("a", "cpu") == 1
    model.asked(0, 1100)
    assert model.size("a", "cpu") is None


def test_steps_that_nobody_knows_say_nothing_against_sharing():
    assert asked(0, 0).size("a", "gpu") is None
    assert asked(0, 0).unrepaid("a", "gpu") == ""


@pytest.mark.parametrize("sharing", ["forced", "fixed"])
def test_sharing_that_is_not_measured_needs_no_steps(sharing):
    assert asked(1, 1, sharing=sharing).size("a", "gpu") == SIZES[sharing]


def test_a_check_that_costs_more_needs_more_steps():
    model = asked(800, 800)
    model.checked("a", "gpu", {0: 70.0, 1: 1.0})
    assert model.size("a", "gpu") == 1
    assert model.unrepaid("a", "gpu") == "1600 steps of 2 trials do not repay an attempt to fuse before 2850"
    assert model.size("a", "cpu") is None, "the cost there is unknown"


def test_six_trials_of_four_units_fuse_at_once_on_an_accelerator():
    """Of bench/small.py: 604 steps each, of a network whose step is all launching."""
    model = asked(*[604] * 6)
    assert model.size("a", "gpu") is None, "their first bundle measures itself"
    assert model.speed(["gpu"]).curve(0).most >= 6
    assert not model.unrepaid("a", "gpu")
    assert asked(*[151] * 6).size("a", "gpu") is None, "at the first rung too"


@pytest.mark.parametrize(("trials", "steps", "size"), [(4, 19, 1), (4, 20, 4), (2, 40, 1), (2, 80, 4)])
def test_where_sharing_is_known_to_pay_its_gain_repays_the_check(trials, steps, size):
    model = asked(*[steps] * trials)
    model.checked("a", "gpu", {0: 2.0, 1: 0.1})
    model.shared("a", "gpu", {1: 0.1, 2: 0.15, 4: 0.2}, 4, recalled=True)
    assert model.size("a", "gpu") == size


def test_what_was_measured_in_this_study_is_paid_for():
    model = asked(1, 1)
    model.shared("a", "gpu", {1: 1.0, 2: 1.0}, 8)
    assert model.size("a", "gpu") == 8


def test_a_trial_of_another_config_takes_its_steps_along():
    model = asked(800, 800)
    model.know(0, "b")
    model.asked(0, 800)
    assert (model.size("a", "cpu"), model.size("b", "cpu")) == (1, 1)
