"""The executor with a virtual clock."""

import random
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.bundle import Bundle, Device, Job, Left, Measured, Placement, TrialFailed, TrialFinished, TrialStopped
from penstock.executors.base import DeviceAdded, DeviceLost
from penstock.executors.simulated.executor import Simulated, SimulatedExecutor
from penstock.log.events import Asked, Placed, Reported
from penstock.log.reader import read
from penstock.task import FunctionTask
from penstock.trial import Report
from tests.contracts.executors import CONFIG, ExecutorContract, alone
from tests.tasks import Blobs, Noisy, stateless, trivial

UNITS = 100
SHARING = ps.Curve(sharing=(1, 1.5), scaling=(1, 0.6))


@ps.TabulatedTask
def table(config):
    """Ten seconds a unit, unless the config says otherwise."""
    if config.get("raises"):
        raise KeyError("no such config")
    losses = [config.get("x", 0) + 1 / unit for unit in range(1, UNITS + 1)]
    return ps.Tabulated(
        {"loss": losses}, config.get("seconds", 10), 5, config.get("curve"), config.get("signature", "one")
    )


class Simulation:
    """An executor and all it has said, with the clock at which it did."""

    def __init__(self, path, devices=2, task=table, **given):
        self.executor = SimulatedExecutor(
            Job(task, 0, "loss", "min", path / "states"), Simulated(devices=devices, **given)
        )
        self.names = [device.name for device in self.executor.devices()]
        self.said = []

    def place(self, *placements, name="a", on=(0,), mode="solo", **bundle):
        self.executor.place(Bundle(name, tuple(self.names[i] for i in on), placements, mode, **bundle))

    def wait(self, timeout=None):
        events = self.executor.wait(timeout)
        self.said += [(self.executor.now(), event) for event in events]
        return events

    def until_left(self, count=1):
        while count > 0:
            count -= sum(isinstance(event, Left) for event in self.wait())
        return self

    def of(self, trial, kind=Report):
        """When a trial said something of a kind, and what."""
        return [(now, e) for now, e in self.said if isinstance(e, kind) and getattr(e, "trial", None) == trial]

    def times(self, trial, kind=Report):
        return [now for now, _ in self.of(trial, kind)]


@pytest.fixture
def simulate(tmp_path):
    return lambda *arguments, **given: Simulation(tmp_path, *arguments, **given)


def one(trial=0, budget=3, attempt=1, state=None, share=1.0, **config):
    return Placement(trial, attempt, config, budget, state, share=share)


class TestSimulatedExecutor(ExecutorContract):
    @classmethod
    def make(cls, job):
        return SimulatedExecutor(job, Simulated(devices=2, unit_seconds=10.0))

    def test_the_callers_random_states_are_as_before(self, tmp_path):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        expected = random.random(), np.random.rand(), torch.rand(1)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        executor = self.make(Job(Noisy(), 0, "loss", "min", tmp_path / "states"))
        self.place(executor, Placement(0, 1, CONFIG, 2))
        self.until_left(executor)
        executor.close()
        assert (random.random(), np.random.rand(), torch.rand(1)) == expected

    def test_trials_that_take_turns_draw_from_random_states_of_their_own(self, tmp_path):
        executor = self.make(Job(Noisy(), 0, "loss", "min", tmp_path / "states"))
        for trial in (0, 1):
            self.place(executor, Placement(trial, 1, CONFIG, 3), device=trial, name=str(trial))
        events = self.until_left(executor, 2)
        for trial in (0, 1):
            assert self.curve([e for e in events if e.trial == trial]) == alone(Noisy(), trial, CONFIG, 3)


class TestSimulatedExecutorWithRealSeconds(ExecutorContract):
    @classmethod
    def make(cls, job):
        return SimulatedExecutor(job, Simulated(devices=2))


# The clock


def test_a_trial_of_a_table_reports_what_stands_there_at_the_end_of_each_unit(simulate):
    run = simulate()
    run.place(one(budget=3, x=7, seconds=[1, 2, 4] + [1] * 97))
    run.until_left()
    assert [(now, e.unit, e.metrics["loss"]) for now, e in run.of(0)] == [(1, 1, 8), (3, 2, 7.5), (7, 3, 7 + 1 / 3)]
    assert [e.usage.device_seconds for _, e in run.of(0)] == [1, 2, 4]
    assert run.times(0, TrialFinished) == [7]


def test_waiting_moves_the_clock_to_the_next_event_and_by_its_timeout_at_most(simulate):
    run = simulate()
    run.place(one())
    assert run.wait(4) == []
    assert run.executor.now() == 4
    run.executor.wake()
    assert run.wait() == []
    assert run.executor.now() == 4
    assert [type(e) for e in run.wait(1000)] == [Report]
    assert run.executor.now() == 10


def test_what_happens_in_one_instant_is_told_at_once_in_a_fixed_order(simulate):
    run = simulate(devices=3)
    for i in (2, 0, 1):
        run.place(one(trial=i, budget=1), name=str(i), on=(i,))
    assert [(type(e), e.trial) for e in run.wait()] == [
        (kind, i) for i in (2, 0, 1) for kind in (Report, TrialFinished)
    ]


def test_a_trial_that_really_trains_takes_the_seconds_it_is_given(simulate):
    run = simulate(task=FunctionTask(trivial), unit_seconds=30.0)
    run.place(one(budget=3, x=1.0))
    run.until_left()
    assert [(now, e.unit, e.usage.device_seconds) for now, e in run.of(0)] == [(30, 1, 30), (60, 2, 30), (90, 3, 30)]


def test_a_trial_that_was_timed_by_its_first_unit_leaves_after_it(simulate):
    run = simulate(task=FunctionTask(trivial))
    run.place(one(budget=3, x=1.0))
    assert run.wait(0) == []
    run.place()
    run.until_left()
    assert [e.unit for _, e in run.of(0)] == [1]
    assert run.of(0, TrialStopped)[0][1].state.unit == 1


def test_a_grant_that_changes_is_that_of_a_trial_that_really_trains(simulate):
    run = simulate(task=FunctionTask(trivial), unit_seconds=30.0)
    run.place(one(budget=3, x=1.0))
    run.wait()
    run.place(one(budget=2, x=1.0))
    run.until_left()
    assert [(e.unit, e.state is not None) for _, e in run.of(0)] == [(1, False), (2, True)]


def test_a_function_without_a_state_begins_again_where_it_is_placed_again(simulate):
    run = simulate(task=FunctionTask(stateless), unit_seconds=30.0)
    run.place(one(budget=3, x=1.0))
    run.wait()
    run.place()
    run.until_left()
    assert run.of(0, TrialStopped)[0][1].state is None
    run.place(one(budget=2, attempt=2, x=1.0))
    run.until_left()
    assert [e.unit for _, e in run.of(0)] == [1, 1, 2]


def test_a_wait_in_which_nothing_can_happen_any_more_is_refused(simulate):
    run = simulate(devices=1, losses=[(25, "node 0/device 0")])
    run.place(one())
    run.until_left()
    with pytest.raises(ps.StudyError, match=r"the last device is lost and none will come.*returns=True"):
        run.wait()
    with pytest.raises(ps.StudyError, match="no trial runs on the 2 devices"):
        simulate().wait()
    assert simulate().wait(5) == []


# Shares


def test_a_trial_that_enters_slows_the_other_in_the_middle_of_its_unit_and_speeds_it_up_as_it_leaves(simulate):
    run = simulate(curve=SHARING)
    run.place(one(0, budget=1), mode="fused")
    run.wait(5)
    run.place(one(0, budget=1), one(1, budget=1), mode="fused")
    run.until_left(2)
    assert run.times(0) == [5 + 5 * 1.5], "half of its unit was done"
    assert run.times(1) == [12.5 + 5], "it had 7.5 seconds of the clock, which are 5 of its own"
    assert run.of(0)[0][1].usage.device_seconds == 5 + 7.5 / 2
    assert run.of(1)[0][1].usage.device_seconds == 7.5 / 2 + 5


def test_a_trial_on_several_devices_goes_by_the_curve_and_uses_them_all(simulate):
    run = simulate(curve=SHARING)
    run.place(one(budget=2), on=(0, 1), mode="distributed")
    run.until_left()
    assert run.times(0) == [6, 12]
    assert run.of(0)[0][1].usage.device_seconds == 12


def test_a_share_that_is_fixed_goes_by_the_placement_whoever_else_is_there(simulate):
    run = simulate(curve=SHARING, fixed_shares=True)
    run.place(one(0, budget=1, share=0.5), one(1, budget=2, share=0.5), mode="fused")
    run.until_left(2)
    assert (run.times(0), run.times(1)) == ([15], [15, 30])
    assert run.of(1)[1][1].usage.device_seconds == 7.5


def test_a_tables_own_curve_goes_before_the_simulations(simulate):
    run = simulate(curve=SHARING)
    own = ps.Curve(sharing=(1, 2, 4))
    run.place(one(0, budget=1, curve=own), one(1, budget=1), mode="fused")
    run.until_left(2)
    assert (run.times(0), run.times(1)) == ([15 + 2.5], [15])


def test_a_curve_goes_on_by_its_last_ratio_where_more_share(simulate):
    run = simulate(curve=SHARING)
    run.place(*(one(i, budget=1) for i in range(4)), mode="processes")
    run.until_left(4)
    assert run.times(3) == [10 * 1.5**3]


def test_a_faster_device_takes_less_and_the_slowest_of_several_decides(simulate):
    devices = [Device("slow", "k80", 1), Device("fast", "h200", 1)]
    run = simulate(devices=devices, speeds={"h200": 4.0}, curve=SHARING)
    run.place(one(0, budget=1), name="a", on=(0,))
    run.place(one(1, budget=1), name="b", on=(1,))
    run.until_left(2)
    assert (run.times(0), run.times(1)) == ([10], [2.5])
    run.place(one(2, budget=1), on=(0, 1), mode="distributed")
    run.until_left()
    assert run.times(2) == [10 + 6]


def test_a_signature_has_a_curve_of_its_own_on_a_type(simulate):
    devices = [Device("a", "k80", 1), Device("b", "h200", 1), Device("c", "h200", 1)]
    curves = {("one", "h200"): ps.Curve(sharing=(1, 1.1)), ("two", "h200"): ps.Curve(sharing=(1, 1.2))}
    run = simulate(devices=devices, curve=SHARING, curves=curves)
    run.place(one(0, budget=1), one(1, budget=1), name="a", on=(0,), mode="fused")
    run.place(one(2, budget=1), one(3, budget=1), name="b", on=(1,), mode="fused")
    run.place(*(one(i, budget=1, signature="two") for i in (4, 5)), name="c", on=(2,), mode="fused")
    run.until_left(6)
    assert [run.times(trial) for trial in (0, 2, 4)] == [[15], [11], [12]]
    run.place(one(6, 1, curve=ps.Curve(sharing=(1, 1.3))), one(7, 1), name="d", on=(1,), mode="fused")
    run.until_left(2)
    assert (run.times(6)[0], run.times(7)[0]) == (15 + 11 + 2 * (1 - 11 / 13) * 5, 15 + 11), "a table's own goes first"


def test_trials_of_several_signatures_share_by_a_curve_that_is_everybodys(simulate):
    run = simulate(curve=SHARING)
    run.place(one(0, 1), one(1, 1, signature="two"), mode="processes")
    run.until_left(2)
    assert (run.times(0), run.times(1)) == ([15], [15])


def test_trials_of_several_signatures_take_turns_where_curves_are_those_of_one(simulate):
    curves = {("one", "simulated"): ps.Curve(sharing=(1, 1.5)), ("two", "simulated"): ps.Curve(sharing=(1, 1.25))}
    run = simulate(curves=curves)
    several = [one(0, 1), one(1, 1), one(2, 1, signature="two")]
    run.place(*several, mode="processes")
    run.until_left(3)
    assert [run.times(trial) for trial in (0, 1, 2)] == [[25], [25], [25]], "1.5 of the first two, and 1 of the other"


def test_a_task_that_really_trains_has_the_curve_of_its_signature(simulate):
    signature = simulate(task=Blobs()).executor.describe([CONFIG], train=False)[0].signature
    curves = {(signature, "simulated"): ps.Curve(sharing=(1, 1.1))}
    run = simulate(task=Blobs(), curve=SHARING, curves=curves, unit_seconds=10.0)
    run.place(*(Placement(i, 1, CONFIG, 1) for i in (0, 1)), mode="fused")
    run.until_left(2)
    assert run.times(0) == [11]


# What is measured


def measured(run):
    return [(now, e) for now, e in run.said if isinstance(e, Measured)]


TRUE = ps.Curve(sharing=(1, 1.2, 1.5, 1.6, 2), scaling=(1, 0.6, 0.5, 0.5))


def test_a_fused_bundle_whose_size_is_not_known_tells_at_once_what_sharing_costs(simulate):
    devices = [Device("slow", "k80", 1), Device("fast", "h200", 1)]
    run = simulate(devices=devices, speeds={"h200": 2.0}, curve=TRUE)
    run.place(one(0), one(1), mode="fused", on=(1,))
    assert run.wait() == [Measured("one", "fast", "sharing", {1: 5, 2: 6, 4: 8, 5: 10}, 4, "simulated", "simulated")], (
        "before the first report: what is decided upon it may go by it"
    )
    assert run.executor.now() == 0
    run.place(one(0), one(1), one(2), mode="fused", on=(1,))
    run.until_left(3)
    assert len(measured(run)) == 1, "a bundle measures once"


def test_a_bundle_measures_when_a_second_trial_enters_it(simulate):
    run = simulate(curve=TRUE)
    run.place(one(0), mode="fused")
    run.wait(5)
    assert measured(run) == [], "a lone trial shows nothing of fusing"
    run.place(one(0), one(1), mode="fused")
    run.wait()
    assert [(now, e.kind) for now, e in measured(run)] == [(5, "sharing")]


def test_a_trial_that_leaves_upon_what_was_measured_has_trained_nothing(simulate):
    run = simulate(task=FunctionTask(trivial))  # its first unit is trained when it begins, to see what that takes
    run.place(one(0, x=1.0), one(1, x=1.0), mode="fused")
    assert [type(e) for e in run.wait()] == [Measured]
    run.place(mode="fused")
    run.until_left(2)
    assert [e for _, e in run.said if isinstance(e, Report)] == []


def test_a_distributed_bundle_tells_at_once_what_its_devices_give_where_it_is_to_measure(simulate):
    run = simulate(devices=3, curve=TRUE)
    run.place(one(budget=1), on=(0, 1, 2), mode="distributed", measure=True)
    told = Measured("one", run.names[0], "scaling", {1: 10, 2: 6, 3: 5}, 3, "simulated", "simulated")
    assert (run.wait(), run.executor.now()) == ([told], 0)
    assert run.until_left().times(0) == [5]


def test_devices_that_give_nothing_more_are_not_the_best_number_of_them(simulate):
    run = simulate(devices=4, curve=TRUE)
    run.place(one(budget=1), on=(0, 1, 2, 3), mode="distributed", measure=True)
    run.wait()
    ((_, told),) = measured(run)
    assert (told.table, told.size) == ({1: 10, 2: 6, 4: 5}, 4)
    run = simulate(devices=4, curve=ps.Curve(scaling=(1, 0.6)))
    run.place(one(budget=1), on=(0, 1, 2, 3), mode="distributed", measure=True)
    run.wait()
    ((_, told),) = measured(run)
    assert (told.table, told.size) == ({1: 10, 2: 6, 4: 6}, 2)


@pytest.mark.parametrize(
    "bundle",
    [
        dict(mode="solo"),
        dict(mode="fused", size=2),
        dict(mode="fused", size=1),
        dict(mode="processes"),
        dict(mode="distributed", on=(0, 1)),
    ],
)
def test_what_a_worker_would_not_measure_is_not_told(simulate, bundle):
    run = simulate(curve=TRUE)
    count = 2 if bundle["mode"] in ("fused", "processes") else 1
    run.place(*(one(i, budget=1) for i in range(count)), **bundle)
    run.until_left(count)
    assert measured(run) == []


def test_a_study_measures_each_signature_once_and_goes_by_it(tmp_path):
    def look_up(config):
        return ps.Tabulated({"loss": [1.0] * 4}, 10.0, signature=config["kind"])

    on = ps.Simulated(devices=2, curve=ps.Curve(sharing=(1, 1.1, 5.0)))
    made = ps.Study(
        ps.TabulatedTask(look_up),
        {"kind": ps.choice(["a", "b"])},
        metric="loss",
        mode="min",
        algorithm=ps.Random(budget=4),
        trials=8,
        dir=tmp_path,
        name="s",
    )
    result = made.run(on=on, progress=False)
    assert {trial.state for trial in result.trials} == {"finished"}
    log = list(read(tmp_path / "s" / "log.jsonl"))
    found = [e for e in log if isinstance(e, Measured)]
    assert sorted((e.signature, e.kind) for e in found if e.kind == "sharing") == [("a", "sharing"), ("b", "sharing")]
    signatures = {e.trial: e.config["kind"] for e in log if isinstance(e, Asked)}
    where, together = {}, defaultdict(list)
    for event in log:
        if isinstance(event, Placed):
            where[event.trial] = event.devices
        elif isinstance(event, Reported):
            together[event.clock, where[event.trial]].append(signatures[event.trial])
    assert max(map(len, together.values())) == 2, "which is as far as it pays"
    assert {len(set(kinds)) for kinds in together.values()} == {1}, "only those that can be fused"


# Coming and going


def test_starting_saving_and_stopping_take_the_seconds_they_are_given(simulate):
    run = simulate(start=3.0, save=2.0, stop=1.0)
    run.place(one(0, budget=2), name="a", on=(0,))
    run.place(one(1, budget=9), name="b", on=(1,))
    while len(run.of(1)) < 1:
        run.wait()
    run.wait(1)
    run.place(name="b", on=(1,))
    run.until_left(2)
    assert run.times(0) == [13, 25], "the report at its budget has a state"
    assert [e.usage.device_seconds for _, e in run.of(0)] == [13, 12]
    assert run.times(0, TrialFinished) == [25]
    assert run.times(1) == [13, 23]
    assert run.times(1, TrialStopped) == [24]


def test_a_trial_that_is_starting_leaves_at_once_with_the_state_it_came_with(simulate):
    run = simulate(start=3.0, stop=1.0)
    run.place(one())
    run.place()
    run.until_left()
    assert [(now, e.state) for now, e in run.of(0, TrialStopped)] == [(0, None)]


def test_a_trial_leaves_after_its_unit_or_at_once_where_the_next_has_just_begun(simulate):
    run = simulate()
    run.place(one(0, budget=9), name="a", on=(0,))
    run.place(one(1, budget=9, seconds=15), name="b", on=(1,))
    while not run.of(0):
        run.wait()
    run.place(name="a", on=(0,))
    run.place(name="b", on=(1,))
    run.until_left(2)
    assert (run.times(0, TrialStopped), run.times(1, TrialStopped)) == ([10], [15])
    assert [e.state.unit for trial in (0, 1) for _, e in run.of(trial, TrialStopped)] == [1, 1]


def test_a_trial_that_has_trained_nothing_has_nothing_to_save(simulate):
    run = simulate(start=2.0, stop=3.0)
    run.place(one())
    assert run.wait(2.0) == []
    run.place()
    run.until_left()
    assert run.times(0, TrialStopped) == [2]
    run.place(one(attempt=2))
    while not run.of(0):
        run.wait()
    run.place()
    run.until_left()
    assert run.times(0, TrialStopped) == [2, 2 + 2 + 10 + 3]


def test_an_attempt_that_left_one_bundle_begins_in_no_other(simulate):
    run = simulate()
    run.place(one(budget=5), name="a")
    run.wait(5)
    run.place(one(budget=5), name="b")
    run.until_left()
    assert (run.times(0), run.times(0, TrialStopped)) == ([10], [10])
    with pytest.raises(ps.StudyError, match="Nothing can happen any more"):
        run.wait()


def test_a_grant_that_grows_or_shrinks_is_that_of_the_next_boundary(simulate):
    run = simulate()
    run.place(one(budget=1))
    run.wait(5)
    run.place(one(budget=4))
    run.wait()
    run.wait()
    run.wait(5)
    run.place(one(budget=1))
    run.until_left()
    assert [e.unit for _, e in run.of(0)] == [1, 2, 3]
    assert [e.state is not None for _, e in run.of(0)] == [False, False, True]


def test_a_trial_that_is_declared_again_before_its_boundary_stays(simulate):
    run = simulate()
    run.place(one(budget=2))
    run.wait(5)
    run.place()
    run.place(one(budget=2))
    run.until_left()
    assert run.times(0, TrialFinished) == [20]


def test_another_bundle_begins_when_the_ones_on_its_devices_have_left(simulate):
    run = simulate(curve=SHARING)
    run.place(one(0, seconds=10), name="a", on=(0,))
    run.place(one(1, seconds=15), name="b", on=(1,))
    run.wait(5)
    run.place(one(2, budget=1), name="c", on=(0, 1), mode="distributed")
    run.until_left(3)
    assert (run.times(0, TrialStopped), run.times(1, TrialStopped), run.times(2)) == ([10], [15], [21])


def test_a_bundle_that_waits_is_replaced_by_a_later_one_and_says_so(simulate):
    run = simulate()
    run.place(one(0), name="a")
    run.wait(5)
    run.place(one(1), name="b")
    run.place(one(2, budget=1), name="c")
    run.until_left(3)
    assert (run.times(1, TrialStopped), run.times(0, TrialStopped), run.times(2)) == ([5], [10], [20])
    assert not run.of(1)


def test_a_solo_trial_waits_for_the_one_before_it_in_its_bundle(simulate):
    run = simulate(curve=SHARING)
    run.place(one(0))
    run.wait(5)
    run.place(one(1, budget=1))
    run.until_left(2)
    assert (run.times(0, TrialStopped), run.times(1)) == ([10], [20])


def test_a_declaration_may_name_those_that_have_left(simulate):
    run = simulate()
    run.place(one(0, budget=1), one(1, budget=2), mode="fused")
    run.until_left()
    run.place(one(0, budget=1), one(1, budget=2), mode="fused")
    run.until_left()
    assert (len(run.of(0)), len(run.of(1))) == (1, 2)
    run.place(one(0, budget=1), one(1, budget=2), mode="fused")
    assert run.wait(1000) == []


def test_a_trial_goes_on_from_its_state_and_the_file_is_as_the_state_says(simulate, tmp_path):
    run = simulate()
    run.place(one(budget=2))
    run.until_left()
    first = run.of(0)[-1][1].state
    assert (first.file, first.unit) == ("000000-1-2.pt", 2)
    assert (tmp_path / "states" / first.file).stat().st_size == first.bytes
    run.place(one(budget=3, attempt=2, state=first))
    run.until_left()
    assert [e.unit for _, e in run.of(0)] == [1, 2, 3]
    run.place(one(budget=9, attempt=3, state=first))
    run.place()
    run.until_left()
    assert run.of(0, TrialStopped)[0][1].state == first, "nothing is new"
    run.place(one(budget=2, attempt=4, state=first))
    run.until_left()
    assert [e.unit for _, e in run.of(0)] == [1, 2, 3], "there was nothing left to do"


def test_states_are_written_in_between_as_often_as_is_said(simulate):
    run = simulate(saving_every=2, save=1.0)
    run.place(one(budget=5))
    run.until_left()
    assert [e.unit for _, e in run.of(0) if e.state] == [2, 4, 5]
    assert run.times(0) == [10, 21, 31, 42, 53]


def test_a_budget_beyond_the_table_is_refused(simulate):
    run = simulate()
    with pytest.raises(ps.TaskError, match=f"{UNITS} units at most.*got 101"):
        run.place(one(budget=UNITS + 1))
    run.place(one(budget=UNITS))
    with pytest.raises(ps.TaskError, match=f"{UNITS} units at most"):
        run.place(one(budget=UNITS + 1))
    run.until_left()
    assert len(run.of(0)) == UNITS


def test_a_config_whose_table_cannot_be_made_fails_alone(simulate):
    run = simulate()
    run.place(one(0, raises=True), one(1, budget=1), mode="fused")
    run.until_left(2)
    ((_, failed),) = run.of(0, TrialFailed)
    assert "no such config" in failed.error
    assert not failed.died
    assert run.times(1) == [10]
    run.place(one(0, raises=True))
    assert run.wait(1000) == [], "it has left"


def test_a_table_describes_a_config(simulate):
    executor = simulate().executor
    (description,) = executor.describe([{}], train=True)
    assert (description.metrics, description.bytes, description.signature) == (("loss",), 5, "one")
    assert executor.describe([{"raises": True}], train=False)[0].signature is None
    with pytest.raises(KeyError):
        executor.describe([{"raises": True}], train=True)


# Devices


def test_a_lost_device_takes_its_trials_with_it_and_gives_others_free(simulate):
    run = simulate(losses=[(25, "node 0/device 1")])
    run.place(one(0), on=(0, 1), mode="distributed", name="a")
    run.until_left()
    lost, failed = (e for now, e in run.said if now == 25)
    assert lost == DeviceLost(Device("node 0/device 1", "simulated", 16 * 2**30, "node 0"))
    assert (failed.trial, failed.died, failed.error) == (0, True, "device node 0/device 1 was lost")
    assert [device.name for device in run.executor.devices()] == ["node 0/device 0"]
    run.place(one(1, budget=1), name="b", on=(0,))
    run.place(one(2, budget=1), name="c", on=(1,))
    run.until_left(2)
    assert run.times(1) == [35]
    assert run.times(2, TrialFailed) == [25], "its device is gone"
    with pytest.raises(ps.StudyError, match="got device 7"):
        run.executor.place(Bundle("d", ("device 7",), (one(3),)))


def test_a_bundle_that_waits_for_a_device_fails_as_that_is_lost(simulate):
    run = simulate(losses=[(5, "node 0/device 1")], stop=100.0)
    run.place(one(0), name="a", on=(0,))
    run.wait(1)
    run.place(one(1), name="b", on=(0, 1))
    run.until_left(2)
    assert (run.times(1, TrialFailed), run.times(0, TrialStopped)) == ([5], [110])


def test_a_device_arrives_after_its_provision(simulate):
    new = Device("new", "h200", 1)
    run = simulate(arrivals=[(7, new)], provision=3.0)
    assert run.executor.provisioning == 3.0
    assert run.wait() == [DeviceAdded(new)]
    assert run.executor.now() == 10
    run.names.append("new")
    run.place(one(budget=1), on=(2,))
    assert run.until_left().times(0) == [20]


def test_a_device_that_returns_does_so_after_its_provision(simulate):
    run = simulate(devices=1, losses=[(5, "node 0/device 0")], provision=3.0, returns=True)
    assert [type(e) for e in (*run.wait(), *run.wait())] == [DeviceLost, DeviceAdded]
    assert run.executor.now() == 8
    assert len(run.executor.devices()) == 1


def hour_of_losses(simulate, seed):
    run = simulate(devices=20, loss_rate=1.0, returns=True, provision=60.0, seed=seed)
    while run.executor.now() < 3600:
        run.wait()
    return run.said


def test_losses_are_drawn_from_the_seed_at_the_rate(simulate):
    said = hour_of_losses(simulate, 0)
    assert said == hour_of_losses(simulate, 0)
    assert said != hour_of_losses(simulate, 1)
    lost = sum(isinstance(e, DeviceLost) for seed in range(10) for _, e in hour_of_losses(simulate, seed))
    assert 150 < lost < 250, "about 20 an hour"


def test_a_device_that_came_back_has_a_loss_of_its_own_to_come(simulate):
    def lost(**given):
        run = simulate(devices=1, loss_rate=60.0, returns=True, **given)
        while run.executor.now() < 600:
            run.wait()
        return [now for now, e in run.said if isinstance(e, DeviceLost)]

    first = lost()[0]
    assert first > 1
    assert first not in lost(losses=[(1, "node 0/device 0")])


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(st.tuples(st.floats(0, 120), st.integers(0, 2)), max_size=6),
    delays=st.tuples(*[st.sampled_from([0.0, 1.5, 10.0])] * 4),
    every=st.integers(0, 2),
    budgets=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    fused=st.booleans(),
)
def test_no_loss_of_a_device_loses_a_report_or_repeats_more_than_since_the_last_state(
    tmp_path_factory, losses, delays, every, budgets, fused
):
    start, save, stop, provision = delays
    run = Simulation(
        tmp_path_factory.mktemp("study"),
        devices=3,
        curve=SHARING,
        losses=[(when, f"node 0/device {i}") for when, i in losses],
        **dict(start=start, save=save, stop=stop, provision=provision, saving_every=every, returns=True),
    )
    attempts = [0] * len(budgets)
    states, done, ended = [None] * len(budgets), [0] * len(budgets), set()
    waiting, running = list(range(len(budgets))), {}

    def place(device, trials):
        for trial in trials:
            attempts[trial] += 1
            running[trial] = device
            done[trial] = 0 if states[trial] is None else states[trial].unit
        placements = [one(t, budgets[t], attempts[t], states[t], seconds=7 + t) for t in trials]
        run.executor.place(Bundle(f"{device} {attempts}", (device,), tuple(placements), "fused" if fused else "solo"))

    while waiting or running:
        for device in run.executor.devices():
            if waiting and device.name not in running.values():
                take = 2 if fused else 1
                place(device.name, waiting[:take])
                waiting = waiting[take:]
        for event in run.wait():
            if isinstance(event, DeviceAdded | DeviceLost | Measured):
                continue
            assert (event.trial, event.attempt) not in ended
            assert event.attempt == attempts[event.trial]
            if isinstance(event, Report):
                assert event.unit == done[event.trial] + 1, "each unit follows the one before it, from the last state"
                done[event.trial] = event.unit
                states[event.trial] = event.state or states[event.trial]
                continue
            ended.add((event.trial, event.attempt))
            del running[event.trial]
            if isinstance(event, TrialFailed):
                assert event.died
                waiting.append(event.trial)
            else:
                assert done[event.trial] == states[event.trial].unit == budgets[event.trial]
    assert {trial for trial, _ in ended} == set(range(len(budgets)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(devices=0), "devices of Simulated must be a whole number from 1 on, got 0"),
        (dict(devices=2.5), "devices of Simulated"),
        (dict(devices=[]), "at least one device"),
        (dict(devices=[Device("a", "x", 1), Device("a", "y", 1)]), "got a more than once"),
        (dict(per_node=0), "per_node"),
        (dict(memory=0), "memory"),
        (dict(saving_every=-1), "saving_every"),
        (dict(start=-1.0), "start of Simulated must be a finite number from 0 on, got -1.0"),
        (dict(stop=float("inf")), "stop"),
        (dict(save=float("nan")), "save"),
        (dict(provision=-1), "provision"),
        (dict(loss_rate=-0.1), "loss_rate"),
        (dict(losses=[(-1, "node 0/device 0")]), "time of a loss"),
        (dict(losses=[(1, "gpu 7")]), "got 'gpu 7': choose of node 0/device 0"),
        (dict(losses=[(1, "node 0/device 0"), (2, "node 0/device 0")]), "is not at 2 seconds"),
        (dict(arrivals=[(1, Device("node 0/device 0", "x", 1))]), "is there at 1 seconds already"),
        (dict(arrivals=[(float("nan"), Device("new", "x", 1))]), "time of a loss or an arrival"),
        (dict(arrivals=[(1, Device("new", "x", 1))], provision=9, losses=[(5, "new")]), "'new' is not at 5 seconds"),
        (dict(speeds={"h200": 0.0}), "speed of 'h200'"),
        (dict(unit_seconds=0.0), "unit_seconds"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, said):
    with pytest.raises(ps.StudyError, match=said):
        Simulated(**{"devices": 2, **given})


def test_a_device_may_arrive_again_under_the_name_of_one_that_was_lost(simulate):
    lost = Device("node 0/device 0", "x", 1)
    run = simulate(devices=1, losses=[(1, lost.name)], arrivals=[(2, lost)])
    assert [type(e) for e in (*run.wait(), *run.wait())] == [DeviceLost, DeviceAdded]


NUMBERS = ("devices", "per_node", "memory", "saving_every", "seed", "opening", "start", "stop", "save", "provision")
NUMBERS += ("loss_rate", "most", "unit_seconds")


@pytest.mark.parametrize(
    "wrong", ["x", None, float("nan"), float("inf"), -1, True, [[]], pytest.param(10**400, id="great"), 1j]
)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_simulation_by_what_is_no_number_is_one_message(name, wrong):
    if (name, wrong) in (("most", None), ("unit_seconds", None), ("seed", -1)):
        return
    with pytest.raises(ps.StudyError, match=rf"^{name} of Simulated must (be|have) "):
        ps.Simulated(**{"devices": 1, name: wrong})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(devices=10**12), "devices of Simulated must be at most 1000000, got 1000000000000"),
        (dict(devices="8"), "devices of Simulated must be a whole number from 1 on, got '8'"),
        (dict(devices=[Device("a", "x", "2")]), "the memory of the device 'a' of Simulated must be a whole number"),
        (dict(devices=[Device("a", None, 2)]), "must have its name, type and node as text"),
        (dict(devices=["a"]), "devices of Simulated must have devices as penstock.bundle.Device, got 'a'"),
        (dict(type=None), "type of Simulated must be a text"),
        (dict(curve=(1, 2)), r"curve of Simulated must be a penstock.Curve, got \(1, 2\)"),
        (dict(curves=[1]), r"curves of Simulated must be a dict of penstock.Curve .* got \[1\]"),
        (dict(curves={("a", "b"): 1}), "curves of Simulated must be a dict of penstock.Curve"),
        (dict(speeds=2), "speeds of Simulated must be a dict"),
        (dict(speeds={"a": "fast"}), "the speed of 'a' of Simulated must be a finite number above 0, got 'fast'"),
        (dict(unit_seconds={"a": -1}), "the unit_seconds of 'a' of Simulated must be a finite number above 0"),
        (dict(losses=5), r"losses of Simulated must be a list of \(seconds, a name\), got 5"),
        (dict(losses=[(1,)]), r"losses of Simulated must be a list of \(seconds, a name\)"),
        (dict(losses=[("x", "a")]), "the time of a loss or an arrival of Simulated must be a finite number"),
        (dict(losses=[(1, 2)]), "losses of Simulated must have the names of devices, got 2"),
        (dict(arrivals=[(1, "a")]), "arrivals of Simulated must have devices as penstock.bundle.Device"),
        (dict(returns="yes"), "returns of Simulated must be True or False, got 'yes'"),
    ],
)
def test_another_wrong_setting_of_a_simulation_is_one_message(settings, said):
    with pytest.raises(ps.StudyError, match=said):
        ps.Simulated(**{"devices": 1, **settings})


def test_a_simulation_takes_numbers_of_numpy():
    made = ps.Simulated(devices=np.int64(2), start=np.float32(0.5), speeds={"simulated": np.float64(2)})
    assert made == ps.Simulated(devices=2, start=0.5, speeds={"simulated": 2.0})
    assert type(made.devices) is int
