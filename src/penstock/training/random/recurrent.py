"""Recurrent layers with dropout between them: one layer after another, so that the masks are keyed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.training.random.masks import dropout, may_drop

if TYPE_CHECKING:
    from penstock.training.random.keyed import Keyed


def recurrent(mode: Keyed, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``torch.lstm`` and its like, as ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call them.

    The arguments are the input, the batch sizes of a packed one, the hidden state, the weights, whether there are
    biases, the number of layers, the dropout, whether it is training, whether there are two directions, and more.
    """
    place = next((place for place, value in enumerate(args) if isinstance(value, bool)), len(args))
    if kwargs or len(args) < place + 5:
        return func(*args, **kwargs)
    x, *sizes = args[: place - 2]
    hidden, weights, biases, layers, p, training, both, *more = args[place - 2 :]
    if not training or layers < 2:
        return func(x, *sizes, hidden, weights, biases, layers, 0.0, training, both, *more)
    if not may_drop(p):  # counted as a rate of 0 is: trials of one bundle differ in their rates
        for _ in range(layers - 1):
            mode.keys.next()
        return func(*args)
    if not mode.draws(func.__name__, x):
        return func(*args)
    directions, each = 1 + both, len(weights) // layers
    ends, out = [], x
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        for layer in range(layers):
            rows = slice(layer * directions, (layer + 1) * directions)
            first = tuple(h[rows] for h in hidden) if isinstance(hidden, tuple | list) else hidden[rows]
            own = weights[layer * each : (layer + 1) * each]
            out, *end = func(out, *sizes, first, own, biases, 1, 0.0, training, both, *more)
            ends.append(end)
            if layer < layers - 1:
                out = dropout(out, p, mode.keys)
    return out, *(torch.cat(list[Tensor](values)) for values in zip(*ends, strict=True))
