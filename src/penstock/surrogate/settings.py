"""The settings of a study's surrogates, each checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import StudyError
from penstock.numeric import finite, shown, whole

STEPS = 3  # after which the coordinate check looks at activations
NARROWEST = 8  # units: narrower layers are too far from the limit of wide ones for hyperparameters to carry over


@dataclass(frozen=True)
class Surrogate:
    """Tune narrow twins of the task's model, and train the best configs at full width (Hydro §2.2, §4.1).

    >>> Surrogate(scale=8)
    Surrogate(scale=8, best=None, eager=0.5, required=False)

    Args:
        scale: how many times narrower a surrogate is.
        best: how many of the best configs race at full width; what the rank check calls for, if None.
        eager: the part of the surrogates after which the race begins.
        required: whether to refuse a model that cannot be analysed. Otherwise a study goes on without surrogates, and
            says so.
    """

    scale: int = 8
    best: int | None = None
    eager: float = 0.5
    required: bool = False

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Surrogate:
        """The settings that a log has kept, beside facts of the study's own.

        >>> Surrogate.of({"scale": 4, "best": 2, "eager": 0.5, "required": False, "pairs": 0}).best
        2
        """
        return cls(**{one.name: kept[one.name] for one in fields(cls)})

    def __post_init__(self) -> None:
        made = whole(self.scale)
        if made is None or made < 2:
            raise StudyError(f"Surrogate(scale=) must be a whole number from 2 on, got {shown(self.scale)}.")
        object.__setattr__(self, "scale", made)
        best, eager = whole(self.best), finite(self.eager)
        if self.best is not None and (best is None or best < 1):
            raise StudyError(f"Surrogate(best=) must be None or a whole number above 0, got {shown(self.best)}.")
        if eager is None or not 0 <= eager <= 1:
            raise StudyError(f"Surrogate(eager=) must be a number from 0 to 1, got {shown(self.eager)}.")
        object.__setattr__(self, "best", best)
        object.__setattr__(self, "eager", float(eager))
        if not isinstance(self.required, bool):
            raise StudyError(f"Surrogate(required=) must be True or False, got {shown(self.required)}.")
