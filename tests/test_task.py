"""The settings of a task: every wrong one is refused when the study is made, before anything trains."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.numeric import finite, legible, shown, whole
from penstock.task import METHODS
from tests.studies import studies
from tests.tasks import Augmented, Blobs, Rows, blobs

SPACE = {"lr": ps.loguniform(1e-3, 0.1)}
study = studies(Blobs, SPACE, trials=4, algorithm=ps.Random(budget=1))


@pytest.mark.parametrize("name", ["unit_steps", "batch_size", "eval_batch_size", "shards"])
@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), "x", True])
def test_a_count_that_is_no_whole_number_above_0_is_refused_when_the_study_is_made(name, value):
    task = type("Wrong", (Blobs,), {name: value})()
    with pytest.raises(ps.TaskError, match=rf"^Wrong\.{name} must be .*a whole number of \w+, 1 or more, got "):
        study(task)


@pytest.mark.parametrize("name", ["unit_steps", "batch_size"])
def test_a_count_that_is_too_great_for_a_float_is_no_finite_number(name):
    said = r", 1 or more, got a number of over 300 digits, which is too great for a finite number\.$"
    with pytest.raises(ps.TaskError, match=said):
        study(type("Wrong", (Blobs,), {name: 10**400})())


def steps(trial):
    yield


async def waits(trial):
    pass


async def streams(trial):
    yield


def two(trial, config):
    pass


def none():
    pass


class Callable:
    def __init__(self, function):
        self.function = function

    def __call__(self, trial):
        self.function(trial)


class Yields:
    def __call__(self, trial):
        yield


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Blobs, r"the class Blobs: make an instance, as in Study\(Blobs\(\), …\)"),
        (torch.nn.Linear, r"the class Linear: make an instance"),
        (torch.nn.Linear(2, 2), r"the module Linear: make it in model\(self, config\) of a penstock.Task"),
        (steps, "the generator function steps: call trial.report where it yields"),
        (streams, "the generator function streams: call trial.report where it yields"),
        (Yields(), "the generator function Yields"),
        (partial(steps), "the generator function partial"),
        (waits, "the coroutine function waits: define it by def and not by async def"),
        (two, r"the function two\(trial, config\): let it take one argument, and bind others by functools.partial"),
        (none, r"the function none\(\): let it take one argument"),
        (Blobs().model.__self__.optimizer, r"the function optimizer\(params, config\)"),
        ({"lr": 1}, "dict"),
    ],
)
def test_what_no_trial_can_call_is_refused_when_the_study_is_made(task, said):
    with pytest.raises(ps.TaskError, match=f"^Expected a penstock.Task or a function of one trial, got {said}"):
        study(task)


@pytest.mark.parametrize("task", [partial(two, config=1), Callable(two), lambda trial, more=1: None, print, max])
def test_what_a_trial_can_call_is_taken(task):
    assert study(task).task.function is task


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": None}, "batch_size must be a whole number of rows, 1 or more, got None"),
        ({"clip_grad_norm": 0}, "clip_grad_norm must be None or a number above 0, got 0"),
        ({"clip_grad_norm": "x"}, "clip_grad_norm must be None or a number above 0, got 'x'"),
        ({"clip_grad_norm": float("inf")}, "clip_grad_norm must be None or a number above 0, got inf"),
        ({"precision": "fp64"}, "precision must be .* got 'fp64'"),
        ({"precision": ["fp32"]}, r"precision must be .* got \['fp32'\]"),
        ({"accumulate": "yes"}, "accumulate must be True or False, got 'yes'"),
        ({"loader": None}, "loader must be a dict such as .* got None"),
        ({"loader": {1: 2}}, "loader must be a dict such as"),
        ({"loader": {"shuffle": True}}, "loader has shuffle, which Penstock gives the DataLoader: leave it out"),
        ({"loader": {"num_workers": -1}}, r'loader\["num_workers"\] must be a whole number from 0 on, got -1'),
    ],
)
def test_another_wrong_setting_is_refused_when_the_study_is_made(settings, said):
    with pytest.raises(ps.TaskError, match=said):
        study(type("Wrong", (Blobs,), settings)())


def test_arguments_that_a_DataLoader_does_not_take_are_one_message():
    for loader in ({"worker": 2}, {"persistent_workers": True}, {"prefetch_factor": 2}):
        with pytest.raises(ps.TaskError, match="A task's loader must have arguments of torch's DataLoader, got"):
            study(type("Wrong", (Augmented,), {"loader": loader})()).run()


def test_numbers_of_numpy_and_torch_are_as_good_as_plain_ones():
    given = {"batch_size": np.int64(16), "unit_steps": torch.tensor(2), "clip_grad_norm": np.float32(1)}
    plain = {name: value.item() for name, value in given.items()}
    one, other = (
        study(type("Numbers", (Blobs,), settings)(), name=name, trials=1).run()
        for name, settings in (("one", given), ("other", plain))
    )
    assert one.trials[0].curve == other.trials[0].curve


class Leaves(Blobs):
    """Calls ``sys.exit`` where its config says so."""

    def _leave(self, config, where):
        if config["where"] == where:
            sys.exit(f"no {where}")

    def data(self, config):
        self._leave(config, "data")
        return super().data(config)

    def features(self, config):
        self._leave(config, "features")
        return super().features(config)

    def model(self, config):
        self._leave(config, "model")
        return super().model(config)

    def optimizer(self, params, config):
        self._leave(config, "optimizer")
        return super().optimizer(params, config)

    def scheduler(self, optimizer, config):
        self._leave(config, "scheduler")
        return super().scheduler(optimizer, config)

    def loss(self, model, batch, config):
        self._leave(config, "loss")
        return super().loss(model, batch, config)

    def metrics(self, model, batch, config):
        self._leave(config, "metrics")
        return super().metrics(model, batch, config)


@pytest.mark.parametrize("sharing", ["solo", "fused"])
@pytest.mark.parametrize("places", [["loss", "nowhere"], ["nowhere", *METHODS]])
def test_sys_exit_in_a_task_fails_its_trial_and_the_others_go_on(sharing, places):
    space = {"lr": 0.1, "where": ps.grid(places)}
    result = study(Leaves(), space, trials=None, algorithm=ps.Grid(budget=1)).run(sharing=sharing)
    for trial in result.trials:
        where = trial.config["where"]
        if where == "nowhere":
            assert trial.state == "finished"
        else:
            assert trial.state == "failed"
            said = f"Leaves.{where} ended by sys.exit('no {where}'): return, or raise an exception."
            assert trial.error == said


def test_sys_exit_in_every_trial_is_one_message():
    with pytest.raises(ps.TaskError, match=r"^Leaves.loss ended by sys.exit\('no loss'\): return, or raise"):
        study(Leaves(), SPACE | {"where": "loss"}).run()


class Unwound(Blobs):
    def loss(self, model, batch, config):
        if config["lr"] > 0.1:
            raise CancelledError
        return super().loss(model, batch, config)


@pytest.mark.parametrize("sharing", ["solo", "fused"])
def test_an_exception_that_would_unwind_the_driver_fails_its_trial_alone(sharing):
    space = {"lr": ps.grid([0.1, 0.2])}
    first, second = study(Unwound(), space, trials=None, algorithm=ps.Grid(budget=1)).run(sharing=sharing).trials
    assert (first.state, second.state) == ("finished", "failed")
    assert second.error == "Unwound.loss ended by raising CancelledError: return, or raise an exception."


class Gone(Rows):
    def __getitem__(self, index):
        sys.exit(1)


def test_sys_exit_in_a_dataset_is_one_message():
    class Away(Blobs):
        def data(self, config):
            return Gone(*blobs()), blobs()

    with pytest.raises(ps.TaskError, match=r"^The dataset ended by sys.exit\(1\)"):
        study(Away()).run()


@pytest.mark.parametrize(("model", "what"), [(None, "None"), ([], "a list"), (torch.relu, "a builtin_function_or")])
def test_a_model_that_is_no_module_is_one_message(model, what):
    class Modelless(Blobs):
        def model(self, config):
            return model

    with pytest.raises(ps.TaskError, match=rf"^Modelless.model must return an nn.Module, got {what}"):
        study(Modelless()).run()


def test_plain_numbers_come_of_every_kind_of_number():
    for given in (np.float32(0.5), np.array(0.5), torch.tensor(0.5), Decimal("0.5"), 0.5):
        assert finite(given) == 0.5
        assert type(finite(given)) is float
    for given in (np.int8(3), np.array(3), torch.tensor(3), 3):
        assert type(whole(given)) is int
        assert whole(given) == finite(given) == 3
    for wrong in (None, "3", True, np.bool_(True), float("nan"), float("inf"), 1j, [3], np.ones(1), torch.ones(2)):
        assert finite(wrong) is None
        assert whole(wrong) is None
    assert finite(10**400) is None


def test_a_message_shows_a_value_whatever_its_repr_does():
    class Loud:
        def __repr__(self):
            raise ValueError

    assert shown(Loud()) == "a value of type Loud that cannot be shown"
    assert shown(10**5000) == "a number of over 300 digits, which is too great for a finite number"
    assert len(shown("x" * 10**6)) == 200
    assert legible("a\ud800") == "a\\ud800"
