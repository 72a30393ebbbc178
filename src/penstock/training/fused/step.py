"""The training step of a bundle: one function of one record of inputs.

``Step`` computes the loss of every trial, the gradients, the clipping and the optimizers' update, on plain tensors.
``Inputs`` holds everything that changes between two steps: the rows, the batch, the keys of the random draws and the
optimizers' coefficients. The same function runs plain, or is compiled or captured (``compiled.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from penstock.task import Task
from penstock.training.fused.flat import Flat, Room
from penstock.training.fused.optimizers import clip_rows
from penstock.training.fused.stack import Stack
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import Way
from penstock.training.loop import Training

Grads = Sequence[torch.Tensor | None]  # by parameter, in the order of ``Step.names``; None where the loss reaches none
_READ = ("rows", "state", "others", "buffers", "coefficients", "batch", "shared", "keys", "numbers")


class Torn(Exception):
    """An error, such as a lack of memory, while parameters were being written: trials go on from their last states."""


class Unreached(Exception):
    """Parameters that the loss does not reach. Nothing was written but buffers."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names


@contextmanager
def whole_or_torn() -> Iterator[None]:
    """Raise every error as ``Torn``, while parameters are being written."""
    try:
        yield
    except Exception as error:
        raise Torn(str(error)) from error


@contextmanager
def unchanged(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back the values of some tensors afterwards."""
    kept = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in kept:
            tensor.copy_(value)


@dataclass
class Inputs:
    """Everything that one step of some rows reads; it writes ``rows``, ``state`` and ``buffers`` in place.

    ``shared``: all trials have one batch; otherwise every tensor of the batch has the trials in front. The last three
    fields spare a plain step some work: the parameters of ``rows`` by name, room for their gradients, and the trials
    whose own optimizers step, as these have no form for many trials.
    """

    rows: list[torch.Tensor]
    state: list[dict[str, torch.Tensor]]
    others: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    coefficients: list[dict[str, torch.Tensor]]
    batch: Any
    shared: bool
    keys: torch.Tensor | None
    numbers: list[torch.Tensor]
    params: dict[str, torch.Tensor] | None = None
    room: Room | None = None
    owners: Sequence[Training] = ()

    @classmethod
    def of(
        cls,
        stack: Stack,
        first: int,
        last: int,
        batch: Any,
        shared: bool,
        keys: torch.Tensor | None,
        numbers: list[torch.Tensor],
        room: Room | None = None,
    ) -> Inputs:
        """The inputs of the stack's rows from ``first`` to ``last``."""
        params, buffers = stack.leaves(first, last)
        return cls(
            [flat.rows[first:last] for flat in stack.flats],
            [flat.states(first, last) for flat in stack.flats],
            {name: rows[first:last] for name, rows in stack.others.items()},
            buffers,
            stack.coefficients(first, last),
            batch,
            shared,
            keys,
            numbers,
            params,
            room,
            () if stack.vectorised else stack.trials[first:last],
        )

    def part(self, first: int, last: int) -> Inputs:
        """The inputs of some of these rows, as far as gradients are computed from them."""

        def cut(leaf: Any) -> Any:
            return leaf[first:last] if isinstance(leaf, torch.Tensor) else leaf

        names = ["rows", "others", "buffers", "keys", "numbers", *([] if self.shared else ["batch"])]
        cuts = {name: tree_map(cut, getattr(self, name)) for name in names}
        return replace(self, **cuts, params=None, room=None, owners=())

    def written(self) -> list[torch.Tensor]:
        """The tensors that a step writes: a row for each trial."""
        return [*self.rows, *(tensor for part in self.state for tensor in part.values()), *self.buffers.values()]

    def addresses(self) -> list[int]:
        """Where the tensors lie that a step writes."""
        return [tensor.data_ptr() for tensor in self.written()]

    def leaves(self) -> tuple[list[Any], TreeSpec]:
        """The tensors and plain values in one list, and the way back to ``Inputs(*...)``."""
        return tree_flatten(tuple(getattr(self, name) for name in _READ))

    def kind(self) -> tuple[object, ...]:
        """The shapes, the plain values and the names of coefficients, which a step that was made once needs equal."""
        leaves, spec = self.leaves()
        return (str(spec), *map(_kind, leaves))


def _kind(leaf: Any) -> object:
    """A tensor is read anew at every step. A batch's other values were read once, and must be the same."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, bool | int | float | str | bytes | None) else id(leaf)


@dataclass(frozen=True)
class Step:
    """The training step of trials of one task: called with inputs, it trains them and gives their losses."""

    way: Way
    task: Task
    flats: Sequence[Flat]

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        losses, grads = self.gradients(inputs)
        if any(grad is None for grad in grads):
            names = zip(self.names, grads, strict=True)
            raise Unreached(frozenset(name for name, grad in names if grad is None))
        with whole_or_torn():
            self._update(inputs, self.joined(grads, inputs.room))
        return losses

    @property
    def names(self) -> list[str]:
        """The names of the parameters that are trained."""
        return [name for flat in self.flats for name in flat.names]

    def gradients(self, inputs: Inputs, *, full: bool = False) -> tuple[torch.Tensor, Grads]:
        """The losses of all trials and their gradients; ``full``: in the precision of the rows, not the task's."""
        with torch.enable_grad():
            params = self._leaves(inputs) if inputs.params is None else inputs.params
            self.way.train()
            with nullcontext() if full else self._precision(inputs):
                losses = self.way.run(
                    self.task.loss, params, inputs.buffers, inputs.batch, inputs.shared, inputs.keys, inputs.numbers
                )
            if not isinstance(losses, torch.Tensor) or losses.ndim != 1:
                raise Unfusable("the loss of a trial is no scalar tensor")
            wanted = [params[name] for name in self.names]
            grads: Grads = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        return losses.detach(), grads

    def joined(self, grads: Grads, room: Room | None = None) -> list[torch.Tensor]:
        """Gradients as one tensor for each flat, laid out like its rows; in ``room``, if there is some."""
        if room is not None:
            return room.filled([grad for grad in grads if grad is not None])
        left = iter(grads)
        return [flat.joined([next(left) for _ in flat.names]) for flat in self.flats]

    def _update(self, inputs: Inputs, grads: list[torch.Tensor]) -> None:
        if self.task.clip_grad_norm is not None:
            clip_rows(grads, self.task.clip_grad_norm)
        given = zip(self.flats, inputs.rows, grads, inputs.state, inputs.coefficients, strict=True)
        for flat, rows, gradient, state, coefficients in given:
            if flat.step is not None:
                flat.step.update(rows, gradient, state, coefficients)
        for row, trial in enumerate(inputs.owners):
            self._step_alone(trial, [gradient[row] for gradient in grads])

    def _step_alone(self, trial: Training, gradients: Sequence[torch.Tensor]) -> None:
        """A step of a trial's own optimizer, on views of the trial's row."""
        params = dict(trial.model.named_parameters())
        for flat, gradient in zip(self.flats, gradients, strict=True):
            for name, view in flat.views(gradient):
                params[name].grad = view
        trial.optimizer.step()
        for p in params.values():
            p.grad = None

    def _leaves(self, inputs: Inputs) -> Mapping[str, torch.Tensor]:
        flats = zip(self.flats, inputs.rows, strict=True)
        views = [view for flat, rows in flats for view in flat.views(rows.detach())]
        return {name: view.detach().requires_grad_() for name, view in views} | inputs.others

    def _precision(self, inputs: Inputs) -> AbstractContextManager[object]:
        if self.task.precision != "bf16":  # "fp16" is never fused
            return nullcontext()
        return torch.autocast(inputs.rows[0].device.type, torch.bfloat16)
