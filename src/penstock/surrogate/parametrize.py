"""Maximal-update parametrization: what a narrower model's initial values and learning rates are multiplied by.

The base width is the target's, so all of its factors are 1, and it stays the user's plain model and optimizer. With m,
the narrow width by the target's (1/S), the table is table 8 of Yang et al., "Tensor Programs V", written for table 3's
form without multipliers (Hydro §4.1, figure 7):

| role   | dimensions that grow  | initial values | SGD       | Adam and others |
|--------|-----------------------|----------------|-----------|-----------------|
| input  | none that is summed   | 1              | m         | 1               |
| hidden | summed, and others    | m^-1/2         | 1         | 1/m             |
| output | summed alone          | 1/m; last: 0   | 1/m       | 1/m             |
| tied   | output and table both | 1              | m         | 1               |
| fixed  | none                  | 1              | 1         | 1               |

Adam's epsilon stands beside a gradient's size. For parameters with other dimensions that grow, this is 1/m times the
target's, and so is the epsilon: where it is far above the gradients, Adam is SGD, and has SGD's factors.

Initial values are rescaled from the target's own, which a narrow parameter is a part of. Biases, gains of norms,
embeddings and depthwise filters are of the role input. What a tied table gives as an output layer is multiplied by 1/m.
The weight decay of a parameter is divided by its learning rate's factor, so that rate × decay stays, as mup has it.
Momentum and betas stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import nn

from penstock.errors import TaskError
from penstock.surrogate.trace import Place, Traced
from penstock.training.rates import PLAIN, Factor

Role = Literal["input", "hidden", "output", "tied", "fixed"]
Family = Literal["SGD", "Adam"]

FAMILIES: dict[type[torch.optim.Optimizer], Family] = {
    torch.optim.SGD: "SGD",
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "Adam",
    torch.optim.NAdam: "Adam",
    torch.optim.RAdam: "Adam",
    torch.optim.Adagrad: "Adam",
    torch.optim.RMSprop: "Adam",
}


@dataclass(frozen=True)
class Part:
    """A parameter of a narrow model: its role, and its width by the target's along what is summed over and the rest.

    ``width`` and ``narrow`` are the size of its narrowest growing dimension in the target and in the narrow model;
    ``numbers`` is how many the parameter has in the target. ``last`` is whether it is a last layer's that begins with
    zeros, and ``attention`` what the scores of attention multiply it by; ``flow`` finds both. ``zero`` is whether it is
    a bias that does, and ``rows`` are those that do, of the target's and of its own, as they make queries.
    """

    role: Role
    summed: float
    rest: float
    width: int = 0
    narrow: int = 0
    numbers: int = 0
    last: bool = False
    attention: float = 1.0
    zero: bool = False
    rows: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @property
    def init(self) -> float:
        """What the target's initial values are multiplied by."""
        if self.zero or (self.role == "output" and self.last):
            return 0.0
        return self.attention * {"hidden": 1 / math.sqrt(self.summed), "output": 1 / self.summed}.get(self.role, 1.0)

    def rate(self, family: Family) -> float:
        """The factor of the learning rate; a parameter that stands for a multiple of itself has the multiple's too."""
        multiple = self.attention**2 if family == "SGD" else self.attention
        if self.role == "tied":
            return multiple * (self.summed if family == "SGD" else 1.0)
        return multiple * (self.rest / self.summed if family == "SGD" else 1 / self.summed)

    def factor(self, family: Family) -> Factor:
        """The factors of the learning rate and of the epsilon."""
        return Factor(self.rate(family), 1.0 if family == "SGD" else self.rate("Adam") / self.rate("SGD"))

    @property
    def multiplier(self) -> float:
        """What a tied table's output is multiplied by."""
        return 1 / self.summed if self.role == "tied" else 1.0


def parts(model: nn.Module, traced: Traced, scale: float) -> dict[str, Part]:
    """The parameters of a target as they are in its narrow twin, by name."""

    def sizes(place: Place, size: int) -> tuple[int, int]:
        found = traced.sizes.get(place, size)
        return (size, traced.at(found, scale)) if traced.grows(place) else (size, size)

    return _parts(model, sizes, traced)


def compared(target: nn.Module, narrow: nn.Module, traced: Traced) -> dict[str, Part]:
    """The same of a target and a twin that the user has made, by the sizes of both."""
    own = dict(narrow.named_parameters())
    for name, p in target.named_parameters():
        if name not in own or own[name].ndim != p.ndim:
            raise TaskError(f"narrow() must make the target's model with smaller sizes: it has no {name} like it.")

    def sizes(place: Place, size: int) -> tuple[int, int]:
        return size, own[f"{place.module}.{place.name}".lstrip(".")].shape[place.part or 0]

    return _parts(target, sizes, traced)


def _parts(model: nn.Module, sizes: Callable[[Place, int], tuple[int, int]], traced: Traced) -> dict[str, Part]:
    found = {}
    grouped = {path: getattr(module, "groups", 1) for path, module in model.named_modules()}  # channels of one group
    for name, p in model.named_parameters():
        path, _, own = name.rpartition(".")
        places = [Place(path, own, part) for part in range(p.ndim)]
        growing = {
            one: both for one, size in zip(places, p.shape, strict=True) if len({*(both := sizes(one, size))}) > 1
        }
        summed = [one for one in growing if one in traced.summed]
        if len(summed) == len(growing) > 1:  # a matrix that is used both ways: by its layout
            summed = summed[-1:]
        rest = [one for one in growing if one not in summed]
        role: Role = "fixed" if not growing else "hidden" if summed and rest else "output" if summed else "input"
        if role == "output" and (path, own) in traced.looked_up:
            role = "tied"
        layers = [widths for one, widths in growing.items() if one.part != 1 or grouped.get(path, 1) == 1]
        by = [prod(growing[one][1] / growing[one][0] for one in some) for some in (summed, rest)]
        width, narrow = (min((one[i] for one in layers), default=0) for i in (0, 1))
        found[name] = Part(role, by[0], by[1], width, narrow, p.numel())
    return found


def family(optimizer: torch.optim.Optimizer) -> Family:
    """The family of an optimizer, by its class; other optimizers are refused."""
    if type(optimizer) not in FAMILIES:
        known = ", ".join(kind.__name__ for kind in FAMILIES)
        raise TaskError(
            f"A surrogate's learning rates are known for {known}, got {type(optimizer).__name__}: use one of these, or "
            "leave surrogate= out."
        )
    return FAMILIES[type(optimizer)]


def rates(known: Mapping[str, Part], optimizer: torch.optim.Optimizer) -> dict[str, Factor]:
    """The factors of the learning rates and epsilons that are not 1, by parameter."""
    of = family(optimizer)
    return {name: factor for name, part in known.items() if (factor := part.factor(of)) != PLAIN}
