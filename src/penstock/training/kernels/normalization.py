"""BatchNorm of all trials at once, with the residual and the activation that follow it.

Images lie as in ``convolution``; for a trial they are [places, channels] here. Forward: the moments of each channel in
parts, the numbers that follow from them, and one pass that scales, shifts, adds the residual and activates. Backward:
one pass for the sums of the moments' gradients in parts, the numbers that follow from them, and one pass that gives the
gradient of the images. Whether the activation lets a gradient through is
computed again from the images, or read off the result where there is a residual. One kernel for both passes, whose
programs wait for one another, is no faster: too little is in flight while they wait.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.training.kernels.choice import runs
from penstock.training.kernels.moments import SUMMING, few, moments, parts, shape, whole
from penstock.training.kernels.tuning import Blocks, tuned
from penstock.training.uncompiled import operator

ACTIVATIONS = {"relu": 1, "relu6": 2}
PASSING = [Blocks(ELEMENTS=elements, num_warps=warps) for elements, warps in ((2048, 4), (4096, 4), (4096, 8))]


@triton.jit
def _passes(z, ACT: tl.constexpr):
    """Whether the activation lets a gradient through."""
    return (z > 0) if ACT == 1 else (z > 0) & (z < 6)


@triton.jit
def _activate(z, ACT: tl.constexpr):
    if ACT > 0:
        z = tl.where(z < 0, 0.0, z)  # NaN stays
    if ACT == 2:
        z = tl.where(z > 6, 6.0, z)
    return z


@triton.jit
def _row(numbers, row: tl.constexpr, C: tl.constexpr, c):
    """A row of numbers of the channels of a program's trial: [rows, trials, channels]."""
    at = numbers + (row * tl.num_programs(1) + tl.program_id(1)) * C + c
    return tl.load(at, mask=c < C, other=0.0)[None, :]


@triton.jit
def _normalize(
    y, numbers, residual, out, R,
    C: tl.constexpr, CP: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out = activation((y - mean) · scale + bias + residual)"""
    trial = tl.program_id(1)
    c = tl.arange(0, CP)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    there = (r < R)[:, None] & (c < C)[None, :]
    at = trial.to(tl.int64) * R * C + (r * C)[:, None] + c[None, :]
    value = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
    z = (value - _row(numbers, 0, C, c)) * _row(numbers, 3, C, c) + _row(numbers, 4, C, c)
    if RES:
        z += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, _activate(z, ACT).to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["EACH"])
def _reduce(
    d, y, made, kept, numbers, out, R, EACH,
    C: tl.constexpr, CP: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr, AGAIN: tl.constexpr,
    BR: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[:, trial, part] = Σ g and Σ g · (y - mean), where g is the part of d that the activation lets through.

    RES: g is kept. AGAIN: the result of the forward is computed again, and kept.
    """
    trial, part = tl.program_id(1), tl.program_id(0)
    c = tl.program_id(2) * CP + tl.arange(0, CP)
    center, a, b = _row(numbers, 0, C, c), _row(numbers, 3, C, c), _row(numbers, 4, C, c)
    base = trial.to(tl.int64) * R * C
    sums = tl.zeros((BR, CP), dtype=tl.float32)
    products = tl.zeros((BR, CP), dtype=tl.float32)
    for block in tl.range(0, EACH, loop_unroll_factor=UNROLL):
        r = (part * EACH + block) * BR + tl.arange(0, BR)
        there = (r < R)[:, None] & (c < C)[None, :]
        at = base + (r * C)[:, None] + c[None, :]
        value = tl.load(y + at, mask=there, other=0.0).to(tl.float32) - center
        grad = tl.load(d + at, mask=there, other=0.0).to(tl.float32)
        z = tl.load(made + at, mask=there, other=0.0).to(tl.float32) if RES else value * a + b
        if ACT > 0:
            grad = tl.where(_passes(z, ACT), grad, 0.0)
        if RES:
            tl.store(kept + at, grad.to(kept.dtype.element_ty), mask=there)
        if AGAIN:
            tl.store(kept + at, _activate(z, ACT).to(kept.dtype.element_ty), mask=there)
        sums += grad
        products += tl.where(there, grad * value, 0.0)
    to = out + (trial * tl.num_programs(0) + part) * C + c
    tl.store(to, tl.sum(sums, 0), mask=c < C)
    tl.store(to + tl.num_programs(1) * (tl.num_programs(0) * C), tl.sum(products, 0), mask=c < C)


@triton.jit(do_not_specialize=["R", "C", "PARTS"])
def _total(parts, numbers, out, R, C, PARTS, CP: tl.constexpr, BP: tl.constexpr):
    """The rows of ``out`` [4, trials, channels] are those of ``reduce``; parts are added in a fixed order."""
    trial = tl.program_id(0)
    c = tl.program_id(1) * CP + tl.arange(0, CP)
    p = tl.arange(0, BP)
    there = (p < PARTS)[:, None] & (c < C)[None, :]
    row = tl.num_programs(0) * C
    at = parts + trial.to(tl.int64) * (PARTS * C) + (p * C)[:, None] + c[None, :]
    by_one = tl.sum(tl.load(at, mask=there, other=0.0), 0)
    by_y = tl.sum(tl.load(at + row.to(tl.int64) * PARTS, mask=there, other=0.0), 0)
    rstd = tl.load(numbers + 2 * row + trial * C + c, mask=c < C, other=0.0)
    scale = tl.load(numbers + 3 * row + trial * C + c, mask=c < C, other=0.0)
    to = out + trial * C + c
    tl.store(to, -scale * (rstd * rstd) * by_y / R, mask=c < C)
    tl.store(to + row, -scale * by_one / R, mask=c < C)
    tl.store(to + 2 * row, by_y * rstd, mask=c < C)
    tl.store(to + 3 * row, by_one, mask=c < C)


@triton.jit
def _spread(
    g, y, numbers, back, out, R, C: tl.constexpr, CP: tl.constexpr, ACT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out = g · scale + (y - mean) · slope + level, where the activation lets g through."""
    trial = tl.program_id(1)
    c = tl.arange(0, CP)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    there = (r < R)[:, None] & (c < C)[None, :]
    at = trial.to(tl.int64) * R * C + (r * C)[:, None] + c[None, :]
    a = _row(numbers, 3, C, c)
    value = tl.load(y + at, mask=there, other=0.0).to(tl.float32) - _row(numbers, 0, C, c)
    grad = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    if ACT > 0:
        grad = tl.where(_passes(value * a + _row(numbers, 4, C, c), ACT), grad, 0.0)
    spread = grad * a + value * _row(back, 0, C, c) + _row(back, 1, C, c)
    tl.store(out + at, spread.to(out.dtype.element_ty), mask=there)


@operator
@torch.library.custom_op(
    "penstock::normalize",
    mutates_args=(),
    schema="(Tensor y, Tensor numbers, Tensor? residual, int act) -> Tensor",
)
def normalize(y: torch.Tensor, numbers: torch.Tensor, residual: torch.Tensor | None, act: int) -> torch.Tensor:
    """activation((y - mean) · scale + bias + residual), by the numbers of ``moments``."""
    if not runs(y, y[0].numel()):
        return normalize_twin(y, numbers, residual, act)
    y, numbers = y.contiguous(), numbers.contiguous()
    other = y if residual is None else residual.contiguous()

    def launch(blocks: Blocks) -> torch.Tensor:
        own, out = whole(y, blocks["ELEMENTS"]), torch.empty_like(y)
        _normalize[triton.cdiv(own["R"], own["BR"]), len(y)](
            y, numbers, other, out, ACT=act, RES=residual is not None, num_warps=blocks["num_warps"], **own
        )
        return out

    return launch(tuned((*shape("normalize", y), act, residual is not None), lambda: PASSING, launch))


@normalize.register_fake
def _(y: torch.Tensor, *others: Any) -> torch.Tensor:
    return y.new_empty(y.shape)


@operator
@torch.library.custom_op(
    "penstock::reduce",
    mutates_args=(),
    schema="(Tensor d, Tensor y, Tensor? made, Tensor numbers, int act, bool again=False) -> (Tensor, Tensor)",
)
def reduce(
    d: torch.Tensor,
    y: torch.Tensor,
    made: torch.Tensor | None,
    numbers: torch.Tensor,
    act: int,
    again: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a BatchNorm's gradients need of its images, [4, trials, channels]; and g, where ``made`` is with a residual.

    That is the slope and the level of the images' gradient, and the gradients of weight and bias. Without a residual,
    the result of the forward may be asked for ``again`` instead of g.
    """
    if not runs(y, y[0].numel()):
        return reduce_twin(d, y, made, numbers, act, again)
    d, y, numbers = d.contiguous(), y.contiguous(), numbers.contiguous()
    other, keeps = y if made is None else made.contiguous(), again or made is not None

    def launch(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        grid, own = parts(y, blocks)
        summed = torch.empty(2, len(y), grid[0], own["C"], device=y.device, dtype=torch.float32)
        kept = torch.empty_like(y) if keeps else y.new_empty(0)
        how = {"num_warps": blocks["num_warps"], "UNROLL": blocks["UNROLL"]}
        _reduce[grid](d, y, other, kept, numbers, summed, ACT=act, RES=made is not None, AGAIN=again, **how, **own)
        out = torch.empty(4, len(y), own["C"], device=y.device, dtype=torch.float32)
        wide, options = few(grid, own)
        _total[wide](summed, numbers, out, **options)
        return out, kept

    return launch(tuned((*shape("reduce", y), act, made is not None, again), lambda: SUMMING, launch))


@reduce.register_fake
def _(d: Any, y: torch.Tensor, made: Any, numbers: Any, act: int, again: bool = False) -> Any:
    wide = torch.promote_types(y.dtype, torch.float32)
    kept = y.shape if again or made is not None else 0
    return y.new_empty(4, len(y), y.shape[-1], dtype=wide), y.new_empty(kept)


@operator
@torch.library.custom_op(
    "penstock::spread",
    mutates_args=(),
    schema="(Tensor g, Tensor y, Tensor numbers, Tensor back, int act) -> Tensor",
)
def spread(g: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor, back: torch.Tensor, act: int) -> torch.Tensor:
    """g · scale + (y - mean) · slope + level, where the activation lets g through; ``back`` is from ``reduce``."""
    if not runs(y, y[0].numel()):
        return spread_twin(g, y, numbers, back, act)
    g, y, numbers, back = g.contiguous(), y.contiguous(), numbers.contiguous(), back.contiguous()

    def launch(blocks: Blocks) -> torch.Tensor:
        own, out = whole(y, blocks["ELEMENTS"]), torch.empty_like(y)
        _spread[triton.cdiv(own["R"], own["BR"]), len(y)](
            g, y, numbers, back, out, ACT=act, num_warps=blocks["num_warps"], **own
        )
        return out

    return launch(tuned((*shape("spread", y), act), lambda: PASSING, launch))


@spread.register_fake
def _(g: Any, y: torch.Tensor, *others: Any) -> torch.Tensor:
    return y.new_empty(y.shape)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: torch.Tensor | float,
        residual: torch.Tensor | None,
        act: int,
    ) -> Any:
        numbers = measured(y, weight, bias, eps)
        out: torch.Tensor = normalize(y, numbers, residual, act)
        stats = numbers[:2]
        ctx.act, ctx.affine = act, (weight is not None, bias is not None)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, numbers, None if residual is None else out)
        return out, stats

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        y, numbers, made = ctx.saved_tensors
        back, g = reduce(grads[0], y, made, numbers, ctx.act)
        passed, act = (grads[0], ctx.act) if made is None else (g, 0)
        return *returned(passed, y, numbers, back, act, ctx.affine), None, None if made is None else g, None


def measured(
    y: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: torch.Tensor | float
) -> torch.Tensor:
    """The numbers of ``moments``, by an ``eps`` that trials share or each trial's own, [trials]."""
    each, one = (eps, 0.0) if isinstance(eps, torch.Tensor) else (None, eps)
    numbers: torch.Tensor = moments(y, weight, bias, each, one)
    return numbers


def returned(
    g: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor, back: torch.Tensor, act: int, affine: tuple[bool, bool]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the images, weight and bias; ``affine``: whether there are a weight and a bias."""
    of_affine = (row if there else None for row, there in zip(back[2:], affine, strict=True))
    return spread(g, y, numbers, back, act), *of_affine


def batch_norm(
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: torch.Tensor | float,
    residual: torch.Tensor | None = None,
    act: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """activation(BatchNorm(y) + residual), differentiable; and each channel's mean and unbiased variance.

    ``weight`` and ``bias`` are [trials, channels], and the statistics [2, trials, channels]. ``eps`` is a number, or
    each trial's own, [trials].
    """
    made: Any = _BatchNorm.apply(y, weight, bias, eps, residual, act)
    return made  # type: ignore[no-any-return]


# The twins


def normalize_twin(y: torch.Tensor, numbers: torch.Tensor, residual: torch.Tensor | None, act: int) -> torch.Tensor:
    z = _affine(y, numbers)
    if residual is not None:
        z = z + _wide(residual)
    return (z.clamp(0, 6) if act == 2 else z.relu() if act else z).to(y.dtype)


def reduce_twin(
    d: torch.Tensor, y: torch.Tensor, made: Any, numbers: torch.Tensor, act: int, again: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    g = _passed(d, _affine(y, numbers) if made is None else made, act)
    by_one = _wide(g).flatten(1, -2).sum(1)
    by_y = (_wide(g) * _centered(y, numbers)).flatten(1, -2).sum(1)
    rstd, scale, places = numbers[2], numbers[3], y[0].numel() // y.shape[-1]
    back = torch.stack([-scale * rstd.square() * by_y / places, -scale * by_one / places, by_y * rstd, by_one])
    if again:
        return back, normalize_twin(y, numbers, None, act)
    return back, y.new_empty(0) if made is None else g.to(y.dtype).clone()


def spread_twin(g: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor, back: torch.Tensor, act: int) -> torch.Tensor:
    passed = _wide(_passed(g, _affine(y, numbers), act))
    made = passed * _by_channel(numbers[3], y) + _centered(y, numbers) * _by_channel(back[0], y)
    return (made + _by_channel(back[1], y)).to(y.dtype)


def _passed(g: torch.Tensor, z: torch.Tensor, act: int) -> torch.Tensor:
    return g if not act else torch.where((z > 0) & (z < 6) if act == 2 else z > 0, g, 0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _centered(y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return _wide(y) - _by_channel(numbers[0], y)


def _affine(y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return _centered(y, numbers) * _by_channel(numbers[3], y) + _by_channel(numbers[4], y)


def _by_channel(value: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return value.reshape(len(y), *[1] * (y.ndim - 2), -1)
