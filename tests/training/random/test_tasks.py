"""Tasks that draw at random as people write them: each trial of a bundle trains as it does alone."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.training.check import describe
from penstock.training.fused.agreement import agree_plain
from penstock.training.fused.general import General
from penstock.training.fused.ways import Native
from tests.tasks import Blobs
from tests.training.fused.test_compiled import made
from tests.training.together import Alone, Together, Trials, as_traced

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
RATES = (0.1, 0.02, 0.3)


class Small(Blobs):
    """Twelve samples with a short last batch."""

    batch_size = 5

    def data(self, config):
        x = torch.linspace(-2, 2, 72).reshape(12, 6).sin()
        y = torch.arange(12) % 3
        return (x, y), (x[:4], y[:4])

    def scheduler(self, optimizer, config):
        return None

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        return self.decode(z), kl


class Variational(Small):
    def model(self, config):
        return VAE()

    def loss(self, model, batch, config):
        made, kl = model(batch[0])
        return F.mse_loss(made, batch[0]) + 0.1 * kl

    def metrics(self, model, batch, config):
        return {"loss": self.loss(model, batch, config)}


class Posterior(Variational):
    """The same by torch.distributions, which look at their arguments' values."""

    def loss(self, model, batch, config):
        (x, _), D = batch, torch.distributions
        mean, scale = model.encode(x).chunk(2, -1)
        q = D.Normal(mean, F.softplus(scale) + 1e-3)
        kl = D.kl_divergence(q, D.Normal(torch.zeros(2), torch.ones(2))).sum(-1).mean()
        return (kl - D.Normal(model.decode(q.rsample()), 0.5).log_prob(x).sum(-1).mean()) / 20


class Diffusion(Small):
    """Predicts the noise that was added, at a time drawn for each sample."""

    def model(self, config):
        return nn.Sequential(nn.Linear(7, 8), nn.SiLU(), nn.Linear(8, 6))

    def loss(self, model, batch, config):
        x = batch[0]
        kept = torch.cos(torch.linspace(0.1, 1.5, 10)).square()
        t = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        a = kept[t].unsqueeze(-1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, t.unsqueeze(-1) / 10], 1)), noise)

    metrics = Variational.metrics


class MixUp(Small):
    def loss(self, model, batch, config):
        x, y = batch
        share = torch.distributions.Beta(0.4, 0.4).sample()
        order = torch.randperm(x.shape[0])
        logits = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


class CutMix(Small):
    """With a box of a mask, so that its size is no shape."""

    def loss(self, model, batch, config):
        x, y = batch
        share, first = torch.rand(()), torch.randint(0, 6, ())
        place = torch.arange(6)
        inside = (place >= first) & (place < first + (share * 6).floor())
        order = torch.randperm(len(x))
        logits = model(torch.where(inside, x[order], x))
        weight = inside.double().mean()
        return (1 - weight) * F.cross_entropy(logits, y) + weight * F.cross_entropy(logits, y[order])


def torchvisions_stochastic_depth(input, p, mode, training=True):
    if p < 0.0 or p > 1.0:
        raise ValueError(f"drop probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input
    survival_rate = 1.0 - p
    size = [input.shape[0]] + [1] * (input.ndim - 1) if mode == "row" else [1] * input.ndim
    noise = torch.empty(size, dtype=input.dtype, device=input.device)
    noise = noise.bernoulli_(survival_rate)
    if survival_rate > 0.0:
        noise.div_(survival_rate)
    return input * noise


def timms_drop_path(x, drop_prob=0.0, training=False, scale_by_keep=True):
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    if keep_prob > 0.0 and scale_by_keep:
        random_tensor.div_(keep_prob)
    return x * random_tensor


def written_in_two_lines(x, p, training):
    noise = torch.empty(x.shape[0], 1)
    noise.bernoulli_(1 - p)
    return x * noise


class Residual(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.first, self.inner, self.last, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), drop

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = x + self.drop(torch.tanh(self.inner(x)), 0.4, self.training)
        return self.last(x)


def by_row(x, p, training):
    return torchvisions_stochastic_depth(x, p, "row", training)


def by_batch(x, p, training):
    return torchvisions_stochastic_depth(x, p, "batch", training)


class Depth(Small):
    def __init__(self, drop):
        self.drop = drop

    def model(self, config):
        return Residual(self.drop)


class LayerDrop(nn.Module):
    """As transformers write it: a branch on a draw of one trial, unless the rate is 0."""

    def __init__(self, rate):
        super().__init__()
        self.layers, self.rate = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), rate
        self.last = nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 3))

    def forward(self, x):
        for layer in self.layers:
            dropout_probability = torch.rand([])
            skip = self.training and dropout_probability < self.rate
            if not skip:
                x = torch.tanh(layer(x))
        return self.last(x)


class Layered(Small):
    def __init__(self, rate):
        self.rate = rate

    def model(self, config):
        return LayerDrop(self.rate)


class Leaky(Small):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 8), nn.RReLU(inplace=True), nn.Linear(8, 3))


class Recurrent(nn.Module):
    def __init__(self, kind, rate, **options):
        super().__init__()
        self.layers = kind(2, 3, 3, dropout=rate, batch_first=True, **options)
        self.last = nn.Sequential(nn.Dropout(0.2), nn.Linear(3 * (1 + self.layers.bidirectional), 3))

    def forward(self, x):
        return self.last(self.layers(x.view(-1, 3, 2))[0][:, -1])


class Recurs(Small):
    def __init__(self, kind, rates, **options):
        self.kind, self.rates, self.options = kind, rates, options

    def model(self, config):
        return Recurrent(self.kind, self.rates[RATES.index(config["lr"])], **self.options)


class Hard(Small):
    """Draws a class, and one of its own kind of noise, in the middle of the network."""

    def loss(self, model, batch, config):
        x, y = batch
        logits = model(x + torch.normal(0.0, 0.1, x.shape))
        hidden = F.gumbel_softmax(logits, tau=0.7, hard=True)
        drawn = torch.distributions.Categorical(logits=logits).sample()
        noise = torch.empty_like(logits).exponential_().log_normal_(0.0, 0.1) * torch.rand(3)
        return F.cross_entropy(logits * noise + hidden, y) - (logits.softmax(-1).gather(1, drawn[:, None])).mean()


def assert_fused(task, way, steps=6, count=3):
    """Trials of a bundle, trained by one way, are those alone; and each drew for itself, by key."""
    trials = Trials(task)
    configs = [{"lr": lr} for lr in RATES[:count]]
    ours = [trials.make(number, config) for number, config in enumerate(configs)]
    together = Together(way).enter(*ours).step(steps)
    assert together.recipe.way is not None, together.recipe.refusals
    for number, (one, config) in enumerate(zip(ours, configs, strict=True)):
        state, alone = together.fused.state(one), Alone(trials, number, config, steps)
        assert alone.run.randomness.unkeyed == []
        alone.assert_like(state, together.curve(one))


TASKS = {
    "vae": Variational(), "distributions": Posterior(), "diffusion": Diffusion(), "mixup": MixUp(), "cutmix": CutMix(),
    "torchvision by row": Depth(by_row), "torchvision by batch": Depth(by_batch), "timm": Depth(timms_drop_path),
    "two lines": Depth(written_in_two_lines), "layer drop off": Layered(0.0), "always dropped": Layered(1.0),
    "rrelu": Leaky(), "hard": Hard(), "lstm": Recurs(nn.LSTM, [0.5] * 3), "gru": Recurs(nn.GRU, [0.4] * 3),
    "rnn": Recurs(nn.RNN, [0.2] * 3, bidirectional=True), "rates of lstm": Recurs(nn.LSTM, [0.5, 0.0, 0.1]),
    "lstm without": Recurs(nn.LSTM, [0.0] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_a_bundle_natively(name):
    assert_fused(TASKS[name], Native)


# Torch's vmap takes no recurrent layers, and no autograd.Function as that of a Beta distribution.
MAPPED = [name for name, task in TASKS.items() if not isinstance(task, Recurs | MixUp)]


@pytest.mark.parametrize("name", MAPPED)
def test_a_bundle_by_vmap(name):
    assert_fused(TASKS[name], General)


@pytest.mark.parametrize("name", ["vae", "diffusion", "torchvision by row", "layer drop off", "rrelu", "lstm", "hard"])
def test_a_step_is_traced_as_it_is(name, monkeypatch):
    """Its keys are inputs of the trace: it draws anew at every step."""
    task = TASKS[name]
    if name == "hard":  # a check of values cannot be traced
        monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    trials = Trials(task)
    fused = Together().enter(*(trials.make(n, {"lr": lr}) for n, lr in enumerate(RATES))).step().fused
    step, _ = made(fused, as_traced)
    for _ in range(3):  # two full batches, of the first epoch and of the second
        fused.step()
    agree_plain(step.step, step, made(fused)[1])


def test_values_that_a_distribution_refuses_cost_their_own_trial_alone():
    class Scaled(Small):
        def loss(self, model, batch, config):
            scale = model(batch[0]).square().mean()
            return torch.distributions.Normal(0.0, scale, validate_args=True).rsample()

    trials = Trials(Scaled())
    first, good, bad = (trials.make(number, {"lr": 0.01}) for number in range(3))
    with torch.no_grad():
        bad.model[0].weight.fill_(math.nan)
    together = Together(Native).enter(first, good).step()
    together.enter(bad)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        together.fused.step()
    assert [trial for trial, _ in together.fused.step_each()] == [bad]
    Alone(trials, 1, {"lr": 0.01}, 2).assert_like(together.fused.state(good), [])


def looked_at(task):
    return describe(Trials(task).make(0, {"lr": 0.1}), [], train=True).reason


class Told(Small):
    def __init__(self, draw):
        self.draw = draw

    def loss(self, model, batch, config):
        return super().loss(model, batch, config) * (1 + 0.1 * self.draw())


def seeded():
    torch.manual_seed(4)
    return torch.rand(())


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: torch.rand((), generator=torch.Generator()), "rand with a generator of the task's own draws numbers "
         "that trials cannot share: without it, the draw is keyed by trial and step"),
        (lambda: torch.empty(()).normal_(generator=torch.Generator()), "normal_ with a generator of the task's own"),
        (lambda: torch.normal(0.0, 1.0, (), generator=torch.Generator()), "normal with a generator of the task's own"),
        (seeded, "rand with a seed of the task's own draws numbers that trials cannot share"),
        (lambda: torch.binomial(torch.ones(()), torch.ones(())), "binomial draws from torch's generator in a way that"),
        (random.random, "the loss draws from Python's or numpy's random generator, which trials cannot share"),
        (lambda: torch.rand(()), ""),
    ],
)  # fmt: skip
def test_a_draw_that_is_not_keyed_is_told_and_trains_alone(draw, said):
    reason = looked_at(Told(draw))
    assert reason.startswith(said)
    assert bool(reason) is bool(said)


def test_a_seed_of_the_tasks_own_gives_the_numbers_that_it_gives_anywhere():
    run = Trials(Told(seeded)).make(0, {"lr": 0.1})
    found = []
    run.task.draw = lambda: found.append(seeded()) or found[-1]
    for _ in range(2):
        run.train_step(next(iter(run.batches())))
    torch.manual_seed(4)
    assert found == [torch.rand(())] * 2


def test_a_layer_drop_that_is_on_is_computed_in_parts():
    trials = Trials(Layered(0.5))
    ours = [trials.make(n, {"lr": 0.1}) for n in range(3)]
    together = Together(Native).enter(*ours).step(6)
    assert "in parts, because of __bool__ at" in together.recipe.tell("")
    together.leave(*ours)
    for n, one in enumerate(ours):
        Alone(trials, n, {"lr": 0.1}, 6).assert_like(one, together.curve(one))


def test_draws_into_memory_that_others_see_are_refused():
    class Shared(Small):
        def loss(self, model, batch, config):
            noise = torch.zeros(2, 3)
            noise[0].normal_()
            return super().loss(model, batch, config) + (noise * model(batch[0]).mean(0)).mean()

    trials = Trials(Shared())
    together = Together(Native).enter(*(trials.make(n, {"lr": 0.1}) for n in range(2)))
    with pytest.raises(ps.PenstockError, match=r"normal_ at .*: it draws for each trial into a tensor that"):
        together.step()


@pytest.mark.parametrize("name", ["diffusion", "timm", "vae"])
def test_parts_of_a_batch_draw_its_rows(name):
    """As where memory is short; the parts of a distributed batch are the same."""
    whole, divided = (Trials(TASKS[name]).make(0, {"lr": 0.1}) for _ in range(2))
    assert divided.divide(2) == ""
    for run in (whole, divided):
        for batch, _ in zip(run.batches(), range(2), strict=False):
            run.train_step(batch)
            run.count_step()
    for one, other in zip(whole.model.parameters(), divided.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


class Later(Small):
    """Draws only in a batch that is shorter than others."""

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 3))

    def loss(self, model, batch, config):
        x, y = batch
        first = model[0](x)
        return F.cross_entropy(model[2](model[1](first) if len(x) < 5 else first), y)


def shaken(x):
    return x + torch.normal(0.0, 0.1, x.shape)


class Shaken(Small):
    """The same by a function of the task's file, which a method of the task calls."""

    def loss(self, model, batch, config):
        x, y = batch
        return F.cross_entropy(model(self.prepared(x) if len(x) < 5 else x), y)

    def prepared(self, x):
        return shaken(x)


@pytest.mark.parametrize("task", [Later(), Shaken()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("way", [Native, General])
def test_a_draw_that_a_later_batch_makes_first_is_keyed_there(way, task):
    assert_fused(task, way)
    first, _ = Trials(task).alone(0, {"lr": 0.1}, 2)
    second = Trials(task).make(0, {"lr": 0.1})
    second.restore(copy.deepcopy(first.state()), inherited=False)
    for run in (first, second):  # one has drawn nothing before, and the other has not begun
        run.model.train()
        run.train_step(next(iter(run.batches())))
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def test_a_task_that_names_no_draw_needs_no_mode():
    for task, wanted in ((Small(), False), (Shaken(), True), (Depth(by_row), True)):
        run, _ = Trials(task).alone(0, {"lr": 0.1}, 1)
        assert run.randomness.needed is wanted


def test_a_trial_that_is_stopped_goes_on_with_the_same_draws():
    trials = Trials(TASKS["hard"])
    alone, curve = trials.alone(0, {"lr": 0.1}, 6)
    first, _ = trials.alone(0, {"lr": 0.1}, 4)
    second = trials.make(0, {"lr": 0.1})
    second.restore(first.state(), inherited=False)
    torch.rand(100)
    rows = [next(steps) for steps in [second.steps()] for _ in range(2)]
    assert rows[-1] == curve[-1]
    for one, other in zip(alone.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
