"""``torch.autograd.grad`` inside a loss: gradient penalties, differential equations, steps within a step.

The graph is ordinary autograd's, of whole tensors. The gradient of the sum over the trials is each trial's own, as no
trial's output depends on another's input. Only an input that all trials share has one gradient for each of them, by as
many passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.training.fused.stacked import Stacked, refusal, rule


@rule("grad")
def grad(
    func: Any,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    if is_grads_batched:
        raise refusal("grad", "is_grads_batched maps over more than the trials; call it for each row")
    outs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    ins = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise refusal("torch.func.grad", "it cannot see the parameters of several trials; use torch.autograd.grad")
    given = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs or [None] * len(outs))
    if not any(isinstance(out, Stacked) for out in outs):  # the trials' own inputs are not reached
        trials = next(v.trials for v in (*ins, *given) if isinstance(v, Stacked))
        outs = [Stacked(out.expand(trials, *out.shape)) for out in outs]
    starts = [_start(out, start) for out, start in zip(outs, given, strict=True)]
    more = {"create_graph": create_graph, "allow_unused": True}
    keep = create_graph if retain_graph is None else retain_graph
    own, common = [x for x in ins if isinstance(x, Stacked)], [x for x in ins if not isinstance(x, Stacked)]
    found: dict[int, Any] = {}
    if own:
        wholes = [out.whole if isinstance(out, Stacked) else out for out in outs]
        made = torch.autograd.grad(wholes, [x.whole for x in own], starts, keep or bool(common), **more)
        found.update((id(x), None if g is None else Stacked(g, x.at)) for x, g in zip(own, made, strict=True))
    if common:
        rows = _of_shared(outs, common, starts, keep, more)
        found.update((id(x), g) for x, g in zip(common, rows, strict=True))
    result = [found[id(x)] for x in ins]
    if materialize_grads:
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(ins, result, strict=True))
    if not allow_unused and any(g is None for g in result):
        raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph.")
    return tuple(result)


def _start(out: Any, given: Any) -> Any:
    """The gradient of an output, in its own layout; ones for scalars."""
    if given is None:
        if out.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.ones_like(out.whole if isinstance(out, Stacked) else out)
    if not isinstance(out, Stacked):
        return given
    if isinstance(given, Stacked):
        return given.moved(out.at)
    return given.unsqueeze(out.at).expand(out.whole.shape)


def _of_shared(outs: Sequence[Any], ins: list[Any], starts: Sequence[Any], keep: bool, more: Any) -> list[Any]:
    """The gradients of inputs that all trials share, a row for each trial."""
    stacked = [(out, start) for out, start in zip(outs, starts, strict=True) if isinstance(out, Stacked)]
    plain = [(out, start) for out, start in zip(outs, starts, strict=True) if not isinstance(out, Stacked)]
    trials, rows = stacked[0][0].trials, []
    for row in range(trials):
        wholes = [out.whole.select(out.at, row) for out, _ in stacked] + [out for out, _ in plain]
        begin = [start.select(out.at, row) for out, start in stacked] + [start for _, start in plain]
        rows.append(torch.autograd.grad(wholes, ins, begin, keep or row < trials - 1, **more))
    return [None if any(g is None for g in each) else Stacked(torch.stack(each)) for each in zip(*rows, strict=True)]
