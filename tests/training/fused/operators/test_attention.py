"""Attention of stacked trials, alone and in torch's modules, against each trial's own."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.training.fused.stacked import Stacked, Unfusable
from tests.training.alone import Own, check, own, shared

B, H, L, S, D = 2, 4, 3, 5, 6


def some(shape, own_one, seed=0):
    return own(*shape, seed=seed) if own_one else shared(*shape, seed=seed)


def mask_of(*shape, trials=None, seed=0):
    made = torch.rand(*(shape if trials is None else (trials, *shape)), generator=torch.Generator().manual_seed(seed))
    made = made > 0.4
    made[..., 0] = True  # a row that may look at nothing is no number in torch's own kernels
    return made if trials is None else Own(made)


@pytest.mark.parametrize("lead", [(), (B,), (B, H), (2, B, H)], ids=str)
def test_whose_queries_keys_and_values(lead):
    for mine in itertools.product([False, True], repeat=3):
        if any(mine):
            q, k, v = (some((*lead, n, D), m, seed=i) for i, (n, m) in enumerate(zip((L, S, S), mine, strict=True)))
            check(F.scaled_dot_product_attention, q, k, v, layouts=1)
    check(F.scaled_dot_product_attention, own(*lead, L, D), own(*lead, S, D), own(*lead, S, 2))
    check(F.scaled_dot_product_attention, own(*lead, L, D), own(*lead, L, D), shared(*lead, L, D), is_causal=True)
    check(F.scaled_dot_product_attention, own(*lead, L, D), own(*lead, S, D), shared(*lead, S, D), scale=0.3)


@pytest.mark.parametrize("lead", [(), (B,), (B, H), (2, B, H)], ids=str)
@pytest.mark.parametrize("learned", [True, False])
def test_masks(lead, learned):
    q, k, v = own(*lead, L, D), own(*lead, S, D, seed=1), shared(*lead, S, D, seed=2)
    for keep in range(len(lead) + 1):
        for ones in itertools.product([False, True], repeat=keep):
            front = [1 if one else n for one, n in zip(ones, lead[len(lead) - keep :], strict=True)]
            for last in ((L, S), (1, S)):
                shape = (*front, *last)
                masks = [own(*shape), shared(*shape)] if learned else [mask_of(*shape), mask_of(*shape, trials=3)]
                for mask in masks:
                    check(F.scaled_dot_product_attention, q, k, v, mask, layouts=1)
    if learned:
        check(F.scaled_dot_product_attention, shared(*lead, L, D), shared(*lead, S, D), v, own(*lead, L, S))


def test_layouts_of_masks():
    check(F.scaled_dot_product_attention, own(B, H, L, D), own(B, H, S, D), own(B, H, S, D), own(H, L, S))


def test_groups_of_queries():
    for lead in ((B,), (2, B)):
        q, k, v = own(*lead, H, L, D), own(*lead, 2, S, D), own(*lead, 2, S, D, seed=1)
        check(F.scaled_dot_product_attention, q, k, v, enable_gqa=True, layouts=1)
        check(F.scaled_dot_product_attention, q, k, v, mask_of(*lead, 1, L, S), enable_gqa=True, layouts=1)
        check(F.scaled_dot_product_attention, q, k, v, mask_of(H, L, S, trials=3), enable_gqa=True, layouts=1)


def test_batches_and_heads_that_broadcast():
    check(F.scaled_dot_product_attention, own(B, H, L, D), own(1, H, S, D), shared(1, 1, S, D), layouts=1)
    check(F.scaled_dot_product_attention, shared(H, L, D), own(B, 1, S, D), shared(B, 1, S, D), layouts=1)


def test_more_rows_than_a_kernel_takes(monkeypatch):
    monkeypatch.setattr("penstock.training.fused.operators.attention.MOST", 4)
    q, k = own(B, H, L, D), own(B, H, S, D)
    for mask in (None, shared(L, S), shared(B, 1, L, S), own(H, L, S)):
        check(F.scaled_dot_product_attention, q, k, k, mask, layouts=1)


def test_dropout_needs_keys():
    x = Stacked(torch.rand(3, B, H, L, D))
    with pytest.raises(Unfusable, match=r"scaled_dot_product_attention at .*test_attention.py"):
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    module = nn.MultiheadAttention(4, 2, dropout=0.5)
    run, params = swapped(module)
    with pytest.raises(Unfusable, match="keys"):
        run([Stacked(p.tensor.float()) for p in params], *[torch.rand(L, B, 4)] * 3)


def swapped(module):
    """A function of the module's parameters and inputs."""
    places = [
        (registry._parameters, name)
        for registry in module.modules()
        for name, p in registry._parameters.items()
        if p is not None
    ]
    plain = [registry[name] for registry, name in places]

    def run(params, *inputs, **options):
        try:
            for (registry, name), p in zip(places, params, strict=True):
                registry[name] = p
            return module(*inputs, **options)
        finally:
            for (registry, name), p in zip(places, plain, strict=True):
                registry[name] = p

    return run, [own(*p.shape, seed=i) for i, p in enumerate(plain)]


WIDTH, HEADS = 8, 2
PADDING = torch.tensor([[False] * S, [False] * 3 + [True] * 2])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)


@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 3, "vdim": 5}, {"batch_first": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention(options, training):
    run, params = swapped(nn.MultiheadAttention(WIDTH, HEADS, **options).double().train(training))
    first = options.get("batch_first")
    q = own(B, L, WIDTH) if first else own(L, B, WIDTH)
    k = shared(*((B, S) if first else (S, B)), options.get("kdim", WIDTH), seed=1)
    v = shared(*((B, S) if first else (S, B)), options.get("vdim", WIDTH), seed=2)
    for more in ({}, {"need_weights": False}, {"average_attn_weights": False}, {"key_padding_mask": PADDING},
                 {"attn_mask": ~mask_of(L, S)}, {"attn_mask": shared(B * HEADS, L, S), "need_weights": False},
                 {"key_padding_mask": PADDING, "need_weights": False}):  # fmt: skip
        check(run, params, q, k, v, **more, layouts=1)
    check(run, params, own(L, WIDTH), k[:, 0] if not first else k[0], v[:, 0] if not first else v[0], layouts=1)
    if "kdim" not in options:
        x = shared(B, S, WIDTH) if first else shared(S, B, WIDTH)
        check(lambda params, x: run(params, x, x, x), params, x, layouts=1)
        check(lambda params, x: run(params, x, x, x, attn_mask=CAUSAL, is_causal=True, need_weights=False),
              params, x, layouts=1)  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", F.gelu])
def test_encoder_layer(training, norm_first, activation):
    module = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, 0.0, activation, batch_first=True, norm_first=norm_first)
    run, params = swapped(module.double().train(training))
    for x in (own(B, S, WIDTH), shared(B, S, WIDTH)):
        check(run, params, x, layouts=1)
        check(run, params, x, src_key_padding_mask=PADDING, layouts=1)
        check(run, params, x, src_mask=CAUSAL, is_causal=True, layouts=1)
        check(run, params, x, src_mask=~mask_of(S, S), layouts=1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested")
def test_encoder_takes_no_fast_path(training, grad):
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 12, 0.0, batch_first=True), 2)
    run, params = swapped(module.double().train(training))
    with torch.set_grad_enabled(grad):
        for x in (own(B, S, WIDTH), shared(B, S, WIDTH)):
            check(run, params, x, layouts=1)
            check(run, params, x, mask=CAUSAL, layouts=1)
            check(run, params, x, mask=CAUSAL, is_causal=True, layouts=1)
            check(padded(run), params, x, layouts=1)
            check(run, params, x, mask=CAUSAL, src_key_padding_mask=PADDING.double() * -1e9, layouts=1)
    check(run, params, own(S, WIDTH), layouts=1)


def padded(run):
    """Without the outputs at padding, which torch's own fast path leaves at zero."""
    return lambda params, x: run(params, x, src_key_padding_mask=PADDING) * ~PADDING.unsqueeze(-1)


@pytest.mark.parametrize("training", [True, False])
def test_decoder_and_the_whole(training):
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 12, 0.0)
    run, params = swapped(nn.TransformerDecoder(layer, 2).double().train(training))
    memory = shared(L, B, WIDTH, seed=4)
    check(run, params, own(S, B, WIDTH), memory, tgt_mask=CAUSAL, tgt_is_causal=True, layouts=1)
    check(run, params, shared(S, B, WIDTH), memory, tgt_mask=CAUSAL, tgt_key_padding_mask=PADDING.double(), layouts=1)
    module = nn.Transformer(WIDTH, HEADS, 1, 1, 12, 0.0, batch_first=True).double().train(training)
    run, params = swapped(module)
    check(run, params, own(B, S, WIDTH), shared(B, L, WIDTH), layouts=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_under_autocast_are_those_of_one_trial(dtype):
    x = torch.rand(3, B, H, L, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    run, params = swapped(nn.MultiheadAttention(WIDTH, HEADS))
    y = torch.rand(L, B, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        alone, made = (F.scaled_dot_product_attention(t, t, t) for t in (x[0], Stacked(x)))
        assert alone.dtype == made.dtype
        torch.testing.assert_close(made.moved(0)[0], alone, rtol=0.02, atol=0.02)
        alone = run([p.tensor[0].float() for p in params], y, y, y)
        made = run([Stacked(p.tensor.float()) for p in params], y, y, y)
        assert [t.dtype for t in alone] == [t.dtype for t in made]


def test_a_trial_that_diverges_changes_no_bit_of_the_others():
    run, params = swapped(nn.TransformerEncoderLayer(WIDTH, HEADS, 12, 0.0))
    results = []
    for value in (1.0, float("nan")):
        leaves = [p.tensor.float().clone() for p in params]
        for leaf in leaves:
            leaf[1] = value
            leaf.requires_grad_()
        x = torch.rand(S, B, WIDTH, generator=torch.Generator().manual_seed(2))
        made = run([Stacked(leaf) for leaf in leaves], x, src_key_padding_mask=PADDING).moved(0)
        made.square().sum().backward()
        results.append([made[[0, 2]], *(leaf.grad[[0, 2]] for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
