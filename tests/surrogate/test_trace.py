"""Which dimensions grow with width, and what a narrower twin is made of."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.surrogate import trace as tracing
from penstock.surrogate.parametrize import parts
from penstock.surrogate.settings import Surrogate
from penstock.surrogate.shrink import shrink
from penstock.surrogate.task import narrowed, rates_of
from penstock.surrogate.trace import Unanalysable, trace
from penstock.training.rates import Factor
from tests.surrogate.models import Biased, Images, Narrowable, Sequences, Tied, Tokens, draws

CLASSES = torch.arange(6) % 33


def loss(model, x):
    given = model(x)
    return F.cross_entropy(given, CLASSES.repeat(len(given))[: len(given)])


def twin(model, x, scale=2):
    """The roles of a model's parameters, and its narrower twin, which has been run."""
    found = trace(model, loss, x)
    roles = {name: part.role for name, part in parts(model, found, scale).items()}
    full = copy.deepcopy(model)
    narrow = shrink(model, found, scale)
    assert type(narrow) is type(full)
    assert narrow(x).shape == full(x).shape
    loss(narrow, x).backward()
    return roles, {name: tuple(p.shape) for name, p in narrow.named_parameters()}, narrow


def test_a_transformer_is_narrowed_along_its_width_alone():
    roles, shapes, narrow = twin(Tokens(), torch.arange(24).view(2, 12))
    assert {name for name, role in roles.items() if role == "output"} == {"head.weight"}
    matrices = ("qkv.weight", "out.weight", "in_proj_weight", "out_proj.weight", "linear1.weight", "linear2.weight")
    assert {name for name, role in roles.items() if role == "hidden"} == {
        name for name in roles if name.endswith(matrices)
    }
    assert shapes["table.weight"] == (33, 32)
    assert shapes["positions"] == (12, 32)
    assert shapes["attention.qkv.weight"] == (96, 32)
    assert shapes["head.weight"] == (33, 32)
    attention = narrow.attention
    assert (attention.heads, attention.head_size, attention.split_size) == (4, 8, 32)
    assert (attention.qkv.in_features, attention.norm.normalized_shape) == (32, (32,))
    assert (narrow.layer.self_attn.embed_dim, narrow.layer.self_attn.head_dim) == (32, 8)


def test_a_table_that_is_the_output_too_is_tied():
    roles, _, narrow = twin(Tied(), torch.arange(24).view(2, 12))
    assert roles["table.weight"] == "tied"
    assert narrow.head.weight is narrow.table.weight


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.first(x) + self.last(self.first(x))


def test_heads_that_a_table_counts_stay_and_outputs_that_no_loss_uses_fix_no_width():
    found = trace(Biased(), lambda model, i: loss(lambda i: model(i)["logits"], i), torch.arange(24).view(2, 12))
    roles = {name: part.role for name, part in parts(Biased(), found, 2).items()}
    narrow = shrink(Biased(), found, 2)
    assert (narrow.head_size, narrow.window, tuple(narrow.bias.weight.shape)) == (8, 4, (8, 4))
    assert {name for name, role in roles.items() if role == "hidden"} == {
        "q.weight",
        "k.weight",
        "v.weight",
        "out.weight",
    }
    assert (roles["bias.weight"], roles["head.weight"]) == ("fixed", "output")
    assert narrow(torch.arange(24).view(2, 12))["hidden"].shape == (2, 12, 32)
    assert "window" not in {place.name for place in found.attributes}, "small numbers are no symbols, which cost time"
    used = trace(Residual(), lambda model, x: model(x).square().mean(), draws(3, 32))
    assert not used.growing, "what a loss uses stays"


def test_convolutions_norms_concatenations_and_reshapes():
    roles, shapes, narrow = twin(Images(), draws(3, 2, 8, 8))
    assert shapes["first.weight"] == (16, 2, 3, 3)
    assert shapes["depthwise.weight"] == (16, 1, 3, 3)
    assert shapes["grouped.weight"] == (32, 9, 1, 1)  # of 16 channels and the input's 2, in two groups
    assert shapes["up.weight"] == (32, 8, 2, 2)
    assert shapes["last.weight"] == (33, 128)
    kinds = ("first", "norm", "depthwise", "grouped", "up", "last")
    assert [roles[f"{name}.weight"] for name in kinds] == ["input", "input", "input", "hidden", "hidden", "output"]
    assert roles["last.bias"] == "fixed"
    assert narrow.norm.running_mean.shape == (16,)
    assert (narrow.depthwise.groups, narrow.grouped.groups, narrow.grouped.in_channels) == (16, 2, 18)


def test_a_recurrent_layer_keeps_its_gates():
    model = Sequences()
    with torch.no_grad():
        model.memory.bias_ih_l0.view(4, 64)[1] = 7.0  # the forget gate's
    roles, shapes, narrow = twin(model, draws(3, 5, 2))
    assert shapes["memory.weight_hh_l1"] == (128, 32)
    assert (roles["memory.weight_ih_l0"], roles["memory.weight_hh_l0"]) == ("input", "hidden")
    assert (narrow.memory.hidden_size, narrow.memory.input_size) == (32, 2)
    assert torch.equal(narrow.memory.bias_ih_l0 == 7.0, torch.arange(128) // 32 == 1)


class Cells(nn.Module):
    """A recurrent cell in a loop, which makes its first state or is given one."""

    def __init__(self, kind):
        super().__init__()
        self.cell, self.last = kind(2, 64), nn.Linear(64, 33)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.last(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNNCell, 1), (nn.GRUCell, 3), (nn.LSTMCell, 4)])
def test_a_recurrent_cell_in_a_loop_keeps_its_gates(kind, gates):
    roles, shapes, narrow = twin(Cells(kind), draws(3, 4, 2))
    assert (shapes["cell.weight_ih"], shapes["cell.weight_hh"]) == ((gates * 32, 2), (gates * 32, 32))
    assert (roles["cell.weight_ih"], roles["cell.weight_hh"]) == ("input", "hidden")
    assert (narrow.cell.hidden_size, narrow.cell.input_size) == (32, 2)


class Shuffled(nn.Module):
    """A half of the channels goes through a layer, as in ShuffleNet; the other half may be of two layers before."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv2d(2, 32, 1), nn.Conv2d(2, 32, 1)
        self.inner, self.last = nn.Conv2d(32, 32, 1), nn.Linear(64, 33)

    def forward(self, x):
        left, right = torch.cat([self.one(x), self.other(x)], 1).chunk(2, 1)
        x = torch.cat([left, self.inner(right)], 1)
        b, c, h, w = x.shape
        return self.last(x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w).mean((2, 3)))


def test_layers_whose_channels_are_halved_together_shrink_together():
    roles, shapes, _ = twin(Shuffled(), draws(3, 2, 4, 4))
    assert [shapes[f"{name}.weight"][0] for name in ("one", "other", "inner")] == [16, 16, 16]
    assert [roles[f"{name}.weight"] for name in ("one", "inner", "last")] == ["input", "hidden", "output"]


class Parted(nn.Module):
    """What torch computes in C++ with plain numbers for sizes, and experts whose outputs are gathered."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 32, 1), nn.InstanceNorm2d(32, affine=True)
        self.pair = nn.Bilinear(32, 32, 32)
        self.router, self.experts = nn.Linear(32, 3), nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.last = nn.Linear(32, 33)

    def forward(self, x):
        x = self.norm(self.first(x)).mean((2, 3))
        x = self.pair(x, x)
        _, places = self.router(x).topk(2)
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return self.last(made.gather(1, places[..., None].expand(-1, -1, x.shape[-1])).sum(1))


def test_norms_of_instances_bilinear_layers_and_gathered_experts():
    roles, shapes, narrow = twin(Parted(), draws(3, 2, 4, 4))
    assert (shapes["norm.weight"], narrow.norm.num_features) == ((16,), 16)
    assert (shapes["pair.weight"], roles["pair.weight"]) == ((16, 16, 16), "hidden")
    assert (shapes["experts.2.weight"], roles["experts.2.weight"]) == ((16, 16), "hidden")
    assert (shapes["router.weight"], roles["router.weight"]) == ((3, 16), "output")


class Graph(nn.Module):
    """Messages are added to nodes, whose states begin by a size of a layer, beside torch's transformer with a mask."""

    def __init__(self):
        super().__init__()
        self.first, self.message, self.cell = nn.Linear(2, 32), nn.Linear(32, 32), nn.GRUCell(32, 32)
        self.layers = nn.Transformer(32, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.last = nn.Linear(32, 33)
        self.register_buffer("goes", torch.tensor([1, 2, 3, 0]))

    def forward(self, x):
        h = self.first(x)
        added = torch.zeros_like(h).index_add(1, self.goes, self.message(h))
        state = torch.zeros(added.shape[0] * added.shape[1], self.message.out_features)
        h = self.cell(added.flatten(0, 1), state).view(*x.shape[:2], -1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.last(self.layers(h, h, tgt_mask=mask).mean(1))


def test_messages_of_a_graph_and_a_transformer_that_looks_at_its_mask():
    roles, shapes, narrow = twin(Graph(), draws(3, 4, 2))
    assert (shapes["message.weight"], roles["message.weight"]) == ((16, 16), "hidden")
    assert (shapes["cell.weight_hh"], roles["cell.weight_hh"]) == ((48, 16), "hidden")
    assert (shapes["layers.decoder.layers.0.multihead_attn.in_proj_weight"], narrow.layers.d_model) == ((48, 16), 16)


class Written(nn.Module):
    """A forward with a number of the full width in it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.first(x).view(-1, 64))


class Branching(Written):
    def forward(self, x):
        return self.last(self.first(x if x.sum() > 0 else -x))


def test_a_number_in_a_forward_ties_the_sizes_to_it_and_its_line_is_told():
    found = trace(Written(), loss, draws(3, 32))
    assert not found.growing
    assert found.tied.split("/")[-1].startswith("test_trace.py:")


def test_a_model_whose_branch_depends_on_values_cannot_be_analysed():
    with pytest.raises(Unanalysable, match=r"cannot be analysed \(.*test_trace.py:\d+\): it depends on the values"):
        trace(Branching(), loss, draws(3, 32))


def test_a_surrogates_factors_go_with_copies_and_pickles_of_its_task():
    task = pickle.loads(pickle.dumps(narrowed(Narrowable(), Surrogate(scale=4))))
    model = task.model({"lr": 0.1})
    again = pickle.loads(pickle.dumps(task))
    assert again._traced.keys() == task._traced.keys() != set()
    other = again.model({"lr": 0.1})
    rates = [rates_of(one, made, torch.optim.Adam(made.parameters())) for one, made in ((task, model), (again, other))]
    assert (
        rates[0]
        == rates[1]
        == {
            **dict.fromkeys(("0.weight", "0.bias", "2.bias"), Factor(1.0, 4.0)),
            "2.weight": Factor(4.0, 4.0),
            "4.weight": Factor(4.0, 1.0),
        }
    )
    assert rates_of(Narrowable(), model, torch.optim.Adam(model.parameters())) == {}


class Experts(nn.Module):
    """Experts whose weights are one tensor: a product shapes it by the sizes of the activations that it meets."""

    def __init__(self):
        super().__init__()
        self.first, self.router = nn.Linear(24, 64), nn.Linear(64, 4, bias=False)
        self.into, self.back = nn.Parameter(draws(4, 64, 128)), nn.Parameter(draws(4, 128, 64))
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.first(x))
        hidden = F.relu(torch.einsum("bd,ndh->bnh", x, self.into))
        made = torch.einsum("bnh,nhd->bnd", hidden, self.back)
        return self.last(x + (self.router(x).softmax(-1)[..., None] * made).sum(1))


def test_what_an_einsum_sums_over_is_a_dimension_of_its_weight():
    roles, shapes, _ = twin(Experts(), draws(3, 24))
    assert {name: role for name, role in roles.items() if role != "input"} == {
        "router.weight": "output", "into": "hidden", "back": "hidden", "last.weight": "output", "last.bias": "fixed"
    }  # fmt: skip
    assert (shapes["into"], shapes["back"]) == ((4, 32, 64), (4, 64, 32))


class Rotated(nn.Module):
    """Attention whose keys have fewer heads than its queries, and whose head size is a buffer's, as Llama has it."""

    def __init__(self, width=64):
        super().__init__()
        self.table, self.head_size = nn.Embedding(33, width), width // 4
        self.q, self.k, self.v = (nn.Linear(width, size, bias=False) for size in (width, width // 2, width // 2))
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 33)
        self.register_buffer("turns", 1 / torch.arange(1, self.head_size // 2 + 1))

    def forward(self, i):
        x = self.table(i)
        q, k, v = (layer(x).view(*i.shape, -1, self.head_size).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angles = torch.arange(i.shape[1])[:, None] * self.turns
        k, v = (one.repeat_interleave(2, 1) for one in (torch.cat([angles, angles], -1).cos() * k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*i.shape, -1)
        return self.head(x + self.out(y)).flatten(0, 1)


def test_the_size_of_a_head_shrinks_where_a_buffer_has_it_too():
    roles, shapes, narrow = twin(Rotated(), torch.arange(24).view(2, 12))
    assert (narrow.head_size, len(narrow.turns)) == (8, 4)
    assert (shapes["k.weight"], roles["k.weight"]) == ((16, 32), "hidden")


@pytest.mark.parametrize(("make", "batch"), [(Biased, torch.arange(24).view(2, 12)), (Images, draws(3, 2, 8, 8))])
def test_sizes_alone_say_what_torchs_own_operators_say(make, batch, monkeypatch):
    def run(model, x):
        made = model(x)
        return loss(lambda _: made["logits"] if isinstance(made, dict) else made, x)

    asked = []
    for own in (False, True):
        if own:
            monkeypatch.setattr(tracing, "quick", lambda func, args: None)
        model = make()
        found = trace(model, run, batch)
        asked.append((parts(model, found, 2), {place: found.at(size, 2) for place, size in found.attributes.items()}))
    assert asked[0] == asked[1]
