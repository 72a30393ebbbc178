"""Attention: the kernels against a float64 reference, and what torch loses beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.training.fused.ways import Native
from penstock.training.kernels import attention as kernels
from penstock.training.kernels.attention import LARGEST, LOG2E, attention, candidates, takes
from penstock.training.kernels.choice import kernels as use
from penstock.training.kernels.tuning import Blocks
from tests.training.kernels.poisoned import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = (Blocks(BM=16, BN=16), Blocks(BM=32, BN=16), Blocks(BM=16, BN=32), Blocks(BM=64, BN=64))


@pytest.fixture(autouse=True, scope="module")
def _rounded() -> Iterator[None]:
    """On a GPU the kernels are for products that are rounded to TF32; torch's are then rounded too."""
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def plan(blocks: Blocks, hold: int) -> Iterator[None]:
    """Let the kernels run with these blocks: small ones, so that short sequences take many."""
    with mock.patch.multiple(kernels, FORWARD=[(LARGEST, blocks)], BACKWARD=[(LARGEST, blocks | {"HOLD": hold})]):
        yield


def drawn(batch: int, heads: int, lengths: tuple[int, int], width: int, layout: str, seed: int = 0) -> list[Any]:
    """What gradients are asked for, how it becomes queries, keys and values, and the output's gradient."""
    random = torch.Generator().manual_seed(seed)
    g = torch.randn(batch, lengths[0], heads, width, generator=random).to(DEVICE).transpose(1, 2)
    if layout == "apart":
        shapes = [(batch, heads, n, width) for n in (lengths[0], *lengths[1:] * 2)]
        return [[torch.randn(shape, generator=random).to(DEVICE) for shape in shapes], list, g]
    shape = {"split": (batch, lengths[0], 3 * heads * width), "stacked": (3, batch, heads, lengths[0], width)}[layout]

    def slices(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        whole = leaves[0] * 1  # a projection is no leaf
        if layout == "stacked":
            return list(whole)
        return [x.view(batch, -1, heads, width).transpose(1, 2) for x in whole.split(heads * width, 2)]

    return [[torch.randn(shape, generator=random).to(DEVICE)], slices, g]


def results(func: Any, leaves: list[torch.Tensor], slices: Any, g: torch.Tensor, **how: Any) -> list[torch.Tensor]:
    """The output and the gradients of the leaves."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = func(*slices(leaves), **how)
    return [out.detach(), *torch.autograd.grad(out, leaves, g.to(out.dtype))]


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


class Rounded(torch.autograd.Function):
    """A product of what TF32 keeps of its factors: eleven bits, the others cut off, as by a tensor core."""

    @staticmethod
    def kept(x: torch.Tensor) -> torch.Tensor:
        return (x.float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).double()

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return Rounded.kept(a) @ Rounded.kept(b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        a, b, g = (Rounded.kept(x) for x in (*ctx.saved_tensors, grads[0]))
        return (g @ b.mT).to(ctx.saved_tensors[0].dtype), (a.mT @ g).to(ctx.saved_tensors[1].dtype)


def rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None
) -> torch.Tensor:
    """Attention by products that are rounded to TF32, which torch's own are only in some shapes, and no more."""
    product: Any = Rounded.apply
    s = product(q, k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    unseen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    made: torch.Tensor = product((s.masked_fill(unseen, -torch.inf) if causal else s).softmax(-1), v)
    return made


def dispatched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class Kept(torch.autograd.Function):
    """Attention in float64, but for scores and their logarithms, which are kept in float32 for the way back."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        q, k, v = q.double(), k.double(), v.double()
        scale = q.shape[-1] ** -0.5
        s = ((q @ k.mT).float() * (scale * LOG2E)).float()
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
        logarithm = (s.double() - s.amax(-1, keepdim=True)).exp2().sum(-1, keepdim=True).log2() + s.amax(
            -1, keepdim=True
        )
        p = (s - logarithm.float()).double().exp2()
        made = p @ v
        ctx.save_for_backward(q, k, v, p, made)
        ctx.scale = scale
        return made.float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (q, k, v, p, made), g = ctx.saved_tensors, grads[0].double()
        s = p * (g @ v.mT - (g * made).sum(-1, keepdim=True)) * ctx.scale
        return *(x.float() for x in (s @ k, s.mT @ q, p.mT @ g)), None


def kept(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    made: torch.Tensor = Kept.apply(q, k, v, causal)
    return made


def compared(leaves: list[torch.Tensor], slices: Any, g: torch.Tensor, rival: Any = torchs, **how: Any) -> None:
    """As near to float64 as torch's own operators within a factor of four.

    On a GPU those are the ones that torch takes by itself, or products that are rounded to TF32, whichever is worse.
    """
    exact = results(torchs, [x.double() for x in leaves], slices, g, **how)
    with poisoned():
        found = results(attention, leaves, slices, g, **how)
    rivals = [dispatched, rounded] if DEVICE == "cuda" else [rival]
    lost = 3e-7  # where terms cancel out
    theirs = [results(one, leaves, slices, g, **how) for one in rivals]
    for ours, true, *others in zip(found, exact, *theirs, strict=True):
        assert ours.shape == true.shape
        assert ours.isfinite().all()
        off, *allowed = (float((x.double() - true).norm()) for x in (ours, *others))
        assert off <= 4 * max(allowed) + 1e-6 * float(true.norm()) + lost * float(g.norm())


@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    lengths=st.tuples(*[st.sampled_from((1, 2, 15, 16, 17, 33, 40))] * 2),
    width=st.sampled_from((1, 8, 16, 24, 32)),
    layout=st.sampled_from(("apart", "split", "stacked")),
    causal=st.booleans(),
    blocks=st.sampled_from(SMALL),
    hold=st.integers(0, 1),
    scale=st.sampled_from((None, 0.3, -0.2)),
    seed=st.integers(0, 99),
)
def test_kernels_are_as_exact_as_torchs_operators(
    batch: int, heads: int, lengths: Any, width: int, layout: str, causal: bool, blocks: Any, hold: int, scale: Any,
    seed: int,
) -> None:  # fmt: skip
    with plan(blocks, hold):
        compared(*drawn(batch, heads, lengths, width, layout, seed), causal=causal, scale=scale)


@pytest.mark.parametrize(
    ("lengths", "width", "causal"),
    [
        ((130, 130), 16, True),
        ((128, 128), 64, True),
        ((20, 130), 16, True),
        ((130, 20), 8, False),
        ((64, 64), 100, True),
    ],
)
def test_the_blocks_that_are_taken_untimed(lengths: Any, width: int, causal: bool) -> None:
    compared(*drawn(1, 1, lengths, width, "apart"), causal=causal)


@pytest.mark.parametrize("i", range(max(len(kernels.FORWARD), len(kernels.BACKWARD))))
def test_every_candidate(i: int) -> None:
    forward, backward = (candidates(offered, 100, 16) for offered in (kernels.FORWARD, kernels.BACKWARD))
    taken = [(LARGEST, forward[i % len(forward)])], [(LARGEST, backward[i % len(backward)])]
    with mock.patch.multiple(kernels, FORWARD=taken[0], BACKWARD=taken[1]):
        compared(*drawn(1, 1, (100, 100), 16, "split"), causal=True)


def test_far_apart_scores_neither_overflow_nor_vanish() -> None:
    leaves, slices, g = drawn(1, 2, (20, 20), 16, "split")
    with plan(SMALL[0], 0):
        # Flash attention keeps the same logarithms, which are as large as the scores, and loses as many digits.
        compared([leaves[0] * 30], slices, g, rival=flash, causal=True)


@pytest.mark.parametrize("hold", [0, 1])
def test_keys_that_are_not_there_weigh_nothing_beside_scores_far_below_zero(hold: int) -> None:
    (q, k, v), slices, g = drawn(1, 1, (17, 17), 16, "apart")
    with plan(SMALL[0], hold):
        # On some CPUs flash attention loses fewer digits than the logarithms that it keeps.
        compared([q + 30, k - 30, v], slices, g, rival=kept, causal=False)


@pytest.mark.parametrize("layout", ["apart", "split"])
def test_nan_stays_in_its_row_and_runs_repeat(layout: str) -> None:
    leaves, slices, g = drawn(3, 2, (17, 17), 8, layout)
    with plan(SMALL[0], 1):
        clean, again = (results(attention, leaves, slices, g, causal=True) for _ in range(2))
        for x in leaves:
            x[1] = torch.nan
        dirty = results(attention, leaves, slices, g, causal=True)
    for one, other, nans in zip(clean, again, dirty, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one[[0, 2]], nans[[0, 2]])
        assert nans[1].isnan().all()


def test_rows_that_are_not_contiguous_and_gradients_that_are_expanded() -> None:
    leaves, _, g = drawn(1, 2, (17, 9), 8, "apart")
    turned = [x.mT.contiguous() for x in leaves]
    compared(turned, lambda leaves: [x.mT for x in leaves], g[:, :, :1, :1].expand_as(g), causal=True)


def test_half_precision_loses_what_its_numbers_do() -> None:
    leaves, slices, g = drawn(2, 2, (33, 33), 16, "split")
    exact = results(torchs, [x.double() for x in leaves], slices, g, causal=True)
    for ours, true in zip(results(attention, [x.half() for x in leaves], slices, g, causal=True), exact, strict=True):
        assert ours.dtype == torch.float16
        assert float((ours.double() - true).norm()) <= 2e-3 * float(true.norm())


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    layout=st.sampled_from(("apart", "split", "stacked")),
    causal=st.booleans(),
    scale=st.sampled_from((None, 0.3, -0.2)),
)
def test_the_twin_is_torchs_attention(lengths: Any, layout: str, causal: bool, scale: Any) -> None:
    leaves, slices, g = drawn(2, 3, lengths, 5, layout)
    ours, theirs = (
        results(func, [x.double() for x in leaves], slices, g, causal=causal, scale=scale)
        for func in (attention, torchs)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["apart", "split"])
def test_a_traced_step_has_one_operator_each_way_and_copies_nothing(layout: str) -> None:
    leaves, slices, g = drawn(2, 3, (17, 17), 8, layout)

    def step(*leaves: torch.Tensor) -> list[torch.Tensor]:
        return results(attention, list(leaves), slices, g, causal=True)

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names.count("penstock.attention.default") == names.count("penstock.attention_back.default") == 1
    assert not any(word in name for name in names for word in ("clone", "copy"))
    for traced, eager in zip(graph(*leaves), step(*leaves), strict=True):
        assert torch.equal(traced, eager)
        assert traced.stride() == eager.stride()


@pytest.mark.parametrize("layout", ["apart", "split"])
def test_the_fake_operators_have_the_strides_of_the_real_ones(layout: str) -> None:
    leaves, slices, g = drawn(2, 3, (17, 17), 8, layout)
    how = True, 0.5
    out, lse = kernels.attend(*slices(leaves), *how)
    assert out.transpose(1, 2).is_contiguous()
    asked = {"test_utils": ["test_schema", "test_faketensor"]}
    torch.library.opcheck(kernels.attend, (*slices(leaves), *how), **asked)
    torch.library.opcheck(kernels.attend_back, (g, *slices(leaves), out, lse, *how), **asked)


def test_what_it_takes() -> None:
    def q(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    small = q(2, 4, 128, 16)
    assert takes(small, small, small, None, 0.0)
    assert takes(q(2, 4, 1, 1), q(2, 4, 256, 1), q(2, 4, 256, 1), None, 0.0)
    assert takes(*[q(2, 4, 128, 64)] * 3, None, 0.0)
    assert not takes(small, small, small, torch.ones(128, 128), 0.0)
    assert not takes(small, small, small, None, 0.1)
    assert not takes(small, small.half(), small, None, 0.0)
    assert not takes(small, *[q(2, 2, 128, 16)] * 2, None, 0.0)
    assert not takes(small, small, q(2, 4, 128, 8), None, 0.0)
    assert not takes(*[q(4, 128, 16)] * 3, None, 0.0)
    assert not takes(*[q(0, 4, 128, 16)] * 3, None, 0.0)
    assert not takes(*[q(2, 4, 257, 16)] * 3, None, 0.0)
    assert not takes(*[q(2, 4, 129, 64)] * 3, None, 0.0)


def test_the_rule_of_the_native_way_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values of each trial's own projection, as a transformer has them."""
    torch.manual_seed(0)
    models = [nn.Linear(8, 24, device=DEVICE) for _ in range(3)]

    def loss(model: nn.Module, batch: torch.Tensor, config: object) -> torch.Tensor:
        three = (part.view(2, 5, 2, 4).transpose(1, 2) for part in model(batch).split(8, 2))
        made = F.scaled_dot_product_attention(*three, is_causal=True)
        return made.transpose(1, 2).reshape(2, 5, 8).square().mean()

    calls = []
    real = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *given: calls.append(1) or real(*given))

    def step(wanted: bool) -> tuple[torch.Tensor, ...]:
        names = [name for name, _ in models[0].named_parameters()]
        params = {n: torch.stack([m.get_parameter(n).detach() for m in models]).requires_grad_() for n in names}
        way = Native(models[0], {})
        way.train()
        with use(wanted):
            losses = way.run(loss, params, {}, batch, True, None, [])
        return (losses, *torch.autograd.grad(losses.sum(), list(params.values())))

    batch = torch.randn(2, 5, 8, device=DEVICE)
    plain, ours = step(False), step(True)
    assert len(calls) == 1
    near = {"rtol": 1e-5, "atol": 1e-6} if DEVICE == "cpu" else {"rtol": 5e-3, "atol": 5e-4}  # TF32
    for one, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(other, one, **near)
