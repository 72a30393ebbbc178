"""A BatchNorm that waits for the operations that follow it, so that one kernel computes all of them.

A residual and an activation usually come next. Until the numbers are asked for, such operations are taken in. Nothing
is computed twice unless the user's code needs both results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.training.fused.operators.kept import LATER
from penstock.training.fused.stacked import Stacked, refusal

Keep = Callable[[torch.Tensor], None]  # takes a batch's statistics into the module's statistics
_SUMS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


@dataclass(frozen=True)
class Parts:
    """The arguments of ``kernels.normalization.batch_norm``; images are [trials, examples, height, width, channels]."""

    images: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: torch.Tensor | float
    residual: torch.Tensor | None = None
    act: int = 0


class Normalized(Stacked):
    """Images of every trial, channels last, whose ``whole`` is computed when it is first asked for."""

    parts: Parts
    running: tuple[Any, ...]  # the statistics that the module keeps
    _keep: Keep | None
    _made: torch.Tensor | None
    _tracked: bool
    _versions: tuple[int, ...]

    @staticmethod
    def __new__(cls, parts: Parts, running: tuple[Any, ...] = (), keep: Keep | None = None) -> Normalized:
        """``keep`` is given the mean and variance of each channel, once they are computed."""
        images = parts.images
        shape = images.permute(0, 1, 4, 2, 3).shape[1:]
        made: Normalized = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=images.dtype, device=images.device)
        made.parts, made.running, made._keep, made._made, made.at = parts, running, keep, None, 0
        made._tracked, made._versions = torch.is_grad_enabled(), _versions(parts)
        if (later := LATER.get()) is not None:
            later.waiting.append(made)
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def whole(self) -> torch.Tensor:
        self.compute()
        assert self._made is not None
        return self._made.permute(0, 1, 4, 2, 3)

    @whole.setter
    def whole(self, value: torch.Tensor) -> None:
        self._made = value.permute(0, 1, 3, 4, 2)

    def compute(self) -> None:
        """Compute now."""
        from penstock.training.kernels.normalization import batch_norm

        if self._made is not None:
            return
        self._check()
        with torch.set_grad_enabled(self._tracked):
            self._made, stats = batch_norm(*vars(self.parts).values())
        if self._keep is not None:
            self._keep(stats)

    def convolved(self, weight: torch.Tensor, geometry: Any) -> torch.Tensor | None:
        """A convolution of it, where nothing else has asked for the numbers before."""
        from penstock.training.kernels.recomputing import convolution_of_normalized

        parts = self.parts
        if self._made is not None or parts.residual is not None or self._tracked != torch.is_grad_enabled():
            return None
        self._check()
        made, self._made, stats = convolution_of_normalized(
            parts.images, parts.weight, parts.bias, parts.eps, parts.act, weight, geometry
        )
        if self._keep is not None:
            self._keep(stats)
        return made

    def _check(self) -> None:
        if _versions(self.parts) != self._versions:
            raise refusal("an operation in place", "it changes what a BatchNorm before it still reads")

    # Known without the numbers

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return 4

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.parts.images.permute(0, 1, 4, 2, 3).shape[1:]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.parts.images.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.parts.images.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.parts.images.is_cuda

    @property
    def requires_grad(self) -> bool:
        return self._tracked

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        raise refusal("requires_grad", "it is set for one trial's tensor")

    def dim(self) -> int:
        return 4

    @property
    def trials(self) -> int:
        return len(self.parts.images)

    # Taking in

    def activated(self, name: str, inplace: bool) -> Normalized | None:
        """With an activation, if it can still be taken in."""
        from penstock.training.kernels.normalization import ACTIVATIONS

        if self.parts.act or name not in ACTIVATIONS or self._made is not None:
            return None
        return self._with(replace(self.parts, act=ACTIVATIONS[name]), inplace)

    def plus(self, other: Any, inplace: bool) -> Normalized | None:
        """With a residual, if it can still be taken in."""
        if self.parts.act or self.parts.residual is not None or self._made is not None or other is self:
            return None
        if not isinstance(other, Stacked) or other.shape != self.shape or other.dtype != self.dtype:
            return None
        return self._with(replace(self.parts, residual=inside(other)), inplace)

    def _with(self, parts: Parts, inplace: bool) -> Normalized:
        if inplace:
            self.parts, self._versions = parts, _versions(parts)
            return self
        made = Normalized(parts, self.running, self._keep)
        self._keep, self.running = None, ()  # the batch is counted once
        if (later := LATER.get()) is not None:
            later.waiting = [one for one in later.waiting if one is not self]  # its numbers may never be asked for
        return made


def inside(x: Stacked) -> torch.Tensor:
    """[trials, examples, height, width, channels], a view where the images lie so."""
    return x.moved(0).permute(0, 1, 3, 4, 2)


def outside(images: torch.Tensor) -> torch.Tensor:
    """The inverse of ``inside``."""
    return images.permute(0, 1, 4, 2, 3)


def added(name: str, values: tuple[Any, ...], inplace: bool) -> Normalized | None:
    """The sum of two tensors as a ``Normalized``, where one can take the other in; in place, the first must."""
    if name not in _SUMS or len(values) != 2:
        return None
    for one, other in (values, values[::-1])[: 1 if inplace else 2]:
        if isinstance(one, Normalized) and (made := one.plus(other, inplace)) is not None:
            return made
    return None


def _versions(parts: Parts) -> tuple[int, ...]:
    return tuple(value._version for value in (parts.images, parts.residual) if value is not None)
