"""The keys by which the trials of a bundle draw: each trial has numbers of its own, those that it has alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.training.fused.stacked import Stacked, Unfusable, refusal
from penstock.training.random import draws
from penstock.training.random.masks import StepKeys, base, keep, rate


class TogetherKeys(StepKeys):
    """Keys of trials that run as one. A seed that the task sets on the way is seen, as one trial's keys see it."""

    def __init__(self, lo: int | Tensor, hi: int | Tensor) -> None:
        super().__init__(lo, hi)
        self._seed = torch.default_generator.initial_seed()

    @property
    def seeded(self) -> bool:
        return torch.default_generator.initial_seed() != self._seed


class BundleKeys(TogetherKeys):
    """The keys of all trials in the native way: a call draws for each trial."""

    _before = 0  # the calls before those that one trial after another makes

    @contextmanager
    def of_row(self, row: int) -> Iterator[StepKeys]:
        """The keys of one trial, for calls that one trial after another makes from row 0 on."""
        if row == 0:
            self._before = self.calls
        assert isinstance(self.lo, Tensor)
        assert isinstance(self.hi, Tensor)
        own = StepKeys(self.lo[row], self.hi[row])
        own.count_from(self._before)
        yield own
        self.count_from(own.calls)

    def mask(self, shape: Sequence[int], device: torch.device, p: Any) -> Tensor:
        of = rate(p)
        lo, hi = self._halves(shape, device)
        rates = of.moved(0).view(lo.shape) if isinstance(of, Stacked) else of
        return Stacked(keep(base(shape, device), lo, hi, self.next(), rates), 0)

    def draw(self, shape: Sequence[int], device: torch.device, formula: draws.Formula) -> Tensor:
        return Stacked(self._drawn(shape, device, formula, self.next()), 0)

    def uniform(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        if len(shape) > 1 or any(size != 1 for size in shape):
            return super().uniform(shape, device, dtype)
        call, formula = self.next(), draws.uniform(dtype)
        return Awaited(lambda: self._drawn(shape, device, formula, call), torch.Size(shape), dtype, device)

    def write(self, into: Tensor, drawn: Tensor, name: str) -> Tensor:
        if isinstance(into, Stacked):
            whole = drawn.moved(into.at) if isinstance(drawn, Stacked) else drawn.unsqueeze(into.at)
            into.whole.copy_(whole)
            return into
        return become(into, Stacked(drawn.moved(0).to(into.dtype), 0) if isinstance(drawn, Stacked) else drawn, name)

    def _drawn(self, shape: Sequence[int], device: torch.device, formula: draws.Formula, call: int) -> Tensor:
        lo, hi = self._halves(shape, device)
        return formula(draws.bits(draws.index(shape, device), lo, hi, call))

    def _halves(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        apart, lo, hi = (-1, *[1] * len(shape)), self.lo, self.hi
        if not isinstance(lo, Tensor) or not isinstance(hi, Tensor):
            raise refusal("a random function", "it was given no keys of trial and step")
        if lo.device != device:
            lo, hi = lo.to(device), hi.to(device)
        return lo.view(apart), hi.view(apart)


class MappedKeys(TogetherKeys):
    """The keys of one trial under vmap, where they are tensors."""

    def write(self, into: Tensor, drawn: Tensor, name: str) -> Tensor:
        functorch = torch._C._functorch
        if not isinstance(self.lo, Tensor) or functorch.is_batchedtensor(into):
            return into.copy_(drawn)
        return become(into, drawn.to(into.dtype), name)


class NoKeys(StepKeys):
    """The keys of metrics, which may ask for a dropout of rate 0 but draw nothing."""

    def mask(self, shape: Sequence[int], device: torch.device, p: Any) -> Tensor:
        raise Unfusable("metrics that draw at random are those of one trial")

    def draw(self, shape: Sequence[int], device: torch.device, formula: draws.Formula) -> Tensor:
        raise Unfusable("metrics that draw at random are those of one trial")


class Awaited(Stacked):
    """A single number of every trial, drawn when it is first asked for.

    A layer drop that is off draws one on the CPU for each layer and never needs it. To draw it for trials on a GPU
    would let the CPU wait, and could not be captured.
    """

    _draw: Callable[[], Tensor]
    _made: Tensor | None
    _known: tuple[torch.Size, torch.dtype, torch.device]

    @staticmethod
    def __new__(
        cls, draw: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Awaited:
        made: Awaited = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._draw, made._made, made.at, made._known = draw, None, 0, (shape, dtype, device)
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def whole(self) -> Tensor:
        if self._made is None:
            self._made = self._draw()
        return self._made

    @whole.setter
    def whole(self, value: Tensor) -> None:
        self._made = value

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._known[0])

    def dim(self) -> int:
        return len(self._known[0])

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._known[0]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._known[1]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._known[2]


def become(shared: Tensor, drawn: Tensor, name: str) -> Tensor:
    """Make a tensor that all trials share, and that nothing else looks at, into one with each trial's draws.

    So ``torch.empty(3).normal_()`` may be written in two lines as well as in one. A trace only knows the result: where
    that is not used, the traced step differs from the plain one, and is not taken.
    """
    if type(shared) is not Tensor:
        return drawn
    lone = torch._C._storage_Use_Count(shared.untyped_storage()._cdata) <= 2 and not shared._is_view()
    try:
        if not lone:
            raise RuntimeError("its memory has other users")
        torch.utils.swap_tensors(shared, drawn)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise refusal(name, f"it draws for each trial into a tensor that trials share ({error})") from error
    return shared
