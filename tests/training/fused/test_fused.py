"""The fused mode by hand: coming and going, trials that diverge, memory that runs out, and what is refused and why."""

import copy
import inspect
import io
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.training.fused.batches import stack_leaves
from penstock.training.fused.general import General
from penstock.training.fused.recipe import Recipe
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import Native
from tests.tasks import Blobs
from tests.training.networks import Bundle, Network
from tests.training.together import Alone, Together, Trials, assert_equal, go_on

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]


def bundle(*blocks, optimizer="adam", input="vector", **changes):
    blocks = blocks or ("linear", "idle", "batch_norm", "leaky_relu", "dropout", "linear")
    settings = dict(trials=9, groups=1, clip=None, unit_steps=None, loss="nll", alike=True, seed=3)
    return Bundle(input, blocks, optimizer=optimizer, **{**settings, **changes})


def written(state):
    """A state as it comes back from disk."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Coming and going


class Story:
    """Trials that come to a bundle, leave it, go on alone and come back; ``curves`` has what each reported anywhere."""

    def __init__(self, task, recipe):
        self.trials, self.together = Trials(task), Together(recipe=recipe)
        self.inside, self.outside, self.curves, self.seen = {}, {}, {}, []

    def fresh(self, number):
        self.curves[number] = []
        self.outside[number] = self.trials.make(number, {"number": number})

    def alone(self, number, steps):
        """Train outside the bundle, by the plain loop."""
        self.curves[number] += go_on(self.outside[number], steps)

    def saved(self, number):
        """Outside, from one process to another: its state to disk and into a new trial."""
        state = written(self.outside[number].state(drawn=False))
        self.outside[number] = self.trials.make(number, {"number": number})
        self.outside[number].restore(state, inherited=False)

    def ahead(self, number, steps):
        """Steps on behalf of the bundle before it enters, as when a first trial is timed alone."""
        for _ in range(steps):
            self.together.fused.step_alone(self.outside[number])
            if self.together.fused.ended:
                return

    def enter(self, number):
        self.inside[number] = self.outside.pop(number)
        self.together.enter(self.inside[number])
        self.together.curves[id(self.inside[number])] = self.curves[number]

    def leave(self, number):
        self.outside[number] = self.inside.pop(number)
        self.together.leave(self.outside[number])

    def look(self, number):
        """Its state while it stays where it is."""
        state = self.together.fused.state(self.inside[number])
        self.seen.append((number, copy.deepcopy(state), list(self.curves[number])))

    def check(self):
        for number in list(self.inside):
            self.leave(number)
        self.seen += [(number, run.state(drawn=False), self.curves[number]) for number, run in self.outside.items()]
        for number, state, curve in self.seen:
            Alone(self.trials, number, {"number": number}, state["step"]).assert_like(state, curve)


@settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_leaving_and_entering_at_any_time_is_as_never_having_been_together(data):
    def pick(*options):
        return data.draw(st.sampled_from(options))

    optimizer = pick("adam", "momentum", "sgd", "nadam", "adagrad", "asgd", "rmsprop", "amsgrad", "fused adam")
    way = pick(Native, Native, General)
    task = Network(bundle(optimizer=optimizer, unit_steps=pick(None, 4), groups=pick(1, 2), clip=pick(None, 0.5)))
    story = Story(task, Recipe(ways=[way], size=pick(None, None, 2)))
    coming = list(range(5))
    for _ in range(data.draw(st.integers(3, 12))):
        story.together.step(pick(1, 2, 4)) if story.inside else None
        if coming and pick(True, True, False):
            number = coming.pop()
            story.fresh(number)
            story.alone(number, pick(0, 0, 1, 4, 7))
            if pick(True, False):
                story.saved(number)
            elif pick(True, False):
                story.ahead(number, pick(1, 3))
            story.enter(number)
            if story.together.fused.ended:
                story.together.step()
        if len(story.inside) > 1 and pick(True, False):
            number = pick(*story.inside)
            story.leave(number)
            story.alone(number, pick(0, 1, 4))
            if pick(True, False):
                story.saved(number) if pick(True, False) else None
                story.enter(number)
        if story.inside and pick(True, False):
            story.look(pick(*story.inside))
    story.check()


def test_trials_that_were_ahead_wait_for_the_others():
    trials = Trials(Network(bundle()))
    ours = [trials.make(number, {"number": number}) for number in range(3)]
    together = Together(Native)
    for _ in range(2):
        together.fused.step_alone(ours[0])
    together.enter(*ours)
    for expected in ([2, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]):
        together.step()
        assert [one.step for one in ours] == expected
    for number, one in enumerate(ours):
        together.leave(one)
        Alone(trials, number, {"number": number}, 4).assert_like(one, together.curve(one))


def test_trials_at_one_position_share_a_batch():
    trials, read = Trials(Network(bundle())), []
    ours = [trials.make(number, {"number": number}) for number in range(5)]
    for one, steps in zip(ours[3:], (1, 4), strict=True):  # a batch ahead, and an epoch and a batch
        go_on(one, steps)
    together = Together(Native).enter(*ours)
    take = together.fused._streams.take
    together.fused._streams.take = lambda *positions: read.append(take(*positions)) or read[-1]
    together.step(5)
    assert [len(batches) for batches in read] == [3] * 5, "one for each position, whoever stands there"
    assert [one.step for one in ours] == [5, 5, 5, 6, 9]


def test_trials_whose_batches_are_of_one_length_take_one_step_together(monkeypatch):
    trials, parts = Trials(Network(bundle())), []
    ours = [trials.make(number, {"number": number}) for number in range(5)]
    for one in ours[1::2]:
        go_on(one, 2)  # the last batch of the epoch is next, and shorter
    together = Together(Native).enter(*ours)
    stepping = together.fused.stepping
    train = stepping.train
    monkeypatch.setattr(
        stepping, "train", lambda first, last, *rest: parts.append(last - first) or train(first, last, *rest)
    )
    together.step()
    assert sorted(parts) == [2, 3]


def test_what_is_no_tensor_in_a_batch_must_be_the_same_at_every_position():
    assert stack_leaves("alike", "alike") == "alike"
    with pytest.raises(Unfusable, match="a batch holds a str that differs from position to position"):
        stack_leaves("one", "another")


@pytest.mark.parametrize("optimizer", ["adam", "adamax"])
def test_what_leaves_is_a_plain_trial_that_shares_no_memory_with_the_bundle(optimizer):
    trials = Trials(Network(bundle(optimizer=optimizer)))
    ours = [trials.make(number, {"number": number}) for number in range(3)]
    together = Together(Native).enter(*ours).step(5)
    state = together.fused.state(ours[1])
    kept = copy.deepcopy(state)
    together.leave(ours[0])
    left = ours[0].state(drawn=False)
    kept_left = copy.deepcopy(left)
    together.step(5)
    assert_equal(state, kept)
    assert_equal(left, kept_left)
    model = trials.task.model({"number": 1})
    model.load_state_dict(state["model"])  # the user's own module takes it
    optimizer = trials.task.optimizer(list(model.parameters()), {"number": 1})
    optimizer.load_state_dict(state["optimizer"])


def test_a_change_of_param_groups_is_seen_at_the_next_step():
    trials = Trials(Network(bundle(optimizer="momentum")))
    ours = [trials.make(number, {"number": number}) for number in range(3)]
    together = Together(Native).enter(*ours).step(3)
    expected = [trials.alone(number, {"number": number}, 3)[0] for number in range(3)]
    for one in (ours[1], expected[1]):
        one.optimizer.param_groups[0].update(lr=0.3, momentum=0.1)
    together.step(2)
    for one, alone in zip(ours, expected, strict=True):
        go_on(alone, 2)
        together.leave(one)
        for p, q in zip(one.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-9)


def test_a_trial_inherits_a_donors_state_and_keeps_its_own_config():
    trials = Trials(Network(bundle()))
    donor, _ = trials.alone(0, {"number": 0}, 5)
    state = written(donor.state(drawn=False))
    both = [trials.make(1, {"number": 1}) for _ in range(2)]
    for one in both:
        one.restore(copy.deepcopy(state), inherited=True)
    together = Together(Native).enter(trials.make(2, {"number": 2}), both[0]).step(6)
    curve = go_on(both[1], 6)
    together.leave(both[0])
    assert both[0].step == both[1].step == 11
    assert together.curve(both[0])[-1] == pytest.approx(curve[-1], abs=1e-9)
    for p, q in zip(both[0].model.parameters(), both[1].model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-9)


# Steps that are taken one by one


class Items(Network):
    def metrics(self, model, batch, config):
        return {name: value.item() for name, value in super().metrics(model, batch, config).items()}


def test_after_an_error_each_trial_takes_the_step_alone_that_it_would_have_taken(monkeypatch):
    trials = Trials(Items(bundle()))  # whose modules were last used to measure them
    ours = [trials.make(number, {"number": number}) for number in range(4)]
    together = Together(Native, size=1).enter(*ours).step(3)
    train = together.fused.stepping.train

    def failing(first, last, batches):
        if first == 2:
            raise ValueError("in the middle of a step")
        train(first, last, batches)

    monkeypatch.setattr(together.fused.stepping, "train", failing)
    with pytest.raises(ValueError, match="in the middle"):
        together.step()
    assert together.fused.step_each() == []
    assert [one.step for one in ours] == [4] * 4, "those who had taken it do not take it twice"
    monkeypatch.undo()
    together.end_units()
    together.step(3)
    assert [one.step for one in ours] == [7] * 4
    for number, one in enumerate(ours):
        state = together.fused.state(one)
        Alone(trials, number, {"number": number}, 7).assert_like(state, together.curve(one))


def test_whoever_fails_alone_is_out_and_the_others_stay(monkeypatch):
    trials = Trials(Network(bundle()))
    ours = [trials.make(number, {"number": number}) for number in range(4)]
    together = Together(Native).enter(*ours).step(2)

    def raises(batch):
        raise ValueError("its own")

    monkeypatch.setattr(ours[1], "train_step", raises)
    ((failed, error),) = together.fused.step_each()
    assert failed is ours[1]
    assert str(error) == "its own"
    assert ours[1] not in together.fused.trials
    together.end_units()
    together.step(4)
    for number in (0, 2, 3):
        state = together.fused.state(ours[number])
        Alone(trials, number, {"number": number}, state["step"]).assert_like(state, together.curve(ours[number]))


class Drops(Network):
    """Draws in its metrics too."""

    def metrics(self, model, batch, config):
        return super().metrics(lambda x: F.dropout(model(x), 0.5), batch, config)


@pytest.mark.parametrize("way", [Native, General])
def test_metrics_that_draw_are_measured_one_by_one(way):
    trials = Trials(Drops(bundle()))
    ours = [trials.make(number, {"number": number}) for number in range(3)]
    together = Together(way).enter(*ours).step(7)
    assert together.recipe.alone == "metrics that draw at random are those of one trial"
    for number, one in enumerate(ours):
        state = together.fused.state(one)
        Alone(trials, number, {"number": number}, 7).assert_like(state, together.curve(one))


def test_those_who_stay_are_measured_with_their_own_numbers_after_one_has_left():
    trials = Trials(Network(bundle("linear", "leaky_relu", "linear", alike=False)))
    ours = [trials.make(number, {"number": number}) for number in range(4)]
    fused = Together(Native).enter(*ours).fused
    for _ in range(3):
        fused.step()
    fused.leave(ours[0])
    stay = [one for one in fused.take_ended() if one is not ours[0]]
    assert len(stay) == 3
    for one, row in zip(stay, fused.evaluate(stay)(), strict=True):
        assert row == pytest.approx(one.evaluate(), abs=1e-9)


def test_no_more_trials_are_measured_at_once_than_train_at_once(monkeypatch):
    task, sizes, run = Network(bundle("linear", "leaky_relu", "linear", alike=False)), [], Native.run
    trials = Trials(task)
    ours = [trials.make(number, {"number": number}) for number in range(5)]

    def noting(self, function, params, *rest):
        if not self.template.training:
            sizes.append(len(next(iter(params.values()))))
        return run(self, function, params, *rest)

    monkeypatch.setattr(Native, "run", noting)
    together = Together(Native, size=2).enter(*ours).step(3)
    assert set(sizes) == {1, 2}
    for number, one in enumerate(ours):
        Alone(trials, number, {"number": number}, 3).assert_like(together.fused.state(one), together.curve(one))


# Trials that diverge

SICK = 1


def poisoned(together, trial, how):
    if how == "lr":
        trial.optimizer.param_groups[0]["lr"] = float("inf")
    else:
        with torch.no_grad():
            value = float("nan") if how == "nan" else float("inf")
            for p in trial.model.parameters():
                p.view(-1)[0] = value


NETWORKS = {
    "vector": ("linear", "batch_norm", "leaky_relu", "dropout", "residual", "functional_batch_norm", "tracked"),
    "image": ("conv2d", "batch_norm2d", "group_norm", "pool2d", "conv_transpose2d", "adaptive_pool2d"),
    "series": ("conv1d", "series_batch_norm", "conv_transpose1d", "pool1d", "dropout1d"),
    "sequence": ("gru", "multihead_attention", "sequence_layer_norm", "transformer_layer"),
    "tokens": ("embedding", "lstm", "dot_product_attention", "to_vector", "layer_norm", "softmax"),
}


@pytest.mark.parametrize(
    ("input", "way", "optimizer", "clip"),
    [
        ("vector", Native, "adam", 0.5),
        ("vector", General, "momentum", 0.5),
        ("vector", Native, "asgd", 0.5),
        ("image", Native, "rmsprop", None),
        ("image", General, "adam", None),
        ("series", Native, "nadam", 0.5),
        ("sequence", Native, "adamw", None),
        ("tokens", Native, "adagrad", 0.5),
    ],
)
def test_a_trial_full_of_nan_leaves_every_bit_of_its_neighbours(input, way, optimizer, clip):
    task = Network(bundle(*NETWORKS[input], input=input, optimizer=optimizer, clip=clip, groups=2))
    healthy = None
    for how in (None, "nan", "inf", "lr"):
        trials = Trials(task)
        ours = [trials.make(number, {"number": number}) for number in range(3)]
        together = Together(way).enter(*ours).step(4)
        if how is not None:
            poisoned(together, ours[SICK], how)
        together.step(8)
        states = [together.fused.state(one) for one in ours]
        together.leave(*ours)
        ended = [(s, together.curve(one), one.state(drawn=False)) for s, one in zip(states, ours, strict=True)]
        if healthy is None:
            healthy = ended
            continue
        assert not all(torch.isfinite(v).all() for v in ended[SICK][0]["model"].values() if v.is_floating_point()), how
        for number in range(3):
            if number != SICK:
                assert_equal(ended[number], healthy[number])


# Memory that runs out


class SimulatedLackOfMemory(Native):
    """Pretends that no more than ``most`` trials fit, once their forward has written what it writes."""

    most = 3

    def run(self, function, params, *rest):
        made = super().run(function, params, *rest)
        if self.template.training and len(next(iter(params.values()))) > self.most:
            raise torch.OutOfMemoryError("simulated")
        return made


@pytest.mark.parametrize(("most", "size"), [(8, None), (4, 4), (3, 2), (1, 1)])
def test_where_memory_runs_out_a_step_is_done_in_halves_and_loses_nothing(most, size, monkeypatch):
    monkeypatch.setattr(SimulatedLackOfMemory, "most", most)
    trials = Trials(Network(bundle("linear", "batch_norm", "dropout", "linear")))
    ours = [trials.make(number, {"number": number}) for number in range(8)]
    together = Together(SimulatedLackOfMemory).enter(*ours).step(7)
    assert together.recipe.size == size
    together.leave(*ours)
    for number, one in enumerate(ours):
        Alone(trials, number, {"number": number}, 7).assert_like(one, together.curve(one))


def test_memory_that_is_too_small_for_one_trial_is_an_error(monkeypatch):
    monkeypatch.setattr(SimulatedLackOfMemory, "most", 0)
    trials = Trials(Network(bundle()))
    together = Together(SimulatedLackOfMemory).enter(trials.make(0, {"number": 0}))
    with pytest.raises(torch.OutOfMemoryError):
        together.step()


def test_an_error_that_is_no_lack_of_memory_says_nothing_about_the_size(monkeypatch):
    def raises(*args):
        raise ValueError("no number")

    trials = Trials(Network(bundle()))
    together = Together(Native).enter(*(trials.make(number, {"number": number}) for number in range(4))).step()
    monkeypatch.setattr(together.recipe.way, "run", raises)
    with pytest.raises(ValueError, match="no number"):
        together.step()
    assert together.recipe.size is None


# What is refused, and why


class Forward(nn.Module):
    """A network with some function in its middle."""

    def __init__(self, function):
        super().__init__()
        self.before, self.after, self.function = nn.Linear(6, 4), nn.Linear(4, 2), function
        self.calls = 0

    def forward(self, x):
        return self.after(self.function(self, self.before(x)))


class Twice(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Mapped(Twice):
    """The same as torch.vmap wants it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def branches(model, x):
    return x if x.mean() > 0 else -x  # branches


def item(model, x):
    return x * x.sum().item()  # item


def counts(model, x):
    model.calls += 1
    return x * model.calls


def selects(model, x):
    return x[x > 0].mean() * x  # selects


def twice(model, x):
    return x + Twice.apply(x)


def mapped(model, x):
    return x + Mapped.apply(x)


def by_users_vmap(model, x):
    return torch.func.vmap(torch.sin)(x)


class Refused(Blobs):
    def __init__(self, function):
        self.function = function

    def model(self, config):
        return Forward(self.function)


def line_of(function, marked):
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if f'# {marked}' in line)}"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (item, "item at {}: its result differs from trial to trial"),
        (selects, "__getitem__ at {}: its result has another shape in each trial"),
    ],
)
def test_what_depends_on_one_trial_is_computed_in_parts_and_told_with_the_operator_and_the_line(function, why):
    trials = Trials(Refused(function))
    together = Together().enter(*(trials.make(number, {"lr": 0.1}) for number in range(3))).step()
    assert f"in parts, because of {why.format(line_of(function, function.__name__))}" in together.recipe.tell("")


def test_a_count_that_the_forward_reads_is_refused_by_name():
    trials = Trials(Refused(counts))
    together = Together().enter(*(trials.make(number, {"lr": 0.1}) for number in range(3)))
    with pytest.raises(
        Unfusable, match=r"^the model changes an attribute of its own in its forward, and reads it: cal"
    ):
        together.step()


@pytest.mark.parametrize("function", [branches, twice, mapped])
def test_a_branch_that_all_take_and_a_backward_of_its_own_are_native(function):
    trials = Trials(Refused(function))
    together = Together().enter(*(trials.make(number, {"lr": 0.1}) for number in range(3))).step(2)
    assert together.recipe.way.name == "native"


@pytest.mark.parametrize(("function", "why"), [(by_users_vmap, "aten.sin")])
def test_what_the_native_way_cannot_do_exactly_the_general_way_does(function, why):
    trials = Trials(Refused(function))
    ours = [trials.make(number, {"lr": 0.1}) for number in range(3)]
    together = Together().enter(*ours).step(7)
    assert together.recipe.way.name == "general"
    assert len(together.recipe.refusals) == 1
    assert re.search(f"native: .*{why}", together.recipe.refusals[0])
    together.leave(*ours)
    for number, one in enumerate(ours):
        _, curve = trials.alone(number, {"lr": 0.1}, 7)
        assert together.curve(one)[0] == pytest.approx(curve[0], rel=1e-4)


class Rated(nn.Module):
    """Takes the rate of its dropout for a plain number."""

    def __init__(self, p):
        super().__init__()
        self.drop, self.layer = nn.Dropout(p), nn.Linear(6, 2)

    def forward(self, x):
        return self.layer(x) * (1 - float(self.drop.p))


class Rates(Blobs):
    def model(self, config):
        return Rated(config["p"])


@pytest.mark.parametrize("rates", [(0.2, 0.5, 0.2), (0.2, 0.2, 0.5)])
def test_a_number_of_a_trial_that_a_model_uses_in_its_own_way_is_refused_whenever_it_comes(rates):
    trials = Trials(Rates())
    ours = [trials.make(number, {"lr": 0.1, "p": p}) for number, p in enumerate(rates)]
    together = Together(Native).enter(*ours[:2])
    with pytest.raises(Unfusable, match=r"drop\.p|gradient"):
        together.step(2).enter(ours[2]).step(2)


def test_metrics_that_look_at_values_are_measured_one_by_one_and_training_stays_fused():
    trials = Trials(Items(bundle()))
    ours = [trials.make(number, {"number": number}) for number in range(3)]
    together = Together(Native).enter(*ours).step(7)
    assert together.recipe.alone.startswith(f"item at {__file__}:")
    together.leave(*ours)
    for number, one in enumerate(ours):
        Alone(trials, number, {"number": number}, 7).assert_like(one, together.curve(one))
