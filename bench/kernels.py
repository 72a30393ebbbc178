"""Penstock's kernels one by one: the time of each for one trial of many, and the share of a copy's bandwidth.

    python bench/kernels.py [--trials 128] [--json]

The shapes are the layers of rn18/8 (batch 256, bf16). A kernel's bytes are its inputs read once and its outputs written
once; the bandwidth is that of a device-to-device copy in the same run. torch: what the fused mode runs without kernels,
for all trials at once: grouped convolutions in channels-last, or BatchNorm and ReLU forward.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

Row = tuple[str, float, int, float | None]  # what, microseconds and bytes of all trials, microseconds of torch's own
BATCH = 256
LAYERS = {  # channels, outputs, height and width, taps, stride
    "stem 3×3": (3, 8, 32, 3, 1),
    "stage 1 3×3": (8, 8, 32, 3, 1),
    "stage 2 3×3 /2": (8, 16, 32, 3, 2),
    "stage 2 1×1 /2": (8, 16, 32, 1, 2),
    "stage 2 3×3": (16, 16, 16, 3, 1),
    "stage 3 3×3": (32, 32, 8, 3, 1),
    "stage 4 3×3": (64, 64, 4, 3, 1),
}
IMAGES = ((8, 32), (16, 16), (32, 8), (64, 4))  # channels, height and width


def microseconds(run: Callable[..., object], *args: Any) -> float:
    for _ in range(3):
        run(*args)
    times: list[float] = []
    for _ in range(7):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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

    folded = x[0] if shared else x.permute(1, 2, 3, 0, 4).flatten(3)
    images = folded.contiguous().permute(0, 3, 1, 2).requires_grad_(not shared)
    weight = w.permute(0, 3, 2, 1).reshape(-1, channels, taps, taps).contiguous(memory_format=torch.channels_last)
    grouped = (images, weight.requires_grad_(), None, stride, taps // 2, 1, 1 if shared else trials)
    out = F.conv2d(*grouped)
    d = torch.randn_like(out)

    def torchs(what: torch.Tensor) -> object:
        return torch.autograd.grad(out, what, d, retain_graph=True)

    yield "forward", microseconds(convolve, x, w, there, None, False), moved, microseconds(F.conv2d, *grouped)
    if not shared:
        yield "input", microseconds(convolve, g, w, back, None, True), moved, microseconds(torchs, images)
    yield "weights", microseconds(weigh, x, g, there), moved, microseconds(torchs, weight)


def normalization(trials: int, channels: int, size: int) -> Iterator[Row]:
    from penstock.training.kernels.moments import moments
    from penstock.training.kernels.normalization import normalize, reduce, spread

    y = torch.randn(trials, BATCH, size, size, channels, device="cuda").bfloat16()
    d, one, small = torch.randn_like(y), 2 * y.numel(), torch.rand(trials, channels, device="cuda")
    three = (small, small, small)
    made = normalize(y, *three, d, 1)
    folded = y.permute(1, 2, 3, 0, 4).flatten(3).contiguous().permute(0, 3, 1, 2)

    def torchs() -> object:
        return F.relu(F.batch_norm(folded, None, None, small.flatten(), small.flatten(), True))

    yield "moments", microseconds(moments, y), one, None
    yield "normalize, ReLU", microseconds(normalize, y, *three, None, 1), 2 * one, microseconds(torchs)
    yield "normalize, residual, ReLU", microseconds(normalize, y, *three, d, 1), 3 * one, None
    yield "sums of gradients", microseconds(reduce, d, y, None, *three, 1), 2 * one, None
    yield "sums, residual", microseconds(reduce, d, y, made, *three, 1), 4 * one, None
    yield "gradient", microseconds(spread, d, y, *three, small, small, 1), 3 * one, None


def rows(trials: int) -> Iterator[tuple[str, Row]]:
    for layer, shape in LAYERS.items():
        yield from ((layer, row) for row in convolution(trials, *shape))
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
    for layer, (what, took, moved, torchs) in rows(given.trials):
        own, share = took / given.trials, moved / took * 1e6 / bandwidth
        other = None if torchs is None else torchs / given.trials
        if given.json:
            row = {"layer": layer, "kernel": what, "microseconds": own, "of a copy": share, "torch": other}
            print(json.dumps(row, ensure_ascii=False))
        else:
            said = "" if other is None else f"   torch {other:6.2f}"
            print(f"{layer:24} {what:26} {own:6.2f}   {share:4.0%} of a copy{said}")


if __name__ == "__main__":
    main()
