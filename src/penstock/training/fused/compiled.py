"""A bundle's training step made faster: compiled by Inductor, or captured as a CUDA graph.

The step is the one in ``step.py``, a function of its inputs alone. It is traced once and compiled beside training
(intra-trial fusion, Hydro §4.2), or recorded once on the device and replayed, which spares the launching of kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from penstock.training.fused import recording
from penstock.training.fused.laying import Laid, Row
from penstock.training.fused.recording import Pool
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.step import Inputs, Step, unchanged
from penstock.training.fused.traces import Traced, traced

_COPIED = ("coefficients", "batch", "keys", "numbers")  # the inputs that are other tensors at every step
TIMED = 5  # steps after which a step's time is known
StepKind = tuple[int, bool, tuple[torch.Size, ...]]


def step_kind(trials: int, shared: bool, batch: Any) -> StepKind:
    """The facts that tell one faster step from another before its inputs are gathered."""
    leaves = tree_flatten(batch)[0]
    return trials, shared, tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))


class FastStep(ABC):
    """A training step made for one kind of inputs."""

    compiled = False

    def __init__(self, step: Step, inputs: Inputs) -> None:
        if inputs.owners:
            raise Unfusable("the trials' optimizers step one after another")
        self.step = step
        self.bytes = 0  # of a graph's own memory, which torch does not count
        self._kind, self._fixed = inputs.kind(), step.way.fixed
        self._read: tuple[str, ...] = ()
        self._plain = step.way.plain(())
        leaves, self._spec = inputs.leaves()
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def takes(self, inputs: Inputs) -> bool:
        """Whether it was made for such inputs."""
        way = self.step.way
        return way.fixed == self._fixed and way.plain(self._read) == self._plain and inputs.kind() == self._kind

    def _took(self, read: tuple[str, ...]) -> None:
        """Note the values of configs that it has in it."""
        self._read, self._plain = read, self.step.way.plain(read)

    @abstractmethod
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Train; gives the losses of the trials."""

    def _train(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The plain step, as a function of the tensors among its inputs."""
        filled = list(self._leaves)
        for i, tensor in zip(self._places, tensors, strict=True):
            filled[i] = tensor
        return self.step(Inputs(*tree_unflatten(filled, self._spec)))

    def _tensors(self, inputs: Inputs) -> list[torch.Tensor]:
        leaves = inputs.leaves()[0]
        return [leaves[i] for i in self._places]


class CompiledStep(FastStep):
    """Compiled by Inductor: ``run`` takes the tensors of its inputs, and those that the trace ``kept``."""

    compiled = True

    def __init__(
        self, step: Step, inputs: Inputs, run: Callable[..., Any], kept: Sequence[torch.Tensor], read: tuple[str, ...]
    ) -> None:
        super().__init__(step, inputs)
        self._run, self._kept = run, kept
        self._took(read)

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        made = self._run(*self._tensors(inputs), *self._kept)
        losses: torch.Tensor = made[0] if isinstance(made, tuple | list) else made
        return losses


class _Plain(FastStep):
    """The plain step, to be traced."""

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        return self._train(*self._tensors(inputs))

    def traced(self, inputs: Inputs) -> Traced:
        try:
            return traced(self._train, self._tensors(inputs))
        finally:
            self.step.way.release()  # its module holds the trace's tensors


def trace(step: Step, inputs: Inputs) -> Traced:
    """The step for such inputs, traced."""
    return _Plain(step, inputs).traced(inputs)


class CapturedStep(FastStep):
    """Recorded as a CUDA graph, of the plain step or of a compiled one.

    The graph has copies of its own of the coefficients, the batch, the keys and the numbers.
    """

    def __init__(self, step: Step, inputs: Inputs, pool: Pool, compiled: FastStep | None = None) -> None:
        super().__init__(step, inputs)
        self._own = replace(inputs, params=None, room=None, **self._copies(inputs))
        self._addresses = inputs.addresses()
        self._run, self.compiled = step.repeated() if compiled is None else compiled, compiled is not None
        try:
            self._recording = recording.Recording(self._once, inputs.written(), pool)
        finally:
            step.way.release()
        self.bytes = self._recording.bytes
        self._took(step.way.read if compiled is None else compiled._read)

    def takes(self, inputs: Inputs) -> bool:
        return super().takes(inputs) and inputs.addresses() == self._addresses

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        for part in _COPIED:
            self._take(part, getattr(inputs, part))
        return self._replay()

    def timed(self) -> float:
        """The milliseconds of one step on the device, whatever it writes."""
        return self._recording.timed()

    def seconds(self, inputs: Inputs) -> float:
        """The least time of a few steps on the device, which leave no trace."""
        with unchanged(inputs.written()):
            return min(self.timed() for _ in range(TIMED)) / 1e3

    def _copies(self, inputs: Inputs) -> dict[str, Any]:
        return {name: tree_map(_copy, getattr(inputs, name)) for name in _COPIED}

    def _once(self) -> torch.Tensor:
        return self._run(self._own)

    def _replay(self) -> torch.Tensor:
        self._recording.replay()
        losses: torch.Tensor = self._recording.made
        return losses

    def _take(self, part: str, given: Any) -> None:
        for into, value in zip(tree_flatten(getattr(self._own, part))[0], tree_flatten(given)[0], strict=True):
            if isinstance(into, torch.Tensor):
                into.copy_(value)


class LaidStep(CapturedStep):
    """A captured step that reads its coefficients, its batch and its keys from where many steps' are ``laid`` down."""

    def __init__(self, step: Step, inputs: Inputs, pool: Pool, compiled: FastStep | None, laid: Laid) -> None:
        self.laid = laid
        self._numbers: list[torch.Tensor] | None = None  # the numbers that were copied last
        super().__init__(step, inputs, pool, compiled)

    @torch.no_grad()
    def leap(self, rows: Sequence[Row], numbers: list[torch.Tensor]) -> torch.Tensor:
        """Take the steps of these rows, one after another; gives the losses of the last."""
        if numbers is not self._numbers:
            self._take("numbers", numbers)
            self._numbers = numbers
        self.laid.lay(rows)
        for _ in rows:
            losses = self._replay()
        return losses

    def _copies(self, inputs: Inputs) -> dict[str, Any]:
        laid = {"coefficients": self.laid.coefficients, "batch": self.laid.batch, "keys": self.laid.keys}
        return super()._copies(inputs) | laid

    def _once(self) -> torch.Tensor:
        self.laid.read()
        return super()._once()


def captured(
    step: Step, inputs: Inputs, laid: Laid | None, pool: Pool, compiled: FastStep | None = None
) -> CapturedStep:
    """A captured step, which reads its inputs from where they are laid down if they can be."""
    if laid is None:
        return CapturedStep(step, inputs, pool, compiled)
    return LaidStep(step, inputs, pool, compiled, laid)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
