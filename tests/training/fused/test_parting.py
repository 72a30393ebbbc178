"""Trials that go on in ways of their own in a step: they are run in parts, each trial as if it were alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.training.fused.refusing import Unfusable
from tests.training.fused.written import Written, cross_entropy, fused_as_alone
from tests.training.together import Together, Trials

MODELS = {}


def listed(made):
    MODELS[made.__name__] = made
    return made


def body(width=6, out=3):
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, out))


@listed
class experts_by_mask(nn.Module):
    """Rows go to experts by a mask; an expert that a trial's batch does not reach has no gradient there."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(body() for _ in range(3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                out[mine] += expert(x[mine]) * weights[mine].unsqueeze(-1)
        return out


@listed
class experts_by_where(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList(body() for _ in range(2))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(1, -1)
        out = torch.zeros(len(x), 3, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            out.index_add_(0, row, expert(x[row]) * weights[row, place, None])
        return out


@listed
class layer_drop(nn.Module):
    """Layers that a draw leaves out, beside dropout and running statistics."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            if not self.training or torch.rand([]) > 0.5:
                x = x + self.drop(torch.tanh(layer(x)))
        return self.last(x)


@listed
class assigned_buffer(nn.Module):
    """A buffer that is written, and another that is assigned, before and behind the line where trials part."""

    def __init__(self):
        super().__init__()
        self.body = body()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.seen += 1
        made = self.body(x)
        if made.mean() > 0:
            made = made * 2
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * made.mean(0).detach()
        return made + self.mean


@listed
class out_of_torch(nn.Module):
    """Numbers that are computed by numpy decide which rows count."""

    def __init__(self):
        super().__init__()
        self.body = body()

    def forward(self, x):
        made = self.body(x)
        order = made.detach().numpy().sum(1).argsort()
        return made[torch.from_numpy(order.copy())].roll(1, 0) + made


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_trials_that_part_train_as_alone(make):
    fused_as_alone(Written(make))


def test_the_line_where_trials_part_is_told():
    trials = Trials(Written(experts_by_mask))
    together = Together().enter(*(trials.make(number, {"lr": 0.1}) for number in range(3))).step(2)
    told = together.recipe.tell("why")
    assert together.recipe.named == "native"
    assert "in parts, because of" in told
    assert "test_parting.py" in told


# Other causes that let models train solo


class Noted(nn.Module):
    """A parametrized layer beside an attribute that each forward writes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3)

    def forward(self, x):
        self.note = torch.tanh(self.first(x))
        return self.last(self.note)


def test_a_parametrized_module_is_equal_to_its_copy():
    fused_as_alone(Written(Noted))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3))

    def forward(self, x):
        return checkpoint(self.body, F.dropout(x, 0.1, self.training), use_reentrant=False)


def test_checkpointing_draws_again_what_it_drew():
    if hasattr(torch.utils.checkpoint, "_NoopSaveInputs"):  # torch 2.11
        with pytest.raises(Unfusable, match="this version of torch keeps its inputs as those of one trial"):
            fused_as_alone(Written(Checkpointed))
    else:
        fused_as_alone(Written(Checkpointed))


class Momentum(nn.Module):
    """A second network that follows the first, by ``data``, as MoCo's does."""

    def __init__(self):
        super().__init__()
        self.query = body()
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x):
        return self.query(x)


def followed(model, batch):
    if model.training:
        for p, q in zip(model.query.parameters(), model.key.parameters(), strict=True):
            q.data = q.data * 0.9 + p.data * 0.1
    return cross_entropy(model, batch) + F.mse_loss(model(batch[0]), model.key(batch[0]))


def test_data_that_is_assigned_is_each_trials_own():
    fused_as_alone(Written(Momentum, followed))


class Chunks(nn.Module):
    """Overlapping windows by ``as_strided``, of a tensor that lies in its memory in another order."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(12, 3)

    def forward(self, x):
        made = self.first(x).t().contiguous().t() if self.training else self.first(x)
        made = made.contiguous()
        rows, step = made.stride()
        return self.last(made.as_strided((len(x), 3, 4), (rows, 2 * step, step)).flatten(1))


def test_strides_are_those_of_a_trials_own_tensor():
    fused_as_alone(Written(Chunks))


def test_a_compiled_model_is_fused_as_it_was_written():
    fused_as_alone(Written(lambda: torch.compile(body(), backend="eager")))


def margin(model, batch):
    """A one-hot tensor by ``scatter_`` of a number, and a condition without dimensions."""
    x, y = batch
    made = F.normalize(model(x), dim=-1)
    hot = torch.zeros_like(made)
    hot.scatter_(1, y.view(-1, 1), 1.0)
    made = torch.where(made.sum() > -100, made - 0.1 * hot, made)
    return F.cross_entropy(4 * made, y)


def test_a_number_is_scattered_and_a_condition_may_have_no_dimensions():
    fused_as_alone(Written(body, margin))
