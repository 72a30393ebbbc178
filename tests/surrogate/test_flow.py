"""What follows from the order of products: last layers begin with zeros, and scores of attention go with 1/d."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from penstock.surrogate.check import STEEPEST, coordinates
from penstock.surrogate.settings import Surrogate
from penstock.surrogate.task import narrowed, parts_of
from tests.surrogate.models import Narrowable, draws

WIDTH, HEADS, SCALE = 64, 2, 4


class Attending(nn.Module):
    """Attention between two layers; ``kind`` says how its scores are made and divided."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.heads, self.size = kind, HEADS, WIDTH // HEADS
        self.written = self.size**-0.5  # a number that does not shrink
        self.first = nn.Linear(8, WIDTH)
        if kind == "torch":
            self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout=0.0, batch_first=True)
        else:
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.normal = nn.LayerNorm(self.size)
        self.last = nn.Linear(WIDTH, 10)

    def attend(self, q, k, v):
        if self.kind == "turned":  # as by rotary positions, whose tables are made by division
            turns = torch.arange(q.shape[-2])[:, None] / (1.0 + torch.arange(q.shape[-1]) / q.shape[-1])
            q, k = q * turns.cos(), k * turns.cos()
        if self.kind in ("fused", "turned"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kind == "normal":
            return F.scaled_dot_product_attention(self.normal(q), self.normal(k), v)
        if self.kind == "before":
            return (q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)).softmax(-1) @ v
        by = {"written": self.written, "whole": 1 / q.shape[-1]}[self.kind]
        return (q @ k.transpose(-1, -2) * by).softmax(-1) @ v

    def forward(self, x):
        x = self.first(x.view(len(x), 4, 8))
        if self.kind == "torch":
            return self.last(self.layer(x).mean(1))
        shape = (*x.shape[:2], 3, self.heads, self.size)
        if self.kind == "heads":
            shape = (*x.shape[:2], 3, -1, 32)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v) if self.kind == "heads" else self.attend(q, k, v)
        return self.last((x + self.out(y.transpose(1, 2).reshape(x.shape))).mean(1))


def found(make):
    model = narrowed(Narrowable(make), Surrogate(scale=SCALE)).model({"lr": 0.1})
    return model, parts_of(model)


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("fused", SCALE**0.5),
        ("turned", SCALE**0.5),
        ("torch", SCALE**0.5),
        ("before", SCALE**0.5),
        ("written", SCALE),
        ("whole", 1),  # the user's own is 1/d
        ("normal", 1),  # normalised queries do not grow with what makes them
        ("heads", 1),  # their number shrinks, and not their size
    ],
)
def test_scores_go_with_the_inverse_of_the_head_size_and_are_the_users_at_full_width(kind, times):
    parts = found(lambda: Attending(kind))[1]
    inner, out = (
        ("layer.self_attn.in_proj_weight", "layer.self_attn.out_proj") if kind == "torch" else ("qkv.weight", "out")
    )
    factors = [
        parts[inner].attention,
        parts[inner.replace("weight", "bias")].attention,
        parts[f"{out}.weight"].attention,
    ]
    assert factors == pytest.approx([times**0.5, times**0.5, times**-0.5])
    others = {
        name: part.attention
        for name, part in parts.items()
        if not name.startswith(inner[:-7]) and name != f"{out}.weight"
    }
    assert set(others.values()) == {1}
    plain = {"init": 2.0, "SGD": 1.0, "Adam": 4.0}  # a hidden matrix of a quarter of the width
    part = parts[inner]
    assert part.init == pytest.approx(plain["init"] * times**0.5)
    assert part.rate("Adam") == pytest.approx(plain["Adam"] * times**0.5)
    assert part.rate("SGD") == pytest.approx(plain["SGD"] * times)
    assert part.factor("Adam").eps == pytest.approx(4.0 / times**0.5)


class Heads(nn.Module):
    """Two outputs whose product is the result, a gate, and an output that nothing multiplies again."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 1)
        self.left, self.right, self.last = (nn.Linear(WIDTH, 10) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = x * torch.sigmoid(self.gate(x))
        return self.left(x) * self.right(x) + self.last(x)


def test_last_layers_begin_with_zeros_and_those_that_are_multiplied_again_do_not():
    model, parts = found(Heads)
    assert {name for name, part in parts.items() if part.role == "output"} == {
        f"{one}.weight" for one in ("gate", "left", "right", "last")
    }
    assert {name for name, part in parts.items() if part.init == 0} == {"last.weight"}
    assert not model.last.weight.any()
    assert model.last.bias.any()
    assert all(layer.weight.any() for layer in (model.gate, model.left, model.right))
    loss = F.cross_entropy(model(draws(4, 32)), torch.arange(4))
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


class Cosine(nn.Module):
    """A head whose weights are normalised in the forward."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(32, WIDTH), nn.Parameter(torch.randn(10, WIDTH))

    def forward(self, x):
        return F.linear(F.normalize(self.first(x)), F.normalize(self.head))


def weight_normed():
    return nn.Sequential(*(weight_norm(nn.Linear(*sizes)) for sizes in ((32, WIDTH), (WIDTH, WIDTH), (WIDTH, 10))))


@pytest.mark.parametrize("make", [Cosine, weight_normed])
def test_weights_that_are_normalised_do_not_begin_with_zeros(make):
    """Zeros have no direction: by weight norm all outputs were NaN, and normalize gives them gradients of 1e12."""
    torch.manual_seed(0)
    model, parts = found(make)
    head = "head" if make is Cosine else "2.parametrizations.weight.original1"
    assert (parts[head].role, parts[head].init) == ("output", SCALE)
    F.cross_entropy(model(draws(4, 32)), torch.arange(4)).backward()
    assert all(0 < float(p.grad.abs().max()) < 1e3 for p in model.parameters())
    if make is weight_normed:
        roles = {name.removeprefix("1.parametrizations.weight."): part.role for name, part in parts.items()}
        assert (roles["original0"], roles["original1"]) == ("input", "hidden")
        narrow, full = (float(made[1].weight.detach().norm(dim=1).mean()) for made in (model, make()))
        assert narrow == pytest.approx(full, rel=0.05), "rows are as long as the target's"


ALL = ("output", "biases", "query")


class Apart(Attending):
    """Queries, keys and values of layers of their own, and a table of positions, which is no bias."""

    def __init__(self):
        super().__init__("fused")
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.places = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x):
        x = self.first(x.view(len(x), 4, 8)) + self.places
        q, k, v = (one(x).view(len(x), 4, HEADS, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.last(self.out(self.attend(q, k, v).transpose(1, 2).reshape(x.shape)).mean(1))


@pytest.mark.parametrize("kind", ["fused", "before", "torch", "apart"])
def test_queries_and_biases_begin_with_zeros_where_that_is_asked_for(kind):
    make = Apart if kind == "apart" else lambda: Attending(kind)
    task = Narrowable(make)
    model = narrowed(task, Surrogate(scale=SCALE, zeros=ALL)).model({"lr": 0.1})
    named = dict(model.named_parameters())
    zero = {name for name, p in named.items() if not p.any()}
    norms = {"layer.norm1.bias", "layer.norm2.bias"} if kind == "torch" else {"normal.bias"}
    assert {name for name in named if name.endswith("bias")} - norms <= zero | {"qkv.bias"}
    assert "places" not in zero
    if kind == "apart":
        assert zero & {"q.weight", "k.weight", "v.weight"} == {"q.weight"}
    else:
        own = named["layer.self_attn.in_proj_weight" if kind == "torch" else "qkv.weight"]
        rows = own.detach().abs().sum(1).view(3, -1)
        assert [bool(one.any()) for one in rows] == [False, True, True]
        assert bool((rows[1:] > 0).all())
    others = narrowed(task, Surrogate(scale=SCALE)).model({"lr": 0.1})
    assert sum(bool(p.any()) for p in others.parameters()) > sum(bool(p.any()) for p in model.parameters())
    steep = [one.slope for one in coordinates(task, {"lr": 0.1}, [1, 2, 4], {}, zeros=ALL)]
    assert steep
    assert max(map(abs, steep)) < STEEPEST
