"""Functions with a backward of the user's own (``torch.autograd.Function``): called for one trial after another.

Torch asks no rule before such a function is called. So ``apply`` is given one here, in the class between
``torch.autograd.Function`` and torch's own code: a ``apply`` that was bound long before comes by there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import CheckpointFunction

from penstock.training.fused.keys import BundleKeys
from penstock.training.fused.stacked import Stacked, by_rows, refusal
from penstock.training.random.keyed import Keyed


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    for value in args:
        if isinstance(value, Stacked) or (type(value) in (list, tuple, dict) and _nested(value)):
            return _by_trial(cls, *args, **kwargs)
    return super(_SingleLevelFunction, cls).apply(*args, **kwargs)


def _nested(value: Any) -> bool:
    return any(isinstance(leaf, Stacked) for leaf in tree_flatten(value)[0])


def _by_trial(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if cls is CheckpointFunction:
        raise refusal("checkpoint", "its form with use_reentrant=True runs inside of another backward: pass False")
    if cls.__name__ == "_NoopSaveInputs":  # by which torch 2.11 keeps what checkpointing begins again from
        raise refusal("checkpoint", "this version of torch keeps its inputs as those of one trial: use torch 2.13")
    written: set[int] = set()  # the places of arguments that it gives back, having written into them
    rows = count()

    def apply(*own: Any, **named: Any) -> Any:
        with _draws_of(next(rows)):
            made = cls.apply(*own, **named)
        written.update(i for i, value in enumerate(own) if made is value and isinstance(value, torch.Tensor))
        return made

    apply.__name__ = f"{cls.__name__}.apply"
    made = by_rows(apply, *args, **kwargs)
    return args[written.pop()] if written else made


@contextmanager
def _draws_of(row: int) -> Iterator[None]:
    """Let random functions draw for one trial; the calls of each trial have the same indices."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Keyed)]  # type: ignore[no-untyped-call]
    for mode in modes:
        if isinstance(keys := mode.keys, BundleKeys):
            with keys.of_row(row) as own:
                mode.draw_by(own)
                try:
                    yield
                finally:
                    mode.draw_by(keys)
            return
    yield


_SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
