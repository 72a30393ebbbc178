"""Which limits are tried, which is chosen, and what a model foresees."""

import pytest

import penstock as ps
from penstock.energy.cost import Draw, Objective
from penstock.energy.power import ALL, SLICE, Search, estimate, first_limits, foreseen, limits
from penstock.log.events import Limited
from tests.studies import log, studies
from tests.tasks import Blobs


def test_limits_are_at_most_twelve_from_the_greatest_to_the_least():
    for least, most in [(200, 700), (100, 250), (100, 300), (150, 160), (300, 300)]:
        found = limits(float(least), float(most))
        assert len(found) <= 12
        assert found == sorted(set(found), reverse=True)
        assert (found[0], found[-1]) == (most, least)


def test_all_limits_are_tried_while_that_is_under_a_hundredth_of_what_is_certain():
    all = limits(200.0, 700.0)
    enough = len(all) * SLICE / ALL
    assert first_limits(all, enough) == all
    few = first_limits(all, enough - 1)
    assert len(few) == 4
    assert (few[0], few[-1]) == (700.0, 200.0)


@pytest.mark.parametrize("best", [100.0, 150.0, 200.0, 250.0])
def test_a_short_search_tries_the_neighbours_of_the_best(best):
    """The cost of a step rises on both sides of the best limit."""
    all = limits(100.0, 250.0)
    search = Search(Objective(1.0, 250.0), all, certain=0.0)
    while (limit := search.next()) is not None:
        search.tried[limit] = Draw(1.0, 100.0 + abs(limit - best))
    assert search.best == best
    assert len(search.tried) < len(all)


def test_a_limit_above_the_draw_changes_nothing_and_one_below_is_foreseen_with_an_error():
    assert estimate(400.0, 500.0, 700.0).error == 0
    below = estimate(650.0, 500.0, 700.0)
    assert below.seconds > 1
    assert below.joules < 1
    assert below.error > 0
    assert foreseen(650.0, limits(200.0, 700.0), Objective(0.0, 700.0)).limit == 700.0


def test_a_profile_goes_before_the_model():
    profile = {700.0: Draw(1.0, 600.0), 200.0: Draw(1.1, 190.0)}
    found = foreseen(600.0, [700.0, 200.0], Objective(0.5, 700.0), profile)
    assert (found.limit, found.known, found.seconds) == (200.0, True, 1.1)


def test_observing_sets_nothing_and_says_what_a_limit_would_give(gpus, monkeypatch):
    from tests.energy.nvml import fake

    monkeypatch.setenv("PENSTOCK_METER", "nvml:GPU-fake")
    fake.change(gpus, draw=690.0)
    study = studies(Blobs, {"lr": ps.loguniform(1e-3, 1)}, trials=2)
    study(objective=0.5).run(progress=False, power="observe", sharing="solo")
    (found,) = [event for event in log() if isinstance(event, Limited)]
    assert not found.set
    assert 200 <= found.limit <= 700
    assert "by objective=0.5" in found.reason
    assert fake.look(gpus)["sets"] == []
