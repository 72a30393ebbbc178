"""Steps compiled beside training: their texts, their files, the side process, and which of them are asked for."""

from __future__ import annotations

import os
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.training.fused import artifacts, audit, traces
from penstock.training.fused.compiled import CapturedStep, trace
from penstock.training.fused.inductor import Inductor
from penstock.training.fused.stacked import Unfusable
from tests.tasks import Blobs
from tests.training.fused.test_compiled import made
from tests.training.recorded import record
from tests.training.together import Instead, Together, Trials, farthest, go_on

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The user's cache, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return artifacts.folder()


@pytest.fixture
def beside():
    made = Inductor()
    yield made
    made.close()


def product(kept):
    return traces.traced(lambda x, y: x @ y @ kept, [torch.ones(2, 3), torch.ones(3, 4)])


# Texts


def test_a_step_is_one_text_whatever_its_data_and_another_where_it_does_something_else():
    def text(width=8, count=2, lr=0.1, smoothing=0.1):
        class Task(Blobs):
            def model(self, config):
                return nn.Sequential(nn.Linear(6, width), nn.Dropout(0.5), nn.Linear(width, 2))

            def loss(self, model, batch, config):
                return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing)

        trials = Trials(Task(), seed=int(lr * 10))
        fused = Together().enter(*(trials.make(n, {"lr": lr}) for n in range(count))).step().fused
        step, inputs = made(fused)
        return trace(step.step, inputs).text

    first = text()
    assert text(lr=0.3) == first
    assert len({first, text(width=9), text(count=3), text(smoothing=0.2)}) == 4


def test_a_graph_is_read_back_with_what_it_reads_besides_its_inputs():
    first, second, x = torch.randn(3, 4), torch.randn(4, 2), torch.randn(2, 3)
    made = traces.traced(lambda x: torch.cat([x @ first, x.add(1.5)], 1)[:, :4] @ second, [x])
    graph, kinds = traces.read(made.text)
    assert [kind["size"] for kind in kinds] == [[2, 3], [3, 4], [4, 2]]
    assert torch.equal(graph(x, *made.kept), (x @ first) @ second)


def test_a_graph_that_no_other_process_can_read_is_refused():
    with pytest.raises(Unfusable, match="a complex, which no other process can read"):
        traces.traced(lambda x: x * 2j, [torch.ones(2)])


# Files


def test_a_damaged_or_foreign_file_is_deleted(kept):
    kept.mkdir(parents=True)
    name = artifacts.name_of("key", CPU)
    assert artifacts.found(name) is None
    foreign = kept / f"{name}.{'0' * 32}"
    foreign.write_bytes(b"something else")
    assert artifacts.found(name) is None
    assert not foreign.exists()

    class Made:
        def save(self, path, format):
            Path(path).write_bytes(b"a step")

    artifacts._save(Made(), name)
    whole = artifacts.found(name)
    assert [*kept.iterdir()] == [whole]
    whole.write_bytes(b"a ste")
    assert artifacts.found(name) is None
    assert not whole.exists()


def test_a_file_that_cannot_be_loaded_is_compiled_anew_once(beside, kept, monkeypatch):
    traced, asked = product(torch.ones(4, 1)), []
    name = artifacts.name_of(traced.key, CPU)
    monkeypatch.setattr(Inductor, "_send", lambda self, number, *request: asked.append(number))
    monkeypatch.setattr(artifacts, "loaded", lambda file: 1 / 0)

    class Made:
        def save(self, path, format):
            Path(path).write_bytes(b"nothing of torch's")

    for attempt in range(2):
        assert not beside.ready(traced)
        artifacts._save(Made(), name)
        beside._hear(attempt, None)
        assert beside.ready(traced)
        if not attempt:
            assert beside.load(traced) is None
        else:
            with pytest.raises(ZeroDivisionError):
                beside.load(traced)
        assert not [*kept.iterdir()]
    assert asked == [0, 1]


# The process


def test_a_step_that_was_compiled_beside_is_the_plain_one(beside, kept):
    """Inductor itself, on products alone, as other steps take its compiler ten seconds."""
    last = torch.randn(4, 2)
    traced = product(last)
    while not beside.ready(traced):
        beside.wait()
    assert beside.failed is None
    assert [file.name.split(".")[0] for file in kept.iterdir()] == [artifacts.name_of(traced.key, CPU)]
    run, x, y = beside.load(traced), torch.randn(2, 3), torch.randn(3, 4)
    assert torch.equal(run(x, y, *traced.kept)[0], x @ y @ last)


def test_a_side_process_that_is_killed_is_said_once_and_takes_its_children_with_it(beside, caplog):
    traced = product(torch.ones(4, 1))
    assert not beside.ready(traced)
    children = Path(f"/proc/{beside._process.pid}/task/{beside._process.pid}/children")
    while not (there := children.read_text().split()):
        beside._exchange()
    child = os.pidfd_open(int(there[0]))
    mapped = Path(f"/proc/{there[0]}/maps")
    while "libtorch" not in mapped.read_text():  # it has begun, and is to end with its parent
        assert not wait([child], timeout=0)
    beside._process.kill()
    beside._process.wait()
    wait([child])
    os.close(child)
    for _ in range(2):
        assert not beside.ready(traced)
        assert not beside.prepared()
    assert [record.message for record in caplog.records if record.name == "penstock"] == [
        "The process that compiles steps beside training ended with -9. Training goes on without it."
    ]


# Which steps are compiled, where they are captured


class Drawing(Blobs):
    """Each trial may have a dropout and a label smoothing of its own. Everything is in float64."""

    def data(self, config):
        (x, y), (v, w) = super().data(config)
        return (x.double(), y), (v.double(), w)

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(config["p"]), nn.ReLU(), nn.Linear(8, 2)).double()

    def loss(self, model, batch, config):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=config["s"])


class Device:
    """A bundle whose steps are captured, on a device that takes a millisecond for a compiled one and two for others."""

    def __init__(self, monkeypatch, **seconds):
        record(monkeypatch)
        monkeypatch.setattr(audit, "EVERY", 10**6)
        seconds = {"compiled": 0.001, "captured": 0.002} | seconds
        monkeypatch.setattr(
            CapturedStep, "seconds", lambda step, _: seconds["compiled" if step.compiled else "captured"]
        )
        self.trials, self.together = Trials(Drawing()), Together()
        self.speeding = self.together.fused.speeding

    def enter(self, *numbers, p=0.1, before=None):
        made = [self.trials.make(n, {"lr": 0.01, "p": p + n / 10, "s": 0.1 + n / 20}) for n in numbers]
        if before is not None:
            before(made[-1], made[-1].unit_length)
        self.together.enter(*made)
        return made

    def meet(self, certain=100):
        self.speeding.meet(list(self.together.fused.trials))
        self.speeding.expect(certain)

    def end_unit(self, certain):
        """A unit of a thousand steps of two milliseconds."""
        self.speeding.took(2.0, 1000)
        self.speeding.end_unit(certain, fast=True, by_device=0.002)

    @property
    def compiled(self):
        return [step.compiled for step in self.together.fused.fast.steps.values()]


def test_a_compiled_step_takes_a_captured_ones_place_within_a_unit_once_it_is_there(monkeypatch):
    device, beside = Device(monkeypatch), Instead(monkeypatch, looks=3)
    made = device.enter(0, 1, 2)
    device.together.step(2)
    device.meet()
    device.together.step(2)
    device.end_unit(10**6)
    device.together.step(1)
    assert (device.compiled, device.speeding.compiles) == ([False], True)
    while device.speeding.wanted is None:
        device.speeding.look()
        device.together.step(0 if device.speeding.wanted else 1)
    assert list(beside.asked.values()) == [4]
    device.together.step(12)
    assert device.compiled == [True]
    assert not device.together.recipe.refusals
    assert device.together.fused.leap(5), "which reads laid down inputs"
    for number, trial in enumerate(made):
        config = {"lr": 0.01, "p": 0.1 + number / 10, "s": 0.1 + number / 20}
        alone, _ = device.trials.alone(number, config, trial.step)
        assert farthest(device.together.fused.state(trial)["model"], alone.state(drawn=False)["model"]) <= (1e-9, "")


@pytest.mark.parametrize(("certain", "steps", "wait", "warm", "asked"), [
    (2000, 0, 0.0, "importing", False),  # the compiler's imports alone would take training longer
    (10000, 0, 0.0, "importing", True),
    (2000, 0, 0.0, False, True),  # of 4 s, 0.4 are saved: 1.6
    (1500, 0, 0.0, False, False),
    (3000, 0, 5.0, False, False),  # most of these are over by then
    (3000, 0, None, False, False),  # it is not known how long it takes
    (3000, 0, None, True, True),  # steps were kept by an earlier study
    (1500, 3, 0.0, False, True),  # three thousand were taken: as many more are expected
])  # fmt: skip
def test_a_step_is_asked_for_where_the_steps_that_are_expected_repay_it(monkeypatch, certain, steps, wait, warm, asked):
    device, beside = Device(monkeypatch), Instead(monkeypatch)
    beside.delay, beside.warm, beside.imported = wait, warm is True, warm != "importing"
    device.enter(0, 1)
    device.together.step(2)
    device.meet()
    device.together.step(1)
    device.together.recipe.compiles.steps[2] = 1000 * (steps - 1) if steps else -1000
    device.end_unit(certain)
    device.together.step(1)
    assert bool(beside.asked) is asked


def test_a_step_that_does_not_what_the_plain_one_does_is_told_and_the_captured_one_goes_on(monkeypatch):
    device, beside = Device(monkeypatch), Instead(monkeypatch)
    monkeypatch.setattr(beside, "load", lambda traced: lambda *tensors: [torch.zeros(2).double()])
    device.enter(0, 1)
    device.together.step(2)
    device.meet()
    device.together.step(1)
    device.end_unit(10**6)
    device.together.step(2)
    assert device.compiled == [False]
    (said,) = device.together.recipe.refusals
    assert said.startswith("compiled: the compiled step differs from the plain one by")
    assert (device.together.recipe.compilable, device.together.recipe.capturable) == (False, True)


def test_a_step_that_is_slower_than_the_captured_one_is_told_and_not_taken(monkeypatch):
    device, beside = Device(monkeypatch, compiled=0.003), Instead(monkeypatch)
    device.enter(0, 1)
    device.together.step(2)
    device.meet()
    device.together.step(1)
    for _ in range(2):
        device.end_unit(10**6)
        device.together.step(2)
        assert device.compiled == [False]
    assert device.together.recipe.refusals == ["compiled: a step of 2 trials takes 3 ms, and 2 captured"]
    assert list(beside.asked.values()) == [1]
    assert device.together.recipe.compilable, "with other numbers of trials"
    device.speeding.meet([])
    device.meet()
    device.together.step(2)
    device.end_unit(10**6)
    device.together.step(2)
    assert device.compiled == [False]
    assert (beside.loads, len(device.together.recipe.refusals)) == (1, 1)


def test_a_compiled_step_goes_on_where_a_step_with_kernels_that_come_later_is_slower(monkeypatch):
    device, _ = Device(monkeypatch), Instead(monkeypatch)
    device.enter(0, 1)
    device.together.step(2)
    device.meet()
    device.together.step(1)
    device.end_unit(10**6)
    device.together.step(2)
    device.together.recipe.compiles.known.clear()
    device.speeding.wanted = "captured"
    device.together.step(2)
    assert device.compiled == [True]


@pytest.mark.parametrize(("ahead", "apart"), [(True, False), (True, True), (False, False)])
def test_the_step_of_one_trial_is_compiled_ahead_and_is_that_of_each_trial_that_is_left_alone(
    monkeypatch, ahead, apart
):
    """The trials have numbers of their own, which are no part of the step; one may be an epoch ahead of the other."""
    device, beside = Device(monkeypatch), Instead(monkeypatch)
    first, second = device.enter(0, 1, before=go_on if apart else None)
    device.together.step(2)
    device.meet()
    device.together.step(1)
    device.together.recipe.compiles.ahead = not ahead
    for _ in range(2):
        assert not beside.asked
        device.end_unit(0)
        device.together.step(1)
    assert len(beside.asked) == ahead
    assert not beside.loads
    device.together.leave(second)
    for trial, other in ((first, second), (second, first)):
        device.meet()
        device.together.step(2)  # one of which has a short batch
        device.end_unit(10**6)
        device.together.step(2)
        assert device.compiled[-1]
        device.together.leave(trial)
        device.together.enter(other)
    assert len(beside.asked) == beside.loads == 1
    assert not device.together.recipe.refusals


def test_a_step_that_took_a_trials_own_number_as_it_was_is_none_of_the_next_trial(monkeypatch):
    device, beside = Device(monkeypatch), Instead(monkeypatch)
    for number in (0, 1):
        (trial,) = device.enter(number, p=0.1 - number / 10)
        device.together.step(2)
        device.meet()
        device.together.step(2)  # one of which has a short batch
        device.end_unit(10**6)
        device.together.step(2)
        assert device.compiled[-1]
        device.together.leave(trial)
    assert len(beside.asked) == 2
