"""What trials share of a dataset that each of them reads, place by place."""

import random

import pytest
import torch

from penstock.training.reading import Common, Differs

CPU = torch.device("cpu")
LENGTH = 20


class Reading:
    """Batches of numbers: of the epoch and the place; it counts, and raises at a place that is bad."""

    def __init__(self, *, by_rows=True, bad=None, batch=lambda rows: rows):
        self.read, self.bad, self.batch = [], bad, batch
        self.common = Common(LENGTH, self, CPU, by_rows=by_rows)

    def __call__(self, epoch, start, stop, size):
        for first in range(start, stop, size):
            places = range(first, min(first + size, stop))
            if self.bad in places:
                raise OSError("bad")
            self.read += [(epoch, place) for place in places]
            yield self.batch(torch.tensor([100 * epoch + place for place in places]))


def rows(epoch, start, stop):
    return list(range(100 * epoch + start, 100 * epoch + stop))


@pytest.fixture
def unaudited(monkeypatch):
    monkeypatch.setattr("penstock.training.reading.EARLY", ())


@pytest.mark.parametrize("seed", range(5))
def test_at_any_pace_each_trial_gets_its_own_batches_and_a_place_is_read_once(unaudited, seed):
    pick, reading = random.Random(seed), Reading()
    at = dict.fromkeys((3, 4, 7, 20), (0, 0))
    while any(epoch < 3 for epoch, _ in at.values()):
        size = pick.choice([size for size, (epoch, _) in at.items() if epoch < 3])
        epoch, start = at[size]
        stop = min(start + size, LENGTH)
        assert reading.common.take(epoch, start, size, list(at.values())).tolist() == rows(epoch, start, stop)
        at[size] = (epoch, stop) if stop < LENGTH else (epoch + 1, 0)
    assert len(reading.read) == len(set(reading.read)) == 3 * LENGTH
    assert not reading.common.any
    assert reading.common._bytes == 0


def test_a_place_that_cannot_be_read_is_an_error_of_the_trial_that_comes_to_it_alone(unaudited):
    reading = Reading(bad=10)
    places = [(0, 0), (0, 0)]
    assert reading.common.take(0, 0, 6, places).tolist() == rows(0, 0, 6)
    assert reading.common.take(0, 0, 9, [(0, 6), (0, 0)]).tolist() == rows(0, 0, 9), "its neighbour reads to 12"
    with pytest.raises(OSError, match="bad"):
        reading.common.take(0, 6, 6, [(0, 6), (0, 9)])


def test_batches_of_a_function_of_the_users_are_shared_whole(unaudited):
    reading = Reading(by_rows=False, batch=lambda rows: {"sum": rows.sum(), "n": len(rows)})
    for place in (0, 8, 16):
        batches = [reading.common.take(0, place, 8, [(0, place), (0, 0 if i else place)]) for i in range(2)]
        assert batches[0] == batches[1]
        assert batches[0]["sum"] is not batches[1]["sum"]
    assert len(reading.read) == LENGTH


def test_batches_that_cannot_be_cut_end_the_sharing(unaudited):
    reading = Reading(batch=lambda rows: {"sum": rows.sum()})
    for start in (0, 4):
        assert reading.common.take(0, start, 4, [(0, start), (0, 0)])["sum"] == sum(rows(0, start, start + 4))
    assert reading.common.take(0, 0, 8, [(0, 8), (0, 0)])["sum"] == sum(rows(0, 0, 8)), "which is not what was read"
    with pytest.raises(Differs) as found:
        reading.common.take(0, 8, 6, [(0, 8), (0, 8)])
    assert found.value.own["sum"] == sum(rows(0, 8, 14))
