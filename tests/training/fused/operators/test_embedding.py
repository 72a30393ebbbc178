"""Embeddings of stacked tables, against each trial's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.training.fused.stacked import Stacked, Unfusable
from tests.training.alone import Own, check, own, shared


def indices(*shape, rows=7, seed=0, dtype=torch.int64):
    return torch.randint(rows, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (2, 1, 3)])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True},
                                     {"padding_idx": 0, "scale_grad_by_freq": True}])  # fmt: skip
def test_embedding(shape, options):
    for dtype in (torch.int64, torch.int32):
        mine = indices(*shape, dtype=dtype)
        check(lambda i, w: F.embedding(i, w, **options), mine, own(7, 3))
        check(lambda i, w: F.embedding(i, w, **options), Own(indices(3, *shape, seed=1, dtype=dtype)), own(7, 3))
        check(lambda i, w: F.embedding(i, w, **options), Own(indices(3, *shape, seed=1, dtype=dtype)), shared(7, 3))


def test_the_padding_row_is_read_but_not_learned():
    table = torch.rand(2, 4, 3, requires_grad=True)
    made = F.embedding(torch.tensor([1, 1, 3]), Stacked(table), padding_idx=1).whole
    assert torch.equal(made[:, 0], table[:, 1])
    made.sum().backward()
    assert table.grad[:, 1].eq(0).all()
    assert table.grad[:, 3].eq(1).all()


def test_the_builtin_and_its_other_arguments():
    check(lambda w, i: torch.embedding(w, i), own(7, 3), indices(4))
    check(lambda w, i: torch.embedding(w, i, 2, True), own(7, 3), indices(20))


def test_a_table_with_gaps_between_the_trials():
    rows = torch.randn(3, 100, dtype=torch.float64, requires_grad=True)
    table = rows[:, 10:31].view(3, 7, 3)
    made = F.embedding(indices(5), Stacked(table)).whole
    assert torch.equal(made, torch.stack([F.embedding(indices(5), t) for t in table]))
    made.square().sum().backward()
    with torch.no_grad():
        expected = 2 * table * torch.bincount(indices(5), minlength=7)[:, None]
    torch.testing.assert_close(rows.grad[:, 10:31].view(3, 7, 3), expected)


def test_the_gradient_has_a_gradient():
    def penalty(table, stacked):
        out = F.embedding(torch.tensor([0, 1, 1]), Stacked(table) if stacked else table, padding_idx=0)
        out = (out.whole if stacked else out) ** 3
        (grad,) = torch.autograd.grad(out.sum(), table, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), table)[0]

    tables = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    alone = [penalty(t.detach().requires_grad_(), False) for t in tables]
    torch.testing.assert_close(penalty(tables, True), torch.stack(alone))


def test_an_index_below_zero_is_an_error_as_in_torch():
    for index in (torch.tensor([0, -1]), Stacked(torch.tensor([[0, -1], [1, 2]])), torch.tensor([7])):
        with pytest.raises((RuntimeError, IndexError)):
            F.embedding(index, Stacked(torch.rand(2, 7, 3)))


def test_refusals_name_the_line():
    table, index = Stacked(torch.rand(2, 7, 3)), indices(4)
    for options in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        if "scale_grad_by_freq" not in options:
            with pytest.raises(Unfusable, match=r"embedding at .*test_embedding.py"):
                F.embedding(index, table, **options)
        with pytest.raises(Unfusable, match="embedding_bag at"):
            F.embedding_bag(index, table, torch.tensor([0]), **options)
    with pytest.raises(AssertionError, match="Padding_idx"):
        F.embedding(index, table, padding_idx=7)
    with pytest.raises(Unfusable, match="num_classes"):
        F.one_hot(Stacked(indices(2, 3)))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2, -1])
def test_bags(mode, padding):
    offsets, ends = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 2, 2, 5, 9])

    def bag(index, table, offsets=None, **options):
        return F.embedding_bag(index, table, offsets, mode=mode, padding_idx=padding, **options)

    for table in (own(7, 3), shared(7, 3)):
        for last in (False, True):
            given = ends if last else offsets
            check(bag, Own(indices(3, 9, seed=1)), table, given, include_last_offset=last)
        check(bag, Own(indices(3, 4, 5, seed=1)), table)
    check(bag, indices(9), own(7, 3), offsets)
    check(bag, indices(9), own(7, 3), ends, include_last_offset=True)
    check(bag, indices(9), own(7, 3), Own(torch.tensor([[0, 2], [0, 9], [0, 0]])))
    check(bag, indices(4, 5), own(7, 3))


def test_weighted_bags():
    for weights in (own(9, seed=1), shared(9, seed=1)):
        check(lambda i, t, w: F.embedding_bag(i, t, torch.tensor([0, 4]), mode="sum", per_sample_weights=w),
              indices(9), own(7, 3), weights)  # fmt: skip
    check(lambda i, t, w: F.embedding_bag(i, t, mode="sum", per_sample_weights=w, padding_idx=1),
          indices(4, 5), own(7, 3), own(4, 5))  # fmt: skip


def test_one_hot():
    check(lambda i: F.one_hot(i, 7), Own(indices(3, 4)))
    check(lambda i: F.one_hot(i, num_classes=9), Own(indices(3, 4, 2)))


@pytest.mark.parametrize("module", [nn.Embedding(7, 3, padding_idx=1), nn.EmbeddingBag(7, 3, mode="sum")])
def test_modules(module):
    def run(weight, index):
        module._parameters["weight"] = weight
        return module(index)

    plain = module._parameters["weight"]
    check(run, own(7, 3), indices(2, 4))
    module._parameters["weight"] = plain


@pytest.mark.parametrize("lookup", [F.embedding, F.embedding_bag])
def test_a_trial_that_diverges_changes_no_bit_of_the_others(lookup):
    results = []
    for value in (1.0, float("nan")):
        table = torch.rand(3, 7, 3, generator=torch.Generator().manual_seed(1))
        table[1] = value
        table.requires_grad_()
        made = lookup(indices(2, 5), Stacked(table), padding_idx=2).whole
        made.square().sum().backward()
        results.append((made.detach()[[0, 2]], table.grad[[0, 2]]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
