"""A trial whose model does not fit one device: each holds a share of its parameters, gradients and optimizer state.

PyTorch's FSDP2 gathers the parameters of a part of the model for as long as they are computed with. Batches are in
parts as in ``data_parallel.py``. The saved state is that of one device: all workers gather the whole tensors at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count as numbers
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from penstock.training.checkpoint import State
from penstock.training.spread import shares
from penstock.training.spread.batchnorm import synchronize, unsynchronized
from penstock.training.spread.data_parallel import CHECKED, Distributed, Outcome, difference
from penstock.training.spread.gang import Gang, Unspreadable, gone
from penstock.training.spread.parts import InParts, Part

_meshes = numbers()


class _Calls(nn.Module):
    """Calls of the task's loss and metrics as one module's forward, so that torch sees every use of the model."""

    reshard: Callable[[], None]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Sharded(Distributed):
    """A trial in training on devices that each hold a share of it. The model is whole, on the CPU, until they join."""

    most = inf  # rows of a batch that are computed
    mesh: DeviceMesh | None = None
    root: _Calls

    def brought(self, model: nn.Module) -> nn.Module:
        return model

    def join(self, gang: Gang) -> None:
        """Take this worker's share of the model; all workers are at the same state."""
        self.gang, self.seat = gang, (gang.rank, gang.count)
        if self.closure:
            raise Unspreadable(f"{type(self.optimizer).__name__} needs all parameters at once: use another optimizer")
        named = self.model.named_modules()
        if renormed := [f"{name}.weight" for name, one in named if getattr(one, "max_norm", None) is not None]:
            raise Unspreadable(f"the loss changes these parameters itself: {', '.join(renormed)} (max_norm)")
        optimizer, scheduler = self.optimizer.state_dict(), self.scheduler and self.scheduler.state_dict()
        # Torch caches facts of a mesh by its name, such as this worker's place: so each gang has a name of its own.
        assert gang.group is not None
        mesh = DeviceMesh.from_group(gang.group, self.device.type, mesh_dim_names=(f"shares {next(_meshes)}",))
        self.mesh = mesh
        self.root = _Calls(self.model)
        try:
            shares.share_out(self.root, mesh)
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise Unspreadable(f"torch cannot share out the model: {error}") from error
        self.optimize()
        shares.take_up(self.optimizer, optimizer)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(scheduler)
        if reason := shares.unlike(self.optimizer, mesh, self.device):
            raise Unspreadable(f"{reason}: use another optimizer")
        if gang.rank > 0:
            self.best_model = {}
        self.randomness = InParts(self.model, self.randomness.generators, self.part)
        synchronize(self.model, gang)

    def leave(self) -> None:
        """Let go of every connection to other workers, and so of all tensors that are shared out."""
        for name in ("model", "root", "optimizer", "scheduler", "zeroed", "randomness", "eval_randomness"):
            self.__dict__.pop(name, None)
        if self.mesh is not None:
            vars(self.mesh).get("_pg_registry", {}).clear()  # torch's cache would hold the connections
        gc.collect()  # modules and torch's hooks on them refer to each other

    def _rows(self) -> int:
        return int(min(super()._rows(), self.most))

    def batches(self) -> Iterator[Any]:
        def rows(whole: int) -> slice:
            part = Part.of(int(min(whole, self.most)), *self.seat)
            return slice(part.begin, part.end)

        return self.data.train.batches(self.epoch, self.place, self.batch_size, rows)

    def _loss(self, batch: Any) -> Tensor:
        part = self.part()
        self.gang.count_part(part.present)
        loss: Tensor = self.root(self.plain_loss, batch)
        if isinstance(loss, DTensor):
            raise Unspreadable("the loss computes with parameters outside of the modules that they belong to")
        return loss * (part.weight * self.seat[1])  # torch divides the sum of gradients by the count

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The metrics, as on one device. All workers call the model as often: one without a batch left repeats one."""
        gang, task, valid = self.gang, self.task, self.data.valid
        self.model.eval()
        keyed = self.eval_randomness.at(self.seed ^ 1, self.step)
        rounds = ceil(ceil(valid.length / task.eval_batch_size) / gang.count)
        rows, batch = [], None
        with self.autocast(), unsynchronized(self.model):
            batches = valid.all(task.eval_batch_size, gang.rank, gang.count)
            for number, (batch, length) in zip(numbers(gang.rank, gang.count), batches, strict=False):
                rows.append((number, length, self._measured(keyed.batch(number), batch)))
            if len(rows) < rounds:
                self._measured(keyed, next(iter(valid.all(task.eval_batch_size)))[0] if batch is None else batch)
        self.root.reshard()
        return self.averaged(rows)

    def _measured(self, keyed: Any, batch: Any) -> dict[str, float]:
        with keyed:
            values = self.root(self.task.metrics, self.model, batch, self.config)
        return {name: float(value) for name, value in values.items()}

    def weights(self) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = dict(self.model.state_dict())
        held = shares.whole(found, keep=self.gang.rank == 0)
        return {k: v.detach().to("cpu", copy=True) for k, v in held.items()} if self.gang.rank == 0 else {}

    def state(self, *, drawn: bool = True) -> State:
        """The state of one device, which all workers gather; only the first gets the whole tensors."""
        state, keep = super().state(drawn=drawn), self.gang.rank == 0
        for name in ("model", "optimizer"):
            state[name] = shares.whole(state[name], keep=keep)
        return state

    def told_state(self) -> State | None:
        state = self.state()
        return state if self.gang.rank == 0 else None

    def check(self, gang: Gang, parts: int = 1) -> None:
        """Join a gang, and compare; here all workers take the same rows first, as many as memory holds."""
        self.join(gang)
        before, place = {name: one.clone() for name, one in self.model.named_buffers()}, self.place
        places = range(place, self.data.train.length, self.batch_size)[:CHECKED]
        self.most = max(2 * gang.count, ceil(self.batch_size / gang.count))
        reason = ""
        for self.place in places:
            whole, ours = (self._try(seat, before) for seat in ((0, 1), (gang.rank, gang.count)))
            for step in (whole, ours):
                gang.sum(step.loss.div_(gang.count))
            found = difference(whole, ours, self.task.precision, gang.sum)
            reason = reason or found
        self.place, self.most = place, inf
        if any(reasons := gang.gather(reason)):
            raise Unspreadable(next(filter(None, reasons)))

    def _try(self, seat: tuple[int, int], before: dict[str, Tensor]) -> Outcome:
        """The outcome of the next batch, whole or in parts."""
        self.seat = seat
        synchronize(self.model, self.gang if seat[1] > 1 else None)
        try:
            step = self.attempt(next(self.batches()), before)
        except Exception as error:
            if gone(error) or seat[1] == 1:
                raise
            raise Unspreadable(f"a part of a batch fails: {type(error).__name__}: {error}") from error
        local = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in step.gradients.items()}
        return replace(step, gradients=local)
