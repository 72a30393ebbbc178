"""What torch says when it cannot map a function over trials, in the words of someone who trains one model."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
_ONE_TRIAL = "its result depends on the values of one trial: use torch.where in place of a branch"
_SAYINGS = (  # a text of torch, and what it means
    (r"data-dependent control flow|calling \.item\(\)", _ONE_TRIAL),
    (r"dynamic shapes?|boolean mask|aten::nonzero|unique", "its shape depends on the values of one trial: use a mask"),
    (r"[Bb]atching rule not implemented for (aten::\w+)", r"torch.vmap has no rule for \1"),
    (r"generate_vmap_rule|autograd\.Function", "torch.vmap does not take an autograd.Function without a vmap rule"),
    (r"randomness", "it draws at random in a way that cannot be repeated for several trials"),
    (r"in-?place", "it writes into a tensor that all trials share: use the operator that gives a new one"),
)


def plainly(error: BaseException) -> str:
    """An error of ``torch.vmap`` in plain words; others as they are, with their class.

    >>> plainly(RuntimeError("vmap: It looks like you're calling .item() on a Tensor. We don't support vmap over ..."))
    'its result depends on the values of one trial: use torch.where in place of a branch'
    """
    if any(frame.name == "flex_attention" for frame in traceback.extract_tb(error.__traceback__)):
        return "flex_attention runs for one trial alone: use F.scaled_dot_product_attention"
    text = " ".join(str(error).split())
    if re.search(r"vmap|[Bb]atching rule|functorch|BatchedTensor", text):
        for pattern, meaning in _SAYINGS:
            if found := re.search(pattern, text):
                return found.expand(meaning)
        return "torch.vmap does not take it"
    return f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"


def line_of(error: BaseException) -> str:
    """The line that an error came from: the innermost of a user or a library, neither torch's nor Penstock's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = next((frame for frame in reversed(frames) if not frame.filename.startswith(_OWN)), None)
    return "" if own is None else f" at {own.filename}:{own.lineno}"
