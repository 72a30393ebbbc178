"""The numbers of torch's own modules that may differ from trial to trial of a bundle, such as a dropout's rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import nn

from penstock.training.fused.stacked import Unfusable

# The attributes that torch's modules may have per trial, by exact class: the name, and whether both ways can.
_DROPOUT = ("p", True)
PER_TRIAL: dict[type[nn.Module], tuple[tuple[str, bool], ...]] = {
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), (_DROPOUT,)),
    **dict.fromkeys((nn.AlphaDropout, nn.FeatureAlphaDropout), (_DROPOUT,)),
    nn.MultiheadAttention: (("dropout", True),),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), (("dropout", True),)),
    nn.LeakyReLU: (("negative_slope", False),),
    nn.ELU: (("alpha", False),),
    nn.CELU: (("alpha", False),),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), (("eps", False), ("momentum", False))),
    nn.LayerNorm: (("eps", False),),
    nn.GroupNorm: (("eps", False),),
}


class PerTrial(float):
    """A number of a module that differs from trial to trial; ``value`` is the tensor that an operator computes with.

    A plain number would be that of one trial, so every use as a plain number is refused.
    """

    def __new__(cls, name: str, every: Sequence[float]) -> PerTrial:
        return super().__new__(cls, "nan")  # an operator that takes it for a plain number shows that

    def __init__(self, name: str, every: Sequence[float]) -> None:
        self.name = name
        self.every = list(every)  # by row; plain numbers, as a compiler cannot look into tensors
        self.value: torch.Tensor | None = None

    def give(self, value: torch.Tensor) -> None:
        """Let operators compute with the numbers of some rows."""
        self.value = value

    def _compare(self, holds: list[bool]) -> bool:
        if any(holds) and not all(holds):
            self._refuse()
        return holds[0]

    def __gt__(self, other: float) -> bool:
        if other == 0:  # torch skips a dropout of rate 0; here it runs if any trial's rate is above
            return any(own > 0 for own in self.every)
        return self._compare([own > other for own in self.every])

    def __lt__(self, other: float) -> bool:
        return self._compare([own < other for own in self.every])

    def __ge__(self, other: float) -> bool:
        return self._compare([own >= other for own in self.every])

    def __le__(self, other: float) -> bool:
        return self._compare([own <= other for own in self.every])

    def _refuse(self, *_: object) -> NoReturn:
        raise Unfusable(f"{self.name} differs from trial to trial, and is used where all trials must have the same")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __float__ = __int__ = __round__ = _refuse
