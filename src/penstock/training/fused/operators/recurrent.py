"""Recurrent layers: a step is one batched product over the trials; the inputs of all steps are one product before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from penstock.training.fused.stacked import Stacked, name_of, refusal, rule

State = tuple[torch.Tensor, ...]  # passed from step to step, the hidden values first; each is [trials, batch, width]


@dataclass(frozen=True)
class Weights:
    """The weights of one layer and direction, with the trials in front, turned so that rows multiply with them."""

    of_input: torch.Tensor
    of_hidden: torch.Tensor
    bias: torch.Tensor | None
    hidden_bias: torch.Tensor | None
    projection: torch.Tensor | None


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)


def _plain_step(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., State]:
    def step(gates: torch.Tensor, state: State, w: Weights) -> State:
        return (activation(torch.baddbmm(gates, state[0], w.of_hidden)),)

    return step


def _lstm_step(gates: torch.Tensor, state: State, w: Weights) -> State:
    hidden, cell = state
    if gates.is_cuda:
        rows = (t.flatten(0, 1) for t in (gates, torch.bmm(hidden, w.of_hidden), cell))
        hidden, cell = (t.view_as(cell) for t in torch.ops.aten._thnn_fused_lstm_cell(*rows)[:2])
    else:
        into, forget, new, out = torch.baddbmm(gates, hidden, w.of_hidden).chunk(4, -1)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        hidden = out.sigmoid() * cell.tanh()
    return hidden if w.projection is None else torch.bmm(hidden, w.projection), cell


def _gru_step(gates: torch.Tensor, state: State, w: Weights) -> State:
    (hidden,) = state
    own = _product(hidden, w.of_hidden, w.hidden_bias)
    if gates.is_cuda:
        rows = (t.flatten(0, 1) for t in (gates, own, hidden))
        return (torch.ops.aten._thnn_fused_gru_cell(*rows)[0].view_as(hidden),)
    reset, update, new = gates.chunk(3, -1)
    own_reset, own_update, own_new = own.chunk(3, -1)
    new = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return ((hidden - new) * (update + own_update).sigmoid() + new,)


STEPS: dict[str, Callable[..., State]] = {
    "rnn_tanh": _plain_step(torch.tanh),
    "rnn_relu": _plain_step(torch.relu),
    "lstm": _lstm_step,
    "gru": _gru_step,
}


class _Tap(torch.autograd.Function):
    """The gates of all steps as they are, [time, trials, batch, width]; their gradient gives that of ``weight`` too.

    One product for all steps, instead of one and a sum in each, halves the time of a backward on a GPU. ``before``, the
    factors that the steps multiplied with the weight, is filled in by then.
    """

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, weight: torch.Tensor, before: list[torch.Tensor]) -> torch.Tensor:
        ctx.before = before
        return gates.view_as(gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows = torch.stack(ctx.before, 1).flatten(1, 2)
        return grad, torch.bmm(rows.transpose(1, 2), grad.transpose(0, 1).flatten(1, 2)), None


def _taps(x: torch.Tensor) -> bool:
    return x.is_cuda and x.shape[1] > 1  # on a CPU, or for one step, the tap gains nothing


def _sequence(kind: str, x: torch.Tensor, state: State, w: Weights, backwards: bool) -> tuple[torch.Tensor, State]:
    """All steps of one layer and direction: hidden values after each, [trials, time, batch, width], and the last."""
    step, bias = STEPS[kind], w.bias
    own = kind == "gru"  # the reset gate scales the second bias, which other kinds add to the first
    if bias is not None and w.hidden_bias is not None and not own:
        bias = bias + w.hidden_bias
    gates = _product(x.flatten(1, 2), w.of_input, bias).view(*x.shape[:3], -1).transpose(0, 1)
    each = [w] * len(gates)
    before: list[torch.Tensor] = []
    if _taps(x):
        fixed = replace(w, of_hidden=w.of_hidden.detach())
        gates, each = gates.contiguous(), [fixed] * len(gates)
        if own:
            added = (gates.new_zeros(1) if w.hidden_bias is None else w.hidden_bias).expand_as(gates)
            tapped = _Tap.apply(added, w.of_hidden, before)  # type: ignore[no-untyped-call]
            each = [replace(fixed, hidden_bias=bias) for bias in tapped.unbind()]
        else:
            gates = _Tap.apply(gates, w.of_hidden, before)  # type: ignore[no-untyped-call]
    way, hidden = slice(None, None, -1 if backwards else 1), [state[0]]
    for now, weights in list(zip(gates.unbind(), each, strict=True))[way]:
        state = step(now, state, weights)
        hidden.append(state[0])
    before += [h.detach() for h in hidden[:-1]][way]
    return torch.stack(hidden[1:][way], 1), state


def front(value: Any, trials: int) -> torch.Tensor:
    made: torch.Tensor = value.moved(0) if isinstance(value, Stacked) else value.expand(trials, *value.shape)
    return made


def weights_of(params: Sequence[torch.Tensor], biases: bool, projected: bool) -> Iterator[Weights]:
    each = 2 + 2 * biases + projected
    for start in range(0, len(params), each):
        of_input, of_hidden, *rest = params[start : start + each]
        bias, hidden_bias = (b.unsqueeze(1) for b in rest[:2]) if biases else (None, None)
        projection = rest[-1].transpose(1, 2) if projected else None
        yield Weights(of_input.transpose(1, 2), of_hidden.transpose(1, 2), bias, hidden_bias, projection)


def cast(tensors: Sequence[torch.Tensor], kind: str) -> tuple[Sequence[torch.Tensor], AbstractContextManager[Any]]:
    """Tensors in the type that torch computes in under autocast, and the context to compute in."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or (device == "cpu" and kind != "lstm"):
        return tensors, nullcontext()  # on a CPU, oneDNN's LSTM is cast as a whole; other kinds in their products
    cudnn = device == "cuda" and not kind.endswith("_cell") and torch.backends.cudnn.enabled
    dtype = torch.float16 if cudnn else torch.get_autocast_dtype(device)  # cuDNN's layers have one type
    return [t if t.dtype == torch.float64 else t.to(dtype) for t in tensors], torch.autocast(device, enabled=False)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(func: Any, *args: Any) -> Any:
    """A layer or several, one direction or two, as ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call them."""
    kind = name_of(func)
    if isinstance(args[3], list | tuple):
        from penstock.training.fused.operators.packed import packed

        return packed(func, *args)
    x, hx, params, biases, layers, dropout, train, both, batch_first = args
    if dropout and train and layers > 1:
        why = "its dropout between layers cannot be keyed by trial and step"
        raise refusal(kind, f"{why}; put nn.Dropout between single layers instead")
    start = tuple(hx) if kind == "lstm" else (hx,)
    projected = start[0].shape[-1] != start[-1].shape[-1]
    trials = next(t.trials for t in (x, *start, *params) if isinstance(t, Stacked))
    inner, context = cast([front(t, trials) for t in (x, *start, *params)], f"{kind} projected" if projected else kind)
    out, states = inner[0], inner[1 : 1 + len(start)]
    if batch_first:
        out = out.transpose(1, 2)
    each, ends = list(weights_of(inner[1 + len(start) :], biases, projected)), list[State]()
    with context:
        for _ in range(layers):
            directions = []
            for backwards in (False, True)[: 1 + both]:
                place = len(ends)
                made, end = _sequence(kind, out, tuple(s[:, place] for s in states), each[place], backwards)
                directions.append(made)
                ends.append(end)
            out = torch.cat(directions, -1) if both else directions[0]
    last = (Stacked(torch.stack(values, 1)) for values in zip(*ends, strict=True))
    return Stacked(out.transpose(1, 2) if batch_first else out), *last


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(func: Any, x: Any, hx: Any, *params: Any) -> Any:
    """One step of one layer, as ``nn.LSTMCell``, ``nn.GRUCell`` and ``nn.RNNCell`` call it."""
    kind = name_of(func).removesuffix("_cell")
    start = tuple(hx) if kind == "lstm" else (hx,)
    given = [p for p in params if p is not None]
    trials = next(t.trials for t in (x, *start, *given) if isinstance(t, Stacked))
    inner, context = cast([front(t, trials) for t in (x, *start, *given)], name_of(func))
    (weights,) = weights_of(inner[1 + len(start) :], len(given) == 4, False)
    with context:
        _, end = _sequence(kind, inner[0].unsqueeze(1), tuple(inner[1 : 1 + len(start)]), weights, False)
    made = tuple(Stacked(t) for t in end)
    return made if kind == "lstm" else made[0]
