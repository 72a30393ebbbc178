"""Depthwise convolutions of all trials at once: every channel of a trial is convolved with a filter of its own.

Images lie as [trials, examples, height, width, channels], so that a trial's images are one piece of memory; filters lie
as [trials, taps, channels]. The time is that of reading the images and writing them, if every number is read from
memory once and little is done for each. A program therefore makes patches of R0 × R1 neighbouring places, reads the
numbers of a patch once, and keeps them in registers for all places and taps. Which number meets which tap of which
place is known when the kernel is compiled: of a strided convolution's input gradient, only taps that meet a number are
computed.

The filters' gradient is added in parts, and these in a fixed order: equal inputs give equal bits. A program belongs to
one trial: no trial's number is ever multiplied with another's, not even by zero.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input, conv2d_weight

from penstock.training.kernels.choice import runs
from penstock.training.kernels.geometry import Geometry
from penstock.training.kernels.tuning import Blocks, about, tuned
from penstock.training.uncompiled import operator

THREADS = 128  # of a program
CHANNELS = 64  # of a program at most: fewer than threads, or threads would read filters one by one and exchange them
# Candidates: a patch's places, how many rows are read ahead of those computed, and how many numbers of each place a
# thread holds.
PATCHES: list[Blocks] = [
    {"R0": r0, "R1": r1, "AHEAD": ahead, "HELD": held} for r0, r1, ahead, held in ((8, 2, 2, 4), (4, 4, 4, 4))
]
SUMS: list[Blocks] = [  # the same, and the least number of parts in which a trial's places are added
    {"R0": r0, "R1": r1, "PARTS": parts, "HELD": held} for r0, r1, parts, held in ((4, 2, 8, 4),)
]


def depthwise(x: torch.Tensor, w: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Convolve ``x`` [trials, examples, *size, channels] with ``w`` [trials, taps, channels]; differentiable.

    >>> x, w = torch.ones(2, 1, 4, 4, 3), torch.ones(2, 9, 3)
    >>> depthwise(x, w, Geometry.of((4, 4), (3, 3), (2, 2), (1, 1), (1, 1))).shape
    torch.Size([2, 1, 2, 2, 3])
    """
    made: torch.Tensor = depthwise_op(x, w, geometry.flat())
    return made


def depthwise_twin(x: torch.Tensor, w: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The same in plain torch."""
    filters = w.mT.reshape(-1, 1, *geometry.taps).to(_wide(x))
    return _unfolded(conv2d(_folded(x), filters, None, *_options(x, geometry)), x).to(x.dtype)


def input_gradient_twin(g: torch.Tensor, w: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The gradient of the convolved images, in plain torch."""
    size = (g.shape[1], g.shape[0] * g.shape[-1], *geometry.size)
    filters = w.mT.reshape(-1, 1, *geometry.taps).to(_wide(g))
    made = conv2d_input(size, filters, _folded(g), *_options(g, geometry))
    return _unfolded(made, g).to(g.dtype)


def weight_gradient_twin(x: torch.Tensor, g: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The gradient of the filters, in plain torch; in float32 at least."""
    size = (x.shape[0] * x.shape[-1], 1, *geometry.taps)
    made: torch.Tensor = conv2d_weight(_folded(x), size, _folded(g), *_options(x, geometry))
    return made.reshape(x.shape[0], x.shape[-1], -1).mT.contiguous()


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _folded(x: torch.Tensor) -> torch.Tensor:
    return x.permute(1, 0, 4, 2, 3).flatten(1, 2).to(_wide(x))


def _unfolded(made: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return made.reshape(x.shape[1], x.shape[0], x.shape[-1], *made.shape[2:]).permute(1, 0, 3, 4, 2).contiguous()


def _options(x: torch.Tensor, geometry: Geometry) -> Any:
    return geometry.stride, geometry.padding, geometry.dilation, x.shape[0] * x.shape[-1]


@operator
@torch.library.custom_op("penstock::depthwise", mutates_args=())
def depthwise_op(x: torch.Tensor, w: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    made = _convolved if _runs(x, geometry) else depthwise_twin
    return made(x, w, Geometry.from_flat(geometry))


@operator
@torch.library.custom_op("penstock::depthwise_input_gradient", mutates_args=())
def input_gradient_op(g: torch.Tensor, w: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    if _runs(g, geometry):
        return _convolved(g, w, Geometry.from_flat(geometry).turned(), turned=True)
    return input_gradient_twin(g, w, Geometry.from_flat(geometry))


@operator
@torch.library.custom_op("penstock::depthwise_weight_gradient", mutates_args=())
def weight_gradient_op(x: torch.Tensor, g: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    made = _weighed if _runs(x, geometry) else weight_gradient_twin
    return made(x, g, Geometry.from_flat(geometry))


@depthwise_op.register_fake
def _(x: torch.Tensor, w: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    return x.new_empty(*x.shape[:2], *Geometry.from_flat(geometry).made, x.shape[-1])


@input_gradient_op.register_fake
def _(g: torch.Tensor, w: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    return g.new_empty(*g.shape[:2], *Geometry.from_flat(geometry).size, g.shape[-1])


@weight_gradient_op.register_fake
def _(x: torch.Tensor, g: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    taps = Geometry.from_flat(geometry).taps
    return x.new_empty(x.shape[0], taps[0] * taps[1], x.shape[-1], dtype=_wide(x))


def _keep(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, w, ctx.geometry = inputs
    ctx.save_for_backward(x, w)


def _gradients(ctx: Any, g: torch.Tensor) -> Any:
    x, w = ctx.saved_tensors
    of_x, of_w, _ = ctx.needs_input_grad
    return (
        input_gradient_op(g, w, ctx.geometry) if of_x else None,
        weight_gradient_op(x, g, ctx.geometry).to(w.dtype) if of_w else None,
        None,
    )


depthwise_op.register_autograd(_gradients, setup_context=_keep)


def _runs(x: torch.Tensor, geometry: list[int]) -> bool:
    places = max(geometry[0] * geometry[1], geometry[2] * geometry[3])
    return runs(x, x.shape[1] * places * x.shape[-1])


def _convolved(x: torch.Tensor, w: torch.Tensor, geometry: Geometry, turned: bool = False) -> torch.Tensor:
    x, w = x.contiguous(), w.contiguous()
    y = x.new_empty(*x.shape[:2], *geometry.made, x.shape[-1])

    def launch(blocks: Blocks) -> None:
        grid = (_count(x, geometry, blocks) * triton.cdiv(x.shape[-1], blocks["BC"]), len(x))
        _convolve[grid](x, w, y, x.shape[1], x.shape[-1], turned, tuple(geometry.flat()), **blocks)

    launch(tuned(_key("depthwise", x, geometry), lambda: _candidates(x, geometry, PATCHES), launch))
    return y


def _weighed(x: torch.Tensor, g: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    x, g = x.contiguous(), g.contiguous()
    taps = geometry.taps[0] * geometry.taps[1]

    def launch(blocks: Blocks) -> torch.Tensor:
        parts = triton.cdiv(_count(x, geometry, blocks), blocks["EACH"])
        out = x.new_empty(len(x), parts, taps, x.shape[-1], dtype=torch.float32)
        grid = (parts * triton.cdiv(x.shape[-1], blocks["BC"]), len(x))
        _weigh[grid](x, g, out, x.shape[1], C=x.shape[-1], G=tuple(geometry.flat()), **blocks)
        return out.sum(1)

    return launch(tuned(_key("depthwise weights", x, geometry), lambda: _candidates(x, geometry, SUMS), launch))


def _key(kernel: str, x: torch.Tensor, geometry: Geometry) -> tuple[Any, ...]:
    """The key of a choice of block sizes."""
    return kernel, x.dtype, *geometry.flat(), x.shape[-1], about(len(x)), about(x.shape[1])


def _candidates(x: torch.Tensor, geometry: Geometry, plans: list[Blocks]) -> list[Blocks]:
    """The plans as block sizes for such a shape; a patch is no larger than the image."""
    found: list[Blocks] = []
    for plan in plans:
        blocks = {**plan, "num_warps": THREADS // 32}
        for name, made, up in zip(("R0", "R1"), geometry.made, geometry.up, strict=True):
            blocks[name] = triton.cdiv(min(plan[name], made), up) * up  # then all patches meet the same taps
        if "AHEAD" in plan:
            blocks["AHEAD"] = min(plan["AHEAD"], blocks["R0"])
        blocks["BC"] = min(triton.next_power_of_2(x.shape[-1]), CHANNELS)
        blocks["BM"] = max(1, THREADS * blocks.pop("HELD") // blocks["BC"])
        if "PARTS" in plan:  # a power of two, so that a choice that was kept is found again
            blocks["EACH"] = 2 ** max(0, (_count(x, geometry, blocks) // blocks.pop("PARTS")).bit_length() - 1)
        if blocks not in found:
            found.append(blocks)
    return found


def _count(x: torch.Tensor, geometry: Geometry, blocks: Blocks) -> int:
    """How many blocks of patches a trial has."""
    down, across = triton.cdiv(geometry.made[0], blocks["R0"]), triton.cdiv(geometry.made[1], blocks["R1"])
    count: int = down * triton.cdiv(x.shape[1] * across, blocks["BM"])
    return count


@triton.constexpr_function
@no_type_check
def _along(geometry, which, count):
    """The reading of ``count`` neighbours of a patch in one direction: (stride, padding, dilation, taps, up, count)."""
    _, _, taps, stride, padding, dilation, up = geometry[which::2]
    return stride, padding, dilation, taps, up, count


@triton.constexpr_function
@no_type_check
def _first(along):
    """The first place that a patch reads, counted from its first tap without padding."""
    return -(along[1] // along[4])


@triton.constexpr_function
@no_type_check
def _last(along, r):
    """The last place that a patch's row or column ``r`` reads."""
    stride, padding, dilation, taps, up, count = along
    return max(_first(along), (min(r, count - 1) * stride + dilation * (taps - 1) - padding) // up)


@triton.constexpr_function
@no_type_check
def _met(rows, columns, r, s, tap):
    """The index of the read number that a tap of the patch's place (r, s) meets; -1: none."""
    h = r * rows[0] + tap // columns[3] * rows[2] - rows[1]
    v = s * columns[0] + tap % columns[3] * columns[2] - columns[1]
    if h % rows[4] or v % columns[4]:
        return -1
    width = _last(columns, columns[5]) - _first(columns) + 1
    return (h // rows[4] - _first(rows)) * width + v // columns[4] - _first(columns)


@triton.jit
@no_type_check
def _patches(
    block,
    c,
    N,
    C: tl.constexpr,
    G: tl.constexpr,
    R0: tl.constexpr,
    R1: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """A block of patches: where they read and write in the images, their rows, and which patches and columns exist."""
    rows: tl.constexpr = _along(G, 0, R0)
    columns: tl.constexpr = _along(G, 1, R1)
    down: tl.constexpr = (G[2] + R0 - 1) // R0
    across: tl.constexpr = (G[3] + R1 - 1) // R1
    patch = block // down * BM + tl.arange(0, BM)
    example = patch // across
    row = block % down
    column = patch % across
    h = row * (R0 * rows[0] // rows[4])
    v = column * (R1 * columns[0] // columns[4])
    there = (patch < N * across)[:, None]
    if C % BC:  # a mask along the channels would split wide reads
        there = there & (c < C)[None, :]
    inside = ()
    for j in tl.static_range(_first(columns), _last(columns, R1) + 1):
        inside += (there & ((v + j >= 0) & (v + j < G[1]))[:, None],)
    made = ()
    for s in tl.static_range(R1):
        made += (there & (column * R1 + s < G[3])[:, None],)
    reads = (((example * G[0] + h) * G[1] + v) * C)[:, None] + c[None, :]
    makes = (((example * G[2] + row * R0) * G[3] + column * R1) * C)[:, None] + c[None, :]
    return reads, makes, h, row * R0, inside, made


@triton.jit
@no_type_check
def _read(x, h, i: tl.constexpr, inside, C: tl.constexpr, G: tl.constexpr, columns: tl.constexpr):
    """Row ``i`` of the patches, which is row ``h + i`` of the images; zero outside."""
    values = ()
    for j in tl.static_range(len(inside)):
        there = inside[j] & (h + i >= 0) & (h + i < G[0])
        value = tl.load(x + (i * G[1] + _first(columns) + j) * C, mask=there, other=0.0)
        values += (value.to(tl.float32),)
    return values


@triton.jit(do_not_specialize=["N"])
@no_type_check
def _convolve(
    x, w, y, N, C: tl.constexpr, TURNED: tl.constexpr, G: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, AHEAD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y[trial, place, c] = Σ_tap x[trial, place at the tap, c] · w[trial, tap, c]."""
    K: tl.constexpr = G[4] * G[5]
    rows: tl.constexpr = _along(G, 0, R0)
    columns: tl.constexpr = _along(G, 1, R1)
    trial = tl.program_id(1).to(tl.int64)
    wide: tl.constexpr = (C + BC - 1) // BC
    c = tl.program_id(0) % wide * BC + tl.arange(0, BC)
    reads, makes, h, row, inside, made = _patches(tl.program_id(0) // wide, c, N, C, G, R0, R1, BM, BC)
    x += trial * N * (G[0] * G[1] * C) + reads
    y += trial * N * (G[2] * G[3] * C) + makes
    filters = ()
    for k in tl.static_range(K):
        at = trial * (K * C) + (K - 1 - k if TURNED else k) * C
        filters += (tl.load(w + at + c, mask=c < C, other=0.0).to(tl.float32)[None, :],)
    seen = ()
    for i in tl.static_range(_first(rows), _last(rows, R0) + 1):
        seen += _read(x, h, i, inside, C, G, columns)
        for r in tl.static_range(R0):
            if _last(rows, r + AHEAD) == i:  # a read after a write waits for it
                for s in tl.static_range(R1):
                    total = tl.zeros((BM, BC), dtype=tl.float32)
                    for k in tl.static_range(K):
                        if _met(rows, columns, r, s, k) >= 0:
                            total += seen[_met(rows, columns, r, s, k)] * filters[k]
                    tl.store(y + (r * G[3] + s) * C, total.to(y.dtype.element_ty), mask=made[s] & (row + r < G[2]))


@triton.jit(do_not_specialize=["N", "EACH"])
@no_type_check
def _weigh(
    x, g, out, N, EACH, C: tl.constexpr, G: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out[trial, part, tap, c] = Σ_place x[trial, place at the tap, c] · g[trial, place, c] over a part's places."""
    K: tl.constexpr = G[4] * G[5]
    rows: tl.constexpr = _along(G, 0, R0)
    columns: tl.constexpr = _along(G, 1, R1)
    trial = tl.program_id(1).to(tl.int64)
    wide: tl.constexpr = (C + BC - 1) // BC
    part = tl.program_id(0) // wide
    c = tl.program_id(0) % wide * BC + tl.arange(0, BC)
    x += trial * N * (G[0] * G[1] * C)
    g += trial * N * (G[2] * G[3] * C)
    totals = ()
    for _ in tl.static_range(K):
        totals += (tl.zeros((BM, BC), dtype=tl.float32),)
    for block in range(0, EACH):
        reads, makes, h, row, inside, made = _patches(part * EACH + block, c, N, C, G, R0, R1, BM, BC)
        seen = ()
        for i in tl.static_range(_first(rows), _last(rows, R0) + 1):
            seen += _read(x + reads, h, i, inside, C, G, columns)
            for r in tl.static_range(R0):
                if _last(rows, r) == i:
                    for s in tl.static_range(R1):
                        value = tl.load(g + makes + (r * G[3] + s) * C, mask=made[s] & (row + r < G[2]), other=0.0)
                        for k in tl.static_range(K):
                            if _met(rows, columns, r, s, k) >= 0:
                                total = totals[k] + seen[_met(rows, columns, r, s, k)] * value.to(tl.float32)
                                totals = totals[:k] + (total,) + totals[k + 1 :]  # noqa: RUF005 (Triton knows no stars)
    at = (trial * (tl.num_programs(0) // wide) + part) * (K * C)
    for k in tl.static_range(K):
        tl.store(out + at + k * C + c, tl.sum(totals[k], 0), mask=c < C)
