"""Checks of values, as torch.distributions makes them of its arguments: of all trials at once.

Where they fail for one trial, the step raises, and each trial takes it alone: so the one at fault is found.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.training.fused.stacked import Stacked, rule


@rule("_is_all_true")
def every(func: Any, x: Stacked) -> torch.Tensor:
    made: torch.Tensor = func(x.whole)
    return made


@rule("__format__")
def shown(func: Any, x: Stacked, how: str) -> str:
    """As the message of such a check has it."""
    return format(repr(x), how)
