"""A step in parts: trials whose values send them different ways are run in groups that go the same way.

A layer drop skips a layer for one trial and not for another; experts get other rows in each. Such a step first runs for
all trials together, up to the line where they part, and then for each group from its beginning. Trials never see each
other's values, so a group gives each of its trials what a run of all would. In the end every trial may be alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from penstock.training.fused.promoting import held
from penstock.training.fused.refusing import Parted, Unfusable
from penstock.training.fused.watching import Branched

Tensors = Mapping[str, torch.Tensor]
Written = list[tuple[torch.Tensor, torch.Tensor]]  # rows of buffers, and the values that they are to have
Together = Callable[..., Any]  # (params, buffers, batch, keys, numbers): the losses of some trials
Grads = Sequence[Any]  # by parameter: of all rows, ``Rows``, or None where no loss reaches it


class Rows(tuple[torch.Tensor | None, ...]):
    """The gradient of a parameter that the losses of some trials reach and those of others do not, by row."""


class Parting:
    """Runs a loss in parts, once trials were seen to part."""

    def __init__(self) -> None:
        self.reason = ""  # the line where trials part
        self._pieces: dict[str, tuple[torch.Tensor, ...]] = {}  # the rows of parameters, where the last run had parts

    def run(
        self, together: Together, take: Callable[[], Written], params: Tensors, buffers: Tensors, batch: Any,
        shared: bool, keys: torch.Tensor | None, numbers: Sequence[torch.Tensor],
    ) -> tuple[Any, Written]:  # fmt: skip
        """The losses of all trials, and the values that are to be written into buffers once the backward is over.

        ``together`` runs trials that go the same way, and ``take`` gives what it would write. Where trials part for
        the first time, nothing was kept to begin again from: ``Branched`` asks for the step to be taken again.
        """
        self._pieces = {}
        versions = [p._version for p in params.values()]
        before = {name: buffer.clone() for name, buffer in buffers.items()} if self.reason else {}
        try:
            return together(params, buffers, batch, keys, numbers), take()
        except Parted as error:
            said, groups = str(error), list(error.groups)
        first, self.reason = not self.reason, self.reason or said
        if first:
            raise Branched
        if versions != [p._version for p in params.values()]:
            raise Unfusable(f"{said}; and the loss writes weights before that line")
        for name, value in before.items():
            buffers[name].copy_(value)
        return self._in_parts(groups, together, take, params, buffers, batch, shared, keys, numbers)

    def _in_parts(
        self, groups: list[Sequence[int]], together: Together, take: Callable[[], Written], params: Tensors,
        buffers: Tensors, batch: Any, shared: bool, keys: torch.Tensor | None, numbers: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, Written]:  # fmt: skip
        trials = len(next(iter(params.values())))
        self._pieces = {name: torch.split(p, [1] * trials) for name, p in params.items() if p.requires_grad}
        losses: dict[int, torch.Tensor] = {}
        written: Written = []
        while groups:
            if held():
                gc.collect()  # tensors of a run that was left, which its error may still hold
            group = groups.pop()
            index = torch.tensor(group)

            def own(leaf: Any, index: torch.Tensor = index) -> Any:
                return leaf.index_select(0, index.to(leaf.device)) if isinstance(leaf, torch.Tensor) else leaf

            some = {name: _some(p, self._pieces.get(name), group) for name, p in params.items()}
            copies = {name: own(buffer) for name, buffer in buffers.items()}
            given = batch if shared else tree_map(own, batch), tree_map(own, keys), tree_map(own, list(numbers))
            try:
                with _part():
                    made, assigned = together(some, copies, *given), take()
            except Parted as error:
                groups += [[group[row] for row in rows] for rows in error.groups]
                continue
            if not isinstance(made, torch.Tensor) or made.shape != (len(group),):
                raise Unfusable("the loss of a trial is no scalar tensor")
            losses.update(zip(group, made.unbind(), strict=True))
            for name, copy in {**some, **copies}.items():
                into = buffers[name] if name in buffers else params[name]
                # A BatchNorm writes its buffers without counting a version.
                if name in buffers or (not copy.requires_grad and copy._version and copy._base is None):
                    into.index_copy_(0, index.to(into.device), copy)
                values = [value for buffer, value in assigned if buffer is copy]
                written += [(into[row : row + 1], value[i : i + 1]) for value in values for i, row in enumerate(group)]
        return torch.stack([losses[row] for row in range(trials)]), written

    def gradients(self, losses: torch.Tensor, wanted: Tensors) -> Grads:
        """The gradients of parameters by name; after a run in parts, those of each row that its loss reaches."""
        if not self._pieces:
            return torch.autograd.grad(losses.sum(), list(wanted.values()), allow_unused=True)
        pieces = [self._pieces[name] for name in wanted]
        self._pieces = {}
        flat = iter(torch.autograd.grad(losses.sum(), [row for each in pieces for row in each], allow_unused=True))
        return [_joined([next(flat) for _ in each]) for each in pieces]


def _some(p: torch.Tensor, pieces: Sequence[torch.Tensor] | None, group: Sequence[int]) -> torch.Tensor:
    """Some rows of a parameter; a single row is no copy."""
    rows = [p[row : row + 1] if pieces is None else pieces[row] for row in group]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _joined(rows: Sequence[torch.Tensor | None]) -> Any:
    there = [row for row in rows if row is not None]
    if len(there) == len(rows):
        return torch.cat(there)
    return Rows(None if row is None else row[0] for row in rows) if there else None


_parts: list[bool] = []


@contextmanager
def _part() -> Iterator[None]:
    _parts.append(True)
    try:
        yield
    finally:
        _parts.pop()


def in_parts() -> bool:
    """Whether a part of a bundle's trials is running now."""
    return bool(_parts)
