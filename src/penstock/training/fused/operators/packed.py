"""Packed sequences: the trials share the lengths, and are one more dimension of every element."""

from __future__ import annotations

from typing import Any

import torch

from penstock.training.fused.operators.recurrent import STEPS, State, Weights, cast, front, weights_of
from penstock.training.fused.stacked import Stacked, name_of, refusal, rule

_LENGTHS = "the trials have sequences of other lengths, which lie apart; pass padded ones with a mask"


@rule("_pack_padded_sequence")
def pack(func: Any, input: Any, lengths: Any, batch_first: bool) -> Any:
    if isinstance(lengths, Stacked):
        raise refusal("pack_padded_sequence", _LENGTHS)
    data, sizes = func(input.moved(2), lengths, batch_first)
    return Stacked(data, 1), sizes


@rule("_pad_packed_sequence")
def pad(
    func: Any, data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int | None = None
) -> Any:
    padded, lengths = func(data.moved(1), batch_sizes, batch_first, padding_value, total_length)
    return Stacked(padded, 2), lengths


def packed(func: Any, *args: Any) -> Any:
    """``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` of a packed sequence."""
    kind = name_of(func)
    x, sizes, hx, params, biases, layers, dropout, train, both = args
    if dropout and train and layers > 1:
        raise refusal(kind, "its dropout between layers cannot be keyed by trial and step for packed sequences")
    if isinstance(sizes, Stacked):
        raise refusal(kind, _LENGTHS)
    start = tuple(hx) if kind == "lstm" else (hx,)
    projected = start[0].shape[-1] != start[-1].shape[-1]
    trials = next(t.trials for t in (x, *start, *params) if isinstance(t, Stacked))
    tensors = [front(t, trials) for t in (x, *start, *params)]
    inner, context = cast(tensors, f"{kind} projected" if projected else kind)
    out, states = inner[0], inner[1 : 1 + len(start)]
    each, ends = list(weights_of(inner[1 + len(start) :], biases, projected)), list[State]()
    counts = sizes.tolist()
    with context:
        for _ in range(layers):
            directions = []
            for backwards in (False, True)[: 1 + both]:
                place = len(ends)
                made, end = _steps(kind, out, counts, tuple(s[:, place] for s in states), each[place], backwards)
                directions.append(made)
                ends.append(end)
            out = torch.cat(directions, -1) if both else directions[0]
    last = (Stacked(torch.stack(values, 1)) for values in zip(*ends, strict=True))
    return Stacked(out), *last


def _steps(
    kind: str, x: torch.Tensor, counts: list[int], state: State, w: Weights, backwards: bool
) -> tuple[torch.Tensor, State]:
    """All steps of one layer and direction over [trials, elements, width]: at each, the sequences that reach it."""
    bias = w.bias
    if bias is not None and w.hidden_bias is not None and kind != "gru":  # whose reset gate scales the second bias
        bias = bias + w.hidden_bias
    product = torch.bmm(x, w.of_input)
    gates = (product if bias is None else product + bias).split_with_sizes(counts, 1)
    made: list[torch.Tensor] = []
    now = list(state)  # of all sequences, the longest first
    for place in reversed(range(len(counts))) if backwards else range(len(counts)):
        count = counts[place]
        new = STEPS[kind](gates[place], tuple(s[:, :count] for s in now), w)
        now = [torch.cat([n, s[:, count:]], 1) if count < s.shape[1] else n for n, s in zip(new, now, strict=True)]
        made.append(new[0])
    return torch.cat(made[::-1] if backwards else made, 1), tuple(now)
