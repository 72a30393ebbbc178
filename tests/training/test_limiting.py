"""Power limits are tried while trials train, kept, and set; the prior one returns."""

import warnings
from copy import copy
from itertools import count

import pytest

import penstock as ps
from penstock.bundle import Bundle
from penstock.energy import power
from penstock.energy.meter import MeterError
from penstock.energy.nvml import Gpu, NvmlError
from penstock.log.events import Limited, Opened
from penstock.training import limiting
from penstock.training.limiting import Limiter
from penstock.training.runs.base import Run
from tests.energy.conftest import gpus as gpus
from tests.energy.nvml import fake
from tests.studies import log, studies
from tests.tasks import Blobs

study = studies(Blobs, {"lr": ps.loguniform(1e-3, 1)}, trials=2, algorithm=ps.Random(budget=8))


class FakeRun(Run):
    """A run whose steps take longer below a limit of 500 W, by a clock that the device's counter follows."""

    certain, together, settled = 0, 1, True
    declare = events = over = None

    def __init__(self, folder, limits=None):
        super().__init__(None, Bundle("a", ("cuda:0",), (), signature="mlp", limits=limits or {}))
        self.folder, self.time = folder, [0.0]
        fake.make(folder, clock=0.0, since=0.0, draw=650.0)

    @property
    def clock(self):
        return self.time[0]

    def after(self):
        """The next such run on this device."""
        made = copy(self)
        made.steps = 0
        return made

    def train(self, seconds):
        self.step(seconds, min(1.0, fake.look(self.folder)["limit"] / 500.0))
        self.time[0] += seconds
        fake.change(self.folder, clock=self.clock)

    def step(self, seconds, pace):
        self.steps += round(seconds * 100 * pace)


def found(run, eta, clock=None):
    limiter = Limiter("cuda:0", Gpu("GPU-fake"), eta, clock=lambda: run.clock)
    told = []
    for _ in range(40):
        if (line := limiter.boundary(run)) is not None:
            told.append(line)
        run.train(limiting.SLICE)
    return limiter, told


@pytest.mark.parametrize(("eta", "limit"), [(0.0, 500.0), (0.5, 500.0), (1.0, 500.0)])
def test_the_limit_of_least_cost_is_found_set_and_given_back(gpus, eta, limit):
    """Below 500 W each step takes as much longer as it draws less."""
    run = FakeRun(gpus)
    run.certain = 10**7  # so long that all limits are tried
    limiter, (line,) = found(run, eta)
    assert set(line.table) == {round(one) for one in power.limits(200.0, 700.0)}
    assert line.set
    if eta:
        assert (line.limit, line.seconds) == (limit, 1.0)
        assert line.joules == pytest.approx(500 / 650, rel=1e-3)
    assert fake.look(gpus)["limit"] == line.limit
    limiter.close()
    assert fake.look(gpus)["limit"] == 700.0


def test_where_little_is_certain_four_limits_and_the_neighbours_of_the_best_are_tried(gpus):
    limiter, (line,) = found(FakeRun(gpus), 1.0)
    limiter.close()
    assert len(line.table) <= 6
    assert line.joules < 0.8


def test_what_an_earlier_study_measured_is_set_at_once(gpus):
    table = {700: (0.01, 650.0), 550: (0.01, 540.0), 400: (0.011, 390.0), 350: (0.012, 340.0), 200: (0.03, 190.0)}
    run = FakeRun(gpus, limits={1: table | {300: (0.015, 290.0), 399: (0.001, 1.0)}})
    limiter, told = found(run, 1.0)
    assert [line.limit for line in told] == [350.0]
    assert fake.look(gpus)["sets"] == [350.0]
    limiter.close()


def test_a_run_that_is_not_settled_is_not_measured(gpus):
    run = FakeRun(gpus)
    run.settled = False
    limiter, told = found(run, 1.0)
    assert (told, fake.look(gpus)["sets"]) == ([], [])
    limiter.close()


def test_a_meter_that_fails_midway_gives_the_limit_back(gpus, monkeypatch):
    run = FakeRun(gpus)
    limiter, readings = Limiter("cuda:0", Gpu("GPU-fake"), 1.0, clock=lambda: run.clock), count()

    def read():
        if next(readings) > 2:
            raise MeterError("it is gone")
        return 0.0

    monkeypatch.setattr(limiter.own._meter, "read", read)
    told = []
    for _ in range(9):
        told += filter(None, [limiter.boundary(run)])
        run.train(limiting.SLICE)
    assert [line.reason for line in told] == ["the power limit is only observed: it is gone"]
    assert len(fake.look(gpus)["sets"]) > 1
    assert fake.look(gpus)["limit"] == 700.0


@pytest.fixture
def limitable(gpus, monkeypatch):
    """The fake device meters this CPU and is limited, and slices take no time."""
    monkeypatch.setenv("PENSTOCK_METER", "nvml:GPU-fake")
    monkeypatch.setattr(limiting, "SLICE", 0.0)
    return gpus


def lines():
    return [event for event in log() if isinstance(event, Limited) and event.signature]


def lines_of_devices():
    return [event for event in log() if isinstance(event, Limited) and not event.signature]


def test_a_study_limits_its_device_and_gives_the_limit_back(limitable):
    study(objective=0.5).run(progress=False, power="limit", sharing="solo")
    (line,) = lines()
    assert line.set
    assert len(line.table) >= 4
    assert fake.look(limitable)["sets"][-1] == fake.look(limitable)["limit"] == 700.0
    study(name="next", objective=0.5).run(progress=False, power="limit", sharing="solo")
    (again,) = [event for event in log("next") if isinstance(event, Limited)]
    assert (again.set, again.limit, again.table) == (True, line.limit, line.table)
    assert "were measured before" in again.reason
    assert fake.look(limitable)["limit"] == 700.0
    study(name="seen", objective=0.5).run(progress=False, power="observe", sharing="solo")
    (seen,) = [event for event in log("seen") if isinstance(event, Limited)]
    assert (seen.set, seen.limit, seen.table) == (False, line.limit, line.table)


def test_an_error_of_the_study_gives_the_limit_back(limitable, monkeypatch):
    """The disk is full once the limit was set."""
    from penstock.log.writer import Log

    append = Log.append

    def full(log, event):
        if isinstance(event, Limited) and event.set:
            raise OSError(28, "No space left on device")
        append(log, event)

    monkeypatch.setattr(Log, "append", full)
    with pytest.raises(OSError, match="No space"):
        study(objective=0.5).run(progress=False, power="limit", sharing="solo")
    assert len(fake.look(limitable)["sets"]) > 1
    assert fake.look(limitable)["limit"] == 700.0


def test_without_permission_it_observes_and_says_so_once(limitable):
    fake.change(limitable, permission=False)
    with pytest.warns(UserWarning, match=r"only observed: NVML says: Insufficient Permissions") as said:
        result = study(objective=0.5).run(progress=False, power="limit", sharing="solo")
    assert len([one for one in said if "only observed" in str(one.message)]) == 1
    assert result.ended == "done"
    assert "by objective=0.5" in lines_of_devices()[-1].reason, "what would be best is told all the same"
    assert fake.look(limitable)["sets"] == []


def test_observing_and_a_plain_run_never_set(limitable):
    with warnings.catch_warnings(record=True):
        study(objective=1.0).run(progress=False, power="observe", sharing="solo")
        study(name="plain", objective=1.0).run(progress=False, sharing="solo")
    assert fake.look(limitable)["sets"] == []


def test_a_recurring_job_finds_its_limit_and_knows_what_a_unit_would_cost_without_it(limitable):
    def made():
        sizes = {"batch_sizes": [8, 16], "default": 16, "target": 0.62, "max_budget": 40, "recurrences": 40}
        config = {"lr": 0.1, "momentum": 0.5}
        return ps.Recurring(Blobs(), config, metric="loss", mode="min", policy="default", name="job", **sizes)

    for _ in range(4):
        made().run(power="limit", progress=False)
    found = [event for event in log("job") if isinstance(event, Limited) and event.signature]
    assert "were measured before" in found[-1].reason, "a call has the limit from its first step on, once it is known"
    opened = [event.settings["kept"]["phases"][-1] for event in log("job") if isinstance(event, Opened)]
    assert opened[0]["default_cost"] is None
    assert opened[-1]["default_cost"] > 0
    assert fake.look(limitable)["limit"] == 700.0


def test_a_mig_slice_is_known_by_its_own_name_so_that_it_says_why_it_has_no_meter(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7,MIG-8")
    assert limiting.uuid_of("cuda:0") == "MIG-7"
    with pytest.raises(NvmlError, match="a MIG slice has no meter and no power limit of its own"):
        Gpu(limiting.uuid_of("cuda:0"))


def test_where_time_alone_counts_no_limit_is_tried(limitable):
    with pytest.warns(UserWarning, match="only observed: by objective=0 time alone counts"):
        study().run(progress=False, power="limit", sharing="solo")
    assert fake.look(limitable)["sets"] == []
