"""How many devices each of several studies may hold, without a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.executors.ray import studies as ray_studies
from penstock.executors.ray.studies import Studies, shares


@given(
    st.integers(1, 40),
    st.dictionaries(st.text("abc", min_size=1), st.tuples(st.floats(0.1, 9), st.integers(1, 40)), min_size=1),
)  # fmt: skip
def test_devices_are_given_out_as_far_as_somebody_can_use_them_and_everybody_has_one(devices, wanted):
    given = shares(devices, wanted)
    assert sum(given.values()) == min(devices, sum(most for _, most in wanted.values()))
    assert all(given[name] <= most for name, (_, most) in wanted.items())
    assert devices < len(wanted) or all(given.values())
    for one, (weight, _) in wanted.items():
        for other, (its, most) in wanted.items():  # nobody would be better off with one of somebody's many
            if given[other] > 1 and given[one] < wanted[one][1]:
                assert given[other] / its <= (given[one] + 1) / weight + 1e-9, (one, other, most)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(ray_studies.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray_studies.threading.Thread, "start", lambda self: None)
    return now


def test_a_driver_that_falls_silent_is_forgotten(clock):
    studies = Studies()
    assert studies.here("a", 1.0, 64, 4) == 4
    assert studies.here("b", 1.0, 64, 4) == 2
    clock[0] += ray_studies.FORGOTTEN
    assert studies.here("b", 1.0, 64, 4) == 4


def test_who_leaves_last_is_told_so(clock):
    studies = Studies()
    studies.here("a", 1.0, 64, 4)
    studies.here("b", 1.0, 64, 4)
    assert studies.gone("a") == 1
    assert studies.gone("b") == 0


def test_more_studies_than_devices_take_turns_by_weight(clock):
    studies, turns = Studies(), {"a": 0, "b": 0, "c": 0}
    for _ in range(400):
        clock[0] += ray_studies.TURN / 2.5
        held = {name: studies.here(name, 2.0 if name == "c" else 1.0, 64, 1) for name in turns}
        assert sum(held.values()) <= 1
        for name in turns:
            turns[name] += held[name]
    assert turns["a"] == pytest.approx(turns["b"], rel=0.1)
    assert turns["c"] == pytest.approx(2 * turns["a"], rel=0.1)
