"""Who had how much of which device from when to when, and how busy that kept the devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log.events import Asked, Devices, Ended, Failed, Opened, Placed, Reported, Saved
from penstock.log.timeline import Row, available, measure, timeline, utilisation
from penstock.trial import StateRef, Usage

OPENED = Opened({"metric": "loss", "mode": "min"})


def asked(trial, budget=3):
    return Asked(trial, {"lr": 1.0}, budget, "g")


def placed(trial, clock, attempt=1, devices=("gpu 0",), mode="solo", share=1.0):
    return Placed(trial, attempt, devices, mode, None, clock, share)


def reported(trial, unit, clock, attempt=1):
    return Reported(trial, attempt, unit, {"loss": 1.0}, None, Usage(), clock)


def saved(trial, unit, clock, attempt=1):
    return Saved(trial, attempt, StateRef(f"{trial}-{unit}.pt", unit, unit, 10), clock)


def there(clock, *names):
    return Devices(tuple({"name": name, "type": "T4"} for name in names), clock)


def spans(*events):
    return [(row.trial, row.start, row.end) for row in timeline([OPENED, *events])]


def test_a_trial_leaves_when_it_reports_at_its_granted_budget():
    events = [OPENED, asked(0), placed(0, 1.0), reported(0, 1, 2.0), reported(0, 3, 4.0), Ended("done", 9.0)]
    assert timeline(events) == [Row("gpu 0", 0, 1.0, 4.0, 1.0, "solo")]


def test_a_trial_asked_for_again_has_a_row_for_each_grant():
    first = [asked(0, 1), placed(0, 1.0), reported(0, 1, 2.0)]
    again = [asked(0, 3), placed(0, 5.0, 2), reported(0, 2, 6.0, 2), reported(0, 3, 7.0, 2)]
    assert spans(*first, *again, Ended("done", 9.0)) == [(0, 1.0, 2.0), (0, 5.0, 7.0)]


def test_a_grant_made_by_the_last_report_does_not_keep_a_trial_on_its_device():
    events = [asked(0, 1), placed(0, 1.0), reported(0, 1, 2.0), asked(0, 3), Ended("deadline", 9.0)]
    assert spans(*events) == [(0, 1.0, 2.0)]


def test_a_trial_on_several_devices_has_a_row_on_each_with_the_share_that_was_logged():
    events = [asked(0), placed(0, 1.0, devices=("a", "b"), mode="distributed", share=2.0), reported(0, 3, 4.0)]
    assert timeline(events) == [Row(device, 0, 1.0, 4.0, 2.0, "distributed") for device in ("a", "b")]


def test_trials_of_a_bundle_keep_the_shares_they_were_placed_with():
    entered = [placed(0, 1.0, mode="fused", share=1.0), placed(1, 2.0, mode="fused", share=0.5)]
    left = [reported(0, 3, 5.0), reported(1, 3, 6.0)]
    assert timeline([asked(0), asked(1), *entered, *left]) == [
        Row("gpu 0", 0, 1.0, 5.0, 1.0, "fused"),
        Row("gpu 0", 1, 2.0, 6.0, 0.5, "fused"),
    ]


def test_a_trial_that_failed_leaves_then_and_its_retry_is_a_row_of_its_own():
    died = [asked(0), placed(0, 1.0), reported(0, 1, 2.0), Failed(0, 1, "died", False, 3.0)]
    assert spans(*died, placed(0, 5.0, 2), reported(0, 3, 8.0, 2)) == [(0, 1.0, 3.0), (0, 5.0, 8.0)]


def test_a_failure_that_comes_while_a_trial_waits_does_not_lengthen_its_row():
    events = [asked(0, 1), placed(0, 1.0), reported(0, 1, 2.0), asked(0, 3), Failed(0, 1, "state gone", True, 7.0)]
    assert spans(*events) == [(0, 1.0, 2.0)]


@pytest.mark.parametrize("last", [saved(0, 1, 4.0), reported(0, 1, 4.0)])
def test_a_trial_that_was_stopped_and_moved_left_with_the_last_thing_said_of_it(last):
    moved = [placed(0, 6.0, 2, devices=("gpu 1",)), reported(0, 3, 8.0, 2)]
    assert spans(asked(0), placed(0, 1.0), last, *moved) == [(0, 1.0, 4.0), (0, 6.0, 8.0)]


def test_a_trial_that_was_moved_without_a_word_stays_until_it_is_placed_again():
    assert spans(asked(0), placed(0, 1.0), placed(0, 6.0, 2), reported(0, 3, 8.0, 2)) == [(0, 1.0, 6.0), (0, 6.0, 8.0)]


@pytest.mark.parametrize(("mode", "ends"), [("solo", [3.0, 3.0, 3.0]), ("fused", [6.0, 9.0, 7.0])])
def test_a_trial_that_left_without_a_word_did_so_when_another_had_its_device_alone(mode, ends):
    both = [asked(0), asked(1), placed(0, 1.0, mode=mode), placed(1, 3.0, mode=mode)]
    for then, end in zip(
        (placed(0, 6.0, 2, devices=("gpu 1",)), Ended("deadline", 9.0), reported(1, 1, 7.0)), ends, strict=True
    ):
        assert spans(*both, then)[0] == (0, 1.0, end)


def test_a_state_saved_in_between_ends_nothing():
    assert spans(asked(0), placed(0, 1.0), saved(0, 1, 2.0), reported(0, 3, 8.0)) == [(0, 1.0, 8.0)]


def test_a_budget_that_was_trained_again_and_only_saved_is_an_end():
    events = [asked(0), asked(1), placed(0, 1.0), saved(0, 3, 2.0), placed(1, 3.0), reported(1, 1, 8.0)]
    assert spans(*events) == [(0, 1.0, 2.0), (1, 3.0, 8.0)]


def test_what_an_older_attempt_says_counts_for_nothing():
    events = [asked(0), placed(0, 1.0), placed(0, 4.0, 2), reported(0, 3, 6.0, attempt=1), Ended("deadline", 9.0)]
    assert spans(*events) == [(0, 1.0, 4.0), (0, 4.0, 9.0)]


def test_what_still_runs_when_the_study_ends_leaves_with_its_last_state_or_with_the_study():
    there = [asked(0), asked(1), placed(0, 1.0), placed(1, 1.0), reported(1, 1, 2.0), saved(0, 2, 3.0)]
    assert spans(*there, Ended("deadline", 5.0)) == [(0, 1.0, 3.0), (1, 1.0, 5.0)]


def test_what_still_runs_now_reaches_to_the_end_of_the_log():
    other = [asked(1), placed(1, 3.0, devices=("gpu 1",)), reported(1, 1, 7.0)]
    there = [asked(0), placed(0, 1.0), saved(0, 1, 2.0), *other]
    assert spans(*there) == [(0, 1.0, 7.0), (1, 3.0, 7.0)]


def test_a_study_that_was_killed_and_resumed_has_no_row_across_the_gap():
    killed = [asked(0), asked(1), placed(0, 1.0), placed(1, 1.0, devices=("gpu 1",)), reported(1, 1, 4.0)]
    resumed = [Opened({}, 4.0), placed(0, 5.0, 2), reported(0, 3, 8.0, 2), Ended("interrupted", 9.0)]
    again = [Opened({}, 9.0), placed(1, 9.5, 2), reported(1, 3, 11.0, 2), Ended("done", 11.0)]
    rows = spans(*killed, *resumed, *again)
    assert rows == [(0, 1.0, 4.0), (1, 1.0, 4.0), (0, 5.0, 8.0), (1, 9.5, 11.0)]


def test_a_row_without_length_is_kept():
    assert spans(asked(0), placed(0, 1.0), Failed(0, 1, "broke", True, 1.0)) == [(0, 1.0, 1.0)]


def test_devices_are_there_from_when_the_log_says_so_until_it_says_otherwise():
    events = [OPENED, there(1.0, "a", "b"), there(4.0, "b"), there(6.0, "a")]
    assert available([*events, Ended("done", 9.0)]) == {"a": [(1.0, 4.0), (6.0, 9.0)], "b": [(1.0, 6.0)]}


def test_devices_of_an_old_log_are_those_placed_on_from_the_first_placement_to_the_end():
    events = [OPENED, asked(0), placed(0, 1.0), asked(1), placed(1, 5.0, devices=("gpu 1",)), Ended("done", 9.0)]
    assert available(events) == {"gpu 0": [(1.0, 9.0)], "gpu 1": [(1.0, 9.0)]}


def test_an_old_log_that_a_newer_driver_goes_on_with_keeps_the_devices_that_stay():
    old = [OPENED, asked(0), placed(0, 1.0), placed(0, 2.0, 2, devices=("gpu 1",)), Ended("deadline", 5.0)]
    new = [Opened({}, 5.0), there(5.0, "gpu 1"), placed(0, 6.0, 3, devices=("gpu 1",)), Ended("done", 9.0)]
    assert available([*old, *new]) == {"gpu 0": [(1.0, 5.0)], "gpu 1": [(1.0, 9.0)]}


def test_utilisation_counts_a_shared_device_once_and_an_idle_one_too():
    shared = [placed(0, 0.0, mode="fused", share=0.5), placed(1, 1.0, mode="fused", share=0.5)]
    left = [reported(0, 3, 3.0), reported(1, 3, 5.0)]
    events = [there(0.0, "gpu 0", "gpu 1"), asked(0), asked(1), *shared, *left, Ended("done", 10.0)]
    found = utilisation(timeline(events), events)
    assert (found.busy, found.available, found.used) == (5.0, 20.0, 3.5)
    assert found.per_device == {"gpu 0": 0.5, "gpu 1": 0.0}
    assert found.fraction == 0.25


def test_utilisation_of_nothing_is_nothing():
    found = utilisation(timeline([OPENED]), [OPENED])
    assert (found.busy, found.available, found.per_device, found.fraction) == (0, 0, {}, 0)


@st.composite
def device_times(draw):
    """When some devices were there, in order and apart, and who was on them, in whole seconds."""
    cuts = st.lists(st.integers(0, 30), max_size=6, unique=True).map(sorted)
    devices = {}
    for name in draw(st.sets(st.sampled_from("abc"))):
        times = draw(cuts)
        devices[name] = list(zip(times[::2], times[1::2], strict=False))
    stay = st.tuples(st.sampled_from("abcd"), st.integers(0, 30), st.integers(0, 12), st.sampled_from([0.25, 1.0, 2.0]))
    rows = [
        Row(name, i, start, start + length, share, "fused")
        for i, (name, start, length, share) in enumerate(draw(st.lists(stay, max_size=12)))
    ]
    return rows, devices


@given(device_times())
def test_utilisation_is_what_counting_second_by_second_gives(found):
    rows, devices = found
    there = {name: {s for start, end in spans for s in range(start, end)} for name, spans in devices.items()}
    taken = {name: {s for row in rows if row.device == name for s in range(row.start, row.end)} for name in devices}
    busy = {name: len(there[name] & taken[name]) for name in devices}
    measured = measure(rows, devices)
    assert measured.busy == sum(busy.values())
    assert measured.available == sum(map(len, there.values()))
    assert measured.used == sum(min(1.0, row.share) for row in rows for _ in range(row.start, row.end))
    assert measured.per_device == {name: busy[name] / len(there[name]) if there[name] else 0.0 for name in devices}
