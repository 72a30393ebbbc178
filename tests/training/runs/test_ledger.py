"""The memory of a pack, against brute force, and a newcomer that has no room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bundle import Bundle, Measured, TrialFinished, TrialStopped
from penstock.training.runs.ledger import Ledger
from tests.training.runs.test_packed import ALIKE, Packed, Unlike

NAMES = st.sampled_from("abcd")


@given(st.lists(st.tuples(NAMES, st.none() | st.integers(0, 60)), max_size=12), st.integers(1, 120))
def test_whoever_came_and_went_the_sum_of_those_there_decides(changes, free):
    ledger, there = Ledger(), {}
    for name, peak in changes:
        if peak is None:
            ledger.leave(name)
            there.pop(name, None)
        else:
            ledger.enter(name, peak)
            there[name] = peak
        used = sum(peak for name, peak in there.items())
        assert ledger.fits(free) == (10 * used <= 9 * free)


def accelerated(pack, monkeypatch, peaks, free):
    """Let a worker on the CPU believe that its memory is an accelerator's, where each part in turn takes a peak."""
    taken, worker = iter(peaks), type(pack.worker)
    monkeypatch.setattr(worker, "on_gpu", True)
    monkeypatch.setattr(worker, "captures", lambda self, bundle: False)
    monkeypatch.setattr(worker, "free_bytes", lambda self: free)
    monkeypatch.setattr(worker, "synchronize", lambda self: None)
    monkeypatch.setattr(pack.worker.account, "watch_peak", lambda: 0)
    monkeypatch.setattr(pack.worker.account, "peak_since", lambda before: next(taken))


def test_a_newcomer_without_room_leaves_alone_with_its_state_and_costs_nobody_anything(tmp_path, monkeypatch):
    pack = Packed(Unlike(), tmp_path)
    accelerated(pack, monkeypatch, peaks=(30, 30, 60), free=100)
    pack.solo(*(pack.placement(trial, 3, **{**ALIKE, "width": 3 + trial}) for trial in range(3)))
    pack.declare()
    pack.go_on()
    (told,) = (event for event in pack.events if isinstance(event, Measured))
    assert (told.kind, told.table, told.size) == ("packing", {}, 2)
    assert "memory has no room for more than 2 bundles" in told.reason
    assert isinstance(pack.left(2), TrialStopped)
    assert pack.left(2).state.step >= 3, "its first steps count"
    assert all(isinstance(pack.left(trial), TrialFinished) for trial in (0, 1))
    pack.assert_as_alone(0, 1)


def test_others_rest_while_a_newcomer_takes_its_first_steps(tmp_path, monkeypatch):
    pack = Packed(Unlike(), tmp_path)
    accelerated(pack, monkeypatch, peaks=(1, 1), free=100)
    pack.solo(pack.placement(0, 3, **ALIKE))
    pack.declare()
    pack.advance(6)
    pack.solo(pack.placement(1, 3, **{**ALIKE, "width": 4}))
    pack.declare()
    first, second = (pack.worker._run._parts[f"trial {trial}"].run for trial in range(2))
    before = first.steps
    while second.steps < 3:
        pack.advance(1)
        assert first.steps == before or second.steps >= 3
    pack.go_on()
    pack.assert_as_alone(0, 1)


@pytest.mark.parametrize(("free", "rests"), [(100, 1), (32, 2)])
def test_nobody_rests_for_a_newcomer_that_is_like_another_if_as_much_fits_once_more(tmp_path, monkeypatch, free, rests):
    watched, pack = [], Packed(Unlike(), tmp_path)
    accelerated(pack, monkeypatch, peaks=(15, 15), free=free)
    monkeypatch.setattr(pack.worker.account, "watch_peak", lambda: watched.append(0) or 0)
    for trial in range(2):
        placed = pack.placement(trial, 3, **ALIKE)
        pack.parts[f"trial {trial}"] = Bundle(f"trial {trial}", ("cpu",), (placed,), signature="alike")
    pack.declare()
    pack.go_on()
    assert len(watched) == rests
    assert [type(pack.left(trial)) for trial in range(2)] == [TrialFinished, [TrialStopped, TrialFinished][free == 100]]
    pack.assert_as_alone(0)
