"""The training step of a bundle: one function of one record of inputs.

``Step`` computes the loss of every trial, the gradients, the clipping and the optimizers' update, on plain tensors.
``Inputs`` holds everything that changes between two steps: the rows, the batch, the keys of the random draws and the
optimizers' coefficients. The same function runs plain, or is compiled or captured (``compiled.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from penstock.task import Task
from penstock.training.fused.flat import Flat, Room
from penstock.training.fused.optimizers import clip_rows
from penstock.training.fused.parting import Rows
from penstock.training.fused.stack import Stack
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.watching import Reached, Unreached
from penstock.training.fused.ways import Way
from penstock.training.kernels.at_once import AtOnce, join
from penstock.training.loop import Training

Grads = Sequence[torch.Tensor | None]  # by parameter, in the order of ``Step.names``; None where the loss reaches none
_READ = ("rows", "state", "others", "buffers", "coefficients", "batch", "shared", "keys", "numbers")


class Torn(Exception):
    """An error, such as a lack of memory, while parameters were being written: trials go on from their last states."""


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

    A task's own loss may write ``others`` too. ``shared``: all trials have one batch; otherwise every tensor of the
    batch has the trials in front. The last three fields spare a plain step some work: the parameters of ``rows`` by
    name, room for their gradients, and the trials whose own optimizers step, as these have no form for many trials.
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
        coefficients: list[dict[str, torch.Tensor]] | None = None,
    ) -> Inputs:
        """The inputs of the stack's rows from ``first`` to ``last``; with ``coefficients``, where these are known."""
        params, buffers = stack.leaves(first, last)
        return cls(
            [flat.rows[first:last] for flat in stack.flats],
            [flat.states(first, last) for flat in stack.flats],
            {name: rows[first:last] for name, rows in stack.others.items()},
            buffers,
            stack.coefficients(first, last) if coefficients is None else coefficients,
            batch,
            shared,
            keys,
            numbers,
            params,
            room,
            () if stack.vectorised else stack.trials[first:last],
        )

    def part(self, first: int, last: int) -> Inputs:
        """The inputs of some of these rows."""

        def cut(leaf: Any) -> Any:
            return leaf[first:last] if isinstance(leaf, torch.Tensor) else leaf

        names = ["rows", "state", "others", "buffers", "coefficients", "keys", "numbers"]
        names += [] if self.shared else ["batch"]
        cuts = {name: tree_map(cut, getattr(self, name)) for name in names}
        return replace(self, **cuts, params=None, room=None, owners=())

    def written(self) -> list[torch.Tensor]:
        """The tensors that a step may write: a row for each trial."""
        return [*(tensor for part in self.state for tensor in part.values()), *self.touched()]

    def touched(self) -> list[torch.Tensor]:
        """The tensors that a task's loss may write: a row for each trial."""
        return [*self.rows, *self.others.values(), *self.buffers.values()]

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
    idle: Sequence[str] = ()  # parameters that no step has reached

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        losses, grads = self.gradients(inputs)
        if inputs.owners:
            with whole_or_torn():
                for row, trial in enumerate(inputs.owners):
                    self._step_alone(trial, [None if grad is None else grad[row] for grad in grads])
            return losses
        if any(isinstance(grad, Rows) for grad in grads):
            raise Reached  # by some trials alone
        if any(grad is None for grad in grads):
            names = zip(self.names, grads, strict=True)
            raise Unreached(frozenset(name for name, grad in names if grad is None))
        with whole_or_torn():
            self._update(inputs, self.joined(grads, inputs.room))
        return losses

    def repeated(self) -> Callable[[Inputs], torch.Tensor]:
        """The step for a recording, which runs it again on the same tensors: layers' small kernels run at once."""
        own = AtOnce()
        return lambda inputs: own.run(lambda: self(inputs), [*inputs.rows, *inputs.others.values()])

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
            wanted = {name: params[name] for name in (*self.names, *self.idle)}
            grads: Grads = self.way.parting.gradients(losses, wanted)
        self.way.settle()
        if self.idle:
            count = len(self.names)
            if any(grad is not None for grad in grads[count:]):
                raise Reached
            grads = grads[:count]
        return losses.detach(), grads

    def joined(self, grads: Grads, room: Room | None = None) -> list[torch.Tensor]:
        """Gradients as one tensor for each flat, laid out like its rows; in ``room``, if there is some."""
        join(grads)
        if room is not None:
            return room.filled([grad for grad in grads if grad is not None])
        left = iter(grads)
        return [flat.joined([next(left) for _ in flat.names]) for flat in self.flats]

    def _update(self, inputs: Inputs, grads: list[torch.Tensor]) -> None:
        if self.task.clip_grad_norm is not None:
            clip_rows(grads, self.task.clip_grad_norm)
        given = zip(self.flats, inputs.rows, grads, inputs.state, inputs.coefficients, strict=True)
        for flat, rows, gradient, state, coefficients in given:
            assert flat.step is not None
            flat.step.update(rows, gradient, state, coefficients)

    def _step_alone(self, trial: Training, gradients: Grads) -> None:
        """A step of a trial's own optimizer, on views of the trial's row; a parameter without a gradient has none.

        Hooks on parameters run as in the trial's own backward. A parameter that others train and this trial does not
        has no gradient either, which clipping would count.
        """
        params = dict(trial.model.named_parameters())
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and params[name].requires_grad:
                laid_out = torch.empty_like(params[name]).copy_(gradient)  # as backward does; Adam(fused=True) needs it
                give_gradient(params[name], laid_out)
        if self.task.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(trial.model.parameters(), self.task.clip_grad_norm)
        trial.randomness.at(trial.seed, trial.step)  # an optimizer that draws does so from torch's generator
        trial.step_optimizer()
        for p in params.values():
            p.grad = None

    def _leaves(self, inputs: Inputs) -> Mapping[str, torch.Tensor]:
        flats = zip(self.flats, inputs.rows, strict=True)
        views = [view for flat, rows in flats for view in flat.views(rows.detach())]
        leaves = {name: view.detach().requires_grad_() for name, view in views} | inputs.others
        return leaves | {name: inputs.others[name].detach().requires_grad_() for name in self.idle}

    def _precision(self, inputs: Inputs) -> AbstractContextManager[object]:
        if self.task.precision != "bf16":  # "fp16" is never fused
            return nullcontext()
        return torch.autocast(inputs.rows[0].device.type, torch.bfloat16)


def hooked(model: torch.nn.Module) -> bool:
    """Whether a parameter has hooks, which run in a trial's own backward."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


@contextmanager
def unhooked(model: torch.nn.Module) -> Iterator[None]:
    """Leave the hooks on parameters out of a backward."""
    kept = [(p, p._backward_hooks) for p in model.parameters() if p._backward_hooks]
    for p, _ in kept:
        p._backward_hooks = None
    try:
        yield
    finally:
        for p, hooks in kept:
            p._backward_hooks = hooks


def give_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Let a parameter have a gradient, changed by its hooks."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    parameter.grad = gradient
    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
