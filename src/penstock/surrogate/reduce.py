"""Surrogates that are smaller in other ways than width: fewer blocks, fewer rows of data, fewer pixels.

No theory says that hyperparameters carry over from these: a study takes them only where its rank check admits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from penstock.surrogate.settings import Surrogate

Number = int | bool | str


def shallower(model: nn.Module, depth: int) -> tuple[int, int]:
    """Keep every ``depth``-th block of each run of equal blocks, in place; gives how many there were, and are left.

    A run lies in an ``nn.Sequential`` or ``nn.ModuleList``, and its blocks have parameters and modules of their own.

    >>> model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(5)), nn.Linear(8, 8))
    >>> shallower(model, 2), len(model)
    ((5, 3), 4)
    """
    before = after = 0
    for module in list(model.modules()):
        if not isinstance(module, nn.Sequential | nn.ModuleList):
            continue
        left: list[tuple[str, nn.Module]] = []
        for run in _runs(list(module._modules.items())):
            kept = run[::depth]
            left += kept
            if len(run) > 1:
                before, after = before + len(run), after + len(kept)
        if len(left) < len(module):
            numbered = all(name.isdigit() for name, _ in left)
            module._modules = {str(i) if numbered else name: block for i, (name, block) in enumerate(left)}
    return before, after


def _runs(blocks: list[tuple[str, Any]]) -> list[list[tuple[str, nn.Module]]]:
    """The modules of a list in their order, with equal blocks that follow each other as one run."""
    runs: list[list[tuple[str, nn.Module]]] = []
    for place, one in enumerate(blocks):
        if runs and _are_equal(runs[-1][-1][1], one[1], place):
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _are_equal(one: nn.Module, other: nn.Module, place: int) -> bool:
    """Whether the block at a place is like the one before it: rates may differ, and a number that is its place."""
    if not any(other.children()) or not any(True for _ in other.parameters()):
        return False
    before, after = _numbers(one), _numbers(other)
    return before.keys() == after.keys() and all(
        value == after[name] or (value, after[name]) == (place - 1, place) for name, value in before.items()
    )


def _numbers(block: nn.Module) -> dict[tuple[str, str], Any]:
    """The classes, sizes and whole numbers of a block, by module and name."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        found[path, ""] = type(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            found[path, name] = None if tensor is None else tensor.shape
        for name, value in vars(module).items():
            if isinstance(value, Number) or (
                isinstance(value, tuple | list) and all(isinstance(one, Number) for one in value)
            ):
                found[path, name] = value
    return found


def reduced(pair: Any, surrogate: Surrogate, seed: int) -> Any:
    """Training and validation data with a part of the training rows, and with fewer pixels in both."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return pair
    train, valid = pair
    return _of(train, surrogate.data, surrogate.resolution, seed), _of(valid, 1.0, surrogate.resolution, seed)


def _of(data: Any, part: float, resolution: float, seed: int) -> Any:
    tensors = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple | list) else [data]
    if all(isinstance(one, Tensor) for one in tensors):
        rows = _rows(min((len(one) for one in tensors), default=0), part, seed)
        if isinstance(data, Mapping):
            return {name: coarser(one[rows], resolution) for name, one in data.items()}
        made = tuple(coarser(one[rows], resolution) for one in tensors)
        return made[0] if isinstance(data, Tensor) else made
    return Fewer(data, part, resolution, seed) if hasattr(data, "__len__") and hasattr(data, "__getitem__") else data


def _rows(length: int, part: float, seed: int) -> Tensor:
    """The rows that are left, in their order."""
    if part == 1:
        return torch.arange(length)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    return order[: max(1, round(part * length))].sort().values


def coarser(images: Tensor, resolution: float, ndim: int = 4) -> Tensor:
    """Images with fewer pixels, each the mean of those that it stands for; another tensor stays as it is.

    >>> coarser(torch.ones(2, 3, 8, 6), 0.5).shape, coarser(torch.ones(2, 3), 0.5).shape
    (torch.Size([2, 3, 4, 3]), torch.Size([2, 3]))
    """
    if resolution == 1 or images.ndim != ndim or not (images.is_floating_point() or images.dtype == torch.uint8):
        return images
    size = [max(1, round(resolution * side)) for side in images.shape[-2:]]
    whole = images if ndim == 4 else images[None]
    made = F.interpolate(whole.float(), size, mode="area")
    made = (made if images.is_floating_point() else made.round()).to(images.dtype)
    return made if ndim == 4 else made[0]


class Fewer(Dataset[Any]):
    """A part of a map-style dataset's rows, whose images have fewer pixels."""

    def __init__(self, dataset: Any, part: float, resolution: float, seed: int) -> None:
        self.dataset, self.resolution = dataset, resolution
        self.rows = _rows(len(dataset), part, seed).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self._coarser(self.dataset[self.rows[row]])

    def _coarser(self, sample: Any) -> Any:
        if isinstance(sample, Tensor):
            return coarser(sample, self.resolution, 3)
        if isinstance(sample, Mapping):
            return {name: self._coarser(one) for name, one in sample.items()}
        return tuple(map(self._coarser, sample)) if type(sample) in (tuple, list) else sample
