"""Recurrent layers and cells of stacked trials, against torch's own for each."""

import itertools
import weakref

import pytest
import torch
from torch import nn

from penstock.training.fused.stacked import Stacked, Unfusable
from tests.training.alone import Own, check, own, shared

KINDS = [nn.LSTM, nn.GRU, nn.RNN]
CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]


def swapped(module):
    """A function of the module's parameters, its input and hidden values, with the names of the parameters."""
    names = [n for n, _ in module.named_parameters()]

    def run(params, *inputs):
        plain = dict(module._parameters)
        try:
            module._parameters.update(zip(names, params, strict=True))
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, n) for n in module._flat_weights_names]
                # Without these, the module believes its weights to be new and asks for their memory, on a GPU.
                module._flat_weight_refs = [weakref.ref(w) for w in module._flat_weights]
            return module(*inputs)
        finally:
            module._parameters.update(plain)

    return run, [own(*p.shape, seed=i) for i, p in enumerate(module.parameters())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"num_layers": 2}, {"bidirectional": True}, {"batch_first": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": True},
    {"num_layers": 2, "bidirectional": True, "bias": False},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("tapped", [False, True])
def test_layers(kind, options, tapped, monkeypatch):
    if tapped:  # as on a GPU
        monkeypatch.setattr("penstock.training.fused.operators.recurrent._taps", lambda x: True)
    run, params = swapped(kind(3, 4, **options).double())
    check(run, params, shared(5, 2, 3), layouts=1)
    check(run, params, own(5, 2, 3), layouts=1)
    check(run, params, shared(5, 3), layouts=1)  # without a batch
    plain = [p.tensor[0] for p in params]
    check(lambda x: run(plain, x), own(5, 2, 3))  # a layer that all trials share


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2, "bias": False}], ids=str)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projections(options):
    run, params = swapped(nn.LSTM(3, 4, proj_size=2, **options).double())
    for x in (shared(5, 2, 3), own(5, 2, 3)):
        check(run, params, x, layouts=1)


def test_relu():
    run, params = swapped(nn.RNN(3, 4, nonlinearity="relu", num_layers=2).double())
    check(run, params, own(5, 2, 3), layouts=1)
    run, params = swapped(nn.RNNCell(3, 4, nonlinearity="relu").double())
    check(run, params, own(2, 3), layouts=1)


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_hidden_values_come_from(kind, monkeypatch):
    monkeypatch.setattr("penstock.training.fused.operators.recurrent._taps", lambda x: True)
    run, params = swapped(kind(3, 4, num_layers=2, bidirectional=True).double())
    for first, second in itertools.product([own, shared], repeat=2):
        hx = first(4, 2, 4, seed=8), second(4, 2, 4, seed=9)
        check(run, params, shared(5, 2, 3), hx if kind is nn.LSTM else hx[0], layouts=1)


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_every_layout(kind):
    run, params = swapped(kind(3, 4).double())
    x = own(2, 3) if kind in CELLS else own(2, 2, 3)
    hidden = own(2, 4, seed=5) if kind in CELLS else own(1, 2, 4, seed=5)
    check(run, params, x, (hidden, hidden) if kind in (nn.LSTM, nn.LSTMCell) else hidden)


@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind):
    for bias in (True, False):
        run, params = swapped(kind(3, 4, bias=bias).double())
        for x in (shared(2, 3), own(2, 3), shared(3), own(3)):
            check(run, params, x, layouts=1)

        def steps(params, x, run=run):
            state = None
            for now in x:
                state = run(params, now, state)
            return state

        check(steps, params, shared(4, 2, 3), layouts=1)


def test_weights_with_gaps_between_the_trials():
    module = nn.GRU(3, 4).double()
    rows = torch.randn(2, 1000, dtype=torch.float64, requires_grad=True)
    stacked, place = [], 8
    for p in module.parameters():
        stacked.append(Stacked(rows[:, place : place + p.numel()].view(2, *p.shape)))
        place += p.numel() + 8
    run, _ = swapped(module)
    x = shared(5, 2, 3)
    run(stacked, x)[0].whole.square().sum().backward()
    for trial in range(2):
        mine = [s.whole[trial].detach().requires_grad_() for s in stacked]
        grads = torch.autograd.grad(run(mine, x)[0].square().sum(), mine)
        place = 8
        for grad in grads:
            torch.testing.assert_close(rows.grad[trial, place : place + grad.numel()], grad.flatten())
            place += grad.numel() + 8


def test_dropout_between_layers_is_refused_in_training_alone():
    module = nn.LSTM(3, 4, num_layers=2, dropout=0.5).double()
    run, params = swapped(module)
    with pytest.raises(Unfusable, match=r"lstm at .*test_recurrent.py:\d+.*: its dropout between layers"):
        check(run, params, own(5, 2, 3), layouts=1)
    module.eval()
    check(run, params, own(5, 2, 3), layouts=1)


def test_packed_sequences_of_lengths_that_differ_from_trial_to_trial_are_refused():
    x, lengths = Stacked(torch.zeros(4, 5, 2, 3)), Stacked(torch.tensor([[5, 3], [5, 4], [5, 5], [4, 4]]))
    with pytest.raises(
        Unfusable, match=r"pack_padded_sequence at .*test_recurrent.py:\d+.*: the trials have sequences"
    ):
        nn.utils.rnn.pack_padded_sequence(x, lengths)


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cast", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_on_a_gpu(kind, cast):
    module = kind(3, 4).to("cuda", torch.float64 if cast is None else torch.float32)
    run, params = swapped(module)
    dtype, tolerance = (torch.float64, 1e-9) if cast is None else (torch.float32, 0.03)
    x = shared(*((2, 3) if kind in CELLS else (5, 2, 3))).to("cuda", dtype)
    leaves = [p.tensor.to("cuda", dtype).requires_grad_() for p in params]
    with torch.autocast("cuda", cast or torch.float16, enabled=cast is not None):
        made = flat(run([Stacked(leaf) for leaf in leaves], x))
        for trial in range(3):
            mine = [leaf.detach()[trial].clone().requires_grad_() for leaf in leaves]
            alone = flat(run(mine, x))
            assert [t.dtype for t in alone] == [t.dtype for t in made]
            for a, b in zip(made, alone, strict=True):
                torch.testing.assert_close(a.moved(0)[trial], b, rtol=tolerance, atol=tolerance)
            here = torch.autograd.grad(sum(m.moved(0).double().sin().sum() for m in made), leaves, retain_graph=True)
            there = torch.autograd.grad(sum(m.double().sin().sum() for m in alone), mine)
            for a, b in zip(here, there, strict=True):
                torch.testing.assert_close(a[trial], b, rtol=tolerance, atol=tolerance * 3)


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_types_under_autocast_are_those_of_one_trial(kind):
    torch.manual_seed(0)  # some weights make more of bfloat16's rounding than others
    module = kind(3, 4)
    run, params = swapped(module)
    x = torch.randn(2, 3) if kind in CELLS else torch.randn(5, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        alone = run([p.tensor[0].float() for p in params], x)
        made = run([Stacked(p.tensor.float()) for p in params], x)
    for a, b in zip(flat(made), flat(alone), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.moved(0)[0], b, rtol=0.05, atol=0.05)


def flat(value):
    return [t for v in value for t in flat(v)] if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_a_trial_that_diverges_changes_no_bit_of_the_others(kind):
    run, params = swapped(kind(3, 4))
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))
    results = []
    for value in (1.0, float("nan")):
        leaves = [p.tensor.float().clone() for p in params]
        for leaf in leaves:
            leaf[1] = value
            leaf.requires_grad_()
        made = flat(run([Stacked(leaf) for leaf in leaves], x if kind in CELLS else x.expand(5, 2, 3)))
        sum(m.whole.sum() for m in made).backward()
        results.append([m.moved(0)[[0, 2]] for m in made] + [leaf.grad[[0, 2]] for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_every_trial_its_own_batch_with_time_second():
    run, params = swapped(nn.GRU(3, 4, batch_first=True).double())
    x = Own(torch.randn(3, 2, 5, 3, dtype=torch.float64))
    check(run, params, x, layouts=1)
