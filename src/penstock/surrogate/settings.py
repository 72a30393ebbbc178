"""The settings of a study's surrogates, each checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.errors import StudyError
from penstock.numeric import finite, shown, whole

STEPS = 3  # after which the coordinate check looks at activations
ZEROS = ("output", "biases", "query")  # Hydro §4.1 and Yang et al., "Tensor Programs V", appendix D.2
NARROWEST = 8  # units: narrower layers are too far from the limit of wide ones for hyperparameters to carry over


@dataclass(frozen=True)
class Surrogate:
    """Tune narrow twins of the task's model, and train the best configs at full width (Hydro §2.2, §4.1).

    >>> Surrogate(scale=8)
    Surrogate(scale=8, best=None, eager=0.5, required=False, depth=1, data=1.0, resolution=1.0, zeros=('output',))

    Args:
        scale: how many times narrower a surrogate is.
        best: how many of the best configs race at full width; what the rank check calls for, if None.
        eager: the part of the surrogates after which the race begins.
        required: whether to refuse a model that cannot be analysed. Otherwise a study goes on without surrogates, and
            says so.
        depth: keep every so many-th block of a run of equal blocks in an ``nn.Sequential`` or ``nn.ModuleList``.
        data: the part of the training rows that surrogates see, the same rows for all of them.
        resolution: the part of the pixels along each side of an image.
        zeros: which of a surrogate's values begin with zeros: those of last layers ("output"), of "biases", and of
            what makes the queries of attention whose head size shrinks ("query").

    No theory carries ``depth``, ``data`` and ``resolution`` over: they are taken only where the rank check admits them,
    and the study goes on with surrogates that are narrower alone where it does not.
    """

    scale: int = 8
    best: int | None = None
    eager: float = 0.5
    required: bool = False
    depth: int = 1
    data: float = 1.0
    resolution: float = 1.0
    zeros: tuple[str, ...] = ("output",)

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Surrogate:
        """The settings that a log has kept, beside facts of the study's own.

        >>> Surrogate.of({"scale": 4, "best": 2, "eager": 0.5, "required": False, "pairs": 0}).best
        2
        """
        return cls(**{one.name: kept[one.name] for one in fields(cls) if one.name in kept})

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
        depth = whole(self.depth)
        if depth is None or depth < 1:
            raise StudyError(f"Surrogate(depth=) must be a whole number from 1 on, got {shown(self.depth)}.")
        object.__setattr__(self, "depth", depth)
        for name in ("data", "resolution"):
            part = finite(getattr(self, name))
            if part is None or not 0 < part <= 1:
                raise StudyError(
                    f"Surrogate({name}=) must be a number above 0, and 1 at most, got {shown(getattr(self, name))}."
                )
            object.__setattr__(self, name, float(part))
        zeros = self.zeros if isinstance(self.zeros, tuple | list) else (None,)
        if any(one not in ZEROS for one in zeros):
            said = ", ".join(map(repr, ZEROS))
            raise StudyError(f"Surrogate(zeros=) must be a tuple of {said}, got {shown(self.zeros)}.")
        object.__setattr__(self, "zeros", tuple(one for one in ZEROS if one in zeros))

    @property
    def reduced(self) -> bool:
        """Whether surrogates have fewer blocks, rows or pixels, beside their narrower width."""
        return bool(self.fewer)

    @property
    def fewer(self) -> str:
        """What surrogates have fewer of.

        >>> Surrogate(depth=2, data=0.5, resolution=0.5).fewer
        'blocks, rows and pixels'
        """
        known = {"blocks": self.depth > 1, "rows": self.data < 1, "pixels": self.resolution < 1}
        *others, last = [name for name, wanted in known.items() if wanted] or [""]
        return f"{', '.join(others)} and {last}" if others else last

    @property
    def plain(self) -> Surrogate:
        """The same surrogates, narrower alone."""
        return replace(self, depth=1, data=1.0, resolution=1.0)
