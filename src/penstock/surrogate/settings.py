"""The settings of a study's surrogates, each checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import StudyError
from penstock.numeric import shown, whole

NARROWEST = 8  # units: narrower layers are too far from the limit of wide ones for hyperparameters to carry over


@dataclass(frozen=True)
class Surrogate:
    """Tune narrow twins of the task's model, and train the best configs at full width (Hydro §2.2, §4.1).

    >>> Surrogate(scale=8)
    Surrogate(scale=8, required=False)

    Args:
        scale: how many times narrower a surrogate is.
        required: whether to refuse a model that cannot be analysed. Otherwise a study goes on without surrogates, and
            says so.
    """

    scale: int = 8
    required: bool = False

    def __post_init__(self) -> None:
        made = whole(self.scale)
        if made is None or made < 2:
            raise StudyError(f"Surrogate(scale=) must be a whole number from 2 on, got {shown(self.scale)}.")
        object.__setattr__(self, "scale", made)
        if not isinstance(self.required, bool):
            raise StudyError(f"Surrogate(required=) must be True or False, got {shown(self.required)}.")
