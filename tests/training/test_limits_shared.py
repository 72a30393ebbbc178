"""Power limits where a run is not alone, or not one: pieces of runs, packs, other processes, several devices."""

import pytest

from penstock.bundle import Device, Job, Limited, Placement
from penstock.energy.lease import Lease
from penstock.energy.meter import CHOSEN
from penstock.energy.nvml import Gpu
from penstock.executors.processes.executor import ProcessExecutor
from penstock.executors.processes.seats import Seat
from penstock.training import limiting
from penstock.training.limiting import Limiter
from tests.contracts.executors import CONFIG, Exact, ExecutorContract
from tests.energy.conftest import gpus as gpus
from tests.energy.nvml import fake
from tests.training.test_limiting import FakeRun


def limiter_of(run, eta=0.5):
    return Limiter("cuda:0", Gpu("GPU-fake"), eta, clock=lambda: run.clock)


def test_a_limit_is_tried_over_several_runs_where_each_is_shorter_than_a_slice(gpus):
    """As a recurring job has them, a unit at a time; a run's end tells what is known so far."""
    run = FakeRun(gpus)
    limiter, told = limiter_of(run), []
    for _ in range(40):
        run = run.after()
        for _ in range(2):
            told += filter(None, [limiter.boundary(run)])
            run.train(1.0)
        told += filter(None, [limiter.left(run)])
        run.time[0] += 7.0  # something else, which counts for no limit
        fake.change(gpus, clock=run.clock)
    assert [len(line.table) for line in told] == [2, 3, 4, 5, 6, 6]
    assert told[-1].limit == 500.0
    assert told[-1].table[500] == pytest.approx((0.01, 500.0), rel=1e-3)
    limiter.close()


def test_a_bundle_whose_trials_leave_gives_what_it_gave_while_they_were_there(gpus):
    """At a fused run's end it has no trials, and its steps are not those of a bundle any more."""
    run = FakeRun(gpus)
    run.together = 4
    limiter = limiter_of(run)
    for _ in range(3):
        limiter.boundary(run)
        run.train(limiting.SLICE)
    run.together = 0
    line = limiter.left(run)
    assert (line.size, set(line.table)) == (4, {700, 550})
    assert [seconds for seconds, _ in line.table.values()] == pytest.approx([0.04, 0.04], rel=1e-2)
    limiter.close()


class FakePack(FakeRun):
    """Two parts, one of which takes far more steps; only the other's become longer below 500 W."""

    alike = "a x1 + b x4", 5
    progress = {}

    def step(self, seconds, pace):
        a, b = self.progress.get(("a", 1), 0.0), self.progress.get(("b", 4), 0.0)
        self.progress = {("a", 1): a + 1000 * seconds, ("b", 4): b + 10 * seconds * pace}


def test_a_pack_is_tried_as_a_whole_and_each_of_its_parts_counts_alike(gpus):
    pack = FakePack(gpus)
    limiter, told = limiter_of(pack, eta=0.0), []
    for _ in range(12):
        told += filter(None, [limiter.boundary(pack)])
        pack.train(limiting.SLICE)
    (line,) = told
    assert (line.signature, line.size, line.limit) == ("a x1 + b x4", 5, 700.0)
    assert line.table[200][0] / line.table[700][0] == pytest.approx(1 / (0.5 + 0.5 * 0.4))
    limiter.close()


def test_nothing_is_tried_while_another_process_holds_the_device_and_the_prior_limit_is_its_first_ones(gpus):
    run = FakeRun(gpus)
    with Lease(Gpu("GPU-fake")) as other:
        other.wish(300.0)
        limiter = limiter_of(run)
        assert limiter.own.prior == 700.0
        for _ in range(5):
            limiter.boundary(run)
            assert fake.look(gpus)["limit"] == 700.0, "the highest wish holds"
            run.train(limiting.SLICE)
    told = []
    for _ in range(12):
        told += filter(None, [limiter.boundary(run)])
        run.train(limiting.SLICE)
    assert [line.limit for line in told] == [500.0]
    limiter.close()


def test_a_slice_into_which_another_process_came_does_not_count(gpus):
    run = FakeRun(gpus)
    limiter = limiter_of(run)
    for _ in range(2):
        limiter.boundary(run)
        run.train(limiting.SLICE)
    before = fake.look(gpus)["limit"]
    assert before < 700.0
    with Lease(Gpu("GPU-fake")) as other:
        other.wish(650.0)
        run.train(limiting.SLICE)
        limiter.boundary(run)
        assert fake.look(gpus)["limit"] == 700.0, "it wishes no other limit than the prior one"
    (search,) = limiter._searches.values()
    assert set(search.tried) == {700.0}
    limiter.close()


class Hasty(Exact):
    """In its workers, a slice takes no time."""

    def data(self, config):
        limiting.SLICE = limiting.LOOK = 0.0
        return super().data(config)


@pytest.fixture
def two(gpus, tmp_path):
    """What is told of the limits of a trial that two workers train, each on a fake device of its own."""

    def train(units, **second):
        uuids = [fake.make(gpus, "GPU-0", draw=400.0), fake.make(gpus, "GPU-1", **{"draw": 600.0, **second})]
        of = [{CHOSEN: f"nvml:{uuid}"} for uuid in uuids]
        seats = [Seat(Device(f"cpu:{i}", "cpu", 2**30, threads=1), "cpu", 1, one) for i, one in enumerate(of)]
        job = Job(Hasty(), 0, "loss", "min", tmp_path / "states", eta=0.5, power="limit")
        suite, executor = ExecutorContract(), ProcessExecutor(job, 2, seats)
        try:
            suite.spread(executor, Placement(4, 1, CONFIG, units))
            events = suite.until_left(executor)
        finally:
            executor.close()
        suite.assert_as_alone([one for one in events if not isinstance(one, Limited)], 4, CONFIG, units)
        return [event for event in events if isinstance(event, Limited)]

    return train


def test_the_devices_of_a_trial_have_one_limit_and_their_watts_are_summed(two, gpus):
    (line,) = two(12, least=300.0)
    assert (line.device, line.signature, line.size, line.set) == ("cpu:0", "one signature on 2", 1, True)
    assert {300, 550, 700} <= set(line.table), "of the limits that both can have"
    assert line.table[700][1] == pytest.approx(1000.0, rel=0.2)
    assert line.table[300][1] == pytest.approx(600.0, rel=0.2)
    assert "on each of 2 devices" in line.reason
    sets = [[watts for watts in fake.look(gpus, f"GPU-{i}")["sets"] if watts != 700.0] for i in (0, 1)]
    assert sets[0] == sets[1] != []


def test_where_one_of_its_devices_cannot_be_limited_none_is_and_that_is_said(two, gpus):
    (line,) = two(4, permission=False)
    assert (line.set, "Insufficient Permissions" in line.reason) == (False, True)
    assert [fake.look(gpus, f"GPU-{i}")["limit"] for i in (0, 1)] == [700.0, 700.0]
