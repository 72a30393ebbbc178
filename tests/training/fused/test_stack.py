"""The rows of a bundle: where each trial's tensors lie, and that none is forgotten when rows move or grow."""

import warnings

import pytest
import torch

from penstock.training.fused.bundle import Fused
from penstock.training.fused.ways import Native
from tests.tasks import Blobs
from tests.training.networks import OPTIMIZERS, Bundle, Network
from tests.training.together import Alone, Together, Trials, go_on, leaves

BLOCKS = ("linear", "idle", "batch_norm", "leaky_relu", "frozen", "tracked", "dropout", "tied")


@pytest.fixture
def _in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def network(optimizer="adam", blocks=BLOCKS, clip=None):
    return Network(Bundle("vector", blocks, 5, optimizer, 1, clip, None, "nll", True, seed=3))


def made(task, capacity=8, count=5):
    trials, together = Trials(task), Together(Native)
    together.fused = Fused(together.recipe, capacity)
    return trials, together, [trials.make(number, {"number": number}) for number in range(count)]


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("optimizer", ["momentum", "nadam", "adamax"])
def test_rows_grow_under_trials_that_stay_where_they_are(optimizer):
    trials, together, ours = made(network(optimizer), capacity=1)
    curves = [[] for _ in ours]
    for number, one in enumerate(ours):
        curves[number] += go_on(one, 3 * number)  # an epoch ahead of the one before, so that no row moves
        together.enter(one)
        together.curves[id(one)] = curves[number]
        assert together.fused.stack.trials == ours[: number + 1]
        for there in range(number + 1):
            state = together.fused.state(ours[there])
            Alone(trials, there, {"number": there}, state["step"]).assert_like(state, curves[there])
        together.step()
        assert together.fused.stack.trials == ours[: number + 1]
        together.step(2)
    together.leave(*ours)
    for number, one in enumerate(ours):
        Alone(trials, number, {"number": number}, one.step).assert_like(one, curves[number])


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_what_no_optimizer_steps_and_what_has_two_names_is_kept_as_it_is(optimizer):
    trials, together, ours = made(network(optimizer))
    together.enter(*ours).step(7)
    for number, one in enumerate(ours):
        state = together.fused.state(one)
        assert any(not p.requires_grad for p in one.model.parameters())
        Alone(trials, number, {"number": number}, 7).assert_like(state, together.curve(one))


class Steady(Network):
    def scheduler(self, optimizer, config):
        return None


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("optimizer", ["momentum", "nesterov", "rmsprop", "adagrad", "asgd"])
def test_numbers_that_never_change_are_those_of_the_rows_and_of_the_step(optimizer, size):
    trials, together, ours = made(Steady(network(optimizer, ("linear", "leaky_relu")).bundle))
    together.recipe.size = size
    together.enter(*ours[:3]).step(2).enter(*ours[3:]).step(2)
    together.leave(ours[0])
    together.step(2)
    for number, one in enumerate(ours[1:], 1):
        state = together.fused.state(one)
        Alone(trials, number, {"number": number}, state["step"]).assert_like(state, together.curve(one))


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_state_has_the_types_that_a_plain_run_gives_it(optimizer):
    trials, together, ours = made(network(optimizer, ("linear", "batch_norm")), count=2)
    together.enter(*ours).step(2)
    alone, _ = trials.alone(1, {"number": 1}, 2)

    def types(state):
        return {path: getattr(value, "dtype", type(value)) for path, value in leaves(state)}

    assert types(together.fused.state(ours[1])) == types(alone.state(drawn=False))


def test_schedulers_see_that_their_optimizers_have_stepped():
    trials = Trials(Blobs())
    ours = [trials.make(number, {"lr": 0.1}) for number in range(2)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Together(Native).enter(*ours).step(2)
    assert not told


@pytest.mark.usefixtures("_in_float64")
def test_what_a_sick_trial_has_left_in_the_gradients_is_gone_for_the_next_in_its_row():
    trials, together, ours = made(network("momentum", ("linear",), clip=0.5), count=4)
    together.enter(*ours[:3]).step(3)
    with torch.no_grad():
        for p in ours[2].model.parameters():
            p.fill_(float("inf"))
    together.step(2).leave(ours[2])
    curve = go_on(ours[3], 5)
    together.enter(ours[3]).step(4)
    for number in (0, 1, 3):
        state, before = together.fused.state(ours[number]), curve if number == 3 else []
        Alone(trials, number, {"number": number}, 9).assert_like(state, before + together.curve(ours[number]))
