"""The parameters of one optimizer group of a bundle, in one tensor: a row for each trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.training.fused.optimizers import VectorStep, read_numbers
from penstock.training.loop import Training

ALIGNED = 32  # numbers: where a parameter begins in its row, so that kernels can load it in whole vectors


@dataclass
class Flat:
    """The parameters of one optimizer group and type: ``rows`` is [capacity, numbers], so are the optimizer's own."""

    group: int
    names: list[str]
    shapes: list[torch.Size]
    starts: list[int]
    rows: torch.Tensor
    step: VectorStep | None
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, np.ndarray] = field(default_factory=dict)
    packed: dict[str, torch.Tensor] = field(default_factory=dict)  # the last step's coefficients
    after: dict[str, np.ndarray] = field(default_factory=dict)  # the scalars after that step
    key: tuple[int, int, bool] | None = None  # what they are of
    same: bool = False  # whether the numbers are those of the step before
    _numbers: list[tuple[float, ...]] = field(default_factory=list)
    _read: np.ndarray | None = None

    def views(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The parts of some rows, by parameter."""
        for name, shape, start in zip(self.names, self.shapes, self.starts, strict=True):
            yield name, tensor[..., start : start + shape.numel()].view((*tensor.shape[:-1], *shape))

    def lengths(self) -> Iterator[tuple[int, int]]:
        """How many numbers each parameter has, and how many lie between it and the next."""
        ends = [*self.starts[1:], self.rows.shape[-1]]
        for shape, start, end in zip(self.shapes, self.starts, ends, strict=True):
            yield shape.numel(), end - start - shape.numel()

    def gaps(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """What lies between the parameters."""
        for start, (length, gap) in zip(self.starts, self.lengths(), strict=True):
            if gap:
                yield tensor[..., start + length : start + length + gap]

    def states(self, first: int, last: int) -> dict[str, torch.Tensor]:
        """The optimizer's own tensors of some rows."""
        return {name: tensor[first:last] for name, tensor in self.state.items()}

    def named(self, trial: Training) -> dict[str, float]:
        """What one trial's own optimizer says now."""
        kind = type(self.step)
        assert issubclass(kind, VectorStep)
        return dict(zip(kind.numbers, read_numbers(trial.optimizer.param_groups[self.group], kind), strict=True))

    def numbers(self, trials: Sequence[Training]) -> dict[str, np.ndarray]:
        """What the trials' own optimizers say now, each number as an array over the trials."""
        assert self.step is not None
        kind = type(self.step)
        now = [read_numbers(t.optimizer.param_groups[self.group], kind) for t in trials]
        self.same = now == self._numbers
        if not self.same:
            self._numbers, self._read = now, np.array(now, dtype=np.float64).reshape(len(now), -1)
        assert self._read is not None
        return {name: self._read[:, i] for i, name in enumerate(kind.numbers)}
