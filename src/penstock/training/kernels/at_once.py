"""Small kernels of all layers, launched once for a whole step.

A layer's convolution wants its weights laid out for its blocks, and the gradient of its weights is added up from parts.
That is little work, and a launch each. A step that is recorded runs twice on the same tensors. Its first run notes the
weights that are laid out, and the gradients that are still as a kernel made them when all gradients are joined. From
the second run on, one launch lays out all these weights, and one adds up all these gradients as they are joined. Every
number is computed as in a launch of its own, in the same order of additions: its bits are equal.

Weights that the first run did not foresee, or that were written meanwhile, are laid out as they come. A gradient that
autograd adds to another, casts or gives to the loss is another tensor when gradients are joined, so it does not wait.
Hooks see no gradient here: those of parameters are left to each trial's own step, which is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
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


@dataclass
class _Run:
    """A run of a step."""

    weights: dict[int, torch.Tensor] = field(default_factory=dict)  # by their memory
    versions: dict[int, int] | None = None  # of the weights, when they were laid out
    hidden: bool = False  # weights were written without a count
    made: int = 0  # gradients
    waiting: list[torch.Tensor] = field(default_factory=list)
    wanted: dict[Hashable, Layout] = field(default_factory=dict)  # in the first run, as are the next two
    noted: list[Noted] = field(default_factory=list)
    unread: dict[int, Noted] = field(default_factory=dict)  # were as a kernel made them, by their place in the run


class AtOnce:
    """What the layers of a step need alike. It lives as long as the step's recording, which reads its tensors."""

    def __init__(self) -> None:
        self._first = True
        self._laid: list[Laid] = []
        self._collected: Collected | None = None
        self._now = _Run()

    def run(self, step: Callable[[], T], weights: Iterable[torch.Tensor]) -> T:
        """Run a step, which reads ``weights`` and is the same at every call; its backward stays in this thread."""
        self._now = _Run({_memory(tensor): tensor for tensor in weights})
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
        if not self._now.wanted and not self._now.unread:
            return
        from penstock.training.kernels.all_layers import Collected, Laid

        layouts = list(self._now.wanted.values())
        for kind in dict.fromkeys((one.w.dtype, one.dtype) for one in layouts):
            self._laid.append(Laid([one for one in layouts if (one.w.dtype, one.dtype) == kind]))
            self._laid[-1].launch()
        if self._now.unread:
            self._collected = Collected(self._now.unread)
            self._collected.launch()
        self._now = _Run()  # nothing of the first run is kept

    # Weights

    def lay(self, one: Layout) -> torch.Tensor | None:
        """Weights that are laid out already, unless they were written since."""
        where = _memory(one.w)
        if (base := self._now.weights.get(where)) is None or self._now.hidden:
            return None
        key = one.key()
        if self._first:
            if sum(map(_bytes, self._now.wanted.values())) + _bytes(one) <= ROOM:
                self._now.wanted.setdefault(key, one)
            return None
        found = next((each.found[key] for each in self._laid if key in each.found), None)
        if found is None:
            return None
        if self._now.versions is None:
            self._now.versions = {at: tensor._version for at, tensor in self._now.weights.items()}
            for each in self._laid:
                each.launch()
        return found if base._version == self._now.versions[where] else None

    def hide(self) -> None:
        """Weights are written, and torch does not count it."""
        self._now.hidden = True

    # Gradients

    def sums(self, cut: Cut, parts: tuple[int, ...], out: tuple[int, ...], device: torch.device) -> Sums:
        """Memory for a gradient and its parts."""
        place, self._now.made = self._now.made, self._now.made + 1
        if self._collected is not None and (found := self._collected.of(place, cut, parts, out)) is not None:
            self._now.waiting.append(found.out)
            return found
        made = _fresh(parts, out, device)
        if self._first:
            self._now.noted.append(Noted(cut, parts, made.out))
        return made

    def join(self, grads: Iterable[torch.Tensor | None]) -> None:
        """Add up what waits: the gradients of a step are about to be read."""
        there = {grad.data_ptr() for grad in grads if grad is not None}
        if self._first:
            room = ROOM
            for place, one in enumerate(self._now.noted):
                if one.out.data_ptr() in there and one.out._version == 0 and (size := _size(one)) <= room:
                    self._now.unread[place] = one
                    room -= size
        elif self._collected is not None and self._now.waiting:
            if not all(one.data_ptr() in there for one in self._now.waiting) or self._collected.written():
                raise RuntimeError(
                    "Expected every gradient of weights to be joined as it was made, as in the step's first run; one "
                    "was read or written before. Let the loss do the same at every step."
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
