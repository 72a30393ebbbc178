"""Keyed dropout: the same bits for a trial however it runs, and masks that nobody could tell from random ones."""

import copy
import itertools
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.seeds import key, step_key
from penstock.training.random import attention as keyed_attention
from penstock.training.random import masks
from penstock.training.random.keyed import Keyed, Solo
from penstock.training.random.masks import SoloKeys, StepKeys, base, halves, keep, threshold

CPU = torch.device("cpu")
RATES = [0.0, 1e-9, 0.01, 0.1, 1 / 3, 0.5, 0.7, 0.99, 1 - 1e-12, 1.0]


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def mask(seed=1, step=0, call=0, p=0.5, shape=(1 << 16,)):
    return keep(base(shape, CPU), *halves(step_key(seed, step)), call, p)


def wrapped(value):
    return (value + 2**31) % 2**32 - 2**31


def hashed(index):
    """The hash of base and keep, in Python's own numbers."""
    index = ((index ^ index >> 15) * 0x2C1B3C6D) & 0x7FFFFFFF
    index = ((index ^ index >> 12) * 0x297A2D39) & 0x7FFFFFFF
    return wrapped((index ^ index >> 15) * 2)


class TestBase:
    @pytest.fixture(autouse=True)
    def _nothing_kept(self, monkeypatch):
        monkeypatch.setattr(masks, "_hashes", {})
        monkeypatch.setattr(masks, "_views", {})

    def test_is_a_hash_of_the_row_major_index(self):
        whole = base((3, 4, 5), CPU)
        assert whole.dtype == torch.int32
        assert whole.shape == (3, 4, 5)
        assert whole.flatten().tolist() == [hashed(i) for i in range(60)]
        assert torch.equal(base((60,), CPU), whole.flatten())
        assert base((), CPU).item() == hashed(0)

    def test_no_two_elements_share_one_and_all_are_even(self):
        many = base((1 << 20,), CPU)
        assert len(many.unique()) == 1 << 20
        assert not (many & 1).any()

    def test_is_made_once_and_what_is_kept_is_bounded(self):
        assert base((7, 9), CPU) is base(torch.Size([7, 9]), CPU)
        for size in range(2 * masks._VIEWS_KEPT):
            base((1, size), CPU)
        assert len(masks._views) <= masks._VIEWS_KEPT
        for size in (10**5, 10**6, 3 * 10**5):
            base((size,), CPU)
        sizes = [made.numel() for made in masks._hashes[CPU]]
        assert sum(sizes) < 2 * max(sizes)  # each is twice the one before

    def test_what_was_given_stays_when_a_larger_one_is_made(self):
        small = base((5,), CPU)  # a captured graph would go on reading it
        base((10**6,), CPU)
        assert small.tolist() == [hashed(i) for i in range(5)]
        assert any(small.data_ptr() == made.data_ptr() for made in masks._hashes[CPU])

    def test_one_made_inside_a_transform_is_not_kept(self):
        count = 1000
        torch.func.grad(lambda x: (x * base((count,), CPU)).sum())(torch.ones(()))
        assert not torch._C._functorch.is_functorch_wrapped_tensor(base((count,), CPU))
        fake = torch._subclasses.fake_tensor.FakeTensorMode()
        with fake:
            assert type(base((10**5,), CPU)) is not torch.Tensor
        assert type(base((10**5,), CPU)) is torch.Tensor

    def test_one_made_in_inference_mode_serves_training(self):
        count = 1000
        with torch.inference_mode():
            base((count,), CPU)
        x = torch.ones(count, requires_grad=True)
        masks.dropout(x, 0.5, StepKeys(1, 2)).sum().backward()
        assert torch.equal(x.grad, keep(base((count,), CPU), 1, 2, 0, 0.5) * 2.0)


class TestKeep:
    def test_is_the_hash_in_pythons_own_numbers(self):
        lo, hi = halves(step_key(5, 6))
        for call, p in itertools.product((0, 1, 77), RATES):
            k0, k1 = lo ^ wrapped(call * 0x9E3779B9) | 1, hi ^ wrapped(call * 0x85EBCA6B) | 1
            sums = [wrapped(t + t * t) for t in (hashed(i) * k1 + k0 for i in range(200))]
            kept = [value >= min(round(p * 2**31) * 2 - 2**31, 2**31 - 1) for value in sums]
            assert keep(base((200,), CPU), lo, hi, call, p).tolist() == kept, (call, p)

    def test_does_not_change(self):  # or a study that is resumed goes on differently
        bits = "".join(str(int(b)) for b in mask(seed=key(0, "trial", 0), step=3, call=2, p=0.3, shape=(48,)))
        assert bits == "101111010111111111111011100111111010011111110111"

    def test_the_same_bits_alone_in_a_bundle_under_vmap_and_compiled(self):
        shape = (6, 5, 4)
        seeds = [key(3, "trial", number) for number in range(len(RATES))]
        pairs = [halves(step_key(seed, 11)) for seed in seeds]
        for call in (0, 1, 5):
            alone = [keep(base(shape, CPU), *pair, call, p) for pair, p in zip(pairs, RATES, strict=True)]
            lo, hi = int32([lo for lo, _ in pairs]), int32([hi for _, hi in pairs])
            p = torch.tensor(RATES, dtype=torch.float64)
            wide = [t.view(-1, 1, 1, 1) for t in (lo, hi, p)]

            def one(lo, hi, p, call=call):
                return keep(base(shape, CPU), lo, hi, call, p)

            assert torch.equal(one(*wide), torch.stack(alone))
            assert torch.equal(torch.vmap(one)(lo, hi, p), torch.stack(alone))
            if call == 1:
                made = torch.compile(one, backend="aot_eager", fullgraph=True)(*wide)
                assert torch.equal(made, torch.stack(alone))
                made = torch.compile(torch.vmap(one), backend="aot_eager", fullgraph=True)(lo, hi, p)
                assert torch.equal(made, torch.stack(alone))

    def test_the_ends_are_exact(self):
        none, everything = torch.tensor([0.0, 1.0], dtype=torch.float64)
        for seed in range(20):
            assert mask(seed, p=0.0).all()
            assert mask(seed, p=none).all()
            assert not mask(seed, p=1.0).any()
            assert not mask(seed, p=everything).any()

    def test_a_tensor_of_rates_has_the_thresholds_of_numbers(self):
        rates = torch.cat([torch.rand(2000, dtype=torch.float64), torch.tensor(RATES, dtype=torch.float64)])
        assert threshold(rates).tolist() == [threshold(p) for p in rates.tolist()]
        assert threshold(torch.tensor([-1.0, 2.0])).tolist() == [-(2**31), 2**31 - 1]

    def test_keys_fit_and_differ(self):
        found = {halves(step_key(seed, step)) for seed in range(50) for step in range(50)}
        assert len(found) == 2500
        assert all(-(2**31) <= half < 2**31 for pair in found for half in pair)
        assert {half & 0x80000000 for _, half in found} == {0, 0x80000000}


def scores(pairs, p):
    """How far the products of masks are from those of independent ones, in standard deviations."""
    return [
        float(((a.double() - 1 + p) * (b.double() - 1 + p)).sum()) / (p * (1 - p) * math.sqrt(a.numel()))
        for a, b in pairs
    ]


def look_random(found):
    squares = sum(z * z for z in found) / len(found)
    assert max(map(abs, found)) < 4.5
    assert 0.6 < squares < 1.5


class TestStatistics:
    @pytest.mark.parametrize("p", [0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
    def test_each_element_is_kept_at_the_rate(self, p):
        deviation = math.sqrt(p * (1 - p) * (1 << 16))
        cases = itertools.product(range(10), range(5), range(2))
        look_random([float((mask(key(i), s, c, p).double() - 1 + p).sum()) / deviation for i, s, c in cases])

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
    def test_neither_neighbours_nor_rows_are_correlated(self, p):
        for distance in (1, 2, 3, 8, 64, 256, 4096):
            masks = [mask(key(i), step, p=p) for i in range(15) for step in range(4)]
            look_random(scores([(m[distance:], m[:-distance]) for m in masks], p))

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
    def test_neither_steps_calls_nor_trials_are_correlated(self, p):
        trials = range(20)
        look_random(scores([(mask(key(i), s, p=p), mask(key(i), s + 1, p=p)) for i in trials for s in range(4)], p))
        look_random(scores([(mask(key(i), 2, c, p), mask(key(i), 2, c + 1, p)) for i in trials for c in range(4)], p))
        look_random(scores([(mask(key(i), 2, 0, p), mask(key(i), 2, c, p)) for i in trials for c in (2, 3, 8, 64)], p))
        look_random(scores([(mask(i, s, p=p), mask(i + 1, s, p=p)) for i in trials for s in range(1, 5)], p))
        look_random(scores([(mask(key(i), s, p=p), mask(key(i) ^ 1, s, p=p)) for i in trials for s in range(4)], p))
        look_random(scores([(mask(key(i), 1, 1, p)[1:], mask(key(i), 1, 0, p)[:-1]) for i in range(60)], p))

    @pytest.mark.parametrize("vary", ["step", "call"])
    def test_an_element_is_kept_as_often_as_any_other_over_the_steps_and_calls(self, vary):
        masks = torch.stack([mask(**{vary: i}, shape=(600,)) for i in range(3000)]).double() * 2 - 1
        look_random((masks.sum(0) / math.sqrt(3000)).tolist())
        pairs = (masks.T @ masks / math.sqrt(3000))[torch.triu_indices(600, 600, 1).unbind()]
        assert 0.98 < pairs.var() < 1.02
        assert pairs.abs().max() < 6
        pairs = (masks @ masks.T / math.sqrt(600))[torch.triu_indices(3000, 3000, 1).unbind()]
        assert 0.98 < pairs.var() < 1.02
        assert pairs.abs().max() < 6.5

    def test_longer_products_show_nothing_either(self):
        def sign(i, step=0, call=0):
            return mask(key(i), step, call).double() * 2 - 1

        root = math.sqrt(1 << 16)
        look_random([float((sign(i, 0) * sign(i, 1) * sign(i, 2)).sum()) / root for i in range(60)])
        look_random([float((sign(i, call=0) * sign(i, call=1) * sign(i, call=2)).sum()) / root for i in range(60)])
        pairs = ((sign(i), sign(i, call=1)) for i in range(60))
        look_random([float((a[1:] * a[:-1] * b[1:] * b[:-1]).sum()) / root for a, b in pairs])
        look_random([float((a[2:] * a[1:-1] * a[:-2]).sum()) / root for a in map(sign, range(60))])


class TestKeys:
    def test_calls_count(self):
        keys = StepKeys(1, 2)
        assert [keys.next() for _ in range(3)] == [0, 1, 2]
        assert keys.calls == 3

    def test_solo_keys_are_those_of_seed_and_step(self):
        keys = SoloKeys(7, 3)
        assert (keys.lo, keys.hi) == halves(step_key(7, 3))
        assert keys.start == step_key(7, 3)

    def test_solo_keys_count_in_the_generator_which_brings_the_count_back(self):
        keys = SoloKeys(7, 3)
        torch.manual_seed(keys.start)
        assert [keys.next() for _ in range(2)] == [0, 1]
        state = torch.get_rng_state()
        assert [keys.next() for _ in range(2)] == [2, 3]
        torch.set_rng_state(state)
        assert [keys.next() for _ in range(3)] == [2, 3, 4]

    @pytest.mark.parametrize("other", [0, 2**64 - 1])
    def test_solo_keys_leave_a_generator_that_someone_else_has_seeded(self, other):
        keys = SoloKeys(7, 3)
        torch.manual_seed(keys.start)
        keys.next()
        torch.manual_seed(other)
        assert [keys.next() for _ in range(3)] == [1, 2, 3]
        assert torch.initial_seed() == other


def kept(shape, p, call=0):
    return keep(base(shape, CPU), 1, 2, call, p)


def keys():
    return StepKeys(1, 2)


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class TestDropout:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_scales_what_it_keeps_in_the_inputs_dtype(self, dtype, p):
        x = torch.randn(30, 40, dtype=dtype, requires_grad=True)
        out = masks.dropout(x, p, keys())
        expected = torch.where(kept(x.shape, p), (x.detach() * (1 / (1 - p))), 0.0)
        assert out.dtype == dtype
        assert torch.equal(out.abs(), expected.abs())
        out.backward(torch.ones_like(out))
        ones = torch.ones_like(out)
        assert torch.equal(x.grad, torch.where(kept(x.shape, p), ones * (1 / (1 - p)), 0.0))

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("apply", [masks.dropout, masks.alpha_dropout])
    def test_a_tensor_of_rates_gives_the_bits_of_numbers(self, apply, dtype):
        x = torch.randn(len(RATES), 30, 40).to(dtype)
        rates = torch.tensor(RATES, dtype=torch.float64)
        alone = torch.stack([apply(row, p, StepKeys(1, 2)) for row, p in zip(x, RATES, strict=True)])

        def own(row, lo, p):
            return apply(row, p, StepKeys(lo, int32(2)))

        assert torch.equal(torch.vmap(own)(x, int32([1] * len(RATES)), rates), alone)
        native = StepKeys(int32([[[1]]] * len(RATES)), int32([[[2]]] * len(RATES)))
        native.mask = lambda shape, device, p: keep(base(shape[1:], device), native.lo, native.hi, 0, p)
        assert torch.equal(apply(x, rates.view(-1, 1, 1), native), alone)

    def test_the_backward_of_a_tensor_of_rates_is_that_of_numbers(self):
        for dtype in FLOATS:
            grads = []
            for p in (0.3, torch.tensor(0.3, dtype=torch.float64)):
                x = torch.linspace(-1, 1, 200).to(dtype).requires_grad_()
                masks.dropout(x, p, keys()).backward(torch.linspace(0.1, 3, 200).to(dtype))
                grads.append(x.grad)
            assert torch.equal(*grads)

    def test_a_dropped_nan_is_still_one_as_in_torch(self):
        out = masks.dropout(torch.full((100,), math.nan), 0.5, keys())
        assert out.isnan().all()
        assert F.dropout(torch.full((100,), math.nan), 0.5).isnan().all()
        assert masks.dropout(torch.full((100,), math.nan), torch.tensor(0.5), keys()).isnan().all()
        assert masks.dropout(torch.full((9,), math.inf), 1.0, keys()).isnan().all()

    @pytest.mark.parametrize("apply", [masks.dropout, masks.alpha_dropout])
    def test_at_rate_1_all_is_0(self, apply):
        x = torch.randn(50)
        assert torch.equal(apply(x, 1.0, keys()), torch.zeros(50))
        assert torch.equal(apply(x, torch.ones((), dtype=torch.float64), keys()), torch.zeros(50))

    @pytest.mark.parametrize("apply", [masks.dropout, masks.alpha_dropout])
    def test_gives_the_input_itself_where_nothing_is_drawn(self, apply):
        x, count = torch.randn(5), keys()
        assert apply(x, 0.5, count, training=False) is x
        assert count.calls == 0
        assert apply(x, 0.0, count) is x
        assert count.calls == 1  # a bundle's other trials may draw here
        empty = torch.empty(0, 3)
        assert apply(empty, 0.5, count) is empty
        assert count.calls == 2
        assert apply(torch.ones(()), 0.5, count).shape == ()

    @pytest.mark.parametrize("p", [0.4, torch.tensor(0.4, dtype=torch.float64)])
    @pytest.mark.parametrize("channels", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("apply", [masks.dropout, masks.alpha_dropout])
    def test_in_place(self, apply, dtype, channels, p):
        x = torch.randn(4, 6, 5).to(dtype)
        expected = apply(x, p, keys(), channels=channels)
        leaf = x.clone().requires_grad_()
        inner = leaf * 1
        out = apply(inner, p, keys(), channels=channels, inplace=True)
        assert out is inner
        assert torch.equal(out, expected)
        out.sum().backward()
        other = x.clone().requires_grad_()
        apply(other, p, keys(), channels=channels).sum().backward()
        assert torch.equal(leaf.grad, other.grad)

    def test_whole_channels(self):
        x = torch.randn(7, 8, 3, 2)
        out = masks.dropout(x, 0.5, keys(), channels=True)
        assert torch.equal(out, x * kept((7, 8, 1, 1), 0.5) * 2)
        with pytest.raises(RuntimeError, match="at least 2 dimensions"):
            masks.dropout(torch.ones(3), 0.5, keys(), channels=True)

    def test_a_mask_goes_by_the_logical_index(self):
        x = torch.randn(4, 8, 5, 5)
        plain = masks.dropout(x, 0.5, keys())
        assert torch.equal(masks.dropout(x.to(memory_format=torch.channels_last), 0.5, keys()), plain)

    def test_calls_differ(self):
        x, count = torch.ones(200), keys()
        first, second = masks.dropout(x, 0.5, count), masks.dropout(x, 0.5, count)
        assert torch.equal(first, kept((200,), 0.5, 0) * 2.0)
        assert torch.equal(second, kept((200,), 0.5, 1) * 2.0)
        assert not torch.equal(first, second)

    @pytest.mark.parametrize("channels", [False, True])
    def test_alpha_dropout_is_torchs_formula(self, channels):
        p, alpha = 0.3, 1.7580993408473766
        x = torch.randn(50, 60, 4, dtype=torch.float64)
        out = masks.alpha_dropout(x, p, keys(), channels=channels)
        a = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
        keeps = kept((50, 60, 1) if channels else x.shape, p)
        expected = torch.where(keeps, x * a + alpha * a * p, -alpha * a + alpha * a * p)
        assert torch.allclose(out, expected, rtol=0, atol=1e-14)
        fives = torch.full((50, 60, 4), 5.0, dtype=torch.float64)
        own, torchs = masks.alpha_dropout(fives, p, keys()), F.alpha_dropout(fives, p, training=True)
        assert torch.allclose(own.unique(), torchs.unique(), rtol=0, atol=1e-14)

    def test_alpha_dropout_keeps_mean_and_variance(self):
        out = masks.alpha_dropout(torch.randn(1 << 17), 0.2, keys())
        assert abs(out.mean()) < 0.02
        assert abs(out.var() - 1) < 0.03


def weights_by_hand(q, k, mask=None, scale=None):
    scores = q @ k.transpose(-2, -1) * (q.size(-1) ** -0.5 if scale is None else scale)
    return torch.softmax(scores if mask is None else scores + mask, -1)


class TestAttention:
    @pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "blank", "blank float"])
    @pytest.mark.parametrize("more", [{}, {"scale": 0.3}, {"enable_gqa": True}])
    def test_at_rate_0_it_is_torchs_with_its_gradients(self, kind, more):
        generator = torch.Generator().manual_seed(0)
        groups = 2 if more.get("enable_gqa") else 4
        shapes = [(3, 4, 5, 8), (3, groups, 6, 8), (3, groups, 6, 7)]
        allowed = torch.rand(3, 1, 5, 6, generator=generator) > 0.3
        allowed[..., 0] = True
        if "blank" in kind:
            allowed[0, 0, 2] = False
        given = {
            "bool": allowed, "blank": allowed, "float": torch.randn(5, 6, generator=generator).double(),
            "blank float": torch.zeros(3, 1, 5, 6).double().masked_fill(~allowed, -math.inf),
        }.get(kind)  # fmt: skip
        results = []
        for own in (True, False):
            inputs = [torch.randn(s, generator=generator.manual_seed(4)).double().requires_grad_() for s in shapes]
            if own:
                out = keyed_attention.attention(*inputs, given, 0.0, kind == "causal", **more, keys=keys())
            else:
                out = F.scaled_dot_product_attention(*inputs, given, 0.0, kind == "causal", **more)
            out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).double())
            results.append([out, *(x.grad for x in inputs)])
        for mine, torchs in zip(*results, strict=True):
            assert torch.allclose(mine, torchs, rtol=0, atol=1e-12)

    def test_drops_weights_by_key(self):
        q, k, v = (torch.randn(2, 3, 4, 5, dtype=torch.float64) for _ in range(3))
        out = keyed_attention.attention(q, k, v, dropout_p=0.4, keys=keys())
        expected = (weights_by_hand(q, k) * kept((2, 3, 4, 4), 0.4) / 0.6) @ v
        assert torch.allclose(out, expected, rtol=0, atol=1e-12)

    def test_a_mask_beside_is_causal_is_refused_as_torch_does(self):
        x = torch.randn(1, 1, 3, 4)
        with pytest.raises(RuntimeError, match="attn_mask"):
            keyed_attention.attention(x, x, x, torch.ones(3, 3).bool(), 0.5, True, keys=keys())


def mha_case(kind, batched, masked, padded, extra, bias, seed=0):
    """Arguments of F.multi_head_attention_forward by name, and those of them that have gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    heads, width, batch, length = 2, 6, 3, 4
    source = length if kind == "self" else 5
    sizes = {"query": (length, width), "key": (source, width), "value": (source, width)}
    if kind == "separate":
        sizes |= {"key": (source, 5), "value": (source, 7)}
    leaves = {name: draw(s[0], *([batch] if batched else []), s[1]) for name, s in sizes.items()}
    if kind == "self":
        leaves = {"query": leaves["query"]}
    elif kind == "encoder":
        leaves.pop("value")
    if kind == "separate":
        leaves |= {"q_proj_weight": draw(width, 6), "k_proj_weight": draw(width, 5), "v_proj_weight": draw(width, 7)}
    else:
        leaves["in_proj_weight"] = draw(3 * width, width)
    leaves["out_proj_weight"] = draw(width, width)
    if bias:
        leaves |= {"in_proj_bias": draw(3 * width), "out_proj_bias": draw(width)}
    if "bias" in extra:
        leaves |= {"bias_k": draw(1, 1, width), "bias_v": draw(1, 1, width)}
    rows = batch * heads if batched else heads
    later = torch.ones(length, source).triu(1).bool()
    masks = {
        "none": None, "bool": later, "causal": later,
        "float": torch.randn(length, source, generator=generator).double(),
        "3d": torch.randn(rows, length, source, generator=generator).double(),
        "3d bool": later.expand(rows, length, source),
    }  # fmt: skip
    padding = torch.zeros(batch, source).bool()
    padding[1, 3:] = True
    padding = padding if batched else padding[1]
    paddings = {"none": None, "bool": padding, "float": padding.double() * -2.5}
    given = dict(embed_dim_to_check=width, num_heads=heads, add_zero_attn="zero" in extra, attn_mask=masks[masked])
    given |= dict(key_padding_mask=paddings[padded], is_causal=masked == "causal", dropout_p=0.0)
    given["use_separate_proj_weight"] = kind == "separate"
    return given, leaves


def call(function, given, leaves, **more):
    named = dict.fromkeys(("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj_bias"))
    named |= leaves
    named.setdefault("key", named["query"])
    named.setdefault("value", named["key"])
    return function(**named, **given, **more)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
class TestMultiHeadAttention:
    @pytest.mark.parametrize("batched", [True, False])
    @pytest.mark.parametrize("kind", ["self", "encoder", "packed", "separate"])
    @pytest.mark.parametrize("masked", ["none", "bool", "causal", "float", "3d", "3d bool"])
    def test_is_torchs_with_its_gradients_whatever_the_options(self, kind, batched, masked):
        options = itertools.product(("none", "bool", "float"), ("", "bias", "zero", "bias zero"), (True, False))
        for padded, extra, bias in options:
            given, leaves = mha_case(kind, batched, masked, padded, extra, bias)
            for need, average in ((True, True), (True, False), (False, True)):
                results = []
                for own in (True, False):
                    function = keyed_attention.multi_head_attention if own else F.multi_head_attention_forward
                    more = {"keys": keys()} if own else {}
                    out, shown = call(function, given, leaves, need_weights=need, average_attn_weights=average, **more)
                    loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
                    if shown is not None:
                        loss = loss + (shown * torch.linspace(-1, 2, shown.numel()).view_as(shown)).sum()
                    grads = torch.autograd.grad(loss, list(leaves.values()))
                    results.append([out, *([] if shown is None else [shown]), *grads])
                said = (padded, extra, bias, need, average)
                assert len(results[0]) == len(results[1]), said
                for mine, torchs in zip(*results, strict=True):
                    assert mine.shape == torchs.shape, said
                    assert torch.allclose(mine, torchs, rtol=0, atol=1e-11), said

    def test_static_keys_and_values(self):
        given, leaves = mha_case("packed", True, "none", "none", "zero", True)
        static = {f"static_{x}": torch.randn(6, 5, 3, dtype=torch.float64) for x in "kv"}
        mine = call(keyed_attention.multi_head_attention, given, leaves, **static, keys=keys())
        torchs = call(F.multi_head_attention_forward, given, leaves, **static)
        assert torch.allclose(mine[0], torchs[0], rtol=0, atol=1e-12)
        assert torch.allclose(mine[1], torchs[1], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("batched", [True, False])
    @pytest.mark.parametrize("masked", ["none", "causal", "float"])
    def test_drops_the_same_weights_whether_they_are_needed_or_not(self, batched, masked):
        given, leaves = mha_case("self", batched, masked, "none", "", True)
        given["dropout_p"] = 0.4
        shown, hidden = keys(), keys()
        out, weights = call(
            keyed_attention.multi_head_attention,
            given,
            leaves,
            need_weights=True,
            average_attn_weights=False,
            keys=shown,
        )
        other, none = call(keyed_attention.multi_head_attention, given, leaves, need_weights=False, keys=hidden)
        assert torch.allclose(out, other, rtol=0, atol=1e-12)
        assert none is None
        assert (shown.calls, hidden.calls) == (1, 1)
        whole = dict(given, dropout_p=0.0)
        _, undropped = call(
            keyed_attention.multi_head_attention,
            whole,
            leaves,
            need_weights=True,
            average_attn_weights=False,
            keys=keys(),
        )
        assert torch.allclose(weights, undropped * kept(weights.shape, 0.4) / 0.6, rtol=0, atol=1e-12)

    def test_counts_one_call_where_it_trains_whatever_the_rate(self):
        given, leaves = mha_case("self", True, "none", "none", "", True)
        for need in (True, False):
            count = keys()
            call(keyed_attention.multi_head_attention, given, leaves, need_weights=need, keys=count)
            assert count.calls == 1
            given_p = dict(given, dropout_p=0.5)
            out, _ = call(
                keyed_attention.multi_head_attention, given_p, leaves, need_weights=need, training=False, keys=count
            )
            assert count.calls == 1
            assert torch.equal(
                out, call(keyed_attention.multi_head_attention, given, leaves, need_weights=need, keys=keys())[0]
            )

    def test_what_does_not_fit_is_refused(self):
        given, leaves = mha_case("self", True, "none", "none", "", True)
        with pytest.raises(AssertionError, match="expected an embedding dimension of 8"):
            call(keyed_attention.multi_head_attention, dict(given, embed_dim_to_check=8), leaves, keys=keys())
        with pytest.raises(AssertionError, match="4 heads divide, got 6"):
            call(keyed_attention.multi_head_attention, dict(given, num_heads=4), leaves, keys=keys())
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            call(keyed_attention.multi_head_attention, dict(given, is_causal=True), leaves, keys=keys())
        with pytest.raises(RuntimeError, match=r"expected an attn_mask of shape \(4, 4\), got \(1, 4\)"):
            call(keyed_attention.multi_head_attention, dict(given, attn_mask=torch.zeros(1, 4)), leaves, keys=keys())
        with pytest.raises(AssertionError, match="go together"):
            call(
                keyed_attention.multi_head_attention,
                given,
                leaves | {"bias_k": torch.zeros(1, 1, 6).double()},
                keys=keys(),
            )
        leaves.pop("in_proj_weight")
        with pytest.raises(AssertionError, match="projection weight is None"):
            call(keyed_attention.multi_head_attention, given, leaves, keys=keys())


X = torch.randn(6, 8, 5, 4)
ELEMENTS, CHANNELS = (6, 8, 5, 4), (6, 8, 1, 1)


def dropped(x, shape, p=0.5):
    return x * kept(shape, p) * (1 / (1 - p))


class Rate(float):
    """A rate that differs from trial to trial, as the fused mode has it."""

    value = torch.tensor(0.25, dtype=torch.float64)


class TestMode:
    @pytest.mark.parametrize(
        ("function", "apply", "channels"),
        [
            (lambda x, p: F.dropout(x, p), masks.dropout, False),
            (lambda x, p: nn.Dropout(p)(x), masks.dropout, False),
            (lambda x, p: torch.dropout(x, p, train=True), masks.dropout, False),
            (lambda x, p: nn.Dropout2d(p)(x), masks.dropout, True),
            (lambda x, p: nn.Dropout1d(p)(x[0]), masks.dropout, True),
            (lambda x, p: nn.Dropout3d(p)(x[..., None]), masks.dropout, True),
            (lambda x, p: torch.feature_dropout(x, p, True), masks.dropout, True),
            (lambda x, p: nn.AlphaDropout(p)(x), masks.alpha_dropout, False),
            (lambda x, p: torch.alpha_dropout(x, p, True), masks.alpha_dropout, False),
            (lambda x, p: nn.FeatureAlphaDropout(p)(x), masks.alpha_dropout, True),
            (lambda x, p: torch.feature_alpha_dropout(x, p, True), masks.alpha_dropout, True),
        ],
    )
    def test_torchs_functions_draw_by_key(self, function, apply, channels):
        with Keyed(keys()) as mode:
            out = function(X, 0.3)
        x = X[0] if out.dim() == 3 else X[..., None] if out.dim() == 5 else X
        assert torch.equal(out, apply(x, 0.3, keys(), channels=channels))
        assert (mode.used, mode.unkeyed, mode.keys.calls) == (True, [], 1)

    @pytest.mark.parametrize(
        ("function", "shape"),
        [
            (lambda x: F.dropout(x, 0.5, inplace=True), ELEMENTS),
            (lambda x: torch.dropout_(x, 0.5, True), ELEMENTS),
            (lambda x: F.dropout2d(x, 0.5, inplace=True), CHANNELS),
            (lambda x: torch.feature_dropout_(x, 0.5, True), CHANNELS),
            (lambda x: F.dropout3d(x, 0.5, inplace=True), (6, 1, 1, 1)),
        ],
    )
    def test_in_place_variants(self, function, shape):
        x = X.clone()
        with Keyed(keys()):
            out = function(x)
        assert out is x
        assert torch.equal(x, dropped(X, shape))

    def test_in_place_alpha_variants(self):
        for function, channels in (
            (lambda x: F.alpha_dropout(x, 0.5, True, inplace=True), False),
            (lambda x: torch.alpha_dropout_(x, 0.5, True), False),
            (lambda x: F.feature_alpha_dropout(x, 0.5, True, inplace=True), True),
            (lambda x: torch.feature_alpha_dropout_(x, 0.5, True), True),
        ):
            x = X.clone()
            with Keyed(keys()):
                assert function(x) is x
            assert torch.equal(x, masks.alpha_dropout(X, 0.5, keys(), channels=channels))

    def test_unbatched_channels_are_torchs(self):
        with Keyed(keys()):
            assert torch.equal(F.dropout1d(X[0, 0], 0.5), dropped(X[0, 0], (5, 1)))
        with Keyed(keys()):
            assert torch.equal(F.dropout3d(X, 0.5), dropped(X, (6, 1, 1, 1)))
        with Keyed(keys()), pytest.warns(UserWarning, match="assuming that channel-wise"):
            assert torch.equal(F.dropout2d(X[0], 0.5), dropped(X[0], (8, 5, 1)))
        with Keyed(keys()), pytest.raises(RuntimeError, match="Expected 2D or 3D input"):
            F.dropout1d(X, 0.5)

    def test_in_evaluation_nothing_is_drawn_or_counted(self):
        with Keyed(keys()) as mode:
            for function in (F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout):
                assert torch.equal(function(X, 0.5, training=False), X)
            assert torch.dropout(X, 0.5, False) is X
            assert F.alpha_dropout(X, 0.5) is X  # its default
        assert mode.keys.calls == 0
        assert not mode.used

    def test_a_rate_of_0_counts_and_a_wrong_one_is_refused(self):
        module = nn.MultiheadAttention(4, 2)
        with Keyed(keys()) as mode:
            assert F.dropout(X, 0.0) is X
            F.scaled_dot_product_attention(X, X, X)
            module(X[0], X[0], X[0])
            assert mode.keys.calls == 3
            for wrong in (-0.1, 1.1):
                with pytest.raises(ValueError, match="between 0 and 1"):
                    F.dropout(X, wrong)
                with pytest.raises(ValueError, match="between 0 and 1"):
                    torch.dropout(X, wrong, True)
        assert mode.used

    def test_a_rate_of_its_own_kind_reaches_the_mask(self):
        with Keyed(keys()):
            assert torch.equal(F.dropout(X, Rate(0.9)), masks.dropout(X, 0.25, keys()))
        with Keyed(keys()):
            assert torch.equal(F.alpha_dropout(X, Rate(0.9), True), masks.alpha_dropout(X, 0.25, keys()))
        with Keyed(keys()):
            out = F.scaled_dot_product_attention(X, X, X, dropout_p=Rate(0.9))
        assert torch.equal(out, keyed_attention.attention(X, X, X, dropout_p=0.25, keys=keys()))
        module = nn.MultiheadAttention(4, 2, dropout=Rate(0.9))
        with Keyed(keys()):
            out, _ = module(X[0], X[0], X[0])
        module.dropout = 0.25
        with Keyed(keys()):
            assert torch.equal(module(X[0], X[0], X[0])[0], out)

    def test_attention(self):
        with Keyed(keys()) as mode:
            out = F.scaled_dot_product_attention(X, X, X, None, 0.4, is_causal=True, scale=0.5)
        assert torch.equal(out, keyed_attention.attention(X, X, X, None, 0.4, True, 0.5, keys=keys()))
        assert mode.keys.calls == 1
        with Keyed(keys()) as mode:
            assert torch.equal(F.scaled_dot_product_attention(X, X, X), F.scaled_dot_product_attention(X, X, X))

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_multi_head_attention_modules(self, need_weights):
        module = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
        x = torch.randn(3, 5, 8)
        runs = []
        for _ in range(2):
            with Keyed(keys()) as mode:
                runs.append(module(x, x, x, need_weights=need_weights)[0])
        assert torch.equal(*runs)
        assert (mode.used, mode.unkeyed) == (True, [])
        with Keyed(StepKeys(3, 4)):
            assert not torch.equal(module(x, x, x, need_weights=need_weights)[0], runs[0])
        module.eval()
        with Keyed(keys()) as mode:
            found = module(x, x, x, need_weights=need_weights)[0]
        assert torch.equal(found, module(x, x, x, need_weights=need_weights)[0])
        assert mode.keys.calls == 0

    def test_a_whole_transformer_draws_nothing_unkeyed(self):
        model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.3, batch_first=True)
        before = torch.get_rng_state()
        with Keyed(keys()) as mode:
            model(torch.randn(2, 4, 8), torch.ones(2, 3, 8)).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
        assert mode.keys.calls == 11  # the input, in 3 attentions and 2 feed-forwards, and after each of the 5
        assert mode.unkeyed == []

    def test_everything_else_goes_through(self):
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
        y = torch.arange(6) % 3
        with Keyed(keys()) as mode:
            inside = F.cross_entropy(copy.deepcopy(model)(X), y, label_smoothing=0.1)
        assert torch.equal(inside, F.cross_entropy(model(X), y, label_smoothing=0.1))
        assert (mode.used, mode.unkeyed, mode.handled) == (False, [], False)

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (lambda: torch.binomial(torch.full((9,), 5.0), torch.full((9,), 0.5)), "binomial"),
            (lambda: nn.init.kaiming_uniform_(torch.empty(3, 3), mode="fan_out"), "kaiming_uniform_"),
        ],
    )
    def test_functions_it_cannot_key_are_noted_and_draw_as_ever(self, function, name):
        torch.manual_seed(3)
        expected = function()
        torch.manual_seed(3)
        with Keyed(keys()) as mode:
            found = function()
            function()
        assert mode.unkeyed == [name]
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (expected, found)), strict=True):
            assert torch.equal(a, b)

    def test_rrelu_in_evaluation_draws_nothing(self):
        with Keyed(keys()) as mode:
            F.rrelu(X)
            torch.rrelu(X, 0.1, 0.2, False)
            nn.RReLU().eval()(X)
        assert (mode.used, mode.handled, mode.keys.calls) == (False, False, 0)

    @pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_recurrent_layers_draw_by_key_between_layers(self, kind, packed):
        x = torch.randn(4, 3, 8)
        if packed:
            x = nn.utils.rnn.pack_padded_sequence(x, [4, 2, 1])
        for layers, p, training, calls in ((3, 0.5, True, 2), (2, 0.5, False, 0), (2, 0.0, True, 1), (1, 0.5, True, 0)):
            module = kind(8, 8, layers, dropout=p).train(training)
            runs = []
            for _ in range(2):
                before = torch.get_rng_state()
                with Keyed(keys()) as mode:
                    runs.append(module(x))
                assert torch.equal(torch.get_rng_state(), before)
            assert (mode.keys.calls, mode.used, mode.unkeyed) == (calls, training and p > 0 and layers > 1, [])
            first, second = (nn.utils.rnn.PackedSequence.__getitem__(out, 0) if packed else out for out, _ in runs)
            assert torch.equal(first, second)

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_layers_with_dropout_are_those_that_torch_has(self, kind, packed, monkeypatch):
        x = torch.randn(4, 3, 8)
        if packed:
            x = nn.utils.rnn.pack_padded_sequence(x, [4, 2, 1])
        module = kind(8, 5, 3, dropout=0.5, bidirectional=True)
        monkeypatch.setattr("penstock.training.random.recurrent.dropout", lambda out, p, keys: out)
        with Keyed(keys()):
            (out, end) = module(x)
        module.dropout = 0.0
        expected, last = module(x)
        assert torch.allclose(*(getattr(o, "data", o) for o in (out, expected)), rtol=0, atol=1e-6)
        for one, other in zip(*(e if isinstance(e, tuple) else (e,) for e in (end, last)), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-6)

    def test_a_lone_trials_own_vmap_draws_as_ever_and_is_noted(self):
        def own(row):
            return F.dropout(row, 0.5)

        x = torch.ones(50, 40)
        with Keyed(SoloKeys(1, 2)) as mode:
            out = torch.vmap(own, randomness="different")(x)
        assert mode.unkeyed == ["dropout"]
        assert len(out.unique(dim=0)) == 50
        with Keyed(StepKeys(int32(1), int32(2))) as mode:
            same = torch.vmap(own)(x)  # the fused mode's keys
        assert mode.unkeyed == []
        assert torch.equal(same, dropped(x, (40,)))

    def test_a_lone_trials_own_compiled_function_draws_as_ever_and_is_noted(self):
        compiled = torch.compile(lambda x: F.dropout(x, 0.5) + F.alpha_dropout(x, 0.5), backend="aot_eager")
        x = torch.ones(40)
        mode = Keyed(SoloKeys(1, 0))
        for step in range(3):
            mode.keys = SoloKeys(1, step)
            torch.manual_seed(mode.keys.start)
            with mode:
                out = compiled(x)
            torch.manual_seed(mode.keys.start)
            assert torch.equal(out, F.dropout(x, 0.5) + x)
        assert mode.unkeyed == ["dropout"]

    def test_a_bundles_keys_go_through_a_compiler(self):
        def forward(x, lo, hi):
            with Keyed(StepKeys(lo, hi)):
                return F.alpha_dropout(F.dropout(F.dropout(x), 0.3), 0.2, True)

        x = torch.randn(20, 30)
        alone = forward(x, 1, 2)
        assert torch.equal(torch.compile(forward, backend="aot_eager", fullgraph=True)(x, int32(1), int32(2)), alone)
        every = torch.compile(torch.vmap(forward, (None, 0, 0)), backend="aot_eager", fullgraph=True)
        assert torch.equal(every(x, int32([3, 1]), int32([4, 2]))[1], alone)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_activation_checkpointing_recomputes_the_same_masks(self, reentrant):
        layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        grads = []
        for recompute in (True, False):
            mode = Keyed(SoloKeys(7, 3))
            mode.keys.seed([torch.default_generator])
            x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
            with mode:
                h = F.dropout(x, 0.1)
                for layer in layers:

                    def block(h, layer=layer):
                        return F.dropout(torch.relu(F.dropout(layer(h), 0.2)), 0.5)

                    h = checkpoint(block, h, use_reentrant=reentrant) if recompute else block(h)
                mode.backward(F.dropout(h, 0.2).pow(2).sum())
            assert mode.recomputed is recompute
            assert mode.keys.calls == 8
            grads.append([x.grad, *(p.grad.clone() for p in layers.parameters())])
            layers.zero_grad()
        assert all(map(torch.equal, *grads))

    def test_backward_is_torchs(self):
        x = torch.randn(5, requires_grad=True)
        for loss, said in ((x.sum().detach(), "does not require grad"), (x * 2, "scalar outputs")):
            with pytest.raises(RuntimeError, match=said):
                Keyed(keys()).backward(loss)
        Keyed(keys()).backward((x * 3).sum())
        assert torch.equal(x.grad, torch.full((5,), 3.0))
        Keyed(keys()).backward((x * 3).sum(0, keepdim=True))
        assert torch.equal(x.grad, torch.full((5,), 6.0))


def solo(model):
    return Solo(model, [torch.default_generator])


class Functional(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)

    def forward(self, x):
        return self.function(self.linear(x))


class TestSolo:
    def run(self, model, steps=3, mode=None, x=None):
        mode = solo(model) if mode is None else mode
        x = torch.ones(4, 8) if x is None else x
        out = []
        for step in range(steps):
            with mode.at(5, step):
                out.append(model(x))
        return mode, out

    def test_plain_dropout_modules_need_no_mode_after_the_first_forward(self):
        model = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout(0.5, inplace=True))
        mode, found = self.run(model)
        assert (mode.needed, mode.used, mode.unkeyed) == (False, True, [])
        for step, out in enumerate(found):
            with Keyed(SoloKeys(5, step)):
                assert torch.equal(model(torch.ones(4, 8)), out)
        assert not any("forward" in module.__dict__ for module in model.modules())

    def test_a_model_that_draws_nothing_needs_no_mode(self):
        mode, _ = self.run(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LSTM(8, 8)))
        assert (mode.needed, mode.used, mode.unkeyed) == (False, False, [])

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: F.dropout(x, 0.5),
            lambda x: F.dropout(x, 0.0),
            lambda x: nn.AlphaDropout(0.5)(x),
            lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        ],
    )
    def test_a_function_keeps_the_mode_on_also_beside_modules(self, function):
        model = nn.Sequential(Functional(function), nn.Dropout(0.5))
        mode, found = self.run(model)
        assert (mode.needed, mode.used, mode.unkeyed) == (True, True, [])
        for step, out in enumerate(found):
            with Keyed(SoloKeys(5, step)):
                assert torch.equal(model(torch.ones(4, 8)), out)

    @pytest.mark.parametrize(
        "module",
        [
            nn.Dropout2d(0.5), nn.AlphaDropout(), nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2),
            nn.GRU(8, 8, 2, dropout=0.1), type("Own", (nn.Dropout,), {})(),
            torch.compile(nn.Linear(8, 8), backend="eager"),
        ],
        ids=lambda module: type(module).__name__,
    )  # fmt: skip
    def test_a_module_that_may_draw_later_keeps_the_mode_on(self, module):
        model = nn.ModuleDict({"first": nn.Linear(8, 8), "unused": module})
        mode = solo(model)
        with mode.at(1, 0):
            model["first"](torch.ones(8))
        assert mode.needed

    def test_unkeyed_functions_are_noted_and_repeat(self):
        five = torch.full((8,), 5.0)
        model = Functional(lambda x: F.dropout(x, 0.5) + torch.binomial(five, five / 10))
        mode, first = self.run(model)
        torch.rand(7)
        _, second = self.run(model)
        assert mode.unkeyed == ["binomial"]
        assert all(map(torch.equal, first, second))

    def test_functions_with_a_generator_or_a_seed_of_the_users_own_draw_by_it(self):
        def seeded():
            torch.manual_seed(4)
            return torch.randn(8)

        def own():
            return torch.Generator().manual_seed(3)

        for draw, said in (
            (lambda: torch.rand(8, generator=own()), "rand with a generator of the task's own"),
            (lambda: torch.empty(8).normal_(generator=own()), "normal_ with a generator of the task's own"),
            (lambda: torch.multinomial(torch.ones(8), 8, generator=own()), None),
            (seeded, "randn with a seed of the task's own"),
        ):  # fmt: skip
            found = []
            mode, _ = self.run(Functional(lambda x, draw=draw, found=found: found.append(draw()) or x))
            assert all(torch.equal(one, draw()) for one in found)
            assert said is None or mode.unkeyed == [said]

    @pytest.mark.parametrize("after", [False, True])
    def test_an_operator_nobody_knows_is_noticed_by_the_generator(self, after):
        def draw(x):
            return torch.ops.aten.bernoulli.default(torch.full_like(x, 0.5))

        model = nn.Sequential(*[Functional(draw), nn.Dropout(0.5)][:: -1 if after else 1])
        mode, _ = self.run(model)
        assert mode.unkeyed == ["an operator that Penstock does not know"]
        assert mode.needed

    def test_modules_of_rate_0_count_and_may_draw_later(self):
        model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.5))
        mode, found = self.run(model, 2)
        assert mode.keys.calls == 2
        model[0].p = 0.4
        _, later = self.run(model, 2, mode)
        for step in range(2):
            ones = torch.ones(4, 8)
            first, second = (mask(5, step, call, p, (4, 8)) for call, p in ((0, 0.4), (1, 0.5)))
            assert torch.equal(found[step], ones * second * 2)
            assert torch.equal(later[step], ones * (first * (1 / 0.6)) * second * 2)

    def test_in_evaluation_modules_draw_and_count_nothing(self):
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)).eval()
        mode, _ = self.run(model)
        assert (mode.keys.calls, mode.needed, mode.used) == (0, False, False)

    def test_the_model_is_as_it_was_after_an_error(self):
        model = nn.Sequential(nn.Dropout(0.5), Functional(lambda x: 1 / 0))
        mode = solo(model)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                self.run(model, 1, mode)
            assert "forward" not in model[0].__dict__
            assert torch.equal(F.relu(torch.ones(2)), torch.ones(2))
        assert mode.needed  # a first forward has not come to its end

    def test_a_copy_made_during_the_forward_is_a_plain_model(self):
        copies = []
        model = nn.Sequential(nn.Dropout(0.5), Functional(lambda x: copies.append(copy.deepcopy(model)) or x))
        self.run(model, 2)
        for copied in copies:
            torch.manual_seed(0)
            expected = F.dropout(torch.ones(4, 8), 0.5)
            torch.manual_seed(0)
            assert torch.equal(copied[0](torch.ones(4, 8)), expected)
            assert copied[0].forward.args[0] is copied[0]

    def test_recomputed_modules_draw_the_same(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
        grads = []
        for recompute in (True, False):
            mode = solo(model)
            for step in range(3):
                model.zero_grad()
                with mode.at(3, step):
                    x = torch.ones(4, 8)
                    out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
                    mode.backward(out.pow(2).sum())
            grads.append([p.grad.clone() for p in model.parameters()])
            assert mode.recomputed is recompute
            assert not mode.needed
        assert all(map(torch.equal, *grads))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    def test_the_bits_of_a_cpu(self):
        cuda = torch.device("cuda", 0)
        lo, hi = halves(step_key(5, 6))
        p = torch.tensor(RATES, dtype=torch.float64)
        for call_ in range(3):
            expected = torch.stack([keep(base((7, 11), CPU), lo, hi, call_, rate) for rate in RATES])
            alone = torch.stack([keep(base((7, 11), cuda), lo, hi, call_, rate) for rate in RATES])
            assert torch.equal(alone.cpu(), expected)
            wide = [t.to(cuda).expand(len(RATES), 1, 1) for t in (int32(lo), int32(hi))]
            native = keep(base((7, 11), cuda), *wide, call_, p.to(cuda).view(-1, 1, 1))
            assert torch.equal(native.cpu(), expected)
        for dtype in FLOATS:
            x = torch.randn(30, 40).to(dtype)
            for rate in (0.3, 0.5):
                assert torch.equal(masks.dropout(x.to(cuda), rate, keys()).cpu(), masks.dropout(x, rate, keys())), dtype

    def test_in_a_graph_with_keys_that_change(self):
        cuda = torch.device("cuda", 0)
        lo, hi = int32([[1], [5]]).to(cuda), int32([[2], [6]]).to(cuda)
        x = torch.ones(2, 100_000, device=cuda)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                keep(base((100_000,), cuda), lo, hi, 0, 0.5)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = (
                x
                * keep(base((100_000,), cuda), lo, hi, 0, 0.5)
                * keep(base((2 * 10**7,), cuda)[:100_000], lo, hi, 1, 0.5)
            )
        lo.add_(3)
        graph.replay()
        base((10**8,), cuda)
        small = base((100_000,), CPU)
        for row, (a, b) in enumerate(((4, 2), (8, 6))):
            assert torch.equal(out[row].cpu().bool(), keep(small, a, b, 0, 0.5) & keep(small, a, b, 1, 0.5))

    def test_recomputed_in_the_engines_thread(self):
        layer = nn.Linear(16, 16).cuda()
        grads, threads = [], []
        for recompute in (True, False):
            layer.zero_grad()
            mode = Keyed(SoloKeys(7, 3))
            torch.manual_seed(mode.keys.start)

            def block(h):
                threads.append(threading.get_ident())
                return F.dropout(torch.relu(layer(h)), 0.5)

            with mode:
                h = torch.ones(4, 16, device="cuda")
                for _ in range(3):
                    h = checkpoint(block, h, use_reentrant=False) if recompute else block(h)
                mode.backward(h.pow(2).sum())
            grads.append([p.grad.clone() for p in layer.parameters()])
        assert len(threads) == 9, "three blocks, twice of them and once"
        assert len(set(threads)) == 2
        assert all(map(torch.equal, *grads))
