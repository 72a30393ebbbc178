"""The batches of one step of a bundle: one for every position in the data at which trials stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from penstock.training.fused.stacked import Unfusable
from penstock.training.loop import Training

Position = tuple[int, int]  # the epoch, and the place in its order
Shapes = tuple[tuple[torch.Size, torch.dtype] | type, ...]  # of everything that a batch holds


@dataclass(frozen=True)
class Batches:
    """Batches by position. Trials at one position share its batch."""

    read: dict[Position, Any]

    def own(self, trial: Training) -> Any:
        """The batch of one trial."""
        return self.read[position_of(trial)]

    def together(self, trials: Sequence[Training]) -> tuple[Any, bool]:
        """One batch for some trials, and whether they share it; otherwise its tensors have the trials in front."""
        positions = [position_of(trial) for trial in trials]
        if len(set(positions)) == 1:
            return self.read[positions[0]], True
        return tree_map(stack_leaves, *(self.read[at] for at in positions)), False

    def alike(self, trials: Sequence[Training], chosen: Sequence[Training]) -> list[tuple[int, int]]:
        """The rows, from ``first`` to ``last``, of neighbours among the chosen whose batches have one shape."""
        shapes = {at: shapes_of(batch) for at, batch in self.read.items()}
        wanted = set(map(id, chosen))
        keys = [shapes[position_of(trial)] if id(trial) in wanted else None for trial in trials]
        found, last = [], 0
        for key, run in groupby(keys):
            first, last = last, last + len(list(run))
            if key is not None:
                found.append((first, last))
        return found


def position_of(trial: Training) -> Position:
    """Where a trial stands in the data."""
    return trial.epoch, trial.place


def shapes_of(batch: Any) -> Shapes:
    """The shapes and types of everything that a batch holds."""
    return tuple((v.shape, v.dtype) if isinstance(v, torch.Tensor) else type(v) for v in tree_flatten(batch)[0])


def full(batch: Any, shared: bool, rows: int) -> bool:
    """Whether a batch has as many rows as most batches have."""
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    return rows in {n for leaf in tensors for n in (leaf.shape[:1] if shared else leaf.shape[1:2])}


def stack_leaves(*leaves: Any) -> Any:
    """The tensors of several positions in one; everything else must be the same at all of them."""
    if isinstance(leaves[0], torch.Tensor):
        return torch.stack(leaves)
    if any(leaf != leaves[0] for leaf in leaves):
        raise Unfusable(f"a batch holds a {type(leaves[0]).__name__} that differs from position to position")
    return leaves[0]
