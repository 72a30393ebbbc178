"""BatchNorm of all trials at once, with the residual and the activation that follow it.

Images lie as in ``convolution``; for a trial they are [places, channels] here. Forward: the moments of each channel,
then one pass that scales, shifts, adds the residual and activates. Backward: one pass for the sums of the
moments' gradients, and one that gives the gradient of the images. Whether the activation lets a gradient through is
computed again from the images, or read off the result where there is a residual. One kernel for both passes, whose
programs wait for one another, is no faster: too little is in flight while they wait.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.training.kernels.choice import runs
from penstock.training.kernels.moments import SUMMING, moments, parts, shape, total, whole
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
def _normalize(
    y, mean, scale, bias, bias_step, residual, out, R,
    C: tl.constexpr, CP: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out = activation((y - mean) · scale + bias + residual)"""
    trial = tl.program_id(1)
    c = tl.arange(0, CP)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    there = (r < R)[:, None] & (c < C)[None, :]
    at = trial.to(tl.int64) * R * C + (r * C)[:, None] + c[None, :]
    center = tl.load(mean + trial * C + c, mask=c < C, other=0.0)
    a = tl.load(scale + trial * C + c, mask=c < C, other=0.0)
    b = tl.load(bias + trial * bias_step + c, mask=c < C, other=0.0)
    value = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
    z = (value - center[None, :]) * a[None, :] + b[None, :]
    if RES:
        z += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, _activate(z, ACT).to(out.dtype.element_ty), mask=there)


@triton.jit
def _reduce(
    d, y, made, kept, mean, scale, bias, bias_step, out, R,
    C: tl.constexpr, CP: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr, AGAIN: tl.constexpr,
    PARTS: tl.constexpr, EACH: tl.constexpr, BR: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[:, trial, part] = Σ g and Σ g · (y - mean), where g is the part of d that the activation lets through.

    RES: g is kept. AGAIN: the result of the forward is computed again, and kept.
    """
    trial, part = tl.program_id(1), tl.program_id(0)
    c = tl.program_id(2) * CP + tl.arange(0, CP)
    center = tl.load(mean + trial * C + c, mask=c < C, other=0.0)
    a = tl.load(scale + trial * C + c, mask=c < C, other=0.0)
    b = tl.load(bias + trial * bias_step + c, mask=c < C, other=0.0)
    base = trial.to(tl.int64) * R * C
    sums = tl.zeros((BR, CP), dtype=tl.float32)
    products = tl.zeros((BR, CP), dtype=tl.float32)
    for block in tl.range(0, EACH, loop_unroll_factor=UNROLL):
        r = (part * EACH + block) * BR + tl.arange(0, BR)
        there = (r < R)[:, None] & (c < C)[None, :]
        at = base + (r * C)[:, None] + c[None, :]
        value = tl.load(y + at, mask=there, other=0.0).to(tl.float32) - center[None, :]
        grad = tl.load(d + at, mask=there, other=0.0).to(tl.float32)
        z = tl.load(made + at, mask=there, other=0.0).to(tl.float32) if RES else value * a[None, :] + b[None, :]
        if ACT > 0:
            grad = tl.where(_passes(z, ACT), grad, 0.0)
        if RES:
            tl.store(kept + at, grad.to(kept.dtype.element_ty), mask=there)
        if AGAIN:
            tl.store(kept + at, _activate(z, ACT).to(kept.dtype.element_ty), mask=there)
        sums += grad
        products += tl.where(there, grad * value, 0.0)
    to = out + (trial * PARTS + part) * C + c
    tl.store(to, tl.sum(sums, 0), mask=c < C)
    tl.store(to + tl.num_programs(1) * (PARTS * C), tl.sum(products, 0), mask=c < C)


@triton.jit
def _spread(
    g, y, mean, scale, bias, bias_step, slope, level, out, R,
    C: tl.constexpr, CP: tl.constexpr, ACT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out = g · scale + (y - mean) · slope + level, where the activation lets g through."""
    trial = tl.program_id(1)
    c = tl.arange(0, CP)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    there = (r < R)[:, None] & (c < C)[None, :]
    at = trial.to(tl.int64) * R * C + (r * C)[:, None] + c[None, :]
    center = tl.load(mean + trial * C + c, mask=c < C, other=0.0)
    a = tl.load(scale + trial * C + c, mask=c < C, other=0.0)
    b = tl.load(bias + trial * bias_step + c, mask=c < C, other=0.0)
    p = tl.load(slope + trial * C + c, mask=c < C, other=0.0)
    q = tl.load(level + trial * C + c, mask=c < C, other=0.0)
    value = tl.load(y + at, mask=there, other=0.0).to(tl.float32) - center[None, :]
    grad = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    if ACT > 0:
        grad = tl.where(_passes(value * a[None, :] + b[None, :], ACT), grad, 0.0)
    tl.store(out + at, (grad * a[None, :] + value * p[None, :] + q[None, :]).to(out.dtype.element_ty), mask=there)


def _in_rows(*values: torch.Tensor) -> Any:
    """Numbers of a trial's channels as kernels read them: a bias is a slice of the row of all parameters."""
    mean, scale, bias, *others = values
    bias = bias if bias.stride(1) == 1 else bias.contiguous()
    return mean.contiguous(), scale.contiguous(), bias, bias.stride(0), *(other.contiguous() for other in others)


@operator
@torch.library.custom_op(
    "penstock::normalize",
    mutates_args=(),
    schema="(Tensor y, Tensor mean, Tensor scale, Tensor bias, Tensor? residual, int act) -> Tensor",
)
def normalize(
    y: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None,
    act: int,
) -> torch.Tensor:
    """activation((y - mean) · scale + bias + residual)"""
    if not runs(y, y[0].numel()):
        return normalize_twin(y, mean, scale, bias, residual, act)
    y, numbers = y.contiguous(), _in_rows(mean, scale, bias)
    other = y if residual is None else residual.contiguous()

    def launch(blocks: Blocks) -> torch.Tensor:
        own, out = whole(y, blocks["ELEMENTS"]), torch.empty_like(y)
        _normalize[triton.cdiv(own["R"], own["BR"]), len(y)](
            y, *numbers, other, out, ACT=act, RES=residual is not None, num_warps=blocks["num_warps"], **own
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
    schema="(Tensor d, Tensor y, Tensor? made, Tensor mean, Tensor scale, Tensor bias, int act, bool again=False)"
    " -> (Tensor, Tensor)",
)
def reduce(
    d: torch.Tensor,
    y: torch.Tensor,
    made: torch.Tensor | None,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    act: int,
    again: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, trials, channels]: Σ g and Σ g · (y - mean); and g, where ``made`` is with a residual.

    Without a residual, the result of the forward may be asked for ``again`` instead.
    """
    if not runs(y, y[0].numel()):
        return reduce_twin(d, y, made, mean, scale, bias, act, again)
    d, y, numbers = d.contiguous(), y.contiguous(), _in_rows(mean, scale, bias)
    other, keeps = y if made is None else made.contiguous(), again or made is not None

    def launch(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        grid, own = parts(y, blocks)
        out = torch.empty(2, len(y), own["PARTS"], own["C"], device=y.device, dtype=torch.float32)
        kept = torch.empty_like(y) if keeps else y.new_empty(0)
        how = {"num_warps": blocks["num_warps"], "UNROLL": blocks["UNROLL"]}
        _reduce[grid](d, y, other, kept, *numbers, out, ACT=act, RES=made is not None, AGAIN=again, **how, **own)
        return total(out), kept

    return launch(tuned((*shape("reduce", y), act, made is not None, again), lambda: SUMMING, launch))


@reduce.register_fake
def _(d: Any, y: torch.Tensor, made: Any, mean: Any, scale: Any, bias: Any, act: int, again: bool = False) -> Any:
    wide = torch.promote_types(y.dtype, torch.float32)
    kept = y.shape if again or made is not None else 0
    return y.new_empty(2, len(y), y.shape[-1], dtype=wide), y.new_empty(kept)


@operator
@torch.library.custom_op(
    "penstock::spread",
    mutates_args=(),
    schema="(Tensor g, Tensor y, Tensor mean, Tensor scale, Tensor bias, Tensor slope, Tensor level, int act)"
    " -> Tensor",
)
def spread(
    g: torch.Tensor,
    y: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    slope: torch.Tensor,
    level: torch.Tensor,
    act: int,
) -> torch.Tensor:
    """g · scale + (y - mean) · slope + level, where the activation lets g through."""
    if not runs(y, y[0].numel()):
        return spread_twin(g, y, mean, scale, bias, slope, level, act)
    g, y, numbers = g.contiguous(), y.contiguous(), _in_rows(mean, scale, bias, slope, level)

    def launch(blocks: Blocks) -> torch.Tensor:
        own, out = whole(y, blocks["ELEMENTS"]), torch.empty_like(y)
        _spread[triton.cdiv(own["R"], own["BR"]), len(y)](
            g, y, *numbers, out, ACT=act, num_warps=blocks["num_warps"], **own
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
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: torch.Tensor,
        residual: torch.Tensor | None,
        act: int,
    ) -> Any:
        stats, mean, rstd, scale = measured(y, weight, eps)
        out: torch.Tensor = normalize(y, mean, scale, bias, residual, act)
        ctx.act = act
        ctx.mark_non_differentiable(stats)
        ctx.save_for_backward(y, mean, scale, bias, rstd, None if residual is None else out)
        return out, stats

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        y, mean, scale, bias, rstd, made = ctx.saved_tensors
        sums, g = reduce(grads[0], y, made, mean, scale, bias, ctx.act)
        passed, act = (grads[0], ctx.act) if made is None else (g, 0)
        return *returned(passed, y, mean, rstd, scale, bias, act, sums), None, None if made is None else g, None


def measured(y: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Both moments, the mean, the reciprocal deviation, and the scale: that times the weight."""
    stats: torch.Tensor = moments(y)
    mean, variance = stats
    rstd = torch.rsqrt(variance + eps.unsqueeze(1))
    return stats, mean, rstd, weight * rstd


def returned(
    g: torch.Tensor,
    y: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    act: int,
    sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the images, weight and bias."""
    by_one, by_y = sums
    places = y[0].numel() // y.shape[-1]
    slope = -scale * rstd.square() * by_y / places
    level = -scale * by_one / places
    return spread(g, y, mean, scale, bias, slope, level, act), by_y * rstd, by_one


def batch_norm(
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: torch.Tensor,
    residual: torch.Tensor | None = None,
    act: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """activation(BatchNorm(y) + residual), differentiable, and each channel's mean and variance [2, trials, channels].

    ``weight`` and ``bias`` are [trials, channels], ``eps`` is [trials].
    """
    made: Any = _BatchNorm.apply(y, weight, bias, eps, residual, act)
    return made  # type: ignore[no-any-return]


# The twins


def normalize_twin(
    y: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None,
    act: int,
) -> torch.Tensor:
    z = _centered(y, mean) * _by_channel(scale, y) + _by_channel(bias, y)
    if residual is not None:
        z = z + _wide(residual)
    return (z.clamp(0, 6) if act == 2 else z.relu() if act else z).to(y.dtype)


def reduce_twin(
    d: torch.Tensor,
    y: torch.Tensor,
    made: Any,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    act: int,
    again: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    z = _centered(y, mean) * _by_channel(scale, y) + _by_channel(bias, y) if made is None else made
    g = _passed(d, z, act)
    products = _wide(g) * _centered(y, mean)
    sums = torch.stack([_wide(g).flatten(1, -2).sum(1), products.flatten(1, -2).sum(1)])
    if again:
        return sums, normalize_twin(y, mean, scale, bias, None, act)
    return sums, y.new_empty(0) if made is None else g.to(y.dtype).clone()


def spread_twin(
    g: torch.Tensor,
    y: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    slope: torch.Tensor,
    level: torch.Tensor,
    act: int,
) -> torch.Tensor:
    centered = _centered(y, mean)
    passed = _wide(_passed(g, centered * _by_channel(scale, y) + _by_channel(bias, y), act))
    made = passed * _by_channel(scale, y) + centered * _by_channel(slope, y) + _by_channel(level, y)
    return made.to(y.dtype)


def _passed(g: torch.Tensor, z: torch.Tensor, act: int) -> torch.Tensor:
    return g if not act else torch.where((z > 0) & (z < 6) if act == 2 else z > 0, g, 0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _centered(y: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return _wide(y) - _by_channel(mean, y)


def _by_channel(value: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return value.reshape(len(y), *[1] * (y.ndim - 2), -1)
