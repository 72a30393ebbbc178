"""Bundles on a worker: what it says of each trial, whoever comes and goes and whatever goes wrong."""

import time
from itertools import count

import pytest
import torch
from torch import nn

from penstock.bundle import Bundle, Job, Left, Measured, Placement, StateSaved, TrialFailed, TrialFinished, TrialStopped
from penstock.errors import TaskError
from penstock.speed.sizes import best_size
from penstock.training.checkpoint import load
from penstock.training.fused import compiles, measuring, speeding
from penstock.training.fused.bundle import Fused
from penstock.training.fused.compiled import FastStep
from penstock.training.fused.measuring import Measuring
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.stepping import Stepping
from penstock.training.fused.ways import Native
from penstock.training.runs import ahead
from penstock.training.runs import base as runs
from penstock.training.runs import fused as fused_run
from penstock.training.worker import Worker
from penstock.trial import Report
from tests.tasks import Blobs
from tests.training.recorded import accelerate
from tests.training.together import Alone, Instead, Trials

LRS = (0.3, 0.1, 0.03, 0.01, 0.2, 0.02)


class Exact(Blobs):
    """In float64, with a dropout rate of its own; ``wrong`` says what goes wrong in a trial, and when."""

    def data(self, config):
        return tuple(tuple(t.double() if t.is_floating_point() else t for t in part) for part in super().data(config))

    def model(self, config):
        if config.get("wrong") == "model":
            raise RuntimeError("no such model")
        rate = nn.Dropout(config.get("rate", 0.3))
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), rate, nn.Linear(12, 2)).double()

    def scheduler(self, optimizer, config):
        wrong, when = config.get("wrong"), config.get("when", 0)
        if wrong in ("step", "unit"):
            return Raises(optimizer, when), wrong
        return super().scheduler(optimizer, config)


class Raises(torch.optim.lr_scheduler.LRScheduler):
    """Goes wrong after some steps, as OneCycleLR does after its last."""

    def __init__(self, optimizer, when):
        self.when = when
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch >= self.when > 0:
            raise ValueError("one step too many")
        return [group["lr"] for group in self.optimizer.param_groups]


class Raising(Exact):
    """Raises in the loss of a trial that says so."""

    def loss(self, model, batch, config):
        if config["wrong"]:
            raise ValueError("raised")
        return super().loss(model, batch, config)


class Driven:
    """A worker with a fused bundle; ``events`` has what it has said."""

    def __init__(self, task, tmp_path):
        self.task, self.states, self.events, self.attempt = task, tmp_path / "states", [], 0
        self.worker = Worker(Job(task, 0, "loss", "min", self.states), "cpu")
        self.placed = {}

    def placement(self, trial, budget, state=None, **config):
        self.attempt += 1
        made = Placement(trial, self.attempt, {"lr": LRS[trial % len(LRS)], **config}, budget, state)
        self.placed[trial] = made
        return made

    def place(self, *placements, size=4, name="a"):
        self.worker.place(Bundle(name, ("cpu",), placements, "fused", "signature", size))

    def go_on(self, until=lambda event: False):
        """Train until everybody has left, or something happens."""
        for _ in range(10_000):
            if self.worker.idle:
                return self
            event = self.worker.advance()
            if event is not None:
                self.events.append(event)
                if until(event):
                    return self
        raise AssertionError("the bundle comes to no end")

    def of(self, trial, kind=object):
        return [e for e in self.events if getattr(e, "trial", None) == trial and isinstance(e, kind)]

    def measured(self):
        return [e for e in self.events if isinstance(e, Measured) and e.kind == "sharing"]

    def left(self, trial):
        """How it left, which is the last that is said of it."""
        events = [e for e in self.of(trial) if not isinstance(e, StateSaved)]
        assert not any(isinstance(e, Left) for e in events[:-1])
        return events[-1]

    def read(self, state):
        return load(self.states, state)

    def assert_as_alone(self, *trials):
        """Curves, and the states that were written last, are those of the trials alone."""
        for trial in trials:
            reports = self.of(trial, Report)
            assert [e.unit for e in reports] == list(range(1, len(reports) + 1)), "no report twice, and none missing"
            config = self.placed[trial].config
            state = next(e.state for e in reversed(self.of(trial)) if getattr(e, "state", None))
            state = self.read(state)
            alone = Alone(Trials(self.task), trial, config, state["step"])
            alone.assert_like(state, [e.metrics for e in reports][: state["unit"]])


@pytest.fixture
def driven(tmp_path):
    return Driven(Exact(), tmp_path)


def test_each_trial_is_told_of_as_if_it_were_alone(driven):
    driven.place(*(driven.placement(trial, budget, rate=0.1 * trial) for trial, budget in enumerate((1, 3, 2, 3))))
    driven.go_on()
    for trial, budget in enumerate((1, 3, 2, 3)):
        kinds = [type(e) for e in driven.of(trial) if not isinstance(e, StateSaved)]
        assert kinds == [Report] * budget + [TrialFinished], "to its grant and no further"
        assert {e.attempt for e in driven.of(trial)} == {trial + 1}
        assert driven.of(trial, Report)[-1].state.unit == budget
        assert [e.usage.steps for e in driven.of(trial, Report)] == [6] * budget
        assert all(e.usage.device_seconds > 0 for e in driven.of(trial, Report))
    driven.assert_as_alone(0, 1, 2, 3)


def test_trials_enter_and_leave_when_the_bundle_is_declared_again(driven):
    first, second, third = (driven.placement(trial, 5) for trial in range(3))
    driven.place(first, second)
    driven.go_on(lambda e: isinstance(e, Report) and (e.trial, e.unit) == (0, 2))
    driven.place(first, third)
    driven.go_on(lambda e: isinstance(e, Report) and (e.trial, e.unit) == (2, 1))
    stopped = driven.left(1)
    assert isinstance(stopped, TrialStopped)
    assert stopped.state.step >= 12
    driven.place(first, third, driven.placement(1, 5, stopped.state))
    driven.go_on()
    assert [type(driven.left(trial)) for trial in (0, 2)] == [TrialFinished, TrialFinished]
    assert [e.unit for e in driven.of(1, Report)] == [1, 2, 3, 4, 5]
    driven.events = [e for e in driven.events if not isinstance(e, TrialStopped)]
    driven.assert_as_alone(0, 1, 2)


def test_a_grant_grows_and_shrinks_while_trials_run(driven):
    first, second = driven.placement(0, 9), driven.placement(1, 9)
    driven.place(first, second)
    driven.go_on(lambda e: isinstance(e, Report))
    driven.place(*(Placement(p.trial, p.attempt, p.config, budget) for p, budget in ((first, 3), (second, 4))))
    driven.go_on()
    assert [len(driven.of(trial, Report)) for trial in (0, 1)] == [3, 4]
    driven.assert_as_alone(0, 1)


def test_a_bundle_declared_empty_stops_everybody_with_a_state(driven):
    driven.place(*(driven.placement(trial, 100) for trial in range(3)))
    driven.go_on(lambda e: isinstance(e, Report) and e.unit == 2)
    driven.place()
    driven.go_on()
    assert [type(driven.left(trial)) for trial in range(3)] == [TrialStopped] * 3
    driven.assert_as_alone(0, 1, 2)


def test_another_bundle_takes_the_place_of_one_that_runs(driven):
    driven.place(*(driven.placement(trial, 100) for trial in range(2)))
    driven.go_on(lambda e: isinstance(e, Report))
    driven.place(*(driven.placement(trial, 2) for trial in range(2, 4)), name="b")
    driven.go_on()
    assert [type(driven.left(trial)) for trial in range(4)] == [
        TrialStopped,
        TrialStopped,
        TrialFinished,
        TrialFinished,
    ]
    driven.assert_as_alone(0, 1, 2, 3)


def test_whoever_is_taken_away_before_it_began_is_stopped_where_it_stood(driven):
    driven.place(driven.placement(0, 2))
    driven.place()
    driven.go_on()
    assert driven.left(0) == TrialStopped(0, 1, None)


def test_whoever_was_told_that_it_left_does_not_come_back_by_an_old_declaration(driven):
    first, second = driven.placement(0, 2), driven.placement(1, 2)
    driven.place(first, second)
    driven.place(first)
    driven.place(first, second)
    driven.go_on()
    assert driven.of(1) == [TrialStopped(1, 2, None)]
    driven.assert_as_alone(0)


def test_states_between_reports_are_those_of_the_trials_alone(driven, monkeypatch):
    monkeypatch.setattr(fused_run, "SAVING", float("inf"))  # saving is free: at every step
    driven.place(*(driven.placement(trial, 2) for trial in range(2)))
    driven.go_on()
    for trial in range(2):
        assert [e.state.step for e in driven.of(trial, StateSaved)] == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
        for saved in driven.of(trial, StateSaved)[::3]:
            state = load(driven.states, saved.state)
            curve = [e.metrics for e in driven.of(trial, Report)][: state["unit"]]
            Alone(Trials(driven.task), trial, {"lr": LRS[trial]}, saved.state.step).assert_like(state, curve)


# Whose error it is


def test_a_trial_that_cannot_be_made_fails_alone(driven):
    driven.place(driven.placement(0, 2), driven.placement(1, 2, wrong="model"), driven.placement(2, 2))
    driven.go_on()
    assert "no such model" in driven.left(1).error
    assert not driven.left(1).died
    driven.assert_as_alone(0, 2)


@pytest.mark.parametrize("wrong", ["step", "unit"])
@pytest.mark.parametrize("sick", [0, 1, 3])
def test_an_error_in_one_trials_scheduler_is_its_alone(driven, sick, wrong):
    when = {"step": 8, "unit": 1}[wrong]
    driven.place(
        *(driven.placement(trial, 3, **({"wrong": wrong, "when": when} if trial == sick else {})) for trial in range(4))
    )
    driven.go_on(lambda e: len(driven.events) > 100)
    assert "one step too many" in driven.left(sick).error
    assert len(driven.of(sick, Report)) == (1 if wrong == "step" else 0), "as far as it would have come alone"
    well = [trial for trial in range(4) if trial != sick]
    assert [type(driven.left(trial)) for trial in well] == [TrialFinished] * 3
    driven.assert_as_alone(*well)


def test_an_error_that_all_trials_make_is_told_of_each(tmp_path):
    class Task(Exact):
        def loss(self, model, batch, config):
            if len(batch[0]) < 16:
                raise ValueError("a short batch")
            return super().loss(model, batch, config)

    driven = Driven(Task(), tmp_path)
    driven.place(*(driven.placement(trial, 2) for trial in range(3)))
    driven.go_on(lambda e: len(driven.events) > 100)
    assert ["a short batch" in driven.left(trial).error for trial in range(3)] == [True] * 3
    assert not any(driven.left(trial).died for trial in range(3))
    assert {e.size for e in driven.measured()} == {4}, "memory has nothing to do with it"


def test_metrics_that_raise_for_one_trial_are_its_error_alone(tmp_path):
    class Task(Exact):
        def metrics(self, model, batch, config):
            metrics = super().metrics(model, batch, config)
            if not metrics["loss"].item() < 100:
                raise ValueError("diverged")
            return metrics

    driven = Driven(Task(), tmp_path)
    driven.place(driven.placement(0, 2), driven.placement(1, 2, lr=1e9), driven.placement(2, 2))
    driven.go_on(lambda e: len(driven.events) > 100)
    assert "diverged" in driven.left(1).error
    driven.assert_as_alone(0, 2)


class Stumbles(torch.optim.Adamax):
    """An optimizer that is not vectorised, and raises at the step that a trial names."""

    def step(self, closure=None):
        if any(float(state["step"]) == self.param_groups[0]["stumbles"] for state in self.state.values()):
            raise ValueError("stumbled")
        return super().step(closure)


class Stumbling(Exact):
    def optimizer(self, params, config):
        return Stumbles([{"params": list(params), "stumbles": config.get("stumbles", -1)}], lr=config["lr"])


def test_an_error_while_parameters_are_written_sends_everybody_to_the_last_state(tmp_path):
    driven = Driven(Stumbling(), tmp_path)
    driven.place(*(driven.placement(trial, 3, stumbles=8 if trial == 1 else -1) for trial in range(5)))
    driven.go_on()
    assert all(isinstance(e, TrialStopped) or e.died for e in map(driven.left, range(5))), "to be tried again"
    assert [len(driven.of(trial, Report)) for trial in range(5)] == [1] * 5
    assert driven.measured()[-1].size == 2, "half as many"


def test_whoever_was_still_to_come_when_a_bundle_gave_up_is_sent_back(tmp_path):
    driven = Driven(Stumbling(), tmp_path)
    first = [driven.placement(trial, 3, stumbles=2 if trial == 1 else -1) for trial in range(3)]
    driven.place(*first)
    driven.go_on(lambda e: isinstance(e, TrialFailed | TrialStopped))
    driven.place(*first, driven.placement(3, 3))
    driven.go_on()
    assert all(isinstance(driven.left(trial), TrialFailed | TrialStopped) for trial in range(3))
    assert driven.left(3) == TrialStopped(3, 4, None)
    driven.place(driven.placement(4, 1), name="b")
    driven.go_on()
    driven.assert_as_alone(4)


def test_a_trial_that_diverges_reports_so_and_the_others_train_on(driven):
    driven.place(driven.placement(0, 2), driven.placement(1, 2, lr=1e200), driven.placement(2, 2))
    driven.go_on()
    assert not driven.of(1, Report)[-1].metrics["loss"] < 1e9
    driven.assert_as_alone(0, 2)


@pytest.mark.parametrize(("steps", "kept"), [(2, None), (8, 8)])
def test_what_was_reported_is_kept_when_a_bundle_dissolves(driven, monkeypatch, steps, kept):
    step = Fused.step

    def refusing(self, **kwargs):
        if self.trials[0].step == steps:
            raise Unfusable("simulated")
        step(self, **kwargs)

    monkeypatch.setattr(Fused, "step", refusing)
    driven.place(*(driven.placement(trial, 3) for trial in range(2)))
    driven.go_on()
    assert [(e.way, e.size, e.reason) for e in driven.measured()[-1:]] == [("solo", 1, "simulated")]
    assert [e.state and e.state.step for e in map(driven.left, range(2))] == [kept] * 2


class Mapped(Exact):
    """Takes an operator that only the general way has a rule for."""

    def loss(self, model, batch, config):
        return super().loss(lambda x: torch.func.vmap(torch.sin)(model(x)), batch, config)


def test_a_way_that_was_not_taken_is_told_with_its_reason(tmp_path):
    driven = Driven(Mapped(), tmp_path)
    driven.place(*(driven.placement(trial, 1) for trial in range(2)))
    driven.go_on()
    assert driven.measured()[0].way == "general"
    assert "; not native: " in driven.measured()[0].reason


def test_trials_of_another_batch_size_begin_with_what_is_known_of_a_signature(driven):
    known = driven.worker.recipe(Bundle("a", (), "fused", ("cpu",), signature="64.abc", size=3))
    known.ways.pop(0)
    known.refusals.append("native: it is odd")
    known.agreed.add("a kind of batch")
    other = driven.worker.recipe(Bundle("b", (), "fused", ("cpu",), signature="128.abc"))
    assert (other.ways, other.refusals) == (known.ways, known.refusals)
    assert (other.agreed, other.size, other.way) == (set(), None, None)
    assert driven.worker.recipe(Bundle("c", (), "fused", ("cpu",), signature="64.other")).refusals == []
    assert driven.worker.recipe(Bundle("d", (), "fused", ("cpu",), signature="64.abc")) is known


def test_an_error_that_is_nobodys_is_told_of_each(driven, monkeypatch):
    def broken(self):
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr(Fused, "take_ended", broken)
    driven.place(*(driven.placement(trial, 2) for trial in range(3)))
    driven.go_on()
    assert all("of our own" in driven.left(trial).error for trial in range(3))
    assert not any(driven.left(trial).died for trial in range(3))


def test_an_error_says_all_and_an_error_in_the_task_what_is_wrong_with_it():
    assert runs.explain(TaskError("no optimizer")) == "no optimizer"
    assert runs.explain(ValueError("no number")) == "ValueError: no number"


@pytest.mark.parametrize(
    ("error", "died"), [(MemoryError(), True), (torch.OutOfMemoryError(), True), (RuntimeError("memory"), False)]
)
def test_a_lack_of_memory_may_be_gone_at_the_next_attempt(error, died):
    assert runs.out_of_memory(error) is died


# Memory


def short_of_memory(monkeypatch, most, training):
    """Simulated: no more than ``most`` trials fit into a forward, of training or of measuring."""
    run = Native.run

    def limited(self, function, params, *rest):
        if self.template.training is training and len(next(iter(params.values()))) > most:
            raise torch.OutOfMemoryError("simulated")
        return run(self, function, params, *rest)

    monkeypatch.setattr(Native, "run", limited)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_simulated_lack_of_memory_halves_the_bundle_and_is_told(driven, monkeypatch, most):
    short_of_memory(monkeypatch, most, training=True)
    driven.place(*(driven.placement(trial, 2) for trial in range(5)), size=8)
    driven.go_on()
    assert driven.measured()[-1].size == most
    assert "memory ran out" in driven.measured()[-1].reason
    driven.assert_as_alone(*range(5))


def test_simulated_lack_of_memory_in_measuring_loses_nothing(driven, monkeypatch):
    short_of_memory(monkeypatch, 2, training=False)
    driven.place(*(driven.placement(trial, 2) for trial in range(5)), size=8)
    driven.go_on()
    assert [type(driven.left(trial)) for trial in range(5)] == [TrialFinished] * 5
    assert driven.measured()[-1].reason.endswith("; measured one by one, because of a lack of memory")
    driven.assert_as_alone(*range(5))


def no_room_for_more_than(most, monkeypatch):
    """Simulated: there is memory for the states of so many trials."""
    enter = Fused.enter

    def limited(self, trial):
        if len(self.trials) >= most:
            raise torch.OutOfMemoryError("simulated")
        enter(self, trial)

    monkeypatch.setattr(Fused, "enter", limited)


def test_whoever_finds_no_room_is_sent_back_and_it_is_told(driven, monkeypatch):
    no_room_for_more_than(2, monkeypatch)
    driven.place(*(driven.placement(trial, 2) for trial in range(4)), size=8)
    driven.go_on()
    assert [driven.left(trial) for trial in (2, 3)] == [TrialStopped(2, 3, None), TrialStopped(3, 4, None)]
    assert driven.measured()[0].size == 2
    assert driven.measured()[0].reason == "memory ran out with more than 2 trials together"
    driven.assert_as_alone(0, 1)


def test_whoever_finds_no_room_alone_may_find_it_elsewhere(driven, monkeypatch):
    no_room_for_more_than(0, monkeypatch)
    driven.place(*(driven.placement(trial, 2) for trial in range(2)))
    driven.go_on()
    assert all(driven.left(trial).died for trial in range(2))
    assert not driven.measured()


# How many


def fake_times(monkeypatch, seconds):
    """Whatever a step takes, it is said to take ``seconds(size)``."""
    took = Measuring.took
    monkeypatch.setattr(
        measuring.Measuring, "took", lambda self, size, _, bytes: took(self, size, seconds(size), bytes)
    )


def test_the_size_is_measured_on_steps_that_count(driven, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.0 + 0.1 * size)
    driven.place(*(driven.placement(trial, 3) for trial in range(6)), size=None)
    driven.go_on()
    first = driven.measured()[0]
    assert sorted(first.table) == [1, 2, 4, 6]
    assert (first.way, first.size) == ("native", best_size(first.table, measuring.LARGEST))
    assert "6 trials together train at 4 steps/s, 4.1 times those of one alone (native)" in first.reason
    driven.assert_as_alone(*range(6))


def test_where_fusing_is_slower_it_says_so(driven, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.2 * size)
    driven.place(*(driven.placement(trial, 3) for trial in range(6)), size=None)
    driven.go_on()
    first = driven.measured()[0]
    assert first.size == 1
    assert "not worth it" in first.reason
    driven.assert_as_alone(*range(6))


@pytest.mark.parametrize("size", [None, 4])
def test_a_capture_that_fails_is_said_once_and_the_size_is_measured_on_plain_steps(driven, monkeypatch, size):
    fake_times(monkeypatch, lambda size: 1.0 + 0.1 * size)
    accelerate(monkeypatch, None)
    driven.place(*(driven.placement(trial, 6) for trial in range(4)), size=size)
    driven.go_on()
    said = [e.reason for e in driven.measured()]
    assert sum("not captured: 'NoneType' object is not callable" in reason for reason in said) == 1
    tables = [sorted(e.table) for e in driven.measured() if e.table]
    assert tables == ([[1, 2, 4]] if size is None else [])
    driven.assert_as_alone(*range(4))


def test_a_pause_in_the_middle_of_steps_that_were_laid_down_at_once_costs_no_bit(driven, monkeypatch):
    accelerate(monkeypatch)
    monkeypatch.setattr(ahead, "FIRST", 3)
    leapt, leap = [], Fused.leap

    def noted(fused, most):
        leapt.append(leap(fused, most))
        return leapt[-1]

    def amid(event=None):
        """Whether several steps were laid down just now, and no unit ended with them."""
        return leapt[-1:] in ([2], [3]) and all(trial.unit_step for trial in driven.worker.training.fused.trials)

    def go_on():
        """Train until units are in the middle of a leap's steps; then the trials are asked to leave."""
        leapt.clear()
        while not amid():
            driven.events += [event for event in [driven.worker.advance()] if event is not None]

    monkeypatch.setattr(Fused, "leap", noted)
    placements = [driven.placement(trial, 6) for trial in range(3)]
    driven.place(*placements)
    go_on()
    driven.place(placements[0], placements[2])  # one leaves, and comes back from its state
    driven.go_on(lambda e: isinstance(e, TrialStopped))
    placements[1] = driven.placement(1, 6, driven.left(1).state)
    driven.place(*placements)
    go_on()
    driven.place()  # all leave
    driven.go_on()
    stopped = [driven.of(trial, TrialStopped)[-1] for trial in range(3)]
    assert all(one.state.step % 6 for one in stopped), "in the middle of a unit"
    driven.place(*(driven.placement(trial, 6, one.state) for trial, one in enumerate(stopped)), name="b")
    driven.events = [e for e in driven.events if not isinstance(e, TrialStopped)]
    driven.go_on()
    assert [type(driven.left(trial)) for trial in range(3)] == [TrialFinished] * 3
    assert not driven.worker._recipes["signature"][0].refusals
    driven.assert_as_alone(0, 1, 2)


class Branching(Exact):
    """A loss that looks at its own size: trials go different ways."""

    def loss(self, model, batch, config):
        loss = super().loss(model, batch, config)
        return loss if loss < 0.7 else 2 * loss


def test_trials_that_lose_too_much_by_steps_in_parts_go_on_solo(tmp_path, monkeypatch):
    fake_times(monkeypatch, lambda size: 1e-9)  # so that any step in parts takes longer
    driven = Driven(Branching(), tmp_path)
    driven.place(*(driven.placement(trial, 8) for trial in range(4)), size=None)
    driven.go_on()
    first, *_, last = [told for told in driven.measured() if told.kind == "sharing"]
    assert first.size > 1
    assert last.size == 1
    assert "in parts at" in last.reason
    assert "not worth it" in last.reason
    driven.assert_as_alone(*range(4))


def test_an_error_in_the_first_steps_alone_is_the_first_trials(tmp_path, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.0)
    driven = Driven(Raising(), tmp_path)
    driven.place(*(driven.placement(trial, 2, wrong=trial == 0) for trial in range(4)), size=None)
    driven.go_on()
    assert "raised" in driven.left(0).error
    assert [type(driven.left(trial)) for trial in range(1, 4)] == [TrialFinished] * 3
    driven.assert_as_alone(1, 2, 3)


def test_whoever_comes_while_it_is_measured_is_measured_with_the_others(driven, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.0)
    placements = [driven.placement(trial, 3) for trial in range(6)]
    driven.place(*placements[:4], size=None)
    for _ in range(measuring.ALONE + 1):
        assert driven.worker.advance() is None
    driven.place(*placements, size=None)
    driven.go_on()
    assert len([e for e in driven.measured() if e.table]) == 1
    driven.assert_as_alone(*range(6))


class Short(Exact):
    unit_steps = 2


def test_a_unit_that_ends_while_the_first_trial_is_timed_is_reported(tmp_path, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.0)
    driven = Driven(Short(), tmp_path)
    driven.place(*(driven.placement(trial, 5) for trial in range(3)), size=None)
    driven.go_on()
    assert [len(driven.of(trial, Report)) for trial in range(3)] == [5] * 3
    assert all(e.usage.steps == 2 for e in driven.events if isinstance(e, Report))
    driven.assert_as_alone(*range(3))


def test_a_size_that_is_known_by_then_is_not_measured(driven):
    first = driven.placement(0, 2)
    driven.place(first, size=None)
    driven.go_on(lambda e: isinstance(e, Report))
    driven.place(first, driven.placement(1, 2), driven.placement(2, 2), size=2)
    driven.go_on()
    assert [(e.size, e.table) for e in driven.measured()] == [(2, {})]
    driven.assert_as_alone(0, 1, 2)


def test_seconds_of_the_device_are_divided_and_counted_once(driven, monkeypatch):
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    driven.place(*(driven.placement(trial, 3) for trial in range(4)))
    driven.go_on()
    seconds = [e.usage.device_seconds for e in driven.events if isinstance(e, Report)]
    assert len(seconds) == 12
    assert 0 < sum(seconds) <= next(ticks)
    assert max(seconds) < 2 * min(seconds), "a report has those of its own unit"


class Faster(FastStep):
    """Stands for a compiled step."""

    made, taken, seconds = 0, 0, 0  # how many were made, how many steps they took, and what making one takes

    def __init__(self, *given):
        super().__init__(*given[:2])
        Faster.made += 1
        for _ in range(self.seconds):
            time.perf_counter()

    def __call__(self, inputs):
        Faster.taken += 1
        return self._train(*self._tensors(inputs))


@pytest.fixture
def faster(monkeypatch):
    """Steps are compiled after the first unit. The clock goes on when it is looked at, and by ten with a plain step."""
    ticks, plain = count(), Stepping._step
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(Stepping, "_step", lambda *given: [next(ticks) for _ in range(10)] and plain(*given))
    monkeypatch.setattr(compiles, "MADE", 0.0)
    monkeypatch.setattr(speeding, "CompiledStep", Faster)
    for name in ("made", "taken", "seconds"):
        monkeypatch.setattr(Faster, name, 0)
    Faster.beside = Instead(monkeypatch)
    return Faster


def test_a_faster_step_is_kept_whatever_it_took_to_make(driven, faster):
    faster.seconds = 3600
    driven.place(*(driven.placement(trial, 4) for trial in range(3)))
    driven.go_on()
    assert faster.made == 1
    assert faster.taken == 1 + 3 * 5, "to be compared, then in all full batches of three units"
    driven.assert_as_alone(0, 1, 2)


def test_training_goes_on_while_a_step_is_compiled_and_it_is_taken_within_a_unit(driven, faster):
    faster.beside.looks = 4
    driven.place(*(driven.placement(trial, 4) for trial in range(3)))
    driven.go_on()
    assert len(faster.beside.asked) == faster.beside.loads == faster.made == 1, "one trace, of which all comes"
    assert faster.taken == 1 + (5 - 4) + 2 * 5, "the second unit begins plain"
    driven.assert_as_alone(0, 1, 2)


def test_a_step_that_is_not_there_in_time_or_no_longer_repays_it_is_not_taken(driven, faster, monkeypatch):
    faster.beside.looks = 14
    driven.place(*(driven.placement(trial, 4) for trial in range(3)))
    driven.go_on(lambda e: isinstance(e, Report) and e.unit == 3)
    assert max(faster.beside.asked.values()) == 13
    monkeypatch.setattr(compiles, "MADE", 1e9)
    driven.go_on()
    assert not faster.made
    driven.assert_as_alone(0, 1, 2)


def test_a_step_that_cannot_be_compiled_is_told_and_not_asked_for_again(driven, faster, monkeypatch):
    def ready(self, traced):
        self.asked[traced.key] = self.asked.get(traced.key, 0) + 1
        if self.asked[traced.key] == 3:
            raise Unfusable("KeyError: no such operator")
        return False

    monkeypatch.setattr(Instead, "ready", ready)
    driven.place(*(driven.placement(trial, 3) for trial in range(3)))
    driven.go_on()
    assert list(faster.beside.asked.values()) == [3]
    assert driven.measured()[-1].reason.endswith("not compiled: KeyError: no such operator")
    driven.assert_as_alone(0, 1, 2)


def test_where_memory_is_too_short_for_a_faster_step_the_plain_one_goes_on(driven, faster, monkeypatch):
    tried = []

    def short(*given):
        tried.append(given)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speeding, "agree_plain", short)
    monkeypatch.setattr(Fused, "step_each", None)
    driven.place(*(driven.placement(trial, 4) for trial in range(3)))
    driven.go_on()
    assert len(tried) == 1, "and it is not tried again"
    assert [type(driven.left(trial)) for trial in range(3)] == [TrialFinished] * 3
    driven.assert_as_alone(0, 1, 2)


def test_where_memory_is_too_short_beside_a_captured_step_that_goes_first(driven, faster, monkeypatch):
    plain, ran_out = Stepping._step, []

    def short(fused, *given):
        if fused.fast:
            ran_out.append(len(fused.trials))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(fused, *given)

    monkeypatch.setattr(Stepping, "_step", short)
    driven.place(*(driven.placement(trial, 3) for trial in range(3)))
    driven.go_on()
    assert ran_out, "the last batch of a unit is shorter"
    [recipe] = driven.worker._recipes["signature"]
    assert not recipe.capturable
    assert recipe.size == 4, "no step is done in halves"
    driven.assert_as_alone(0, 1, 2)


def test_when_a_trial_leaves_the_faster_step_is_made_once_more_and_at_once(driven, faster):
    driven.place(*(driven.placement(trial, budget) for trial, budget in enumerate((2, 6, 6))))
    driven.go_on()
    assert faster.made == 2
    assert faster.taken == 1 + 5 + 1 + 4 * 5
    driven.assert_as_alone(0, 1, 2)


def test_the_next_bundle_of_a_signature_hurries_from_its_first_step(driven, faster):
    driven.place(*(driven.placement(trial, 2) for trial in range(2)))
    driven.go_on()
    assert faster.taken == 1 + 5
    driven.place(*(driven.placement(trial, 1) for trial in (2, 3)), name="next")
    driven.go_on()
    assert (faster.made, faster.taken) == (2, 2 * (1 + 5))
    driven.assert_as_alone(0, 1, 2, 3)


def test_without_a_time_alone_nobody_pays_for_the_first_trials_error(tmp_path, monkeypatch):
    fake_times(monkeypatch, lambda size: size**1.5)
    driven = Driven(Raising(), tmp_path)
    driven.place(*(driven.placement(trial, 2, lr=0.01 * trial, wrong=trial == 0) for trial in range(9)), size=None)
    driven.go_on()
    assert [type(driven.left(trial)) for trial in range(1, 9)] == [TrialFinished] * 8


def test_measuring_begins_when_a_second_trial_comes(driven, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.0)
    first = driven.placement(0, 3), driven.placement(1, 3, wrong="model")
    driven.place(*first, size=None)
    driven.go_on(lambda e: isinstance(e, Report))
    driven.place(*first, driven.placement(2, 3), driven.placement(3, 3), size=None)
    driven.go_on()
    driven.assert_as_alone(0, 2, 3)


def test_measuring_ends_though_a_trial_has_left_meanwhile(driven, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.0)
    placements = [driven.placement(trial, 3) for trial in range(8)]
    driven.place(*placements, size=None)
    for _ in range(measuring.ALONE + 2):
        assert driven.worker.advance() is None
    driven.place(*placements[:-1], size=None)
    driven.go_on()
    assert max(driven.measured()[0].table) == 7
    driven.assert_as_alone(*range(7))


def test_a_scheduler_that_fails_while_the_first_trial_is_timed_is_its_error_alone(driven, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.0)
    driven.place(driven.placement(0, 2, wrong="step", when=1), *(driven.placement(t, 2) for t in (1, 2)), size=None)
    driven.go_on()
    assert "one step too many" in driven.left(0).error
    driven.assert_as_alone(1, 2)


def sizes_tried(trials, seconds, bytes=lambda size: None, free=10**9, alone=True, **more):
    """What a bundle of so many trials would time, step after step, until it is done."""
    asked = Measuring(trials, free, **more)
    if alone:
        for _ in range(measuring.ALONE):
            asked.took(1, seconds(1), bytes(1))
    steps = []
    while not asked.done:
        left, parts = trials, []
        while left:
            parts.append(asked.next(left))
            assert 1 <= parts[-1] <= left
            asked.took(parts[-1], seconds(parts[-1]), bytes(parts[-1]))
            left -= parts[-1]
        steps.append(parts)
        assert len(steps) < 20, "measuring ends"
    return asked, steps


def test_sizes_double_up_to_all_trials_and_every_trial_takes_every_step():
    asked, steps = sizes_tried(20, lambda size: 1.0)
    assert {size for parts in steps for size in parts} >= {2, 4, 8, 16, 20}
    assert all(sum(parts) == 20 for parts in steps)
    assert len(steps) == 11
    assert asked.size == measuring.LARGEST, "nothing is known against more"


def timed(times, trials=2, **more):
    """What was found of sizes that took so long, one after another."""
    asked = Measuring(trials, 10**9, **more)
    for size, seconds in times.items():
        for one in seconds:
            asked.took(size, one, None)
    return asked


def test_the_median_of_repeats_counts_without_the_first_which_checks_the_way():
    asked = timed({1: [9.0, 1.0, 1.0, 5.0, 1.1], 2: [9.0, 1.0, 1.3]})
    assert not asked.done
    asked.took(2, 7.0, None)
    assert asked.done
    assert asked.seconds == {1: 1.05, 2: 1.3}
    assert asked.checking == 9.0 - 1.3


def test_a_row_that_is_left_over_is_no_trial_alone():
    asked = timed({1: [1.0] * 3, 2: [1.2] * 4})
    for _ in range(9):
        asked.took(1, 50.0, None)
    assert asked.seconds[1] == 1.0


def test_nothing_follows_from_few_times_as_another_program_may_have_had_the_machine():
    asked = timed({1: [1.0] * 3, 2: [9.0, 500.0, 500.0]}, steps=100)
    assert asked.lost == 0
    assert asked.seconds == {1: 1.0}
    assert not asked.done
    assert not asked.steady


@pytest.mark.parametrize(("steps", "done"), [(100, True), (10_000, False)])
def test_no_more_is_lost_on_timing_than_the_certain_steps_repay(steps, done):
    asked = timed({1: [1.0] * 3, 2: [5.0] * 4, 4: [5.2] * 4}, trials=64, steps=steps)
    assert asked.lost == pytest.approx(3 * 3.0 + 3 * 1.2)
    assert asked.done is done


@pytest.mark.parametrize(
    ("together", "steady"),
    [
        ([9.0, 1.0, 1.1, 1.2], True),
        ([9.0, 1.0, 1.1, 9.0], False),
        ([9.0, 2.4, 2.2, 2.3], True),
        ([9.0, 7.0, 7.0, 7.0], False),  # no fused step is that slow: the machine was
    ],
)
def test_times_are_steady_where_the_least_and_the_greatest_tell_the_same(together, steady):
    assert timed({1: [1.0] * 4, 2: together}).steady is steady


def test_what_unsteady_times_tell_holds_for_this_study_alone(driven, monkeypatch):
    took, times = Measuring.took, count()
    unsteady = lambda size: 1.0 if size == 1 else (1.0, 9.0)[next(times) % 2]  # noqa: E731
    monkeypatch.setattr(Measuring, "took", lambda self, size, _, bytes: took(self, size, unsteady(size), bytes))
    driven.place(*(driven.placement(trial, 3) for trial in range(2)), size=None)
    driven.go_on()
    assert driven.measured()[0].table == {}, "without a table it is not kept"
    assert driven.measured()[0].reason.endswith("; the next study measures again, as times varied")
    assert not [e for e in driven.events if isinstance(e, Measured) and e.kind == "trying"]
    driven.assert_as_alone(*range(2))


def test_the_cost_of_the_check_is_told_with_steady_times(driven, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.0)
    driven.place(*(driven.placement(trial, 3) for trial in range(2)), size=None)
    driven.go_on()
    (cost,) = (e for e in driven.events if isinstance(e, Measured) and e.kind == "trying")
    assert cost.table == {0: 0.0, 1: 1.0}


def test_trials_of_a_bundle_that_does_not_pay_go_on_as_they_are_without_a_state(driven, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.2 * size)
    driven.place(*(driven.placement(trial, 3) for trial in range(4)), size=None)
    driven.go_on(lambda e: isinstance(e, Measured) and e.size == 1)
    begun = {member.placement.trial: member.training for member in driven.worker._run.members}
    driven.place()
    driven.go_on()
    assert [driven.left(trial) for trial in range(4)] == [TrialStopped(trial, trial + 1, None) for trial in range(4)]
    assert not list(driven.states.glob("*")), "nothing was written"
    assert begun[0].step > 0
    for trial in range(4):
        again = driven.placement(trial, 3)
        assert driven.worker.trials.begin_task(again) is begun[trial], "it is not made again either"
        driven.worker.trials.keep_begun(again, begun[trial])
        driven.worker.place(Bundle("b", ("cpu",), (again,), "solo"))
        driven.go_on()
    driven.events = [e for e in driven.events if not isinstance(e, TrialStopped)]
    driven.assert_as_alone(*range(4))


def test_trials_of_a_bundle_that_is_stopped_have_their_states_written(driven, monkeypatch):
    fake_times(monkeypatch, lambda size: 1.0)
    driven.place(*(driven.placement(trial, 3) for trial in range(2)), size=None)
    driven.go_on(lambda e: isinstance(e, Measured))
    driven.place()
    driven.go_on()
    assert all(driven.left(trial).state.step > 0 for trial in range(2))


def test_growing_ends_where_a_further_trial_costs_as_much_as_one_alone():
    asked, _ = sizes_tried(64, lambda size: 1.0 if size == 1 else 0.3 + 1.1 * size)
    assert sorted(asked.seconds) == [1, 2, 4]
    assert asked.size == 1


def test_growing_goes_on_where_only_the_fixed_cost_of_a_step_makes_small_sizes_slow():
    asked, _ = sizes_tried(64, lambda size: 1.0 if size == 1 else 5.0 + 0.1 * size)
    assert asked.seconds[4] > 4.0, "slower than four alone"
    assert asked.size == measuring.LARGEST


def test_a_size_that_paid_at_another_batch_size_is_timed_first_and_larger_ones_after_it():
    asked, steps = sizes_tried(32, lambda size: 1.0 if size == 1 else 1.0 + 0.1 * size, guess=16)
    assert sorted(asked.seconds) == [1, 16, 32]
    assert len(steps) == 6, "and 11 from two trials on"
    assert asked.size == measuring.LARGEST


def test_a_guess_that_does_not_pay_is_no_claim():
    best_at_four = lambda size: {1: 1.0, 2: 1.2, 4: 1.6, 8: 5.0}.get(size, 2.0 * size)  # noqa: E731
    asked, _ = sizes_tried(32, best_at_four, guess=16, steps=100)
    assert {1, 2, 4, 8, 16} <= asked.seconds.keys()
    assert asked.size == 4


def test_a_guess_for_more_trials_than_there_are_times_them_all():
    asked = Measuring(8, 10**9, guess=64)
    asked.took(1, 1.0, None)
    assert (asked.next(7), asked.next(8)) == (7, 8), "one of them is ahead"
    asked.took(7, 9.0, None)
    for _ in range(4):
        asked.took(8, 1.6, None)
    assert asked.done
    assert asked.checking == pytest.approx(9.0 - 7 * 0.2)


def test_what_is_left_of_a_step_goes_in_parts_of_the_size_that_lost_least():
    asked = timed({1: [1.0] * 3, 2: [4.0] * 4, 4: [7.0] * 4}, trials=64)
    assert asked.done
    assert (asked.size, asked.next(30), asked.next(3)) == (1, 4, 3)


@pytest.mark.parametrize(("device", "threads", "clock"), [("cpu:1", 1, "thread_time"), ("cpu", 2, "perf_counter"),
                                                          ("cuda:0", 1, "perf_counter")])  # fmt: skip
def test_a_cpus_only_thread_is_timed_by_what_it_computes(device, threads, clock, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert measuring.stopwatch(device) is getattr(time, clock)


def test_steps_alone_and_together_are_timed_by_the_same_clock(driven, monkeypatch):
    ticks = count()
    monkeypatch.setattr(measuring, "stopwatch", lambda device: lambda: next(ticks))
    driven.place(*(driven.placement(trial, 3) for trial in range(4)), size=None)
    driven.go_on()
    assert driven.measured()[0].table == {1: 1, 2: 1, 4: 1}


def test_growing_ends_at_what_memory_holds():
    asked, steps = sizes_tried(64, lambda size: 1.0, bytes=lambda size: 100 + 100 * size, free=1000)
    assert asked.slope == (100, 100)
    assert asked.ceiling == 8, "a tenth is left free"
    assert asked.size == 8
    assert all(size <= 8 for parts in steps for size in parts)
