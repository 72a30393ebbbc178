"""Parts of a meter's joules: by device time, and they add up."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.energy.account import Ledger

steps = st.lists(
    st.tuples(
        st.sampled_from(["count", "enter", "claim", "leave", "weigh"]),
        st.integers(0, 3),  # the user
        st.fractions(0, 3, max_denominator=50),  # seconds that pass
        st.fractions(0, 900, max_denominator=10),  # joules, or the seconds that are claimed
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(steps, st.integers(1, 3), st.booleans())
def test_parts_and_what_is_idle_add_up_to_the_devices_joules_exactly(steps, devices, beside):
    now, parts = Fraction(0), Fraction(0)
    ledger = Ledger(now, devices, beside=beside)
    for what, user, seconds, amount in steps:
        now += seconds
        if what == "count":
            ledger.count(now, amount)
        elif what == "enter":
            ledger.enter(user, now)
        elif what == "weigh":
            ledger.weigh({one: int(amount) % (one + 2) for one in range(user + 1)})
        elif user in ledger.users:
            part = ledger.claim(user, now, amount)
            assert part >= 0
            parts += part
            if what == "leave":
                ledger.leave(user)
        assert parts + ledger.idle() + ledger.open == ledger.total
    for user in ledger.users:
        ledger.leave(user)
    ledger.count(now + 1, Fraction(10**6))  # more than was foreseen
    assert ledger.idle() >= 0
    assert parts + ledger.idle() + ledger.open == ledger.total
    assert ledger.open == 0


def fused(ledger, trials, seconds):
    for trial in range(trials):
        ledger.enter(trial, 0.0)
    ledger.count(seconds, 100.0 * seconds)
    return [ledger.claim(trial, seconds, seconds / trials) for trial in range(trials)]


def test_fused_trials_share_equally():
    assert fused(Ledger(0.0), 4, 8.0) == [200.0] * 4


def test_who_came_later_pays_for_its_own_seconds_alone():
    ledger = Ledger(0.0)
    ledger.enter("first", 0.0)
    ledger.count(10.0, 7000.0)
    ledger.enter("second", 10.0)
    ledger.count(20.0, 1000.0)
    assert ledger.claim("second", 20.0, 10.0) == 1000.0
    assert ledger.claim("first", 20.0, 10.0) == 7000.0
    assert ledger.idle() == 0


def test_processes_beside_each_other_divide_a_device_by_their_presence():
    ledger = Ledger(0.0, beside=True)
    ledger.enter("one", 0.0)
    ledger.count(10.0, 1000.0)
    ledger.enter("other", 10.0)
    ledger.count(20.0, 1000.0)
    assert (ledger.claim("one", 20.0, 20.0), ledger.claim("other", 20.0, 10.0)) == (1500.0, 500.0)


def test_processes_whose_work_is_known_divide_a_device_by_it():
    ledger = Ledger(0.0, beside=True)
    for user in ("one", "other", "idle"):
        ledger.enter(user, 0.0)
    ledger.weigh({"one": 60, "other": 20, "idle": 0})
    ledger.count(10.0, 1000.0)
    assert ledger.claim("one", 10.0, 10.0) == 750.0
    ledger.enter("new", 10.0)  # nobody knows how much it worked, so they divide by presence
    ledger.count(14.0, 400.0)
    assert [ledger.claim(user, 14.0, seconds) for user, seconds in (("other", 14.0), ("idle", 14.0))] == [350.0, 100.0]
    assert (ledger.claim("new", 14.0, 4.0), ledger.claim("one", 14.0, 4.0)) == (100.0, 100.0)


def test_between_two_readings_the_last_power_is_taken_and_made_good_later():
    ledger = Ledger(0.0)
    ledger.enter("one", 0.0)
    ledger.count(1.0, 100.0)
    assert ledger.claim("one", 1.5, 1.5) == 150.0
    ledger.count(2.0, 60.0)
    assert ledger.claim("one", 2.0, 0.5) == 10.0


def test_long_windows_keep_few_buckets():
    ledger = Ledger(0.0)
    ledger.enter("one", 0.0)
    for second in range(1, 5001):
        ledger.count(float(second), 1.0)
    assert len(ledger._buckets) <= 1001
    assert round(ledger.claim("one", 5000.0, 2500.0), 6) == 2500.0
