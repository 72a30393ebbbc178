"""The choice of packs, with injected timings: a bundle joins while that pays, and losing means in turn."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.speed.packing import JOINS, STAYS, how_many, improvement, reason, switching, throughput


def test_the_papers_measures():
    assert improvement(throughput([2.0, 2.0], [2.4, 2.4])) == pytest.approx((4.0 - 2.4) / 4.0)
    assert switching(227.0, [107.0, 107.0]) == 13.0
    assert "2 bundles together train 0.90 times" in reason({2: 0.9})


def test_losing_means_in_turn():
    assert how_many({2: 0.8, 3: 0.7}) == 1
    assert how_many({2: 1.03}) == how_many({2: 1.049}) == 1
    assert how_many({2: 1.05}) == 2


@given(st.lists(st.floats(0.1, 9.0), max_size=8))
def test_a_bundle_joins_only_while_the_throughput_grows(sigmas):
    table = dict(enumerate(sigmas, 2))
    size = how_many(table)
    taken = [1.0, *(table[count] for count in range(2, size + 1))]
    assert all(after >= JOINS * before for before, after in pairwise(taken))
    assert size == 1 or table[size] > STAYS
    assert size == len(table) + 1 or table[size + 1] < JOINS * taken[-1]
