"""The cost of time and energy, against the paper's equations, and joules as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.energy.cost import Draw, Objective, front, joules, legible
from penstock.errors import StudyError

seconds, watts = st.floats(1e-3, 1e6), st.floats(1, 1e4)
parts = st.floats(0, 1)


@given(seconds, watts, parts, st.floats(1, 1e4))
def test_the_forms_of_the_cost_agree(time, power, eta, most):
    """Eq. 2 and eq. 3 are one cost, and eq. 5 is that of one epoch."""
    draw, objective = Draw(time, power), Objective(eta, most)
    assert objective.cost(time, draw.joules) == pytest.approx(objective.rate(power) * time)
    assert objective.unit_cost(draw) == pytest.approx(objective.cost(draw.seconds, draw.joules))


def test_eta_chooses_between_time_and_energy():
    draws = {250.0: Draw(10.0, 220.0), 175.0: Draw(11.0, 160.0), 100.0: Draw(25.0, 95.0)}
    assert [Objective(eta, 250.0).best_limit(draws) for eta in (0, 0.5, 1)] == [250.0, 175.0, 175.0]
    assert Objective(1, 250.0).epoch_cost(draws) == 11.0 * 160.0
    assert Objective(0, 250.0).epoch_cost(draws) == 10.0 * 250.0
    same = {250.0: Draw(10.0, 90.0), 175.0: Draw(10.0, 90.0)}
    assert Objective(0.5, 250.0).best_limit(same) == 250.0, "a limit above the draw changes nothing: none is set"


@given(st.lists(st.builds(Draw, seconds, watts), max_size=20))
def test_the_front_is_beaten_by_no_point(points):
    found = front(points)
    assert set(found) <= set(points)
    for point in points:
        assert any(one.seconds <= point.seconds and one.joules <= point.joules for one in found)
    for one in found:
        better = [p for p in points if p.seconds <= one.seconds and p.joules <= one.joules]
        assert all((p.seconds, p.joules) == (one.seconds, one.joules) for p in better)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("2kWh", 7.2e6), ("2 KWH", 7.2e6), ("300Wh", 1.08e6), ("500kJ", 5e5), ("1e3 J", 1e3), ("0.5MWh", 1.8e9), (7, 7.0)],
)
def test_energies_are_read(text, amount):
    assert joules(text) == amount


@pytest.mark.parametrize(
    "text", ["2kW", "kWh", "-2kWh", "0", "2 kWh 3", "5mJ", "nan", "1e999J", True, [2], float("inf")]
)
def test_another_energy_is_refused_in_one_message(text):
    with pytest.raises(
        StudyError, match=r'^max_energy must be a finite number of joules above 0, or text such as "500'
    ):
        joules(text)


@given(st.floats(1e-2, 1e12))
def test_an_energy_written_and_read_again_is_the_same(amount):
    assert joules(legible(amount)) == pytest.approx(amount, rel=5e-3)


@pytest.mark.parametrize("eta", [-0.1, 1.1, None, "1", float("nan")])
def test_an_eta_outside_0_and_1_is_refused(eta):
    with pytest.raises(StudyError, match=r"^eta must be a number from 0 to 1, got"):
        Objective(eta, 250.0)


def test_a_power_of_0_is_refused():
    with pytest.raises(StudyError, match=r"^max_power must be a number of watts above 0, got 0\.$"):
        Objective(0.5, 0)
