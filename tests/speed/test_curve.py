"""Curves: what a unit takes at a share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StudyError
from penstock.speed.curve import Curve, measured

seconds = st.floats(1e-3, 1e3)
times = st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), seconds)


def test_a_share_is_a_part_of_one_device_or_several_whole_ones():
    curve = Curve((1, 1.25, 1.5), (1, 0.6, 0.5))
    assert [curve.at(1 / p) for p in (1, 2, 3)] == [1, 1.25, 1.5]
    assert [curve.at(w) for w in (1, 2, 3)] == [1, 0.6, 0.5]
    assert (curve.most, curve.widest) == (3, 3)


@pytest.mark.parametrize(
    "wrong", [(), (2.0,), (1.0, -1.0), (1.0, 0.0), (1.0, math.inf), (1.0, math.nan)], ids=lambda wrong: str(wrong)
)
def test_curves_that_a_user_gives_are_finite_and_positive(wrong):
    with pytest.raises(StudyError, match="sharing must be finite times above 0"):
        Curve(sharing=wrong)
    with pytest.raises(StudyError, match="scaling must be finite times above 0"):
        Curve(scaling=wrong)


def test_fluids_curve_and_the_alpha_and_beta_that_are_fitted_to_it():
    curve = Curve.of(alpha=1.2, most=4, beta=1.05, widest=8)
    assert curve.at(1 / 3) == pytest.approx(1.2**2)
    assert curve.at(5) == pytest.approx(1.05**4 / 5)
    assert curve.alpha == pytest.approx(1.2)
    assert curve.beta == pytest.approx(1.05)
    assert (Curve().alpha, Curve().beta) == (1, 1)


def test_a_curve_goes_to_at_least_one():
    with pytest.raises(StudyError, match="most=0"):
        Curve.of(most=0)


def test_between_measured_counts_the_logarithm_of_the_time_is_linear_in_that_of_the_count():
    curve, said = measured({1: 2.0, 4: 4.0}, {1: 2.0, 4: 0.5})
    assert curve.sharing == pytest.approx([1, math.sqrt(2), math.sqrt(3), 2])
    assert curve.scaling == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert not said


def test_where_nothing_is_measured_nothing_is_assumed():
    assert measured({}, {}) == (Curve(), [])
    assert measured({2: 1.0}, {4: 1.0}) == (Curve(), [])
    assert measured({1: 2.0}, {1: 2.0}) == (Curve(), [])


def test_sharing_that_costs_more_than_it_saves_is_not_used():
    curve, said = measured({1: 1.0, 2: 10.0, 4: 40.0}, {})
    assert curve.most == 1
    assert said == ["sharing stops to pay at 1 trial a device, of 4 tried"]


def test_a_curve_that_bends_back_is_smoothed_and_cut_at_its_best_point_and_that_is_said():
    curve, said = measured({1: 1.0, 2: 1.5, 4: 1.0, 8: 1.2}, {1: 1.0, 2: 0.6, 4: 0.7, 8: 0.5, 16: 0.6})
    assert list(curve.sharing) == sorted(curve.sharing)
    assert list(curve.scaling) == sorted(curve.scaling, reverse=True)
    assert curve.most == 8
    assert curve.widest == 8
    assert curve.scaling[1] == pytest.approx(curve.scaling[3])
    assert said == [
        "sharing was measured to get faster with more trials in places, and was smoothed",
        "scaling stops to pay at 8 devices, of 16 tried",
        "scaling was measured to get slower with more devices in places, and was smoothed",
    ]


@given(times, times)
def test_whatever_was_measured_gives_a_curve_that_only_falls_with_more_devices(sharing, scaling):
    curve, _ = measured(sharing, scaling)
    assert list(curve.sharing) == sorted(curve.sharing)
    assert all(a >= b - 1e-9 for a, b in zip(curve.scaling, curve.scaling[1:], strict=False))
    assert curve.most <= max(sharing, default=1)
    assert curve.widest <= max(scaling, default=1)


def test_times_that_cannot_be_are_passed_over():
    curve, _ = measured({1: 1.0, 2: math.nan, 4: 1.0, 8: -1.0}, {1: 1.0, 2: math.inf, 4: 0.25})
    assert curve.sharing == (1.0,) * 4
    assert curve.scaling == pytest.approx((1, 1 / 2, 1 / 3, 1 / 4))


def test_between_measured_numbers_of_devices_a_time_is_predicted_and_no_number_is_given() -> None:
    curve, _ = measured({}, {1: 8.0, 2: 4.5, 4: 2.5})
    assert curve.counts == (1, 2, 4)
    assert curve.at(2) > curve.at(3) > curve.at(4)
    assert Curve.of(beta=1.0, widest=4).counts == (1, 2, 3, 4)
    assert measured({}, {1: 8.0, 2: 4.5, 3: 3.5})[0].counts == (1, 2, 3)


def test_numbers_of_devices_beyond_a_curve_were_not_tried() -> None:
    with pytest.raises(StudyError, match="must be from 1 to 2"):
        Curve(scaling=(1.0, 0.5), tried=(1, 3))
