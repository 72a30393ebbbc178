"""Convolutions of many channels: by torch's own operator, one trial after another.

A trial's images are one piece of memory, channels last, as cuDNN's fastest kernels read them. Where each launch fills
the device, nothing is faster; otherwise, launching takes most of the time.
"""

from __future__ import annotations

import torch

from penstock.training.kernels.choice import exact
from penstock.training.kernels.geometry import Geometry
from penstock.training.kernels.tuning import Blocks

APART = Blocks(APART=1)
MANY = 32  # channels


def offered(channels: int, made: int) -> list[Blocks]:
    return [APART] if min(channels, made) >= MANY else []


def convolve_apart(
    x: torch.Tensor, w: torch.Tensor, geometry: Geometry, addend: torch.Tensor | None, turned: bool
) -> torch.Tensor:
    """``convolve``, one trial after another."""
    made = w.shape[2 if turned else 3]
    y = x.new_empty(len(w), x.shape[1], *geometry.made, made)
    for i, weight in enumerate(_weights(w, geometry, x.dtype)):
        given, out = x[i].permute(0, 3, 1, 2), y[i].permute(0, 3, 1, 2)
        if turned:
            there = geometry.turned()
            back = _back(given, out, weight, there, of_input=True)[0]
            torch.add(back, addend[i].permute(0, 3, 1, 2), out=out) if addend is not None else out.copy_(back)
        else:
            _there(given, weight, geometry, out)
            if addend is not None:
                out += addend[i].permute(0, 3, 1, 2)
    return y


def weigh_apart(x: torch.Tensor, g: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """``weigh``, one trial after another."""
    (down, across), channels, made = geometry.taps, x.shape[-1], g.shape[-1]
    out = torch.empty(len(g), made, channels, down, across, device=x.device, dtype=torch.float32)
    weight = x.new_empty(made, down, across, channels).permute(0, 3, 1, 2)  # for its shape
    for i in range(len(g)):
        out[i] = _back(g[i].permute(0, 3, 1, 2), x[i].permute(0, 3, 1, 2), weight, geometry, of_input=False)[1]
    return out.flatten(3).permute(0, 3, 2, 1)


def _weights(w: torch.Tensor, geometry: Geometry, dtype: torch.dtype) -> torch.Tensor:
    """[trials, outputs, channels, taps, taps], channels last."""
    apart = torch.unflatten(w, 1, geometry.taps).permute(0, 4, 1, 2, 3)
    return apart.to(dtype, memory_format=torch.contiguous_format).permute(0, 1, 4, 2, 3)


def _there(x: torch.Tensor, weight: torch.Tensor, by: Geometry, out: torch.Tensor) -> None:
    if x.is_cuda:
        torch.ops.aten.cudnn_convolution.out(
            x, weight, by.padding, by.stride, by.dilation, 1, False, True, not exact(), out=out
        )
    else:  # channels first: of one channel laid out as the last, oneDNN reads past the end (torch 2.13)
        x, weight = (t.clone(memory_format=torch.contiguous_format) for t in (x, weight))
        out.copy_(torch.ops.aten.convolution(x, weight, None, by.stride, by.padding, by.dilation, False, [0, 0], 1))


def _back(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, by: Geometry, *, of_input: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=not exact()):
        found = torch.ops.aten.convolution_backward(
            g, x, weight, None, by.stride, by.padding, by.dilation, False, [0, 0], 1, [of_input, not of_input, False]
        )
    return found[0], found[1]
