"""Copies of a trial's tensors in one vector: a device takes few calls for all of them, and is read back once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

ON_DEVICE = 2**27  # numbers of a vector, 1 GiB, beyond which it lies on the host


@dataclass(frozen=True)
class Copies(Mapping[str, torch.Tensor]):
    """Tensors by name, each a part of a vector of float64."""

    vector: torch.Tensor
    places: dict[str, tuple[int, int, torch.Size]]  # where each begins and ends, and its shape

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Copies:
        """Copies of some tensors, where the first of them that is on an accelerator lies.

        >>> copies = Copies.of({"a": torch.ones(2, 2), "b": torch.tensor(3)})
        >>> copies.vector.tolist(), copies["b"]
        ([1.0, 1.0, 1.0, 1.0, 3.0], tensor(3., dtype=torch.float64))
        """
        ends = list(accumulate((one.numel() for one in tensors.values()), initial=0))
        device = next((one.device for one in tensors.values() if one.device.type != "cpu"), torch.device("cpu"))
        vector = torch.empty(ends[-1], dtype=torch.float64, device=device if ends[-1] <= ON_DEVICE else "cpu")
        places = {name: (*ends, one.shape) for (name, one), ends in zip(tensors.items(), pairwise(ends), strict=True)}
        made = cls(vector, places)
        for name, one in tensors.items():
            made[name].copy_(one.detach())
        return made

    def __getitem__(self, name: str) -> torch.Tensor:
        begin, end, shape = self.places[name]
        return self.vector[begin:end].view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def less(self, before: Copies) -> Copies:
        """What became of each tensor, less what it was, where it was there."""
        if self.places == before.places:
            return Copies(self.vector - before.vector, self.places)
        made = Copies(self.vector.clone(), self.places)
        for name in made.keys() & before.keys():
            made[name].sub_(before[name])
        return made

    def numbers(self, names: Sequence[str]) -> int:
        """How many numbers some of the tensors have."""
        return sum(end - begin for begin, end, _ in map(self.places.__getitem__, names))


def lengths(vectors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[list[float]]:
    """The length of each part of some vectors, whose parts have these sizes; the device is read once.

    >>> lengths([torch.tensor([3.0, 4.0, 2.0])], [2, 1])
    [[5.0, 2.0]]
    """
    parts = [part.square().sum() for vector in vectors for part in torch.split(vector, list(sizes))]
    found = torch.stack(parts).sqrt().tolist() if parts else []
    return [found[i : i + len(sizes)] for i in range(0, len(found), len(sizes))] or [[] for _ in vectors]
