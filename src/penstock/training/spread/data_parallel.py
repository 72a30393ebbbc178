"""A trial on several devices: data-parallel, and with the batches that one device would have seen.

The global batch stays the same, however many devices there are (RubberBand §3): each worker has its rows of every
batch, and its loss counts by their number. So parameters, BatchNorm's statistics, dropout's masks and metrics are those
of one device, to rounding. A task for which that is untrue (its loss is no mean over samples) is found by comparing a
few batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import count as numbers
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.training.checkpoint import State
from penstock.training.loop import Training
from penstock.training.random.keyed import Solo
from penstock.training.runs.base import out_of_memory
from penstock.training.spread.batchnorm import synchronize, unsynchronized
from penstock.training.spread.gang import Gang, Unspreadable, gone
from penstock.training.spread.parts import InParts, Part

CHECKED = 4  # batches that are compared whole and in parts: the parts of a single one may happen to be alike

# Buffers are the same on all workers without torch's help. The setting's name depends on torch's version.
_BUFFERS = next(
    n for n in ("forward_sync_buffers", "broadcast_buffers") if n in signature(DistributedDataParallel).parameters
)


class Distributed(Training):
    """A trial in training on the devices of a gang. Each worker has such an object; all take every step together."""

    gang: Gang
    seat: tuple[int, int] = (0, 1)  # which part of a batch this worker has, and of how many
    together: DistributedDataParallel | None = None
    _timed: list[float] | None = None  # where the seconds of each step are noted, if they are wanted
    _trained: list[tuple[str, nn.Parameter]]

    def join(self, gang: Gang) -> None:
        """Train with a gang from the next step on; all its workers are at the same state."""
        self.gang, self.seat = gang, (gang.rank, gang.count)
        spread = gang.count > 1
        synchronize(self.model, gang if spread else None)
        generators = self.randomness.generators
        whole = not spread and self.parts == 1
        self.randomness = Solo(self.model, generators, self.task.loss) if whole else self.in_parts
        self.together = None
        self._trained = [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]
        if spread:
            try:
                settings: dict[str, Any] = {"process_group": gang.group, _BUFFERS: False}
                self.together = DistributedDataParallel(_Loss(self), **settings)
            except RuntimeError as error:
                if gone(error):
                    raise
                raise Unspreadable(f"torch cannot wrap the model: {error}") from error

    @cached_property
    def in_parts(self) -> InParts:
        return InParts(self.model, self.randomness.generators, self.part)

    def leave(self) -> None:
        """Let go of every connection to other workers."""
        self.together = None
        synchronize(self.model, None)

    def take_over(self, gang: Gang) -> None:
        """Go on from where the first worker of a gang is."""
        state = gang.hand_on(self.state() if gang.rank == 0 else None)
        if gang.rank > 0:
            self.restore(state, inherited=False)

    @property
    def full(self) -> bool:
        """Whether the next batch is as large as others."""
        return self._rows() == self.batch_size

    def part(self) -> Part:
        """This worker's part of the next batch, or the smaller part that it takes now."""
        return self._ours() if self.parts == 1 else self._taken

    def _ours(self) -> Part:
        return Part.of(self._rows(), *self.seat)

    def divide(self, parts: int) -> str:
        """As on one device: of so many parts of a batch each worker takes its own, one after another.

        Parts were compared with whole batches before.
        """
        if reason := self._indivisible(parts):
            return reason
        self.parts = parts
        return ""

    def _accumulate(self, batch: Any) -> Tensor:
        """Every worker takes as many parts, as BatchNorm exchanges sums in each; the last exchanges gradients."""
        ours, total = self._ours(), torch.zeros((), device=self.device)
        many = min(-(-one // self.gang.count) for one in (self.parts, ours.whole))
        for rank in range(many):
            some = Part.of(ours.rows, rank, many)
            begin, end = ours.begin + some.begin, ours.begin + some.end
            self._taken = Part(begin, end, ours.whole, ours.present and some.present)
            if self.together is None:
                total = total + self._backward(some.cut(batch), self._taken.weight).detach()
                continue
            with nullcontext() if rank == many - 1 else self.together.no_sync():
                total = total + self._backward(some.cut(batch)).detach()
        return total

    def batches(self) -> Iterator[Any]:
        def rows(whole: int) -> slice:
            part = Part.of(whole, *self.seat)
            return slice(part.begin, part.end)

        return self.data.train.batches(self.epoch, self.place, self.batch_size, rows)

    def train_step(self, batch: Any) -> None:
        if self._timed is None:
            super().train_step(batch)
            return
        began = self._now()
        super().train_step(batch)
        self._timed.append(self._now() - began)

    def time_steps(self, seconds: list[float] | None) -> None:
        """Note the seconds of every step in a list from now on, or no more."""
        self._timed = seconds

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def backward(self, batch: Any) -> Tensor:
        loss = super().backward(batch)
        if self.together is None:
            return loss
        if unused := [name for name, one in self._trained if one.grad is None]:  # torch has exchanged no gradient then
            raise Unspreadable(f"the loss does not always use these parameters: {', '.join(unused)}")
        if self.closure:  # the optimizer looks at the loss
            loss = self.gang.sum(loss.detach() / self.gang.count)
        return loss

    def _loss(self, batch: Any) -> Tensor:
        if self.together is None:
            return super()._loss(batch)
        part = self.part()
        self.gang.count_part(part.present)
        loss: Tensor = self.together(batch)
        return loss * (part.weight * self.gang.count)  # torch divides the sum of gradients by the count

    def plain_loss(self, batch: Any) -> Tensor:
        """The task's loss of this worker's rows."""
        return super()._loss(batch)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        gang, task = self.gang, self.task
        self.model.eval()
        keyed = self.eval_randomness.at(self.seed ^ 1, self.step)
        rows = []
        with self.autocast(), unsynchronized(self.model):
            batches = self.data.valid.all(task.eval_batch_size, gang.rank, gang.count)
            for number, (batch, length) in zip(numbers(gang.rank, gang.count), batches, strict=False):
                with keyed.batch(number):
                    values = task.metrics(self.model, batch, self.config)
                rows.append((number, length, {name: float(value) for name, value in values.items()}))
        return self.averaged(rows)

    def averaged(self, rows: list[tuple[int, int, dict[str, float]]]) -> dict[str, float]:
        """The metrics of all workers' batches: numbers, lengths and values."""
        sums, lengths = dict[str, float](), Counter[str]()
        for _, length, values in sorted(row for part in self.gang.gather(rows) for row in part):
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value * length
                lengths[name] += length
        return {name: value / lengths[name] for name, value in sums.items()}

    def told_state(self) -> State | None:
        """The state, for the first worker, and None for others; all are asked at once."""
        return self.state() if self.gang.rank == 0 else None

    def check(self, gang: Gang, parts: int = 1) -> None:
        """Join a gang, if batches in parts give the same as whole ones: losses, gradients and buffers.

        The first worker takes whole batches; where memory only holds one of ``parts``, batches of that size. The
        comparison leaves no trace.
        """
        size, self.batch_size = self.batch_size, -(-self.batch_size // parts)
        try:
            self._compare(gang)
        finally:
            self.batch_size = size

    def _compare(self, gang: Gang) -> None:
        before, place = {name: one.clone() for name, one in self.model.named_buffers()}, self.place
        places = range(0, self.data.train.length, self.batch_size)[:CHECKED]
        self.place = 0  # where batches are full
        whole, unused = list[Outcome](), list[str]()
        if gang.rank == 0:
            batches = self.data.train.batches(self.epoch, 0, self.batch_size)
            whole = [self.attempt(batch, before) for batch, _ in zip(batches, places, strict=False)]
            unused = sorted({name for one in whole for name, gradient in one.gradients.items() if gradient is None})
        if unused := gang.hand_on(unused):
            raise Unspreadable(f"the loss does not use these parameters: {', '.join(unused)}")
        self.join(gang)
        reason, batches = "", self.batches()
        for i, self.place in enumerate(places):
            try:
                parts = self.attempt(next(batches), before)
            except Exception as error:
                if gone(error) or out_of_memory(error):
                    raise
                raise Unspreadable(f"a part of a batch fails: {type(error).__name__}: {error}") from error
            gang.sum(parts.loss.div_(gang.count))
            reason = reason or ("" if not whole else difference(whole[i], parts, self.task.precision))
        self.place = place
        if reason := gang.hand_on(reason):
            raise Unspreadable(reason)

    def attempt(self, batch: Any, before: dict[str, Tensor]) -> Outcome:
        """The outcome of a batch; the model's buffers are as before then."""
        self.model.train()
        versions = {name: one._version for name, one in self.model.named_parameters()}
        with self.randomness.at(self.seed, self.step):
            loss = self._loss(batch)
            self.randomness.backward(loss)
        if changed := [name for name, one in self.model.named_parameters() if one._version != versions[name]]:
            raise Unspreadable(f"the loss changes these parameters itself: {', '.join(changed)}")
        if made := [n for n, one in self.model.named_buffers() if n not in before or one.shape != before[n].shape]:
            raise Unspreadable(f"the model makes these buffers while it computes: {', '.join(made)}")
        step = Outcome(
            loss.detach().double(),
            {name: one.grad for name, one in self.model.named_parameters() if one.requires_grad},
            {name: one.clone() for name, one in self.model.named_buffers()},
        )
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(before[name])
        for parameter in self.model.parameters():
            parameter.grad = None
        return step


@dataclass
class Outcome:
    """The loss, the gradients and the buffers after one batch."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def difference(whole: Outcome, parts: Outcome, precision: str, total: Callable[[Tensor], Tensor] | None = None) -> str:
    """The difference that is larger than rounding, in words; nothing where the batch may be taken in parts.

    Where each worker has a share of the gradients, ``total`` gives the sum over all shares.
    """
    dtypes = {one.dtype for one in whole.gradients.values() if one is not None}
    exact = dtypes == {torch.float64} and precision == "fp32"
    bound = 1e-7 if exact else 1e-3 if precision == "fp32" else 5e-2
    given = {name: one for name, one in whole.gradients.items() if one is not None}
    norms, apart = _norms([(one, parts.gradients[name]) for name, one in given.items()], total)
    one, other = float(whole.loss), float(parts.loss)
    if abs(one - other) > bound * max(abs(one), abs(other)):
        return f"the loss of a batch is {one:.6g} and the mean over its parts {other:.6g}: it is no mean over samples"
    without = [name for name in given if parts.gradients[name] is None]
    least = max(max(bound, 1e-3) * max(norms), 1e-300)  # a gradient that should be 0 is all rounding
    far = [name for name, norm, off in zip(given, norms, apart, strict=True) if off > 10 * bound * max(norm, least)]
    for name in [*without, *far]:
        return f"the gradient of {name} over a batch is not the mean of those over its parts"
    for name, buffer in whole.buffers.items():
        (norm,), (off,) = _norms([(buffer, parts.buffers[name])])
        if off > 10 * bound * max(norm, 1e-12):
            return f"what a batch leaves in the buffer {name} is not what its parts leave"
    return ""


def _norms(
    pairs: list[tuple[Tensor, Tensor | None]], total: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[float], list[float]]:
    """The norm of the first of each pair, and how far the second is from it, if there is one."""
    squares = [one.double().square().sum() for one, _ in pairs]
    squares += [
        one.new_zeros((), dtype=torch.float64) if b is None else (one.double() - b.double()).square().sum()
        for one, b in pairs
    ]
    found = torch.stack(squares)
    norms = (found if total is None else total(found)).sqrt().tolist()
    return norms[: len(pairs)], norms[len(pairs) :]


class _Loss(nn.Module):
    """The task's loss as one module's forward, so that torch sees every use that it makes of the model."""

    def __init__(self, training: Distributed) -> None:
        super().__init__()
        self.model = training.model
        self._plain = training.plain_loss

    def forward(self, batch: Any) -> Tensor:
        return self._plain(batch)
