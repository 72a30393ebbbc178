"""The gain of a pack, with a clock that the test gives: who trains when, and that losing means in turn."""

import math
import time

import pytest

from penstock.bundle import Bundle
from penstock.training.runs.base import Run
from penstock.training.runs.weighing import LAUNCHES, LONGEST, STEPS, Weighing


class Clocked(Run):
    """A run whose steps take as long as the test says, alone and beside so many others."""

    def __init__(self, alone, signature=""):
        super().__init__(None, Bundle("a", ("gpu",), (), signature=signature))
        self.alone, self.fast, self.undisturbed = alone, True, False

    over = property(lambda self: False)
    settled = property(lambda self: self.fast)

    def declare(self, bundle):
        return True

    def events(self):
        yield None

    def put_off(self, wanted):
        self.undisturbed = wanted

    def step(self):
        self.steps += 1


def weigh(monkeypatch, runs, seconds):
    """Let the weighing's active runs take a step each, which takes as long as ``seconds`` says of them."""
    clock, active = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    weighing = Weighing(runs)
    while not weighing.done:
        active.append(tuple(runs.index(run) for run in weighing.active))
        timed = weighing.active if weighing._began is not None else ()
        assert [run for run in runs if run.undisturbed] == [*timed]
        clock[0] += seconds(weighing.active)
        for run in weighing.active:
            run.step()
        weighing.look()
    assert not any(run.undisturbed for run in runs)
    return weighing, list(dict.fromkeys(active))


def in_turn(active):
    return sum(run.alone for run in active)


def at_once(active):
    return max(run.alone for run in active)


def test_bundles_that_gain_nothing_take_turns(monkeypatch):
    weighing, active = weigh(monkeypatch, [Clocked(0.001), Clocked(0.002), Clocked(0.001)], in_turn)
    assert active == [(0, 1, 2), (0,), (1,), (2,), (0, 1)], "and nothing else where the second does not pay"
    assert weighing.sigmas == {3: pytest.approx(1.0), 2: pytest.approx(1.0)}
    assert weighing.size == 1


def test_where_all_gain_together_fewer_are_not_timed(monkeypatch):
    weighing, active = weigh(monkeypatch, [Clocked(0.001) for _ in range(6)], at_once)
    assert active == [tuple(range(6)), *((one,) for one in range(6))]
    assert weighing.sigmas == {6: pytest.approx(6)}
    assert weighing.size == 6


def test_bundles_join_one_by_one_while_they_gain(monkeypatch):
    def seconds(active):
        return at_once(active) if len(active) < 4 else 9 * at_once(active)

    weighing, active = weigh(monkeypatch, [Clocked(0.001) for _ in range(5)], seconds)
    assert active[6:] == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert weighing.sigmas == {n: pytest.approx(n if n < 4 else n / 9) for n in range(2, 6)}
    assert weighing.size == 3


def test_of_many_bundles_several_join_at_once(monkeypatch):
    def seconds(active):
        return at_once(active) if len(active) <= 13 else in_turn(active)

    weighing, active = weigh(monkeypatch, [Clocked(0.001) for _ in range(32)], seconds)
    assert [len(together) for together in active[33:]] == [2, 3, 4, 6, 9, 13, 19]
    assert weighing.size == 13


def test_bundles_that_are_alike_are_timed_alone_once(monkeypatch):
    runs = [Clocked(0.001 * (1 + kind), f"kind {kind}") for kind in range(2) for _ in range(3)]
    weighing, active = weigh(monkeypatch, runs, in_turn)
    assert active == [(0, 1, 2, 3, 4, 5), (0,), (3,), (0, 1)]
    assert weighing.sigmas == {6: pytest.approx(1.0), 2: pytest.approx(1.0)}


def test_what_was_timed_holds_on_when_a_part_leaves_and_of_a_newcomer_only_its_own_times_are_missing(monkeypatch):
    runs, clock, active = [Clocked(0.001) for _ in range(3)], [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    weighing = Weighing(runs)

    def go_on(until):
        while not until():
            active.append(tuple(runs.index(run) for run in weighing.active))
            clock[0] += at_once(weighing.active)
            for run in weighing.active:
                run.step()
            weighing.look()

    go_on(lambda: len(active) > 2 and len(weighing.active) == 3)
    weighing.leave(runs[0])
    assert not weighing.sigmas, "they were others"
    runs.append(Clocked(0.001))
    weighing.join(runs[3])
    active.clear()
    go_on(lambda: weighing.done)
    assert list(dict.fromkeys(active)) == [(1, 2, 3), (3,)]
    assert weighing.sigmas == {3: pytest.approx(3)}


def test_who_rests_may_leave_and_nobody_is_left_undisturbed(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    first, second, third = runs = [Clocked(0.001, name) for name in ("a", "b", "b")]
    weighing = Weighing(runs)
    for run in runs:
        run.step()
    weighing.look()
    for run in (first, second):
        for _ in range(STEPS):
            run.step()
        weighing.look()
    assert all(run.undisturbed for run in runs), "the third is as the second alone, and all are timed"
    weighing.leave(third)
    weighing.leave(second)
    assert not any(run.undisturbed for run in runs)


def test_a_window_in_which_something_came_between_two_steps_is_begun_anew(monkeypatch):
    runs, left = [Clocked(0.001), Clocked(0.001)], [2]

    def seconds(active):
        if active == runs[:1] and runs[0].steps % STEPS == 5 and left[0]:
            left[0] -= 1
            runs[0].interrupted += 1
            return 1.0  # the end of a unit
        return at_once(active)

    weighing, _ = weigh(monkeypatch, runs, seconds)
    assert not left[0]
    assert weighing.sigmas == {2: pytest.approx(2)}


def test_a_window_has_few_steps_and_a_run_that_settles_is_not_timed(monkeypatch):
    runs = [Clocked(0.001), Clocked(0.001)]
    runs[1].fast = False

    def seconds(active):
        if runs[1].steps == 5:
            runs[1].fast, runs[1].alone = True, 0.0001
        return in_turn(active)

    weighing, _ = weigh(monkeypatch, runs, seconds)
    assert weighing.sigmas == {2: pytest.approx(1.0)}, "not the time of its slow first steps"
    assert runs[0].steps + runs[1].steps <= 4 * STEPS + 2 * 6


class ByDevice(Clocked):
    """A run whose steps the device times: the test says how many launches it has computed, and a step's seconds."""

    launched, seconds = 0, 0.001

    def put_off(self, wanted):
        super().put_off(wanted)
        self.launched = 0

    def step_seconds(self, launches):
        return self.seconds if self.launched >= launches else math.nan


def begun(monkeypatch, runs):
    """A weighing whose first window has begun, and its clock."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    weighing = Weighing(runs)
    for run in runs:
        run.step()
    weighing.look()
    return weighing, clock


def test_steps_that_are_launched_ahead_are_timed_by_the_device_whatever_the_host_saw(monkeypatch):
    weighing, clock = begun(monkeypatch, runs := [ByDevice(0.001, "a"), ByDevice(0.001, "b")])
    while not weighing.done:
        together = len(weighing.active) > 1
        for run in weighing.active:
            for _ in range(250 if run is runs[0] else 1):  # as many as were enqueued, which is not what was computed
                run.step()
            run.launched, run.seconds = run.launched + 1, 0.0015 if together else 0.001
            run.interrupted += 1  # a unit may end meanwhile: the device does not count that
        clock[0] += 0.06
        weighing.look()
    assert weighing.sigmas == {2: pytest.approx(4 / 3)}
    assert clock[0] == pytest.approx(3 * LAUNCHES * 0.06), "no longer than the device needs"


def test_a_device_that_computes_few_launches_is_not_waited_for_long(monkeypatch):
    weighing, clock = begun(monkeypatch, [ByDevice(0.001, "a"), ByDevice(0.001, "a")])
    while not weighing.done:
        for run in weighing.active:
            run.step()
            run.launched += 1
        clock[0] += LONGEST
        weighing.look()
    assert clock[0] == 2 * LONGEST


def test_a_run_that_launches_nothing_any_more_holds_nobody_up(monkeypatch):
    weighing, clock = begun(monkeypatch, [ByDevice(0.1, "a"), ByDevice(0.1, "b")])
    while not weighing.done:
        for run in weighing.active:
            run.step()
        clock[0] += 0.1
        weighing.look()
    assert weighing.sigmas == {2: pytest.approx(2)}, "by the host, at last"


def test_a_run_whose_step_has_become_another_kind_of_step_is_timed_alone_again(monkeypatch):
    weighing, clock = begun(monkeypatch, [plain := Clocked(0.02, "a"), other := ByDevice(0.001, "b")])
    while not weighing.done:
        if len(weighing.active) > 1:  # from now on, it is captured
            plain.step_seconds = lambda launches: 0.001
        for run in weighing.active:
            run.step()
            other.launched += 1
        clock[0] += 0.02
        weighing.look()
    assert weighing.sigmas == {2: pytest.approx(2)}, "and not 21: 0.02 s alone against 0.001 s"
