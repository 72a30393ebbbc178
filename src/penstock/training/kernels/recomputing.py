"""BatchNorm and the convolution that reads its result, which is not kept between forward and backward.

The images before the BatchNorm are kept anyway. The backward reads them for the BatchNorm's sums, and the same kernel
writes the convolution's input again: one pass over memory for a quarter of a ResNet's activations.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.training.kernels.convolution import convolve
from penstock.training.kernels.geometry import Geometry
from penstock.training.kernels.normalization import measured, normalize, reduce, returned
from penstock.training.kernels.weighing import packed, weigh


class _OfNormalized(torch.autograd.Function):
    """Also gives the normalized images, for other readers: the convolution's kernel adds up the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: torch.Tensor | float,
        act: int,
        w: torch.Tensor,
        geometry: list[int],
    ) -> Any:
        numbers = measured(y, weight, bias, eps)
        images: torch.Tensor = normalize(y, numbers, None, act)
        stats = numbers[:2]
        ctx.act, ctx.geometry, ctx.affine = act, geometry, (weight is not None, bias is not None)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, numbers, w)
        return convolve(images, w, geometry, None, False), images, stats

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        y, numbers, w = ctx.saved_tensors
        g, d, _ = grads
        if g is not None:
            d = convolve(g, w, Geometry.from_flat(ctx.geometry).turned().flat(), d, True)
        back, images = reduce(d, y, None, numbers, ctx.act, g is not None)
        of_w = None if g is None else weigh(images, g, ctx.geometry).to(w.dtype)
        return *returned(d, y, numbers, back, ctx.act, ctx.affine), None, None, of_w, None


def convolution_of_normalized(
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: torch.Tensor | float,
    act: int,
    filters: torch.Tensor,
    geometry: Geometry,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``convolution`` of ``batch_norm``, differentiable: the output, the normalized images, mean and variance."""
    made: Any = _OfNormalized.apply(y, weight, bias, eps, act, packed(filters), geometry.flat())
    return made  # type: ignore[no-any-return]
