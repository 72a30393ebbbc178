"""The suite that every executor must pass: inherit ``ExecutorContract`` and define ``make``."""

import itertools

import pytest
import torch

import penstock as ps
from penstock.bundle import Bundle, Job, Left, Measured, Placement, StateSaved, TrialFailed, TrialFinished, TrialStopped
from penstock.executors.local import find_devices
from penstock.training.checkpoint import load
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.trial import Report
from tests.tasks import Blobs, Fails

CONFIG = {"lr": 0.05}
attempts = itertools.count(1)  # every placement has an attempt of its own


def alone(task, trial, config, units, seed=0):
    """The curve of a trial trained by the bare loop, on the device that executors on this machine use."""
    device = torch.device(find_devices()[0].name)
    data = DataCache(task, seed, device).get(config)
    run = Training(task, trial, config, data, seed=seed, device=device, metric="loss", mode="min")
    return [metrics for metrics in _until(run, units) if metrics is not None]


def _until(run, units):
    for metrics in run.steps():
        yield metrics
        if run.unit == units:
            return


class Exact(Fails):
    """In float64, where trials that train together give what they give alone to 1e-9; some cannot be made."""

    def data(self, config):
        return tuple(tuple(t.double() if t.is_floating_point() else t for t in part) for part in super().data(config))

    def model(self, config):
        if config.get("broken"):
            raise RuntimeError("no such model")
        return super().model(config).double()


class Shared(Exact):
    """Each of two devices has a share of it."""

    shards = 2

    def loss(self, model, batch, config):
        loss = super().loss(model, batch, config)
        return loss * len(batch[0]) if config.get("sum") else loss


class Contract:
    """How bundles are placed on any executor, and what comes of them."""

    @classmethod
    def make(cls, job):
        raise NotImplementedError

    def place(self, executor, *placements, device=0, name="a", **fused):
        executor.place(Bundle(name, (executor.devices()[device].name,), placements, **fused))

    def spread(self, executor, *placements, devices=(0, 1), name="a", **more):
        names = tuple(executor.devices()[i].name for i in devices)
        executor.place(Bundle(name, names, placements, "distributed", "one signature", **more))

    def fuse(self, executor, *placements, **where):
        signature = executor.describe([CONFIG], train=False)[0].signature
        self.place(executor, *placements, **where, mode="fused", signature=signature, size=8)

    def assert_as_alone(self, events, trial, config, units):
        """Every unit was reported once and in order, as the trial alone would."""
        own = [e for e in events if isinstance(e, Report) and e.trial == trial]
        assert [e.unit for e in own] == list(range(1, units + 1))
        for report, expected in zip(own, alone(Exact(), trial, config, units), strict=True):
            assert report.metrics == pytest.approx(expected, abs=1e-9)

    def until_left(self, executor, count=1):
        """The events until ``count`` trials have left their bundles."""
        events = []
        while count > 0:
            for event in executor.wait():
                events.append(event)
                count -= isinstance(event, Left)
        return events

    def curve(self, events):
        return [event.metrics for event in events if isinstance(event, Report)]


class ExecutorContract(Contract):
    """What ``penstock.executors.base.Executor`` promises."""

    endless = 10**6  # units of a bundle that is to be stopped: so many that its step is compiled meanwhile

    @pytest.fixture(scope="class")
    @classmethod
    def executor(cls, tmp_path_factory):
        job = Job(Fails(), 0, "loss", "min", tmp_path_factory.mktemp("states"))
        executor = cls.make(job)
        executor.states = job.states
        yield executor  # each test leaves it idle
        executor.close()

    @pytest.fixture(scope="class")
    @classmethod
    def exact(cls, tmp_path_factory):
        executor = cls.make(Job(Exact(), 0, "loss", "min", tmp_path_factory.mktemp("states")))
        yield executor  # each test leaves it idle
        executor.close()

    def test_a_trial_trains_to_its_grant_and_no_further(self, executor):
        attempt = next(attempts)
        self.place(executor, Placement(4, attempt, CONFIG, 3))
        events = [e for e in self.until_left(executor) if not isinstance(e, StateSaved | Measured)]
        assert [type(e) for e in events] == [Report, Report, Report, TrialFinished]
        assert [e.unit for e in events[:3]] == [1, 2, 3]
        assert {(e.trial, e.attempt) for e in events} == {(4, attempt)}
        assert self.curve(events) == alone(Blobs(), 4, CONFIG, 3)
        assert events[2].state.unit == 3, "a state is written when a trial reports its budget"
        assert load(executor.states, events[2].state)["step"] == 18
        assert sum(e.usage.steps for e in events[:3]) == 18

    def test_a_trial_goes_on_from_its_state(self, executor):
        self.place(executor, Placement(4, next(attempts), CONFIG, 2))
        first = self.until_left(executor)
        state = [e for e in first if isinstance(e, Report)][-1].state
        self.place(executor, Placement(4, next(attempts), CONFIG, 4, state))
        assert self.curve(first + self.until_left(executor)) == alone(Blobs(), 4, CONFIG, 4)

    def test_a_bundle_declared_empty_stops_with_a_state(self, executor):
        self.place(executor, Placement(4, next(attempts), CONFIG, 10**6))
        events = executor.wait()
        self.place(executor)
        events += self.until_left(executor)
        assert isinstance(events[-1], TrialStopped)
        done = len(self.curve(events))
        self.place(executor, Placement(4, next(attempts), CONFIG, done + 2, events[-1].state))
        assert self.curve(events + self.until_left(executor)) == alone(Blobs(), 4, CONFIG, done + 2)

    def test_a_grant_can_change_while_the_trial_runs(self, executor):
        attempt = next(attempts)
        self.place(executor, Placement(4, attempt, CONFIG, 10**6))
        self.place(executor, Placement(4, attempt, CONFIG, 4))
        events = self.until_left(executor)
        assert isinstance(events[-1], TrialFinished)
        done = len(self.curve(events))  # above 4 where the trial was faster than the news
        assert 4 <= done < 10**6
        assert self.curve(events) == alone(Blobs(), 4, CONFIG, done)

    def test_another_trial_replaces_the_one_that_runs(self, executor):
        self.place(executor, Placement(4, next(attempts), CONFIG, 10**6))
        self.place(executor, Placement(5, next(attempts), CONFIG, 2), name="b")
        events = self.until_left(executor, 2)
        assert [type(e) for e in events if e.trial == 4][-1] is TrialStopped
        assert self.curve([e for e in events if e.trial == 5]) == alone(Blobs(), 5, CONFIG, 2)

    def test_a_trial_that_raises_says_why_and_costs_the_next_one_nothing(self, executor):
        self.place(executor, Placement(0, next(attempts), {"lr": 0.05, "fail": True}, 3))
        (failed,) = self.until_left(executor)
        assert "ZeroDivisionError" in failed.error
        assert not failed.died
        self.place(executor, Placement(1, next(attempts), CONFIG, 2))
        assert self.curve(self.until_left(executor)) == alone(Blobs(), 1, CONFIG, 2)

    def test_an_inherited_state_gives_the_weights_and_keeps_the_config(self, executor):
        self.place(executor, Placement(4, next(attempts), CONFIG, 2))
        state = [e for e in self.until_left(executor) if isinstance(e, Report)][-1].state
        self.place(executor, Placement(5, next(attempts), {"lr": 0.0}, 3, state, inherited=True))
        own = [e for e in self.until_left(executor) if isinstance(e, Report)]
        assert [e.unit for e in own] == [3]

    def test_waiting_ends_at_its_timeout_and_when_woken(self, executor):
        self.place(executor, Placement(4, next(attempts), CONFIG, 10**6))
        while executor.wait(0.0):
            pass
        executor.wake()
        events = executor.wait()
        assert all(not isinstance(e, TrialStopped | TrialFinished) for e in events)
        self.place(executor)
        self.until_left(executor)

    def test_a_dry_batch_describes_a_config_and_changes_nothing(self, executor):
        (description,) = executor.describe([CONFIG], train=True)
        assert description.metrics == ("loss", "accuracy")
        assert description.bytes > 0
        self.place(executor, Placement(4, next(attempts), CONFIG, 2))
        assert self.curve(self.until_left(executor)) == alone(Blobs(), 4, CONFIG, 2)

    def test_a_task_that_cannot_train_is_refused_by_its_dry_batch(self, executor):
        with pytest.raises(ps.TaskError, match="above its 90 training samples"):
            executor.describe([{"lr": 0.1, "batch_size": 1000}], train=True)

    def test_the_clock_goes_forward(self, executor):
        before = executor.now()
        assert executor.now() >= before >= 0

    def test_devices_say_what_they_are(self, executor):
        assert all(device.memory > 0 and device.type and device.name for device in executor.devices())

    def test_trials_that_differ_in_what_may_differ_have_one_signature(self, executor):
        one, other, larger, broken = executor.describe(
            [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.1, "batch_size": 8}, {"lr": 0.1, "batch_size": 10**6}], train=False
        )
        assert one.signature == other.signature is not None
        assert larger.signature not in (one.signature, None)
        assert larger.batch_size == 8
        assert broken.signature is None, "its trial says why when it trains"

    def test_a_fused_bundle_is_told_of_trial_by_trial_as_if_each_were_alone(self, exact):
        placed = [(trial, {"lr": 0.02 * (trial + 1)}, 1 + trial % 3) for trial in range(4)]
        self.fuse(exact, *(Placement(trial, next(attempts), config, units) for trial, config, units in placed))
        events = self.until_left(exact, 4)
        for trial, config, units in placed:
            self.assert_as_alone(events, trial, config, units)
            own = [e for e in events if getattr(e, "trial", None) == trial and not isinstance(e, StateSaved)]
            report, finished = own[-2:]
            assert isinstance(finished, TrialFinished)
            assert report.state.unit == units

    def test_a_fused_bundle_changes_when_it_is_declared_again(self, exact):
        stays, goes, comes = (Placement(trial, next(attempts), CONFIG, self.endless) for trial in (1, 2, 3))
        self.fuse(exact, stays, goes)
        events = []
        while len(self.curve(events)) < 4:
            events += exact.wait()
        self.fuse(exact, stays, comes)
        events += self.until_left(exact)
        (stopped,) = (e for e in events if isinstance(e, TrialStopped))  # others may have reported since
        assert stopped.trial == 2
        units = len([e for e in events if isinstance(e, Report) and e.trial == 2])
        again = Placement(2, next(attempts), CONFIG, units + 2, stopped.state)
        self.fuse(exact, stays, comes, again)
        events += self.until_left(exact)
        self.place(exact)
        events += self.until_left(exact, 2)
        self.assert_as_alone(events, 2, CONFIG, units + 2)
        for trial in (1, 3):
            left = [e for e in events if getattr(e, "trial", None) == trial][-1]
            done = len([e for e in events if isinstance(e, Report) and e.trial == trial])
            assert isinstance(left, TrialStopped)
            self.assert_as_alone(events, trial, CONFIG, done)
            self.place(exact, Placement(trial, next(attempts), CONFIG, done + 1, left.state))  # it goes on solo
            more = self.until_left(exact)
            self.assert_as_alone(events + more, trial, CONFIG, done + 1)

    def test_a_trial_of_a_fused_bundle_that_cannot_be_made_fails_alone(self, exact):
        broken = {**CONFIG, "broken": True}
        self.fuse(exact, *(Placement(trial, next(attempts), (CONFIG, broken)[trial == 2], 2) for trial in (1, 2, 3)))
        events = self.until_left(exact, 3)
        (failed,) = (e for e in events if isinstance(e, TrialFailed))
        assert failed.trial == 2
        assert "no such model" in failed.error
        for trial in (1, 3):
            self.assert_as_alone(events, trial, CONFIG, 2)


class SpreadContract(ExecutorContract):
    """What an executor of several devices keeps besides: a trial on all of them is the trial on one."""

    endless = 10**3  # its workers train as any: compiling, which takes them ten seconds, is seen on one device

    def test_a_trial_on_several_devices_is_the_trial_on_one(self, exact):
        attempt = next(attempts)
        self.spread(exact, Placement(4, attempt, CONFIG, 4))
        events = self.until_left(exact)
        self.assert_as_alone(events, 4, CONFIG, 4)
        assert isinstance(events[-1], TrialFinished)
        assert all(e.attempt == attempt for e in events if isinstance(e, Report))
        assert events[-2].state.unit == 4

    def test_it_grows_shrinks_and_moves(self, exact):
        events, state = [], None
        for unit, devices in enumerate([(0,), (0, 1), (1,), (1, 0), (0, 1)], 1):
            placement = Placement(4, next(attempts), CONFIG, unit, state)
            if len(devices) == 1:
                self.place(exact, placement, device=devices[0], name=f"bundle {unit}")
            else:
                self.spread(exact, placement, devices=devices, name=f"bundle {unit}")
            events += self.until_left(exact)
            state = [e for e in events if isinstance(e, Report)][-1].state
        self.assert_as_alone(events, 4, CONFIG, 5)

    def test_it_stops_wherever_it_is_and_goes_on_from_there(self, exact):
        self.spread(exact, Placement(4, next(attempts), CONFIG, 10**6))
        events = exact.wait()
        exact.place(Bundle("a", tuple(d.name for d in exact.devices()[:2]), ()))
        events += self.until_left(exact)
        assert isinstance(events[-1], TrialStopped)
        done = sum(isinstance(e, Report) for e in events)
        self.spread(exact, Placement(4, next(attempts), CONFIG, done + 2, events[-1].state), devices=(1, 0))
        self.assert_as_alone(events + self.until_left(exact), 4, CONFIG, done + 2)

    def test_what_each_number_of_devices_gives_is_measured_while_it_trains(self, exact):
        self.spread(exact, Placement(4, next(attempts), CONFIG, 6), measure=True)
        events = self.until_left(exact)
        self.assert_as_alone(events, 4, CONFIG, 6)
        (measured,) = (e for e in events if isinstance(e, Measured))
        assert (measured.kind, set(measured.table)) == ("scaling", {1, 2})
        assert all(seconds > 0 for seconds in measured.table.values())
        assert measured.device == exact.devices()[0].name
        assert measured.reason.startswith("a step takes ")
        assert sum(e.usage.steps for e in events if isinstance(e, Report)) == 36, "none is forgotten while it measures"

    def test_a_trial_that_ends_before_all_is_measured(self, exact):
        self.spread(exact, Placement(4, next(attempts), CONFIG, 1), measure=True)
        events = self.until_left(exact)
        self.assert_as_alone(events, 4, CONFIG, 1)
        assert not any(isinstance(e, Measured) for e in events)
        self.place(exact, Placement(5, next(attempts), CONFIG, 1), device=1, name="b")
        self.assert_as_alone(self.until_left(exact), 5, CONFIG, 1)

    def test_an_error_in_one_of_its_parts_is_the_trials(self, executor):
        self.spread(executor, Placement(3, next(attempts), {"lr": 0.05, "fail": True}, 3))
        (failed,) = self.until_left(executor)
        assert "ZeroDivisionError" in failed.error
        assert not failed.died
        self.spread(executor, Placement(4, next(attempts), CONFIG, 1), devices=(1, 0), name="b")
        assert [type(e) for e in self.until_left(executor) if not isinstance(e, StateSaved)] == [Report, TrialFinished]

    def test_a_bundle_that_follows_one_on_several_devices(self, exact):
        self.spread(exact, Placement(4, next(attempts), CONFIG, 2))
        self.assert_as_alone(self.until_left(exact), 4, CONFIG, 2)
        self.place(exact, Placement(5, next(attempts), CONFIG, 3), device=1, name="b")
        self.assert_as_alone(self.until_left(exact), 5, CONFIG, 3)


class SharesContract(Contract):
    """What it keeps of a task with shards; by then the executors of the class before have given their devices back."""

    @pytest.fixture
    @classmethod
    def shared(cls, tmp_path):
        executor = cls.make(Job(Shared(), 0, "loss", "min", tmp_path))
        yield executor
        executor.close()

    def test_a_trial_in_shares_is_the_trial_on_one(self, shared):
        self.spread(shared, Placement(4, next(attempts), CONFIG, 10**6))
        events = shared.wait()
        shared.place(Bundle("a", tuple(d.name for d in shared.devices()[:2]), ()))
        events += self.until_left(shared)
        assert isinstance(events[-1], TrialStopped)
        done = sum(isinstance(e, Report) for e in events)
        self.spread(shared, Placement(4, next(attempts), CONFIG, done + 2, events[-1].state), devices=(1, 0), name="b")
        events += self.until_left(shared)
        self.assert_as_alone(events, 4, CONFIG, done + 2)
        self.spread(shared, Placement(5, next(attempts), {**CONFIG, "sum": True}, 3), name="c")
        (failed,) = self.until_left(shared)
        assert "cannot be trained with shards = 2" in failed.error
        assert "it is no mean over samples" in failed.error
        assert not failed.died
