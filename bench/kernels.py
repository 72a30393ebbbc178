"""Penstock's kernels one by one: the time of each per trial, and its fraction of a copy's bandwidth.

    python bench/kernels.py [--trials 128] [--json]

The shapes are layers of rn18/8 and mobilenet/8 (batch 256) and of the character transformer (batch 64), in bf16. A
kernel's bytes are its inputs read once and its outputs written once; the bandwidth is that of a device-to-device copy
in the same run. torch: the operators that the fused mode uses without kernels, for all trials at once: grouped
convolutions in channels-last, BatchNorm and ReLU forward, scaled_dot_product_attention. All are launched while the
device is busy, because a captured step has no launch overhead either.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

Run = Callable[..., object]
Row = tuple[str, float, int, float | None]  # name, microseconds and bytes of all trials, microseconds of torch
BATCH = 256
BUSY = 4_000_000  # cycles that the device is kept busy: about two milliseconds
LAYERS = {  # channels, outputs, height and width, taps, stride
    "stem 3×3": (3, 8, 32, 3, 1),
    "stage 1 3×3": (8, 8, 32, 3, 1),
    "stage 2 3×3 /2": (8, 16, 32, 3, 2),
    "stage 2 1×1 /2": (8, 16, 32, 1, 2),
    "stage 2 3×3": (16, 16, 16, 3, 1),
    "stage 3 3×3": (32, 32, 8, 3, 1),
    "stage 4 3×3": (64, 64, 4, 3, 1),
}
DEPTHWISE = {  # channels, height and width, stride
    "depthwise 3×3": (8, 32, 1),
    "depthwise 3×3 /2": (16, 32, 2),
    "depthwise 3×3, 16×16": (32, 16, 1),
}
IMAGES = ((8, 32), (16, 16), (32, 8), (64, 4))  # channels, height and width


def microseconds(run: Run, *args: Any) -> float:
    for _ in range(3):
        run(*args)
    times: list[float] = []
    for _ in range(7):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
        began.record()
        run(*args)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3)
    return median(times)


def convolution(trials: int, channels: int, made: int, size: int, taps: int, stride: int) -> Iterator[Row]:
    from penstock.training.kernels.convolution import convolve
    from penstock.training.kernels.geometry import Geometry
    from penstock.training.kernels.weighing import weigh

    geometry = Geometry.of((size, size), (taps, taps), (stride, stride), (taps // 2, taps // 2), (1, 1))
    there, back, shared = geometry.flat(), geometry.turned().flat(), channels == 3
    x = torch.randn(1 if shared else trials, BATCH, size, size, channels, device="cuda").bfloat16()
    w = torch.randn(trials, taps * taps, channels, made, device="cuda").bfloat16()
    y = convolve(x, w, there, None, False)
    g, moved = torch.randn_like(y), 2 * (x.numel() + y.numel())

    folded = x[0] if shared else _folded(x)
    images = folded.contiguous().permute(0, 3, 1, 2).requires_grad_(not shared)
    weight = w.permute(0, 3, 2, 1).reshape(-1, channels, taps, taps).contiguous(memory_format=torch.channels_last)
    forward, gradient = torchs(images, weight, stride, 1 if shared else trials)
    yield "forward", microseconds(convolve, x, w, there, None, False), moved, microseconds(forward)
    if not shared:
        yield "input", microseconds(convolve, g, w, back, None, True), moved, microseconds(gradient, images)
    yield "weights", microseconds(weigh, x, g, there), moved, microseconds(gradient, weight)


def torchs(images: torch.Tensor, weight: torch.Tensor, stride: int, groups: int) -> tuple[Run, Run]:
    """Torch's own convolution, and its gradient with respect to the images or the weight."""
    forward = partial(F.conv2d, images, weight.requires_grad_(), None, stride, weight.shape[-1] // 2, 1, groups)
    out = forward()
    d = torch.randn_like(out)
    return forward, lambda what: torch.autograd.grad(out, what, d, retain_graph=True)


def depthwise(trials: int, channels: int, size: int, stride: int) -> Iterator[Row]:
    from penstock.training.kernels.depthwise import depthwise_op, input_gradient_op, weight_gradient_op
    from penstock.training.kernels.geometry import Geometry

    geometry = Geometry.of((size, size), (3, 3), (stride, stride), (1, 1), (1, 1)).flat()
    x = torch.randn(trials, BATCH, size, size, channels, device="cuda").bfloat16()
    w = torch.randn(trials, 9, channels, device="cuda").bfloat16()
    y = depthwise_op(x, w, geometry)
    g, moved = torch.randn_like(y), 2 * (x.numel() + y.numel())
    images = _folded(x).contiguous().permute(0, 3, 1, 2).requires_grad_()
    weight = w.mT.reshape(-1, 1, 3, 3).contiguous()
    forward, gradient = torchs(images, weight, stride, trials * channels)
    yield "forward", microseconds(depthwise_op, x, w, geometry), moved, microseconds(forward)
    yield "input", microseconds(input_gradient_op, g, w, geometry), moved, microseconds(gradient, images)
    yield "weights", microseconds(weight_gradient_op, x, g, geometry), moved, microseconds(gradient, weight)


def attention(trials: int) -> Iterator[Row]:
    from penstock.training.kernels.attention import attend, attend_back

    whole = torch.randn(trials * 64, 128, 3, 4, 16, device="cuda").bfloat16()
    parts = [part.transpose(1, 2) for part in whole.unbind(2)]
    out, lse = attend(*parts, True, 0.25)
    g, one = torch.randn_like(out), 2 * out.numel()
    q, k, v = (part.detach().requires_grad_() for part in parts)
    forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    backward = partial(torch.autograd.grad, forward(), (q, k, v), g, retain_graph=True)
    yield "forward", microseconds(attend, *parts, True, 0.25), 4 * one, microseconds(forward)
    took = microseconds(attend_back, g, *parts, out, lse, True, 0.25)
    yield "gradients", took, 8 * one, microseconds(backward)


def _folded(x: torch.Tensor) -> torch.Tensor:
    """The channels of all trials side by side."""
    return x.permute(1, 2, 3, 0, 4).flatten(3)


def normalization(trials: int, channels: int, size: int) -> Iterator[Row]:
    from penstock.training.kernels.moments import moments
    from penstock.training.kernels.normalization import normalize, reduce, spread

    y = torch.randn(trials, BATCH, size, size, channels, device="cuda").bfloat16()
    d, one, small = torch.randn_like(y), 2 * y.numel(), torch.rand(trials, channels, device="cuda")
    numbers = torch.stack([small] * 5)
    made = normalize(y, numbers, d, 1)
    back = reduce(d, y, None, numbers, 1)[0]
    folded = _folded(y).contiguous().permute(0, 3, 1, 2)

    def theirs() -> object:
        return F.relu(F.batch_norm(folded, None, None, small.flatten(), small.flatten(), True))

    yield "moments", microseconds(moments, y), one, None
    yield "normalize, ReLU", microseconds(normalize, y, numbers, None, 1), 2 * one, microseconds(theirs)
    yield "normalize, residual, ReLU", microseconds(normalize, y, numbers, d, 1), 3 * one, None
    yield "sums of gradients", microseconds(reduce, d, y, None, numbers, 1), 2 * one, None
    yield "sums, residual", microseconds(reduce, d, y, made, numbers, 1), 4 * one, None
    yield "gradient", microseconds(spread, d, y, numbers, back, 1), 3 * one, None


def rows(trials: int) -> Iterator[tuple[str, Row]]:
    for layer, shape in LAYERS.items():
        yield from ((layer, row) for row in convolution(trials, *shape))
    for layer, dims in DEPTHWISE.items():
        yield from ((layer, row) for row in depthwise(trials, *dims))
    yield from (("attention 128×16", row) for row in attention(trials))
    for channels, size in IMAGES:
        yield from ((f"BatchNorm {size}×{size}×{channels}", row) for row in normalization(trials, channels, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/kernels.py needs a GPU: elsewhere the kernels' twins run, which are not made to be fast.")
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    bandwidth = 4 * source.numel() / microseconds(source.clone) * 1e6
    del source
    if not given.json:
        name = torch.cuda.get_device_name()
        print(f"{name}, copy {bandwidth / 1e12:.2f} TB/s, {given.trials} trials, microseconds of one of them")
    for layer, (what, took, moved, theirs) in rows(given.trials):
        own, share = took / given.trials, moved / took * 1e6 / bandwidth
        other = None if theirs is None else theirs / given.trials
        if given.json:
            row = {"layer": layer, "kernel": what, "microseconds": own, "of a copy": share, "torch": other}
            print(json.dumps(row, ensure_ascii=False))
        else:
            said = "" if other is None else f"   torch {other:6.2f}"
            print(f"{layer:24} {what:26} {own:6.2f}   {share:4.0%} of a copy{said}")


if __name__ == "__main__":
    main()
