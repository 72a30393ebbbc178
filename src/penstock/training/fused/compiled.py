"""A bundle's training step made faster: compiled by Inductor, or captured as a CUDA graph.

The step is the one in ``step.py``, a function of its inputs alone. It is traced once with ``make_fx`` and compiled
(intra-trial fusion, Hydro §4.2), or recorded once on the device and replayed, which spares the launching of kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.step import Inputs, Step, unchanged

_COPIED = ("coefficients", "batch", "keys", "numbers")  # the inputs that are other tensors at every step
StepKind = tuple[int, bool, tuple[torch.Size, ...]]


def step_kind(trials: int, shared: bool, batch: Any) -> StepKind:
    """The facts that tell one faster step from another before its inputs are gathered."""
    leaves = tree_flatten(batch)[0]
    return trials, shared, tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))


class FastStep(ABC):
    """A training step made for one kind of inputs."""

    def __init__(self, step: Step, inputs: Inputs) -> None:
        if inputs.owners:
            raise Unfusable("the trials' optimizers step one after another")
        self.step = step
        self.bytes = 0  # of a graph's own memory, which torch does not count
        self._kind, self._fixed = inputs.kind(), step.way.fixed
        leaves, self._spec = inputs.leaves()
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def takes(self, inputs: Inputs) -> bool:
        """Whether it was made for such inputs."""
        return self.step.way.fixed == self._fixed and inputs.kind() == self._kind

    @abstractmethod
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Train; gives the losses of the trials."""

    def _train(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The plain step, as a function of the tensors among its inputs."""
        filled = list(self._leaves)
        for i, tensor in zip(self._places, tensors, strict=True):
            filled[i] = tensor
        return self.step(Inputs(*tree_unflatten(filled, self._spec)))

    def _tensors(self, inputs: Inputs) -> list[torch.Tensor]:
        leaves = inputs.leaves()[0]
        return [leaves[i] for i in self._places]


class CompiledStep(FastStep):
    """Compiled by Inductor."""

    def __init__(self, step: Step, inputs: Inputs) -> None:
        from torch._inductor import compile as inductor
        from torch.fx.experimental.proxy_tensor import make_fx

        super().__init__(step, inputs)
        given = self._tensors(inputs)
        try:
            graph = make_fx(self._train, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
        finally:
            step.way.release()  # its module holds the trace's tensors
        _leave_alone(graph)
        self._run: Callable[..., Any] = inductor(graph, list(given))

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        made = self._run(*self._tensors(inputs))
        losses: torch.Tensor = made[0] if isinstance(made, tuple | list) else made
        return losses


def _leave_alone(graph: torch.fx.GraphModule) -> None:
    """Tell Inductor that Penstock's kernels are called as they are.

    Inductor would find that out by itself. But torch 2.11 first writes a text of everything that an argument was
    computed from, even where nobody reads it, and a residual network doubles that text at every block.
    """
    from torch._inductor import lowering

    for op in {node.target for node in graph.graph.nodes if str(node.target).startswith("penstock.")}:
        if op not in lowering.lowerings:
            lowering.make_fallback(op, layout_constraint=lowering.constrain_to_fx_strides)  # type: ignore[no-untyped-call]


class CapturedStep(FastStep):
    """Recorded as a CUDA graph, of the plain step or of a compiled one.

    The graph has copies of its own of the coefficients, the batch, the keys and the numbers.
    """

    def __init__(self, step: Step, inputs: Inputs, compiled: FastStep | None = None) -> None:
        super().__init__(step, inputs)
        # Without this, the graph's memory would be cut from large free pieces, and would hold them.
        torch.cuda.empty_cache()
        self._own = replace(
            inputs, params=None, room=None, **{name: tree_map(_copy, getattr(inputs, name)) for name in _COPIED}
        )
        self._addresses = inputs.addresses()
        run = partial(step if compiled is None else compiled, self._own)
        with unchanged(inputs.written()):
            stream = _stream(torch.cuda.current_device())
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    run()  # libraries choose their kernels here, before the recording
                    self.bytes = _room(run)
                torch.cuda.current_stream().wait_stream(stream)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=stream):
                    torch.empty(
                        self.bytes, dtype=torch.uint8, device=inputs.rows[0].device
                    )  # all its memory in one piece
                    self._losses = run()
            finally:
                step.way.release()
                torch.cuda.synchronize()

    def takes(self, inputs: Inputs) -> bool:
        return super().takes(inputs) and inputs.addresses() == self._addresses

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        for part in _COPIED:
            own, given = (tree_flatten(getattr(which, part))[0] for which in (self._own, inputs))
            for into, value in zip(own, given, strict=True):
                if isinstance(into, torch.Tensor):
                    into.copy_(value)
        self._graph.replay()
        return self._losses


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of all recordings on a device, so that no graph's memory holds cuBLAS's room for a stream."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        one = torch.ones(1, 1, device=device)
        one @ one
    return stream


def _room(run: Callable[[], object]) -> int:
    """How many bytes a step takes at most, besides those in use before it.

    A graph's own memory is never given back to others. Asked for piece by piece, as the step goes on, it would come to
    a quarter more than is ever in use at once.
    """
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
