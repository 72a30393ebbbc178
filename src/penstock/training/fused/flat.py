"""The parameters of one optimizer group of a bundle, in one tensor: a row for each trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.training.fused.optimizers import VectorStep, read_numbers
from penstock.training.loop import Training
from penstock.training.rates import PLAIN, Factor, scaled

ALIGNED = 32  # numbers: where a parameter begins in its row, so that kernels can load it in whole vectors


@dataclass
class Flat:
    """The parameters of one optimizer group and type: ``rows`` is [capacity, numbers], and so is each tensor of
    ``state``, the optimizer's own. ``step`` is None where the trials' own optimizers step.
    """

    group: int
    names: list[str]
    shapes: list[torch.Size]
    starts: list[int]
    rows: torch.Tensor
    step: VectorStep | None
    steps: NDArray[Any]  # by row: how many steps the optimizer's state has seen
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, NDArray[Any]] = field(default_factory=dict)
    factor: Factor = PLAIN  # of the learning rate
    _found: dict[str, NDArray[Any]] = field(default_factory=dict)  # the coefficients of the last step
    _packed: dict[str, torch.Tensor] = field(default_factory=dict)  # the same on the device
    _of: dict[str, NDArray[Any]] | None = None  # the coefficients that these are of
    _after: dict[str, NDArray[Any]] = field(default_factory=dict)  # the scalars after that step
    _key: tuple[int, int, bool] | None = None  # the rows of that step, and whether all had been stepped before
    _numbers: list[tuple[float, ...]] = field(default_factory=list)  # the trials' numbers in that step
    _read: NDArray[Any] | None = None  # the same as an array

    @classmethod
    def of(
        cls,
        group: int,
        params: Sequence[tuple[str, torch.Tensor]],
        step: VectorStep | None,
        capacity: int,
        factor: Factor = PLAIN,
    ) -> Flat:
        """Room for some parameters of one type."""
        starts, end = [], 0
        for _, p in params:
            starts.append(end)
            end += -(-p.numel() // ALIGNED) * ALIGNED
        like = params[0][1]
        rows = torch.zeros(capacity, end, dtype=like.dtype, device=like.device)
        names, shapes = [name for name, _ in params], [p.shape for _, p in params]
        if step is None:
            return cls(group, names, shapes, starts, rows, step, np.zeros(capacity), factor=factor)
        wide = torch.get_default_dtype() == torch.float64  # as torch keeps them
        scalars = {name: np.zeros(capacity, np.float64 if wide else np.float32) for name in step.scalars}
        state = {name: torch.zeros_like(rows) for name in step.state}
        return cls(group, names, shapes, starts, rows, step, np.zeros(capacity), state, scalars, factor)

    def views(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's piece of some rows."""
        for name, shape, start in zip(self.names, self.shapes, self.starts, strict=True):
            yield name, tensor[..., start : start + shape.numel()].view((*tensor.shape[:-1], *shape))

    def _lengths(self) -> Iterator[tuple[int, int]]:
        """How many numbers each parameter has, and how many lie between it and the next."""
        ends = [*self.starts[1:], self.rows.shape[-1]]
        for shape, start, end in zip(self.shapes, self.starts, ends, strict=True):
            yield shape.numel(), end - start - shape.numel()

    def gaps(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The pieces of some rows that lie between the parameters."""
        for start, (length, gap) in zip(self.starts, self._lengths(), strict=True):
            if gap:
                yield tensor[..., start + length : start + length + gap]

    def joined(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """One tensor like the rows, from a tensor [trials, ...] for each parameter, with zeros in the gaps."""
        pieces: list[torch.Tensor] = []
        zeros: torch.Tensor | None = None  # for all gaps
        for part, (_, gap) in zip(parts, self._lengths(), strict=True):
            assert part is not None
            pieces.append(part.reshape(len(part), -1))
            if gap:
                zeros = part.new_zeros(len(part) * ALIGNED) if zeros is None else zeros
                pieces.append(zeros[: len(part) * gap].view(len(part), gap))
        return torch.cat(pieces, 1)

    def states(self, first: int, last: int) -> dict[str, torch.Tensor]:
        """The optimizer's own tensors of some rows."""
        return {name: tensor[first:last] for name, tensor in self.state.items()}

    def larger(self, capacity: int) -> Flat:
        """A copy with more rows."""
        rows, state = larger(self.rows, capacity), {k: larger(v, capacity) for k, v in self.state.items()}
        scalars = {name: np.resize(values, capacity) for name, values in self.scalars.items()}
        steps = np.resize(self.steps, capacity)
        return Flat(
            self.group, self.names, self.shapes, self.starts, rows, self.step, steps, state, scalars, self.factor
        )

    def take(self, larger: Flat) -> None:
        """Go on with the rows of a larger copy."""
        self.rows, self.state, self.scalars, self.steps = larger.rows, larger.state, larger.scalars, larger.steps

    def named(self, trial: Training) -> dict[str, float]:
        """The numbers of one trial's own optimizer, by name."""
        kind = type(self.step)
        assert issubclass(kind, VectorStep)
        return dict(zip(kind.numbers, read_numbers(trial.optimizer.param_groups[self.group], kind), strict=True))

    def seen(self, trial: Training, params: Mapping[str, torch.Tensor]) -> set[float]:
        """How many steps a trial's own optimizer has taken of these parameters, as its state tells."""
        if self.step is None:
            return {0.0}
        return {steps_seen(trial.optimizer.state.get(params[name], {}), self.step) for name in self.names}

    def coefficients(self, trials: Sequence[Training], first: int, last: int) -> dict[str, torch.Tensor]:
        """The numbers that the next step of ``trials`` in these rows needs; the same tensors while nothing changes."""
        found = self.on_host(trials, first, last)
        if found is not self._of:
            packed = torch.from_numpy(np.stack(list(found.values()))) if found else torch.empty(0)
            packed = packed.to(device=self.rows.device, dtype=self.rows.dtype).unsqueeze(-1)
            self._packed, self._of = dict(zip(found, packed.unbind(), strict=True)), found
        return self._packed

    def on_host(self, trials: Sequence[Training], first: int, last: int) -> dict[str, NDArray[Any]]:
        """The same numbers on the host; the same arrays while nothing changes."""
        if self.step is None:
            return self._found
        kind = type(self.step)
        now = [read_numbers(trial.optimizer.param_groups[self.group], kind) for trial in trials]
        same = now == self._numbers
        if not same or self._read is None:
            self._numbers, self._read = now, np.array(now, dtype=np.float64).reshape(len(now), -1)
        steps = self.steps[first:last]
        key = (first, last, bool(steps.all()))
        if self.step.counts or not same or self._key != key:
            numbers = {name: self._read[:, i] for i, name in enumerate(kind.numbers)}
            numbers |= {} if self.factor == PLAIN else scaled(numbers, self.factor)
            scalars = {name: values[first:last] for name, values in self.scalars.items()}
            self._found, self._key = self.step.coefficients(numbers, steps, scalars), key
            self._after = self.step.advance(numbers, steps, scalars)
        return self._found

    def count(self, first: int, last: int) -> None:
        """Count the step of some rows whose ``coefficients`` were asked for last."""
        self.steps[first:last] += 1
        for name, values in self._after.items():
            self.scalars[name][first:last] = values


def steps_seen(state: Mapping[str, Any], step: VectorStep) -> float:
    """How many steps a parameter's state has seen; where torch does not count them, 0 or 1."""
    if step.counts:
        return float(state.get("step", 0.0))
    return float(any(state.get(name) is not None for name in step.state))


class Room:
    """Memory for the gradients of as many rows, kept from step to step: one tensor for each flat."""

    def __init__(self, flats: Sequence[Flat], rows: int) -> None:
        self._rows = rows
        self._whole = [torch.zeros_like(flat.rows[:rows]) for flat in flats]
        pairs = list(zip(flats, self._whole, strict=True))
        self._parts = [view for flat, tensor in pairs for _, view in flat.views(tensor)]
        self._gaps = [gap for flat, tensor in pairs for gap in flat.gaps(tensor)]

    def __len__(self) -> int:
        return self._rows

    def filled(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Write the gradients, which come by parameter, into the tensors."""
        torch._foreach_copy_(self._parts, grads)
        if self._gaps:
            torch._foreach_zero_(self._gaps)  # the last step has left something there
        return self._whole


def larger(tensor: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy with more rows, which are zero."""
    made = torch.zeros(capacity, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    made[: len(tensor)] = tensor
    return made
