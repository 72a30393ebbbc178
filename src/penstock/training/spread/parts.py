"""Parts of a batch: taken by several workers at once, or one after another where memory is short.

A part's loss counts by its rows, and its random draws are its rows of the whole batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.training.random import draws
from penstock.training.random.keyed import Solo
from penstock.training.random.masks import SoloKeys, base, keep, rate


@dataclass(frozen=True)
class Part:
    """Some rows of a batch. A worker without rows computes the first row, which does not count."""

    begin: int
    end: int
    whole: int
    present: bool = True

    @classmethod
    def of(cls, whole: int, rank: int, count: int) -> Part:
        """One of ``count`` parts: their lengths differ by one at most.

        >>> [(part.begin, part.end) for part in (Part.of(7, rank, 3) for rank in range(3))]
        [(0, 2), (2, 4), (4, 7)]
        """
        begin, end = whole * rank // count, whole * (rank + 1) // count
        return cls(begin, end, whole) if begin < end else cls(0, 1, whole, present=False)

    @property
    def rows(self) -> int:
        return self.end - self.begin

    @property
    def weight(self) -> float:
        """The weight of this part in the batch's mean."""
        return self.rows / self.whole if self.present else 0.0

    def cut(self, batch: Any) -> Any:
        """These rows of a batch: of every tensor and list in it that has a row for each sample.

        >>> Part(1, 3, 4).cut({"x": [0, 1, 2, 3], "name": "a"})
        {'x': [1, 2], 'name': 'a'}
        """
        if isinstance(batch, Tensor):
            if batch.ndim and len(batch) == self.whole:
                return batch[self.begin : self.end]
            raise ValueError(f"a tensor of {tuple(batch.shape)} in a batch of {self.whole}")
        if isinstance(batch, Mapping):
            return {name: self.cut(value) for name, value in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*(self.cut(value) for value in batch))
        if isinstance(batch, tuple | list):
            if len(batch) == self.whole and not any(isinstance(value, Tensor | Mapping) for value in batch):
                return batch[self.begin : self.end]
            return type(batch)(self.cut(value) for value in batch)
        return batch


class InParts(Solo):
    """The random draws of a part of a batch: its rows of the whole batch's draws."""

    def __init__(self, model: nn.Module, generators: Sequence[torch.Generator], part: Callable[[], Part]) -> None:
        super().__init__(model, generators)
        self._part = part
        self._dims: dict[int, set[int]] = {}

    def at(self, seed: int, step: int) -> Solo:
        super().at(seed, step)
        self.keys = _PartKeys(seed, step, self._part(), self._dims)
        self.keys.seed(self.generators)
        return self


class _PartKeys(SoloKeys):
    """``dims`` has, by call, the dimensions that samples may lie along: some may have the batch's length by chance."""

    def __init__(self, seed: int, step: int, part: Part, dims: dict[int, set[int]]) -> None:
        super().__init__(seed, step)
        self.part, self.dims = part, dims

    def mask(self, shape: Sequence[int], device: torch.device, p: Any) -> Tensor:
        call = self.next()
        return keep(self._rows_of(base, tuple(shape), device, call), self.lo, self.hi, call, rate(p))

    def draw(self, shape: Sequence[int], device: torch.device, formula: draws.Formula) -> Tensor:
        call = self.next()
        index = self._rows_of(draws.index, tuple(shape), device, call)
        return formula(draws.bits(index, self.lo, self.hi, call))

    def _rows_of(self, make: Callable[..., Tensor], shape: tuple[int, ...], device: torch.device, call: int) -> Tensor:
        """This part's rows of a tensor that ``make`` has for the whole batch."""
        part, dims = self.part, self._may_be_in(shape, call)
        if 0 in dims:  # samples lie along the first dimension, each in one or several rows
            many = shape[0] // part.rows
            return make((part.whole * many, *shape[1:]), device)[part.begin * many : part.end * many]
        if 1 in dims:  # sequences often have time first, and samples second
            return make((shape[0], part.whole, *shape[2:]), device)[:, part.begin : part.end]
        return make(shape, device)

    def _may_be_in(self, shape: tuple[int, ...], call: int) -> set[int]:
        rows = self.part.rows
        here = {0} if shape and shape[0] and shape[0] % rows == 0 else set()
        if len(shape) > 1 and shape[1] == rows:
            here.add(1)
        self.dims[call] = here & self.dims.get(call, here)
        return self.dims[call]
