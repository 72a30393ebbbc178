"""What a fused step does besides computing, noticed before it is applied: its draws, and the parameters it reaches.

A step that leaves the pattern of those before it ends with one of the errors here. Nothing was written then but what
the task's own loss writes, which is put back, and the step is taken again in the way that is right.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.training.fused.stacked import Unfusable
from penstock.training.random.generators import position

Look = tuple[list[Any], tuple[object, ...] | None]  # the states of torch's generators, and of Python's and numpy's


class Again(Exception):
    """A step that must be taken again in another way."""


class Drew(Again):
    """Something was drawn in a step that was taken to draw nothing. It is taken again with keys."""


class Numbered(Again):
    """A number of the config that differs from trial to trial was read for the first time. Steps are given it now."""


class Branched(Drew):
    """Trials went on in ways of their own in a step that was taken to be one for all. It is taken again in parts."""


class Unreached(Again):
    """Parameters that the loss does not reach. A plain run neither decays them nor gives them a state."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names


class Reached(Again):
    """The loss reaches parameters that no step reached before. The trials' own optimizers step them from then on."""


class Unclear(Again):
    """The gradients of a trial alone are not finite, so that nothing can be compared with them."""


class Drawing:
    """Looks whether a forward drew from the global generators; ``python``: from Python's and numpy's too.

    >>> drawing = Drawing(python=False)
    >>> looked = drawing.look(); drawing.drew(looked)
    False
    >>> _ = torch.rand(1); drawing.drew(looked)
    True
    """

    def __init__(self, *, python: bool) -> None:
        self.python = python

    def look(self) -> Look | None:
        """Where the generators stand; None where that cannot be asked: while a step is traced or captured."""
        if torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling():
            return None
        states: list[Any] = [torch.default_generator.get_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            if torch.cuda.is_current_stream_capturing():
                return None
            states.append(torch.cuda.default_generators[torch.cuda.current_device()].get_state())
        return states, position() if self.python else None

    def drew(self, before: Look | None) -> bool:
        """Whether torch's generators have moved; refuses a draw from Python's or numpy's."""
        now = None if before is None else self.look()
        if before is None or now is None:
            return False
        if before[1] != now[1]:
            raise Unfusable("the loss draws from Python's or numpy's random generator, which trials cannot share")
        pairs = zip(before[0], now[0], strict=True)
        return any(old.numpy().tobytes() != new.numpy().tobytes() for old, new in pairs)
