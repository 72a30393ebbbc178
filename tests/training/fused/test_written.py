"""Models and losses as people write them: each kind trains natively as its trials would alone."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from penstock.training.fused.promoting import demote
from penstock.training.fused.stacked import Stacked, Unfusable
from penstock.training.fused.wording import plainly
from tests.training.fused.written import Written, cross_entropy, fused_as_alone

MODELS, LOSSES, REFUSED = {}, {}, {}


def listed(table):
    def register(made):
        table[made.__name__] = made
        return made

    return register


class Two(nn.Module):
    """A function of what is between two layers."""

    def __init__(self, function=torch.tanh, first=None):
        super().__init__()
        self.first, self.last, self.function = first or nn.Linear(6, 8), nn.Linear(8, 3), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


# Weights that are computed


@listed(MODELS)
def weight_norm():
    return Two(first=parametrizations.weight_norm(nn.Linear(6, 8)))


@listed(MODELS)
def weight_norm_by_hook():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Two(first=nn.utils.weight_norm(nn.Linear(6, 8)))


@listed(MODELS)
def spectral_norm():
    return Two(first=parametrizations.spectral_norm(nn.Linear(6, 8)))


@listed(MODELS)
def spectral_norm_by_hook():
    return Two(first=nn.utils.spectral_norm(nn.Linear(6, 8)))


@listed(MODELS)
def orthogonal():
    return Two(first=parametrizations.orthogonal(nn.Linear(6, 8)))


@listed(MODELS)
def orthogonal_by_cayley():
    return Two(first=parametrizations.orthogonal(nn.Linear(6, 8), orthogonal_map="cayley"))


@listed(MODELS)
def pruned():
    model = Two()
    prune.l1_unstructured(model.first, "weight", 0.3)
    prune.random_unstructured(model.last, "weight", 0.3)
    return model


@listed(MODELS)
def hooks_that_compute():
    model = Two()
    model.first.register_forward_hook(lambda module, inputs, out: out * 1.5)
    model.last.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))
    return model


@listed(MODELS)
def defined_inside_a_function():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = nn.Linear(6, 3)

        def forward(self, x):
            return self.only(x).tanh()

    return Inner()


# Sequences


class Packed(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(2, 4, batch_first=True, **options)
        self.last = nn.Linear(8 if self.layers.bidirectional else 4, 3)

    def forward(self, x):
        lengths = torch.arange(len(x)).remainder(3) + 1
        packed = pack_padded_sequence(x.view(-1, 3, 2), lengths, batch_first=True, enforce_sorted=False)
        out, end = self.layers(packed)
        end = end[-1] if isinstance(end, tuple) else end
        return self.last(pad_packed_sequence(out, batch_first=True)[0].sum(1)) + end.sum()


@listed(MODELS)
def packed_lstm():
    return Packed(nn.LSTM, num_layers=2, bidirectional=True)


@listed(MODELS)
def packed_gru():
    return Packed(nn.GRU, bidirectional=True)


@listed(MODELS)
def packed_rnn():
    return Packed(nn.RNN, bias=False)


# Functions with a backward of their own


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.by * grad, None


class Scaled(torch.autograd.Function):
    """In the newer style; its gradient is wrong on purpose, so that no other can take its place."""

    @staticmethod
    def forward(x, y):
        return x * x * y, 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad, _):
        x, y = ctx.saved_tensors
        return 1.8 * x * y * grad, x * x * grad


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


bound_before = Reversed.apply


@listed(MODELS)
def old_function():
    return Two(lambda x: bound_before(x, 0.5))


@listed(MODELS)
def new_function():
    return Two(lambda x: Scaled.apply(x, x.sigmoid())[0])


@listed(MODELS)
def function_in_place():
    return Two(lambda x: Doubled.apply(x * 1).tanh())


@torch.jit.script
def scripted(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.tanh(x) * by


@listed(MODELS)
def scripted_function():
    return Two(lambda x: scripted(x, 2.0))


# Writing in place


def into_a_part(x):
    y = x.clone()
    y[:, 0] = x[:, 1] * 2
    y[:, 2:4] += x[:, :2]
    y[torch.tensor([0, 2])] *= 2
    y[[1], [2, 3]] = x[0, :2]
    y[:, [1, 3]] = 0.5
    y[y > 1] = 0.1
    y[..., -1] = x.new_ones(len(x))
    y[:2, None, 5] = x[:2, :1]
    return y + y[[0, 1, 1, 0]][:, [2, 0], None].sum((1, 2), keepdim=True)[:, 0]


def into_a_tensor_of_all(x):
    out = torch.zeros(len(x), 8, dtype=x.dtype)
    out[:, :4] = x[:, 4:]
    out[:, 5] += x[:, 0]
    row = torch.ones(3, 8, dtype=x.dtype)[1]
    row += x[0]
    total = torch.zeros(8, dtype=x.dtype)
    for one in x:
        total += one
    put = torch.zeros(3, 8, dtype=x.dtype).index_add_(0, torch.tensor([0, 0, 1, 2]), x)
    return out + row + total + put.sum(0)


def by_index(x):
    places = torch.arange(8).expand(len(x), 8) % 3
    y = torch.zeros_like(x).scatter_(1, places, x).scatter_add(1, places, x * 2)
    y.index_put_((torch.tensor([0, 1]), torch.tensor([1, 2])), x[:2, 0], accumulate=True)
    y.index_copy_(1, torch.tensor([7]), x[:, :1])
    y = y.masked_fill(y > 2, 2.0) + x.gather(dim=1, index=places) + x.take_along_dim(x.argsort(1), 1)
    best = x.argmax(1)
    return y + x[torch.arange(len(x)), best][:, None] + x.index_select(0, torch.tensor([1, 1, 0, 3]))


for function in (into_a_part, into_a_tensor_of_all, by_index):
    MODELS[function.__name__] = lambda function=function: Two(function)


@listed(MODELS)
def lists_of_tensors():
    def function(x):
        made = torch._foreach_mul([x, x.sin()], [1.0, 0.5])
        torch._foreach_add_(made, 1.0)
        torch._foreach_lerp_(made, [x, x], 0.25)
        return torch._foreach_addcmul(made, [x, x], made, value=0.1)[1] / torch._foreach_norm(made)[0]

    return Two(function)


# Buffers


class Kept(nn.Module):
    """Averages in buffers: one written in place, one assigned, and a count."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        h = self.first(x)
        if self.training:
            self.seen += 1
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * h.mean(0))
            self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
        return self.last(h - self.average + self.mean * 0.1)


MODELS["buffers"] = Kept


class Codebook(nn.Module):
    """A vector quantizer that learns its codes by averages, with a straight-through gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.linspace(-1, 1, 20).view(5, 4))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x):
        h = self.first(x)
        nearest = torch.cdist(h, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, num_classes=5).to(h.dtype)
                self.counts.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.codes.lerp_((chosen.T @ h + self.codes) / (chosen.sum(0) + 1)[:, None], 0.1)
        return self.last(h + (self.codes[nearest] - h).detach())


MODELS["codebook"] = Codebook


@listed(MODELS)
def batch_norm_over_all_batches():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))


class Neighbours(nn.Module):
    """A sparse matrix of a graph."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.graph = torch.eye(4, dtype=torch.float64).roll(1, 0).to_sparse()

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.sparse.mm(self.graph, h) + self.graph @ h.tanh())


MODELS["sparse_matrix"] = Neighbours


class Named(nn.Module):
    """Products and others with their arguments by name, as BLOOM's attention has them."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        q, k = self.query(x).view(-1, 2, 3), self.key(x).view(size=(-1, 2, 3))
        bias = torch.ones(len(x), 2, 2, dtype=x.dtype)
        scores = bias.baddbmm(batch1=q, batch2=k.mT, beta=0.5, alpha=0.7).softmax(dim=-1)
        scores = torch.baddbmm(input=scores, batch1=q, batch2=k.transpose(dim0=1, dim1=-1), beta=0)
        more = torch.addmm(input=x.new_zeros(size=(3,)), mat1=q[:, 0], mat2=k[:3, 0].T).sum(axis=-1, keepdims=True)
        first, _ = torch.bmm(input=scores, mat2=q).chunk(chunks=2, dim=1)
        top = torch.sum(input=k, dim=1).topk(k=2).values
        out = F.linear(input=q.flatten(1), weight=self.last.weight, bias=self.last.bias)
        return out + more + first.squeeze(dim=1).repeat(repeats=(1, 1)) + top.mean(1, keepdim=True)


MODELS["arguments_by_name"] = Named


@listed(MODELS)
def a_buffer_that_no_state_has():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(6, 3)
            self.register_buffer("mean", torch.zeros(6), persistent=False)

        def forward(self, x):
            if self.training:
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return self.last(x - self.mean)

    return Centred()


@listed(MODELS)
def stays_in_evaluation():
    """A BatchNorm that is frozen, as of a network that is tuned further."""

    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    return Frozen(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("name", MODELS)
def test_models_train_natively_as_alone(name):
    fused_as_alone(Written(MODELS[name]))


# Gradients inside the loss


@listed(LOSSES)
def gradient_penalty(model, batch):
    x, y = batch
    x = x.clone().requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + (slope.norm(2, dim=1) - 1).square().mean()


@listed(LOSSES)
def differential_equation(model, batch):
    x, y = batch
    a, b = x[:, :3].clone().requires_grad_(), x[:, 3:].clone()
    b.requires_grad = True
    u = model(torch.cat([a, b.sin()], 1)).sum(1)
    by_a, by_b = torch.autograd.grad(u, [a, b], torch.ones_like(u), create_graph=True)
    twice = torch.autograd.grad(by_a.sum(), a, create_graph=True)[0]
    return (twice.sum(1) + by_b.sum(1) - y).square().mean()


@listed(LOSSES)
def step_within_a_step(model, batch):
    x, y = batch
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(x[:2]), y[:2]), list(params.values()), create_graph=True)
    inner = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, inner, (x,)), y)


@listed(LOSSES)
def branch_that_all_trials_take(model, batch):
    lost = cross_entropy(model, batch)
    return lost if bool(lost > 0) and torch.isfinite(lost) else lost * 2


@pytest.mark.parametrize("name", LOSSES)
def test_losses_train_natively_as_alone(name):
    fused_as_alone(Written(Two, LOSSES[name]))


# What stays solo, by name, with the line and what to do


@listed(REFUSED)
def backward_inside():
    def lost(model, batch):
        made = cross_entropy(model, batch)
        made.backward(retain_graph=True)
        return made

    return Written(Two, lost), r"backward at .*test_written.py:\d+: .*use torch.autograd.grad inside of it"


@listed(REFUSED)
def scripted_module():
    made = Written(lambda: Two(first=torch.jit.script(nn.Linear(6, 8).double())))
    return made, "the module first is compiled by torch.jit.script"


@listed(REFUSED)
def sparse_gradients():
    def model():
        return nn.Sequential(nn.Embedding(5, 6, sparse=True), nn.Flatten(), nn.Linear(36, 3))

    tokens = Written(model, numbers=lambda g: torch.randint(5, (12, 6), generator=g))
    return tokens, r"embedding at .*: sparse gradients cannot be stacked; leave sparse=False"


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_operator_the_line_and_what_to_do(name):
    task, told = REFUSED[name]()
    with pytest.raises(Unfusable) as refused:
        fused_as_alone(task)
    assert re.search(told, str(refused.value)), refused.value
    assert "vmap" not in str(refused.value)


def test_a_tensor_of_all_trials_that_is_kept_is_given_back_as_it_was_and_refused():
    kept = torch.zeros(2)
    kept += Stacked(torch.ones(3, 2))
    assert kept.whole.tolist() == [[1, 1]] * 3
    with pytest.raises(Unfusable, match=r"a tensor of shape \[2\] that is kept .*: register it as a buffer"):
        demote()
    assert type(kept) is torch.Tensor
    assert kept.tolist() == [0, 0]
    demote()


def test_a_tensor_of_all_trials_is_not_written_where_another_view_would_not_see_it():
    shared = torch.zeros(2, 2)
    view = shared[0]
    with pytest.raises(Unfusable, match="seen under other views; clone it"):
        shared += Stacked(torch.ones(3, 2, 2))
    assert view.tolist() == [0, 0]


def flex_attention():
    raise RuntimeError("vmap over torch's higher order operator")  # as torch's own raises on a GPU


def test_flex_attention_is_refused_by_name():
    with pytest.raises(RuntimeError) as raised:
        flex_attention()
    assert plainly(raised.value) == ("flex_attention runs for one trial alone: use F.scaled_dot_product_attention")
