"""Packs on a worker: each part trains as if it were alone, whoever comes and goes and whatever goes wrong beside it."""

import random
import time
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

from penstock.bundle import Bundle, Job, Measured, StateSaved, TrialFailed, TrialFinished, TrialStopped
from penstock.speed.packing import how_many
from penstock.task import as_task
from penstock.training.fused import stepping
from penstock.training.fused.agreement import agree
from penstock.training.fused.audit import Audits
from penstock.training.fused.ways import Native
from penstock.training.runs import packed
from penstock.training.runs.base import Run
from penstock.training.worker import RUNS, Worker
from penstock.trial import Report
from tests.training.runs.test_fused import Driven, Exact

OPTIMIZERS = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr / 10),
    "rmsprop": lambda params, lr: torch.optim.RMSprop(params, lr=lr / 10),
}


class Unlike(Exact):
    """Networks, optimizers and batch sizes as the config says; one draws from Python's and numpy's generators too."""

    def model(self, config):
        self.width = config["width"]  # a value outside of the model, which is the trial's own
        layers = [nn.Linear(6, config["width"]), nn.BatchNorm1d(config["width"]), nn.ReLU(), nn.Dropout(0.3)]
        return nn.Sequential(*layers, nn.Linear(config["width"], 2)).double()

    def optimizer(self, params, config):
        return OPTIMIZERS[config["optimizer"]](params, config["lr"])

    def loss(self, model, batch, config):
        loss = super().loss(model, batch, config)
        if config.get("wrong"):
            raise ValueError("raised")
        if config.get("noisy"):
            loss = loss * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        return loss * (self.width / config["width"])


class Packed(Driven):
    """A worker with a pack; ``parts`` are the bundles that were declared last, by name."""

    def __init__(self, task, tmp_path, **job):
        super().__init__(task, tmp_path)
        self.worker = Worker(Job(as_task(task), 0, "loss", "min", self.states, **job), "cpu")
        self.parts = {}

    def solo(self, *placements):
        for one in placements:
            self.parts[f"trial {one.trial}"] = Bundle(f"trial {one.trial}", ("cpu",), (one,))

    def fused(self, name, *placements, signature=None):
        self.parts[name] = Bundle(name, ("cpu",), placements, "fused", signature or name, 4)

    def free(self, trial):
        for name, part in list(self.parts.items()):
            left = tuple(p for p in part.placements if p.trial != trial)
            self.parts[name] = replace(part, placements=left)
            if not left:
                del self.parts[name]

    def declare(self, name="pack", measure=False):
        parts = tuple(self.parts.values())
        placements = tuple(p for part in parts for p in part.placements)
        self.worker.place(Bundle(name, ("cpu",), placements, "packed", measure=measure, parts=parts))

    def advance(self, boundaries):
        for _ in range(boundaries):
            if self.worker.idle:
                return
            if (event := self.worker.advance()) is not None:
                self.events.append(event)
                if isinstance(event, TrialFinished | TrialStopped | TrialFailed):
                    self.free(event.trial)

    def read(self, state):
        """A state as one of a trial that has drawn nothing: what a trial draws shows in its curve."""
        return {**super().read(state), "random": None}

    def last(self, trial):
        return next((e for e in reversed(self.of(trial)) if not isinstance(e, StateSaved)), None)

    @property
    def there(self):
        return [p.trial for part in self.parts.values() for p in part.placements]

    def again(self, trial):
        """A placement of a trial that was made to leave, from its last state."""
        self.attempt += 1
        return replace(self.placed[trial], attempt=self.attempt, state=self.of(trial, TrialStopped)[-1].state)


@pytest.fixture
def pack(tmp_path):
    return Packed(Unlike(), tmp_path)


ALIKE = {"width": 5, "optimizer": "sgd"}
KINDS = st.fixed_dictionaries(
    {
        "width": st.integers(2, 9),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "batch_size": st.sampled_from([7, 16, 30]),
        "noisy": st.booleans(),
    }
)


@settings(max_examples=6, deadline=None)
@given(kinds=st.lists(KINDS, min_size=2, max_size=4), alike=st.integers(0, 3), seed=st.integers(0, 2**16))
def test_unlike_trials_that_come_and_go_are_each_as_if_alone(tmp_path_factory, kinds, alike, seed):
    pack, trials, pick = Packed(Unlike(), tmp_path_factory.mktemp("pack")), count(), random.Random(seed)
    waiting = [pack.placement(next(trials), pick.randint(1, 3), **kind) for kind in kinds]
    pack.solo(waiting.pop())
    if alike:
        pack.fused("alike", *(pack.placement(next(trials), pick.randint(1, 3), **ALIKE) for _ in range(alike)))
    pack.declare()
    while not pack.worker.idle or waiting:
        pack.advance(pick.randint(1, 9))
        gone = [t for t in pack.placed if t not in pack.there and isinstance(pack.last(t), TrialStopped)]
        waiting += [pack.again(t) for t in gone if all(p.trial != t for p in waiting)]
        if waiting and (pick.random() < 0.5 or pack.worker.idle):
            pack.solo(waiting.pop())
        elif len(pack.there) > 1 and pick.random() < 0.3:
            pack.free(pick.choice(pack.there))
        pack.declare()
    pack.assert_as_alone(*pack.placed)
    assert all(isinstance(pack.last(trial), TrialFinished) for trial in pack.placed)


def test_parts_of_a_pack_are_audited_as_any_fused_bundle(pack, monkeypatch):
    right = Native.run
    pack.fused("alike", *(pack.placement(trial, 2, **ALIKE) for trial in range(3)))
    pack.solo(pack.placement(3, 2, **ALIKE | {"width": 3}))
    pack.declare()
    pack.advance(4)
    monkeypatch.setattr(Audits, "due", lambda *_, **__: True)
    monkeypatch.setattr(Native, "run", lambda *args: right(*args) * 1.01)  # as a step that has frozen something would
    pack.advance(1000)
    assert pack.worker.idle
    (found,) = (e.reason for e in pack.measured() if e.way == "solo")
    assert found.startswith("a step together was another than alone: ")
    assert [pack.left(trial) for trial in range(3)] == [TrialStopped(trial, trial + 1, None) for trial in range(3)]
    pack.assert_as_alone(3)


def test_a_trial_that_raises_or_cannot_be_made_costs_its_neighbours_nothing(pack):
    pack.solo(pack.placement(0, 3, **ALIKE, wrong=True), pack.placement(1, 3, **ALIKE, batch_size=30))
    pack.solo(pack.placement(2, 2, **ALIKE, wrong="model", batch_size=10**6))
    pack.fused("alike", *(pack.placement(trial, 2, **ALIKE) for trial in (3, 4)))
    pack.declare()
    pack.go_on()
    assert "ValueError: raised" in pack.left(0).error
    assert "above its 90 training samples" in pack.left(2).error
    pack.assert_as_alone(1, 3, 4)


def test_a_bundle_that_trains_becomes_a_part_and_is_not_disturbed(pack):
    alone = [pack.placement(trial, 3, **ALIKE) for trial in (0, 1)]
    pack.place(*alone, name="a")
    pack.go_on(until=lambda event: isinstance(event, Report))
    run = pack.worker._run
    pack.fused("a", *alone)
    pack.solo(pack.placement(2, 2, width=7, optimizer="adam"))
    pack.declare("a")
    assert pack.worker._run._parts["a"].run is run
    pack.go_on()
    pack.assert_as_alone(0, 1, 2)


def test_a_pack_that_is_stopped_goes_on_in_another_mode(pack):
    pack.solo(pack.placement(0, 4, width=3, optimizer="rmsprop", noisy=True))
    pack.fused("alike", *(pack.placement(trial, 4, **ALIKE) for trial in (1, 2)))
    pack.declare()
    pack.go_on(until=lambda event: isinstance(event, Report))
    pack.parts.clear()
    pack.declare()
    pack.go_on()
    assert all(isinstance(pack.left(trial), TrialStopped) for trial in range(3))
    for trial in range(3):
        pack.worker.place(Bundle(f"solo {trial}", ("cpu",), (pack.again(trial),)))
        pack.go_on()
    pack.assert_as_alone(0, 1, 2)


def test_two_bundles_of_one_signature_keep_the_numbers_of_their_own_trials(tmp_path, monkeypatch):
    """What was compared with a trial alone in one of them holds for the other."""
    compared = []
    monkeypatch.setattr(stepping, "agree", lambda *given: compared.append(agree(*given)))
    pack = Packed(Exact(), tmp_path)
    for name, trials in (("first", (0, 1)), ("second", (2, 3))):
        made = (pack.placement(trial, 2, rate=0.1 + 0.2 * trial) for trial in trials)
        pack.fused(name, *made, signature="one")
    pack.declare()
    pack.advance(10_000)
    assert not pack.of(0, TrialFailed)
    assert not [event for event in pack.events if isinstance(event, Measured) and event.way == "solo"]
    pack.assert_as_alone(0, 1, 2, 3)
    assert len(compared) == 2, "a full batch and the last, shorter one"


class Counts(Exact):
    """Notes the samples that each trial's loss is given."""

    seen = defaultdict(list)

    def data(self, config):
        (x, y), valid = super().data(config)
        return (torch.cat([x[:, :5], torch.arange(90.0).double()[:, None]], 1), y), valid

    def loss(self, model, batch, config):
        self.seen[config["batch_size"]] += batch[0][:, 5].int().tolist()
        return super().loss(model, batch, config)


def test_each_trial_sees_each_sample_once_an_epoch_in_the_order_of_all(tmp_path):
    pack = Packed(Counts(), tmp_path)
    pack.solo(*(pack.placement(size, 2, batch_size=size) for size in (7, 16, 30, 90)))
    pack.declare()
    pack.go_on()
    orders = list(Counts.seen.values())
    assert len(orders) == 4
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == sorted([*range(90), *range(90)])
    assert sorted(orders[0][:90]) == list(range(90))


def draws(trial):
    """Draws from every global generator between its reports, and waits for the worker now and then."""
    total = trial.state or 0.0
    for unit in range(trial.state is not None, 5):
        total += random.random() + float(np.random.rand()) + float(torch.rand(()))
        trial.report(unit + 1, state=total, loss=total)


def test_functions_take_turns_between_their_reports(tmp_path):
    alone = {}
    for trial in range(3):
        single = Packed(draws, tmp_path / f"{trial}")
        single.solo(single.placement(trial, 3))
        single.declare()
        single.go_on()
        alone[trial] = [event.metrics for event in single.of(trial, Report)]
    pack = Packed(draws, tmp_path / "pack")
    pack.solo(*(pack.placement(trial, 3) for trial in range(3)))
    pack.declare()
    pack.go_on()
    assert {trial: [event.metrics for event in pack.of(trial, Report)] for trial in range(3)} == alone
    assert all(isinstance(pack.left(trial), TrialFinished) for trial in range(3))


def test_the_seconds_of_the_parts_are_those_of_the_device(pack, monkeypatch):
    clock = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    pack.solo(*(pack.placement(trial, 2, width=3 + trial, optimizer="sgd") for trial in range(3)))
    pack.fused("alike", *(pack.placement(trial, 2, **ALIKE) for trial in (3, 4)))
    began = next(clock)
    pack.declare()
    pack.go_on()
    used = sum(e.usage.device_seconds for e in pack.events if isinstance(e, Report))
    whole = next(clock) - began
    assert 0.9 * whole < used <= whole


class Slow(Run):
    """A run whose work is enqueued ahead: it is busy until it is waited for, and ends after some calls."""

    def __init__(self, worker, bundle, calls, said):
        super().__init__(worker, bundle)
        self.calls, self.said, self.ahead = calls, said, False

    over = property(lambda self: self.calls == 0)
    busy = property(lambda self: self.ahead)

    def declare(self, bundle):
        return True

    def wait(self):
        self.said.append(f"wait {self.bundle.name}")
        self.ahead = False

    def events(self):
        while self.calls:
            self.calls -= 1
            self.ahead = True
            self.said.append(self.bundle.name)
            yield None


def test_a_busy_part_is_left_alone_and_the_first_that_was_called_is_waited_for(pack, monkeypatch):
    said = []
    monkeypatch.setitem(RUNS, "solo", lambda worker, bundle: Slow(worker, bundle, 2, said))
    pack.solo(*(pack.placement(trial, 1, **ALIKE) for trial in range(3)))
    pack.declare()
    while not pack.worker.idle:
        pack.worker.advance()
    names = [f"trial {trial}" for trial in range(3)]
    assert said == [*names, *(word for name in names for word in (f"wait {name}", name))]


def test_a_pack_times_its_parts_on_steps_that_count_and_tells_it_once(pack, monkeypatch):
    monkeypatch.setattr("penstock.training.runs.weighing.STEPS", 4)  # so that no trial ends before all are timed
    monkeypatch.setattr("penstock.training.runs.weighing.throughput", lambda alone, together: 1.0 / len(alone))
    pack.solo(*(pack.placement(trial, 24, width=3 + trial, optimizer="sgd") for trial in range(2)))
    pack.fused("alike", *(pack.placement(trial, 24, **ALIKE) for trial in (2, 3)))
    pack.declare(measure=True)
    pack.go_on()
    ended = next(
        i for i, e in enumerate(pack.events) if isinstance(e, TrialFinished)
    )  # after which it may be told anew
    (told,) = (e for e in pack.events[:ended] if isinstance(e, Measured) and e.kind == "packing")
    assert told.table == {2: 1 / 2, 3: 1 / 3}, "all gained too little, and so did two"
    assert told.size == how_many(told.table) == 1
    assert "2 bundles together train" in told.reason
    pack.assert_as_alone(0, 1, 2, 3)


def test_parts_that_gain_nothing_at_once_stay_and_take_long_turns_and_are_timed_again_when_trials_are_few(
    pack, monkeypatch
):
    monkeypatch.setattr("penstock.training.runs.weighing.STEPS", 2)
    monkeypatch.setattr("penstock.training.runs.weighing.throughput", lambda alone, packed: 1.0)
    monkeypatch.setattr(packed, "SPELL", 1e9)
    pack.solo(*(pack.placement(trial, 6 + 2 * trial, width=3 + trial, optimizer="sgd") for trial in range(5)))
    pack.declare(measure=True)
    pack.go_on()
    told = [i for i, e in enumerate(pack.events) if isinstance(e, Measured) and e.kind == "packing"]
    assert [pack.events[i].size for i in told] == [1, 1]
    ended = [i for i, e in enumerate(pack.events) if isinstance(e, TrialFinished)]
    assert told[0] < ended[2] < told[1] < ended[4], "again once fewer than half of the trials are left"
    turns = [e.trial for e in pack.events[told[0] : ended[2]] if isinstance(e, Report)]
    assert turns == sorted(turns, key=turns.index), "one trial to its end, and then another"
    pack.assert_as_alone(*range(5))


class Read(Dataset):
    """Samples with a random part, counted; the sample of an index may be missing or depend on who asks."""

    def __init__(self, first, last):
        self.first, self.length, self.asked, self.missing = first, last - first, Counter(), -1

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.missing:
            raise OSError("no such sample")
        self.asked[index] += 1
        x = torch.arange(6.0).double() * (self.first + index) % 7
        return {"x": x + 0.1 * torch.rand((), dtype=torch.float64) + 0.1 * random.random(), "y": index % 2, "w": "a"}


class Reads(Unlike):
    """Unlike trials that read one dataset, whose samples are dicts with a text."""

    sets = None

    def data(self, config):
        self.sets = self.sets or (Read(0, 90), Read(90, 120))
        return self.sets

    def loss(self, model, batch, config):
        assert batch.pop("w") == ["a"] * len(batch["y"])
        batch["x"].sub_(1.0)  # what it is given is its own
        return super().loss(model, (batch["x"], batch["y"]), config)

    def metrics(self, model, batch, config):
        return super().metrics(model, (batch["x"], batch["y"]), config)


def reading(tmp_path, task, units=2, sizes=(7, 16, 16, 30, 90)):
    """A pack whose trials cut one order by batch sizes of their own."""
    pack = Packed(task, tmp_path)
    for trial, size in enumerate(sizes):
        pack.solo(pack.placement(trial, units, width=3 + trial, optimizer="adam", batch_size=size))
    return pack


def test_a_sample_is_read_once_for_all_trials_whatever_their_batch_sizes(tmp_path):
    task = Reads()
    pack = reading(tmp_path, task, units=4)
    pack.declare()
    pack.go_on()
    train, valid = (one.asked.total() for one in task.sets)
    apart = 5 * 4 * 90
    assert train - 4 * 90 < 250 < apart - 4 * 90, "but for the first steps, of trials that began alone, and audits"
    assert valid < 5 * 30 < 5 * 4 * 30
    pack.assert_as_alone(*range(5))
    sources = [source for _, data in pack.worker.trials.data.loaded for source in (data.train, data.valid)]
    assert not any(common._kept or common._fronts for source in sources for common in source._commons.values())


def test_a_bound_on_what_is_kept_costs_reads_and_no_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.training.reading.KEPT", 3000)
    monkeypatch.setattr("penstock.training.reading.ROOM", 500)
    pack = reading(tmp_path, Reads())
    pack.declare()
    while not pack.worker.idle:
        pack.advance(1)
        for _, data in pack.worker.trials.data.loaded if pack.worker.trials.data else ():
            assert all(common._bytes <= 3000 for common in data.train._commons.values())
    pack.assert_as_alone(*range(5))


class Short(Reads):
    """Trials of two steps."""

    unit_steps = 2


def test_a_sample_that_cannot_be_read_fails_only_the_trials_that_come_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "TURN", 0.0)  # each advance is another part's
    task = Short()
    pack = reading(tmp_path, task, units=1, sizes=(30, 16, 7, 30))
    pack.declare()
    pack.advance(1)
    ((_, data),) = pack.worker.trials.data.loaded
    task.sets[0].missing = int(data.train.order(0)[50])
    pack.go_on()
    assert [isinstance(pack.left(trial), TrialFinished) for trial in range(4)] == [False, True, True, False]
    assert "no such sample" in pack.left(0).error
    task.sets[0].missing = -1
    pack.assert_as_alone(1, 2)


class Stateful(Read):
    """Its samples depend on how often it was asked."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + self.asked.total()}


def test_a_dataset_with_a_state_of_its_own_is_read_by_each_trial(tmp_path):
    task = Reads()
    task.sets = Stateful(0, 90), Read(90, 120)
    pack = reading(tmp_path, task)
    pack.declare()
    pack.go_on()
    ((_, data),) = pack.worker.trials.data.loaded
    assert data.train._commons is None
    assert data.valid._commons is not None
    assert task.sets[0].asked.total() > 5 * 2 * 90 - 100
