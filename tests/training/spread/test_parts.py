"""Batches that memory is too short for: taken in parts, one after another, with the curve of the whole."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.bundle import Bundle, Job, Left, Measured, Placement, TrialFinished, TrialStopped
from penstock.executors.processes.executor import ProcessExecutor
from penstock.log.states import Folder
from penstock.training.spread.parts import Part
from penstock.trial import Report
from tests.contracts.executors import Exact, alone
from tests.tasks import TimeFirst

CONFIG = {"lr": 0.05}


class Plain(Exact):
    """Without BatchNorm; its memory holds so many rows."""

    holds = 10**6

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 2)).double()

    def loss(self, model, batch, config):
        if torch.is_grad_enabled() and len(batch[0]) > self.holds:
            raise torch.OutOfMemoryError("Tried to allocate more than there is")
        return super().loss(model, batch, config)


class Short(Plain):
    holds = 5


class Normalized(Short):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2)).double()


class Accepting(Normalized):
    accumulate = True


class Weighted(Short):
    def loss(self, model, batch, config):
        super().loss(model, batch, config)
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([0.1, 0.9]).double())


class Nested(Short):
    """Batches with names, as a dataset of dicts gives them."""

    def data(self, config):
        return tuple(Rows(*pair) for pair in super().data(config))

    def loss(self, model, batch, config):
        return super().loss(model, (batch["x"], batch["y"][0]), config)

    def metrics(self, model, batch, config):
        return super().metrics(model, (batch["x"], batch["y"][0]), config)


class Rows(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": (self.y[index], str(index))}


def tuned(task, units=3):
    study = ps.Study(task, {"lr": ps.grid([0.05])}, metric="loss", mode="min", algorithm=ps.Grid(budget=units))
    return study.run(sharing="solo", progress=False).trials[0]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where memory runs out is what the tasks say


@pytest.mark.parametrize("task", [Short(), Nested()])
def test_the_curve_is_that_of_whole_batches(task):
    """Of 16 rows 5 fit: two parts are too few, four are not; of the last batch, of 10, parts are 2 and 3 rows."""
    trial = tuned(task)
    for row, expected in zip(trial.curve, alone(Plain(), 0, CONFIG, 3), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-9)


def test_batch_norm_is_not_shown_parts_unless_that_is_accepted():
    why = "nor can it be taken in parts: BatchNorm would see parts of a batch: set accumulate = True"
    assert why in tuned(Normalized()).error
    assert len(tuned(Accepting()).curve) == 3


def test_a_loss_that_is_no_mean_is_not_taken_in_parts():
    trial = tuned(Weighted())
    assert "it is no mean over samples" in trial.error


def test_what_does_not_fit_at_all_fails():
    class Nothing(Short):
        holds = 0

    with pytest.raises(ps.TaskError, match="Tried to allocate more than there is"):
        tuned(Nothing())


def test_what_cannot_be_cut_is_not():
    with pytest.raises(ValueError, match=r"a tensor of \(3,\) in a batch of 4"):
        Part(0, 2, 4).cut((torch.zeros(4, 2), torch.zeros(3)))


# On several devices


class Late(Plain):
    """Memory gets short on the second of its workers: before it trains, and again while it does."""

    calls = 0

    def loss(self, model, batch, config):
        self.calls += 1
        second = dist.is_initialized() and dist.get_rank() == 1
        self.holds = 10**6 if self.calls < 3 or not second else 7 if self.calls < 30 else 3
        return super().loss(model, batch, config)


class Ragged(Accepting):
    """Of its last batch each of two workers has one row."""

    batch_size = 22


def spread(task, **more):
    """What happens to a trial on two devices, which is placed again from its state each time that it is stopped."""
    events, state = [], None
    executor = ProcessExecutor(Job(task, 0, "loss", "min", Folder(Path("states"))), 2)
    try:
        for attempt in range(1, 5):
            placement = Placement(0, attempt, CONFIG, 5, state)
            executor.place(Bundle(f"bundle {attempt}", ("cpu:0", "cpu:1"), (placement,), "distributed", "a", **more))
            while not (left := [e for e in events if isinstance(e, Left) and e.attempt == attempt]):
                events += executor.wait()
            if not isinstance(left[0], TrialStopped):
                break
            state = left[0].state
    finally:
        executor.close()
    return events


@pytest.mark.parametrize(("task", "stops", "more"), [(Short(), 2, {"measure": True}), (Late(), 2, {})])
def test_on_several_devices_all_take_smaller_parts_once_memory_ran_out_on_one(task, stops, more):
    events = spread(task, **more)
    assert [type(e) for e in events].count(TrialStopped) == stops
    assert isinstance(events[-1], TrialFinished)
    reports = {e.unit: e.metrics["loss"] for e in events if isinstance(e, Report)}
    for unit, expected in enumerate(alone(Plain(), 0, CONFIG, 5), 1):
        assert reports[unit] == pytest.approx(expected["loss"], abs=1e-9)
    measured = [e.table.keys() for e in events if isinstance(e, Measured)]
    assert measured == ([{1, 2}] if more else [])


def test_on_several_devices_batch_norm_is_not_shown_parts_either():
    events = spread(Normalized())
    (measured,) = {e.reason for e in events if isinstance(e, Measured)}
    assert measured.endswith("BatchNorm would see parts of a batch: set accumulate = True in the task to accept that")
    assert measured.startswith("never on several devices: a batch does not fit into memory")
    events = spread(Ragged())
    assert [e.unit for e in events if isinstance(e, Report)] == [1, 2, 3, 4, 5]


class Sequences(Exact):
    """Time first, in three steps: as many as one of three workers has of the 10 rows of a last batch."""

    unit_steps = 5  # of 6 in an epoch

    def model(self, config):
        return TimeFirst().double()


def test_workers_that_meet_again_before_a_short_batch_know_which_rows_are_theirs():
    executor = ProcessExecutor(Job(Sequences(), 0, "loss", "min", Folder(Path("states"))), workers=3)
    names, reports = tuple(device.name for device in executor.devices()), []
    try:
        for attempt, budget in ((1, 1), (2, 3)):
            begun = Placement(0, attempt, CONFIG, budget, reports[-1].state if reports else None)
            executor.place(Bundle(f"bundle {attempt}", names, (begun,), "distributed", "one signature"))
            left = []
            while not left:
                events = executor.wait()
                reports += [e for e in events if isinstance(e, Report)]
                left = [e for e in events if isinstance(e, Left)]
            assert isinstance(left[0], TrialFinished), left
    finally:
        executor.close()
    for report, expected in zip(reports, alone(Sequences(), 0, CONFIG, 3), strict=True):
        assert report.metrics == pytest.approx(expected, abs=1e-9)
