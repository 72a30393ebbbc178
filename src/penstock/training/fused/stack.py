"""The tensors of a bundle: everything that a trial needs between two steps, in one row of each.

All parameters of an optimizer's group lie in one tensor of shape [rows, numbers], so that a step of the optimizer is a
few operations however many layers and trials there are. Each trial's own plain module looks at its row, so it can be
measured, saved and taken out at any time; its own plain optimizer stays the source of its hyperparameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from penstock.training.copying import brought
from penstock.training.fused.flat import Flat, Room, larger, steps_seen
from penstock.training.fused.optimizers import VECTORISED
from penstock.training.fused.structure import Kind, Looks, kind_of
from penstock.training.loop import Training

RowCopy = tuple[list[torch.Tensor], list[float]]  # the tensors of a row; the steps and scalars of each flat


class Stack:
    """The rows of a bundle: ``trials[i]`` lives in row i; ``idle`` names parameters that the loss does not reach.

    ``own``: the trials' own optimizers step, one after another.
    """

    def __init__(
        self, first: Training, *, idle: frozenset[str] = frozenset(), capacity: int = 8, own: bool = False
    ) -> None:
        self.device = first.device
        self.idle, self.own = idle, own
        self.trials: list[Training] = []
        self.capacity = capacity
        self.flats: list[Flat] = []
        self.others: dict[str, torch.Tensor] = {}  # parameters that no optimizer steps
        self.buffers: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, list[str]] = {}  # the names that a model's state_dict has for a tensor
        self.best: list[torch.Tensor] = []  # rows like those of the model, at each trial's best report
        self.kinds: dict[int, Kind] = {}  # by trial: how its optimizer is built
        self._looks: dict[int, Looks] = {}
        self._leaves: dict[tuple[int, int], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
        self._room: Room | None = None
        self._apart = False  # whether the rows are laid out for optimizers as they no longer are
        self._lay_out([first])

    def _lay_out(self, trials: Sequence[Training]) -> None:
        """Make room for trials. They step at once where their optimizers are built alike; else each has its own step.

        The parameters of a flat have taken equally many steps in every trial: a head that was frozen has a flat of its
        own.
        """
        first, kinds = trials[0], [kind_of(trial) for trial in trials]
        alike = all(kind == kinds[0] for kind in kinds)
        names = {id(p): name for name, p in first.model.named_parameters()}
        flags = kinds[0][0] if alike and not self.own else None
        placed: set[str] = set()
        by_flat: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
        steps = [] if flags is None else [VECTORISED[type(first.optimizer)](dict(group)) for group in flags]
        own = [dict(trial.model.named_parameters()) for trial in trials]
        for (_, held, trained), of in zip(kinds, own, strict=True):
            for number, group in enumerate(held):
                for name in group:
                    if name in trained and name not in self.idle and name not in placed:
                        placed.add(name)
                        states = [t.optimizer.state.get(o[name], {}) for t, o in zip(trials, own, strict=True)]
                        seen = tuple(steps_seen(state, steps[number]) for state in states) if steps else ()
                        kind = number, of[name].dtype, first.rates.get(name, Flat.factor), seen
                        by_flat.setdefault(kind, []).append((name, of[name]))
        for (number, _, factor, _), params in by_flat.items():
            self.flats.append(Flat.of(number, params, steps[number] if steps else None, self.capacity, factor))
        for name, p in first.model.named_parameters():
            if name not in placed:
                self.others[name] = self._new(p)
        for name, b in first.model.named_buffers():
            self.buffers[name] = self._new(b)
        every = dict(first.model.named_parameters(remove_duplicate=False))
        kept = set(first.model.state_dict())
        for alias, p in every.items():
            self.aliases.setdefault(names[id(p)], []).append(alias)
        self.aliases.update({name: [name] for name in self.buffers if name in kept})

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.capacity, *like.shape, dtype=like.dtype, device=self.device)

    def __len__(self) -> int:
        return len(self.trials)

    # Coming and going

    def enter(self, trial: Training) -> None:
        """Give a trial the next row and let its module look at it."""
        if not self._fits(trial):
            self.renew(trial)
            return
        if len(self.trials) == self.capacity:
            self._grow()
        self.trials.append(trial)
        self._take_in(trial, len(self.trials) - 1)
        self._bind(len(self.trials) - 1)

    def _take_in(self, trial: Training, row: int) -> None:
        """Copy all that a plain trial holds into its row."""
        params = dict(trial.model.named_parameters())
        state = trial.optimizer.state
        for flat in self.flats:
            for name, view in flat.views(flat.rows[row]):
                view.copy_(params[name].detach())
            if flat.step is None:
                continue
            numbers = flat.named(trial)
            for kept, tensor in flat.state.items():
                tensor[row].fill_(flat.step.initial(kept, numbers))
                for name, view in flat.views(tensor[row]):
                    if kept in (own := state.get(params[name], {})) and own[kept] is not None:
                        view.copy_(own[kept])
            flat.steps[row] = max(flat.seen(trial, params))  # all are the same, but in an audit of a step that differs
            own = state.get(params[flat.names[0]], {})  # the others have the same: they were stepped together
            for scalar in flat.scalars:
                flat.scalars[scalar][row] = float(own.get(scalar, flat.step.initial(scalar, numbers)))
        for name, tensor in self.others.items():
            tensor[row].copy_(params[name].detach())
        for name, buffer in trial.model.named_buffers():
            self.buffers[name][row].copy_(buffer)
        if trial.best_model:
            for tensor, name in self._best_parts(row):
                tensor.copy_(trial.best_model[name])
            trial.keep_best({})
        self.kinds[id(trial)], self._looks[id(trial)] = kind_of(trial), Looks(trial)
        if any(flat.step is not None for flat in self.flats):
            self.forget(trial)  # until it leaves, its rows are the truth
            trial.optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn that nothing stepped it

    def step_alone(self, trial: Training, batch: Any) -> dict[str, torch.Tensor]:
        """One step of a trial by its own module and optimizer, in its row; gives its gradients."""
        self.export(trial)
        trial.model.train()
        trial.train_step(batch)
        grads = {name: p.grad for name, p in trial.model.named_parameters() if p.grad is not None}
        for p in trial.model.parameters():
            p.grad = None
        row = self.trials.index(trial)
        self._take_in(trial, row)
        self._bind(row)
        return grads

    def take_buffers(self, trial: Training) -> None:
        """Copy into a trial's row the buffers that its own module has assigned."""
        row = self.trials.index(trial)
        for name, buffer in trial.model.named_buffers():
            self.buffers[name][row].copy_(buffer)
        self._bind(row)

    def copy_row(self, trial: Training) -> RowCopy:
        """A copy of all that a trial's row holds."""
        row = self.trials.index(trial)
        numbers = [values[row] for flat in self.flats for values in (flat.steps, *flat.scalars.values())]
        return [tensor[row].clone() for tensor in self._rows()], numbers

    def put_row(self, trial: Training, copy: RowCopy) -> None:
        """Write a copy of a trial's row back."""
        row = self.trials.index(trial)
        tensors, numbers = copy
        for tensor, value in zip(self._rows(), tensors, strict=True):
            tensor[row].copy_(value)
        arrays = [values for flat in self.flats for values in (flat.steps, *flat.scalars.values())]
        for values, number in zip(arrays, numbers, strict=True):
            values[row] = number
        self._bind(row)

    def _fits(self, trial: Training) -> bool:
        """Whether the rows have room for what a trial trains, and it can step as the others do."""
        flags, _, trained = kind = kind_of(trial)
        params = dict(trial.model.named_parameters())
        if not self.vectorised:
            return trained - self.idle <= {name for flat in self.flats for name in flat.names}
        if any(kind != other for other in self.kinds.values()) or flags is None:
            return False
        return all(len(flat.seen(trial, params)) == 1 for flat in self.flats)

    def outdated(self) -> bool:
        """Whether a scheduler has rebuilt an optimizer, or trials that were built apart are now alike."""
        for trial in [trial for trial in self.trials if self._looks[id(trial)].changed()]:
            if (kind := kind_of(trial)) != self.kinds[id(trial)]:
                self.kinds[id(trial)] = kind
                self._apart = True
        return self._apart and bool(self.trials)

    def renew(self, *others: Training) -> None:
        """Lay out the rows anew, for the trials as they are now and some more."""
        trials = list(self.trials)
        for trial in trials:
            self.leave(trial)
        self.flats, self.others, self.buffers, self.aliases, self.best = [], {}, {}, {}, []
        self._leaves.clear()
        self._room, self._apart = None, False
        self.capacity = max(self.capacity, len(trials) + len(others))
        self._lay_out([*trials, *others])
        for trial in (*trials, *others):
            self.enter(trial)

    def leave(self, trial: Training) -> None:
        """Give a trial tensors of its own again; the last row takes its place."""
        self.export(trial)
        row, last = self.trials.index(trial), len(self.trials) - 1
        trial.keep_best(brought(self.best_weights(trial)))
        self.kinds.pop(id(trial), None)
        self._looks.pop(id(trial), None)
        if not self.own and not self.vectorised and len({*self.kinds.values()}) == 1:
            self._apart = next(iter(self.kinds.values()))[0] is not None
        for p in trial.model.parameters():
            p.data, p.grad = p.data.clone(), None
        for module, name, _ in _buffers(trial.model):
            module._buffers[name] = module._buffers[name].clone()  # type: ignore[union-attr]
        moved = self.trials.pop()
        if row == last:
            return
        self.trials[row] = moved
        for tensor in self._tensors():
            tensor[row].copy_(tensor[last])
        for flat in self.flats:
            flat.steps[row] = flat.steps[last]
            for values in flat.scalars.values():
                values[row] = values[last]
        self._bind(row)

    def export(self, trial: Training) -> None:
        """Write the state in a trial's rows into its own optimizer, as a plain run would have it."""
        row, params = self.trials.index(trial), dict(trial.model.named_parameters())
        state = trial.optimizer.state
        for flat in self.flats:
            if flat.step is None or not flat.steps[row]:
                continue  # it has not stepped yet; Adagrad has a state before its first step
            for name in flat.names if flat.step.counts or flat.scalars or flat.state else ():
                state[params[name]] = {}
                if flat.step.counts:
                    step = torch.tensor(float(flat.steps[row]))
                    fused = trial.optimizer.param_groups[flat.group].get("fused")
                    state[params[name]]["step"] = step.float().to(self.device) if fused else step
                for scalar, values in flat.scalars.items():
                    state[params[name]][scalar] = torch.tensor(values[row])
            for kept, tensor in flat.state.items():
                for name, view in flat.views(tensor[row]):
                    state[params[name]][kept] = view.clone()

    def forget(self, trial: Training) -> None:
        """Undo ``export`` for a trial that stays."""
        row, params = self.trials.index(trial), dict(trial.model.named_parameters())
        for flat in self.flats:
            for name in flat.names if flat.step is not None and flat.steps[row] else ():
                trial.optimizer.state.pop(params[name], None)

    def order(self, wanted: Sequence[Training]) -> None:
        """Bring the rows into another order."""
        if list(wanted) == self.trials:
            return
        places = [self.trials.index(trial) for trial in wanted]
        index = torch.tensor(places, device=self.device)
        for tensor in self._tensors():
            tensor[: len(places)] = tensor[index]
        for flat in self.flats:
            flat.steps[: len(places)] = flat.steps[places]
            for values in flat.scalars.values():
                values[: len(places)] = values[places]
        self.trials = list(wanted)
        for row in range(len(places)):
            self._bind(row)

    def _rows(self) -> Iterator[torch.Tensor]:
        for flat in self.flats:
            yield flat.rows
            yield from flat.state.values()
        yield from self.others.values()
        yield from self.buffers.values()

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._rows()
        yield from self.best

    def keep_best(self, rows: Sequence[int]) -> None:
        """Remember the weights that some rows have now as their best."""
        now = self._model_tensors()
        if not self.best:
            self.best = [torch.zeros_like(tensor) for tensor in now]
        index = torch.tensor(list(rows), device=self.device)
        for best, tensor in zip(self.best, now, strict=True):
            best.index_copy_(0, index, tensor.index_select(0, index))

    def best_weights(self, trial: Training) -> dict[str, torch.Tensor]:
        """A trial's best weights as its module's ``state_dict``, where they lie; empty where it has reported none."""
        known = trial.best_unit and self.best
        parts = {name: tensor for tensor, name in self._best_parts(self.trials.index(trial))} if known else {}
        return {name: parts[name] for name in trial.model.state_dict()} if known else {}

    def _best_parts(self, row: int) -> Iterator[tuple[torch.Tensor, str]]:
        """The tensors of a best row, under every name that the model's ``state_dict`` has for them."""
        if not self.best:
            self.best = [torch.zeros_like(tensor) for tensor in self._model_tensors()]
        for flat, tensor in zip(self.flats, self.best, strict=False):
            for name, view in flat.views(tensor[row]):
                yield from ((view, alias) for alias in self.aliases[name])
        rest = self.best[len(self.flats) :]
        for name, tensor in zip((*self.others, *self.buffers), rest, strict=True):
            yield from ((tensor[row], alias) for alias in self.aliases.get(name, ()))

    def _model_tensors(self) -> list[torch.Tensor]:
        return [*(flat.rows for flat in self.flats), *self.others.values(), *self.buffers.values()]

    def _bind(self, row: int) -> None:
        trial = self.trials[row]
        params = dict(trial.model.named_parameters())
        for flat in self.flats:
            for name, view in flat.views(flat.rows[row]):
                params[name].data = view
        for name, tensor in self.others.items():
            params[name].data = tensor[row]
        for module, short, name in _buffers(trial.model):
            module._buffers[short] = self.buffers[name][row]

    def _grow(self) -> None:
        grown = self.capacity * 2
        # All tensors are made before any takes its place: memory may run out in between.
        flats = [flat.larger(grown) for flat in self.flats]
        others, buffers = ({k: larger(v, grown) for k, v in part.items()} for part in (self.others, self.buffers))
        best = [larger(tensor, grown) for tensor in self.best]
        for flat, one in zip(self.flats, flats, strict=True):
            flat.take(one)
        self.others, self.buffers, self.best = others, buffers, best
        self.capacity = grown
        self._leaves.clear()
        self._room = None
        for row in range(len(self.trials)):
            self._bind(row)

    # For a step

    def leaves(self, first: int, last: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parameters and the buffers of some rows, by name; the parameters in ``flats`` take gradients."""
        found = self._leaves.get((first, last))
        if found is None:
            params = {
                name: view.detach().requires_grad_()
                for flat in self.flats
                for name, view in flat.views(flat.rows[first:last])
            }
            params.update({name: rows[first:last].detach() for name, rows in self.others.items()})
            for name in self.idle:  # a loss that reaches them after all is noticed by their gradients
                params[name].requires_grad_()
            found = params, {name: rows[first:last] for name, rows in self.buffers.items()}
            if len(self._leaves) > 32:
                self._leaves.clear()
            self._leaves[first, last] = found
        return found

    @property
    def vectorised(self) -> bool:
        """Whether the trials' optimizers step at once."""
        return all(flat.step is not None for flat in self.flats)

    def coefficients(self, first: int, last: int) -> list[dict[str, torch.Tensor]]:
        """The numbers that the optimizers' next steps need by trial, for each flat."""
        return [flat.coefficients(self.trials[first:last], first, last) for flat in self.flats]

    def versions(self) -> list[int]:
        """Numbers that grow with each write to weights, trained or not."""
        return [rows._version for rows in self._weights()]

    def written_by_loss(self, *, weights: bool) -> list[torch.Tensor]:
        """The tensors that a task's loss may write: buffers, and ``weights``, which few write."""
        return [*(self._weights() if weights else ()), *self.buffers.values()]

    def _weights(self) -> list[torch.Tensor]:
        return [*(flat.rows for flat in self.flats), *self.others.values()]

    def count(self, first: int, last: int) -> None:
        """Count a step of the optimizers in some rows."""
        for flat in self.flats:
            flat.count(first, last)

    def room(self, rows: int) -> Room:
        """Room for the gradients of as many rows."""
        if self._room is None or len(self._room) != rows:
            self._room = None  # its memory is free before more is asked for
            self._room = Room(self.flats, rows)
        return self._room

    def spare(self) -> None:
        """Give back the room for gradients, which a faster step does not use."""
        self._room = None


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, f"{prefix}.{name}" if prefix else name
