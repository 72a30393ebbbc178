"""Small kernels of all layers, launched once for a whole step.

A layer's convolution wants its weights laid out for its blocks, and the gradient of its weights is added up from parts.
That is little work, and a launch each. A step that is recorded runs twice on the same tensors. Its first run notes the
weights that are laid out, and the gradients that are still as a kernel made them when all gradients are joined. From
the second run on, one launch lays out all these weights, and one adds up all these gradients as they are joined. Every
number is computed as in a launch of its own, in the same order of additions: its bits are equal.

A tensor that the first run did not foresee, and weights that were written meanwhile, are computed as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:
    from penstock.training.kernels.all_layers import Collected, Laid
    from penstock.training.kernels.patches import Cut

ROOM = 2**26  # bytes of all laid out weights of a step, and of all parts: where there are more, launches count little
T = TypeVar("T")

_HERE: ContextVar[AtOnce | None] = ContextVar("here", default=None)


@dataclass(frozen=True)
class Layout:
    """Weights as a convolution reads them: for the patches and the blocks of a cut."""

    w: torch.Tensor
    cut: Cut
    dtype: torch.dtype
    turned: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.w), self.cut.constants["K"], self.cut.columns

    def key(self) -> Hashable:
        """Equal for the same weights in the same order; a cut is made once and kept."""
        return self.w.data_ptr(), self.w.shape, self.w.stride(), id(self.cut), self.dtype, self.turned


class Sums(NamedTuple):
    """The parts of a gradient, [trials, parts, places × channels, columns], and the gradient, as its parameter lies."""

    parts: torch.Tensor
    out: torch.Tensor
    waits: bool = False  # to be added up with those of other layers


@dataclass(frozen=True)
class Noted:
    """A gradient of the first run."""

    cut: Cut
    parts: tuple[int, ...]
    out: torch.Tensor


class AtOnce:
    """What the layers of a step need alike. It lives as long as the step's recording, which reads its tensors."""

    def __init__(self) -> None:
        self._first = True
        self._wanted: dict[Hashable, Layout] = {}
        self._noted: list[Noted] = []
        self._unread: set[int] = (
            set()
        )  # the gradients, by their place in a run, that nobody reads before they are joined
        self._laid: list[Laid] = []
        self._collected: Collected | None = None
        self._begin([])

    def _begin(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = {_memory(tensor): tensor for tensor in weights}
        self._versions: dict[int, int] | None = None  # of the weights, when they were laid out
        self._hidden = False  # weights were written without a count
        self._made = 0  # gradients
        self._waiting: list[torch.Tensor] = []

    def run(self, step: Callable[[], T], weights: Iterable[torch.Tensor]) -> T:
        """Run a step, which reads ``weights`` and is the same at every call; its backward stays in this thread."""
        self._begin(weights)
        token = _HERE.set(self)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                made = step()
        finally:
            _HERE.reset(token)
        if self._first:
            self._prepare()
        return made

    def _prepare(self) -> None:
        """Lay tables down for the next runs, and launch their kernels once: in a recording none can be loaded."""
        self._first = False
        layouts, collected = list(self._wanted.values()), [self._noted[i] for i in sorted(self._unread)]
        self._wanted, self._noted = {}, []
        if layouts or collected:
            from penstock.training.kernels.all_layers import Collected, Laid

            for kind in dict.fromkeys((one.w.dtype, one.dtype) for one in layouts):
                self._laid.append(Laid([one for one in layouts if (one.w.dtype, one.dtype) == kind]))
            if collected:
                self._collected = Collected(collected, sorted(self._unread))
        for each in self._laid:
            each.launch()
        if self._collected is not None:
            self._collected.launch()

    # Weights

    def lay(self, one: Layout) -> torch.Tensor | None:
        """Weights that are laid out already, unless they were written since."""
        where = _memory(one.w)
        if (base := self._weights.get(where)) is None or self._hidden:
            return None
        key = one.key()
        if self._first:
            if sum(map(_bytes, self._wanted.values())) + _bytes(one) <= ROOM:
                self._wanted.setdefault(key, one)
            return None
        found = next((each.found[key] for each in self._laid if key in each.found), None)
        if found is None:
            return None
        if self._versions is None:
            self._versions = {at: tensor._version for at, tensor in self._weights.items()}
            for each in self._laid:
                each.launch()
        return found if base._version == self._versions[where] else None

    def hide(self) -> None:
        """Weights are written, and torch does not count it."""
        self._hidden = True

    # Gradients

    def sums(self, cut: Cut, parts: tuple[int, ...], out: tuple[int, ...], device: torch.device) -> Sums:
        """Memory for a gradient and its parts."""
        place, self._made = self._made, self._made + 1
        if self._collected is not None and (found := self._collected.of(place, cut, parts, out)) is not None:
            self._waiting.append(found.out)
            return found
        made = _fresh(parts, out, device)
        if self._first:
            self._noted.append(Noted(cut, parts, made.out))
        return made

    def join(self, grads: Iterable[torch.Tensor | None]) -> None:
        """Add up what waits: the gradients of a step are about to be read."""
        there = {grad.data_ptr() for grad in grads if grad is not None}
        if self._first:
            room = ROOM
            for place, one in enumerate(self._noted):
                if one.out.data_ptr() in there and one.out._version == 0 and (size := _size(one)) <= room:
                    self._unread.add(place)
                    room -= size
        elif self._collected is not None and self._waiting:
            if not all(one.data_ptr() in there for one in self._waiting) or self._collected.written():
                raise RuntimeError(
                    "Expected every gradient that waits to be joined as it is; one was read or written before. "
                    "Record the step without waiting."
                )
            self._collected.launch()


def at_once() -> AtOnce | None:
    """The step that runs now, if it is to be recorded."""
    return _HERE.get()


def sums(cut: Cut, parts: tuple[int, ...], out: tuple[int, ...], device: torch.device) -> Sums:
    """Memory for a gradient of weights and its parts; the gradient of a recorded step may wait to be added up."""
    here = _HERE.get()
    return _fresh(parts, out, device) if here is None else here.sums(cut, parts, out, device)


def join(grads: Iterable[torch.Tensor | None]) -> None:
    """Add up the gradients that wait, before they are read."""
    if (here := _HERE.get()) is not None:
        here.join(grads)


def _fresh(parts: Sequence[int], out: Sequence[int], device: torch.device) -> Sums:
    whole, own = (torch.empty(*shape, device=device, dtype=torch.float32) for shape in (parts, out))
    return Sums(whole, own)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(one: Layout) -> int:
    trials, rows, columns = one.shape
    return trials * rows * columns * one.dtype.itemsize


def _size(one: Noted) -> int:
    trials, parts, rows, columns = one.parts
    return trials * parts * rows * columns * one.out.dtype.itemsize
