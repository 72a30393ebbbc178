"""The tensors of a bundle: everything that a trial needs between two steps, in one row of each.

All parameters of an optimizer's group lie in one tensor of shape [rows, numbers], so that a step of the optimizer is a
few operations however many layers and trials there are. Each trial's own plain module looks at its row, so it can be
measured, saved and taken out at any time; its own plain optimizer stays the source of its hyperparameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.training.fused.flat import Flat, Room, larger
from penstock.training.fused.optimizers import VECTORISED, vector_flags
from penstock.training.loop import Training


class Stack:
    """The rows of a bundle: ``trials[i]`` lives in row i; ``idle`` names parameters that the loss does not reach."""

    def __init__(self, first: Training, *, idle: frozenset[str] = frozenset(), capacity: int = 8) -> None:
        self.device = first.device
        self.idle = idle
        self.trials: list[Training] = []
        self.capacity = capacity
        self.flats: list[Flat] = []
        self.others: dict[str, torch.Tensor] = {}  # parameters that no optimizer steps
        self.buffers: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, list[str]] = {}  # the names that a model's state_dict has for a tensor
        self.best: list[torch.Tensor] = []  # rows like those of the model, at each trial's best report
        self.steps = np.zeros(capacity, dtype=np.float64)  # how many steps the optimizers' states have seen
        self.unstepped: dict[int, set[str]] = {}  # by trial: parameters that its optimizer had not stepped when it came
        self._leaves: dict[tuple[int, int], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
        self._room: Room | None = None
        self._lay_out(first)

    def _lay_out(self, first: Training) -> None:
        names = {id(p): name for name, p in first.model.named_parameters()}
        flags = vector_flags(first.optimizer)
        placed = set()
        for number, group in enumerate(first.optimizer.param_groups):
            by_type: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
            for p in group["params"]:
                name = names.get(id(p))
                if name is not None and name not in self.idle and p.requires_grad:
                    by_type.setdefault(p.dtype, []).append((name, p))
                    placed.add(name)
            for params in by_type.values():
                step = None if flags is None else VECTORISED[type(first.optimizer)](dict(flags[number]))
                self.flats.append(Flat.of(number, params, step, self.capacity))
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
        if len(self.trials) == self.capacity:
            self._grow()
        row = len(self.trials)
        self.trials.append(trial)
        params = dict(trial.model.named_parameters())
        state = trial.optimizer.state
        seen = 0.0
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
                        if not flat.step.counts:  # Adagrad has a state before its first step
                            seen = max(seen, 1.0)
            for name in flat.names:
                own = state.get(params[name], {})
                if "step" in own:
                    seen = max(seen, float(own["step"]))
                for scalar in flat.scalars:
                    if scalar in own:
                        flat.scalars[scalar][row] = float(own[scalar])
            if not seen:
                for scalar in flat.scalars:
                    flat.scalars[scalar][row] = flat.step.initial(scalar, numbers)
        self.steps[row] = seen
        self.unstepped[id(trial)] = {n for flat in self.flats for n in flat.names if not _stepped(state, params[n])}
        for name, tensor in self.others.items():
            tensor[row].copy_(params[name].detach())
        for name, buffer in trial.model.named_buffers():
            self.buffers[name][row].copy_(buffer)
        if trial.best_model:
            for tensor, name in self._best_parts(row):
                tensor.copy_(trial.best_model[name])
            trial.keep_best({})
        if any(flat.step is not None for flat in self.flats):
            self.forget(trial)  # until it leaves, its rows are the truth
            trial.optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn that nothing stepped it
        self._bind(row)

    def leave(self, trial: Training) -> None:
        """Give a trial tensors of its own again; the last row takes its place."""
        self.export(trial)
        row, last = self.trials.index(trial), len(self.trials) - 1
        trial.keep_best(self.best_model(trial))
        self.unstepped.pop(id(trial), None)
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
        self.steps[row] = self.steps[last]
        for flat in self.flats:
            for values in flat.scalars.values():
                values[row] = values[last]
        self._bind(row)

    def export(self, trial: Training) -> None:
        """Write the state in a trial's rows into its own optimizer, as a plain run would have it."""
        row = self.trials.index(trial)
        params = dict(trial.model.named_parameters())
        state = trial.optimizer.state
        for flat in self.flats:
            if flat.step is None or not self.steps[row]:
                continue
            unstepped = self.unstepped.get(id(trial), ())
            names = [name for name in flat.names if name not in unstepped]
            for name in names if flat.step.counts or flat.scalars or flat.state else ():
                state[params[name]] = {}
                if flat.step.counts:
                    step = torch.tensor(float(self.steps[row]))
                    fused = trial.optimizer.param_groups[flat.group].get("fused")
                    state[params[name]]["step"] = step.float().to(self.device) if fused else step
                for scalar, values in flat.scalars.items():
                    state[params[name]][scalar] = torch.tensor(values[row])
            for kept, tensor in flat.state.items():
                for name, view in flat.views(tensor[row]):
                    if name not in unstepped:
                        state[params[name]][kept] = view.clone()

    def forget(self, trial: Training) -> None:
        """Undo ``export`` for a trial that stays."""
        if not self.steps[self.trials.index(trial)]:
            return  # Adagrad has a state before its first step
        params, kept = dict(trial.model.named_parameters()), self.unstepped.get(id(trial), ())
        for flat in self.flats:
            for name in flat.names if flat.step is not None else ():
                if name not in kept:
                    trial.optimizer.state.pop(params[name], None)

    def order(self, wanted: Sequence[Training]) -> None:
        """Bring the rows into another order."""
        if list(wanted) == self.trials:
            return
        places = [self.trials.index(trial) for trial in wanted]
        index = torch.tensor(places, device=self.device)
        for tensor in self._tensors():
            tensor[: len(places)] = tensor[index]
        self.steps[: len(places)] = self.steps[places]
        for flat in self.flats:
            for values in flat.scalars.values():
                values[: len(places)] = values[places]
        self.trials = list(wanted)
        for row in range(len(places)):
            self._bind(row)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for flat in self.flats:
            yield flat.rows
            yield from flat.state.values()
        yield from self.others.values()
        yield from self.buffers.values()
        yield from self.best

    def keep_best(self, rows: Sequence[int]) -> None:
        """Remember the weights that some rows have now as their best."""
        now = self._model_tensors()
        if not self.best:
            self.best = [torch.zeros_like(tensor) for tensor in now]
        index = torch.tensor(list(rows), device=self.device)
        for best, tensor in zip(self.best, now, strict=True):
            best.index_copy_(0, index, tensor.index_select(0, index))

    def best_model(self, trial: Training) -> dict[str, torch.Tensor]:
        """A trial's best weights as its module's ``state_dict``, on the CPU; empty where it has reported none."""
        if not trial.best_unit or not self.best:
            return {}
        parts = {name: tensor for tensor, name in self._best_parts(self.trials.index(trial))}
        return {name: parts[name].to("cpu", copy=True) for name in trial.model.state_dict()}

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
        self.steps = np.resize(self.steps, grown)
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
        trials, steps = self.trials[first:last], self.steps[first:last]
        return [flat.coefficients(trials, first, last, steps) for flat in self.flats]

    def count(self, first: int, last: int) -> None:
        """Count a step of the optimizers in some rows."""
        for flat in self.flats:
            flat.count(first, last)
        self.steps[first:last] += 1
        if self.unstepped:
            for trial in self.trials[first:last]:
                self.unstepped.pop(id(trial), None)

    def room(self, rows: int) -> Room:
        """Room for the gradients of as many rows."""
        if self._room is None or len(self._room) != rows:
            self._room = None  # its memory is free before more is asked for
            self._room = Room(self.flats, rows)
        return self._room

    def spare(self) -> None:
        """Give back the room for gradients, which a faster step does not use."""
        self._room = None


def _stepped(state: Any, parameter: torch.Tensor) -> bool:
    own = state.get(parameter)
    return bool(own) and float(own.get("step", 1)) > 0


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, f"{prefix}.{name}" if prefix else name
