"""A bundle's whole training step as one function: compiled by Inductor, or captured as a CUDA graph.

``train`` is the step: the user's loss for all trials, its gradients, clipping and the optimizers' step, on plain
tensors. Everything that changes between steps is among its inputs: the rows, the batch, the step's keys and the
optimizers' coefficients. It is traced once with ``make_fx`` and compiled (intra-trial fusion, Hydro §4.2), or recorded
once on the device and replayed, which spares the launching of its kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from penstock.task import Task
from penstock.training.fused.flat import Flat
from penstock.training.fused.optimizers import clip_rows
from penstock.training.fused.stack import Stack
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import Way


@dataclass
class Inputs:
    """All that one step of some rows reads, and writes in place: the rows, the optimizers' state and the buffers."""

    rows: list[torch.Tensor]
    state: list[dict[str, torch.Tensor]]
    others: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    coefficients: list[dict[str, torch.Tensor]]
    batch: Any
    keys: torch.Tensor | None
    numbers: list[torch.Tensor]

    @classmethod
    def of(cls, stack: Stack, first: int, last: int, batch: Any, keys: Any, numbers: list[torch.Tensor]) -> Inputs:
        """Those of the stack's rows from ``first`` to ``last``."""
        return cls(
            [flat.rows[first:last] for flat in stack.flats],
            [flat.states(first, last) for flat in stack.flats],
            {name: rows[first:last] for name, rows in stack.others.items()},
            {name: rows[first:last] for name, rows in stack.buffers.items()},
            stack.coefficients(first, last),
            batch,
            keys,
            numbers,
        )

    def part(self, first: int, last: int, shared: bool) -> Inputs:
        """What the gradients of some of these rows are computed from."""

        def cut(leaf: Any) -> Any:
            return leaf[first:last] if isinstance(leaf, torch.Tensor) else leaf

        names = ["rows", "others", "buffers", "keys", "numbers", *([] if shared else ["batch"])]
        return Inputs(**vars(self) | {name: tree_map(cut, getattr(self, name)) for name in names})

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put back afterwards whatever a step writes."""
        before = [tensor.clone() for tensor in self.written()]
        try:
            yield
        finally:
            for tensor, value in zip(self.written(), before, strict=True):
                tensor.copy_(value)

    def written(self) -> list[torch.Tensor]:
        """What a step writes: a row for each trial."""
        return [*self.rows, *(tensor for part in self.state for tensor in part.values()), *self.buffers.values()]

    def addresses(self) -> list[int]:
        """Where that lies."""
        return [tensor.data_ptr() for tensor in self.written()]

    def leaves(self) -> tuple[list[Any], Any]:
        """The tensors in one list, and the way back."""
        return tree_flatten(tuple(vars(self).values()))

    def kind(self) -> tuple[Any, ...]:
        """What a step must have been made for to take these: shapes, plain values, and which coefficients there are."""
        leaves, spec = self.leaves()
        return (str(spec), *map(_kind, leaves))


def step_kind(trials: int, shared: bool, batch: Any) -> tuple[Any, ...]:
    """What tells one fast step from another before its inputs are gathered."""
    leaves = tree_flatten(batch)[0]
    return trials, shared, tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))


class FastStep(ABC):
    """A training step made for one kind of inputs."""

    bytes = 0  # that it holds, and torch does not count

    def __init__(self, way: Way, task: Task, flats: Sequence[Flat], inputs: Inputs, shared: bool) -> None:
        self.way, self.task, self.flats, self.shared = way, task, flats, shared
        self._kind, self._fixed = inputs.kind(), way.fixed
        leaves, self._spec = inputs.leaves()
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._leaves = leaves

    def takes(self, inputs: Inputs) -> bool:
        """Whether it was made for such inputs."""
        return self.way.fixed == self._fixed and inputs.kind() == self._kind

    @abstractmethod
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Train; gives the losses of the trials."""

    def _train(self, *tensors: torch.Tensor) -> torch.Tensor:
        filled = list(self._leaves)
        for i, tensor in zip(self._places, tensors, strict=True):
            filled[i] = tensor
        return train(self.way, self.task, self.flats, Inputs(*tree_unflatten(filled, self._spec)), self.shared)

    def _tensors(self, inputs: Inputs) -> list[torch.Tensor]:
        leaves = inputs.leaves()[0]
        return [leaves[i] for i in self._places]


class CompiledStep(FastStep):
    """Compiled by Inductor."""

    def __init__(self, way: Way, task: Task, flats: Sequence[Flat], inputs: Inputs, shared: bool) -> None:
        from torch._inductor import compile as inductor
        from torch.fx.experimental.proxy_tensor import make_fx

        super().__init__(way, task, flats, inputs, shared)
        given = self._tensors(inputs)
        try:
            graph = make_fx(self._train, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
        finally:
            way.release()  # its module holds the trace's tensors
        _leave_alone(graph)
        self._run: Any = inductor(graph, list(given))
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        made = self._run(*self._tensors(inputs))
        losses: torch.Tensor = made[0] if isinstance(made, tuple | list) else made
        return losses


def _leave_alone(graph: torch.fx.GraphModule) -> None:
    """Tell Inductor that Penstock's kernels are called as they are.

    It would find that out by itself, but torch 2.11 writes a text of everything that an argument was computed from
    first, even where nobody reads it: a residual network doubles that at every block.
    """
    from torch._inductor import lowering

    for op in {node.target for node in graph.graph.nodes if str(node.target).startswith("penstock.")}:
        if op not in lowering.lowerings:
            lowering.make_fallback(op, layout_constraint=lowering.constrain_to_fx_strides)  # type: ignore[no-untyped-call]


class CapturedStep(FastStep):
    """Recorded as a CUDA graph, over ``step`` or the plain one; its own copies of the batch, keys and numbers."""

    def __init__(
        self, way: Way, task: Task, flats: Sequence[Flat], inputs: Inputs, shared: bool, step: FastStep | None = None
    ) -> None:
        super().__init__(way, task, flats, inputs, shared)
        torch.cuda.empty_cache()  # or what is kept from here on would be cut from, and hold, large pieces that are free
        self._own = Inputs(
            inputs.rows,
            inputs.state,
            inputs.others,
            inputs.buffers,
            *(tree_map(_copy, part) for part in (inputs.coefficients, inputs.batch, inputs.keys, inputs.numbers)),
        )
        self._addresses = inputs.addresses()
        run = partial(self._train, *self._tensors(self._own)) if step is None else partial(step, self._own)
        with inputs.unchanged():
            stream = _stream(torch.cuda.current_device())
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    run()  # what chooses kernels does so before the recording
                    self.bytes = _room(run)
                torch.cuda.current_stream().wait_stream(stream)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=stream):
                    torch.empty(self.bytes, dtype=torch.uint8, device=inputs.rows[0].device)  # all of it in one piece
                    self._losses = run()
            finally:
                way.release()
                torch.cuda.synchronize()

    def takes(self, inputs: Inputs) -> bool:
        return super().takes(inputs) and inputs.addresses() == self._addresses

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        for part in ("coefficients", "batch", "keys", "numbers"):
            own, given = (tree_flatten(getattr(which, part))[0] for which in (self._own, inputs))
            for into, value in zip(own, given, strict=True):
                if isinstance(into, torch.Tensor):
                    into.copy_(value)
        self._graph.replay()
        return self._losses


@cache
def _stream(device: int) -> Any:
    """That of all recordings on a device. What cuBLAS keeps for a stream is none of a graph's own memory."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        one = torch.ones(1, 1, device=device)
        one @ one
    return stream


def _room(run: Callable[[], object]) -> int:
    """How many bytes a step takes at most besides those that are taken.

    A graph's own memory is never given back to others. Asked for piece by piece, as a step needs it, it would come to a
    quarter more than what is ever used at once.
    """
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def agree(step: FastStep, inputs: Inputs) -> None:
    """Refuse a step that does not do what the plain one does to copies of these inputs, where that is finite."""
    leaves, spec = inputs.leaves()
    plain, fast = (Inputs(*tree_unflatten([_copy(leaf) for leaf in leaves], spec)) for _ in range(2))
    expected = train(step.way, step.task, step.flats, plain, step.shared)
    step.way.release()
    losses = step(fast)

    def compare(old: torch.Tensor, one: torch.Tensor, other: torch.Tensor, of_change: float, of_all: float) -> None:
        there, dtype = torch.isfinite(one), torch.promote_types(one.dtype, torch.float32)
        old, one, other = (torch.where(there, x, 0).to(dtype) for x in (old, one, other))
        far, changed, all_of_it = (float(x.norm()) for x in (one - other, one - old, one))
        if not far <= of_change * changed + max(of_all, 4 * torch.finfo(dtype).eps) * all_of_it:
            raise Unfusable(f"the compiled step differs from the plain one by {far / max(changed, 1e-30):.2g}")

    off = 1e-9 if expected.dtype == torch.float64 else 0.05 if step.task.precision == "fp32" else 0.3
    compare(torch.zeros_like(expected), expected, losses, off, 0.0)
    # Of averages of gradients, and of buffers that have settled, a step changes hardly more than rounding does.
    for part, of_change, of_all in (("rows", off, 0.0), ("state", 0.0, off), ("buffers", off, off / 25)):
        for old, one, other in zip(*(tree_flatten(getattr(x, part))[0] for x in (inputs, plain, fast)), strict=True):
            compare(old, one, other, of_change, of_all)


def train(way: Way, task: Task, flats: Sequence[Flat], inputs: Inputs, shared: bool) -> torch.Tensor:
    """One training step of all trials, in place; gives their losses."""
    losses, grads = gradients(way, task, flats, inputs, shared, task.precision == "bf16")
    with torch.no_grad():
        if task.clip_grad_norm is not None:
            clip_rows(grads, task.clip_grad_norm)
        for flat, rows, gradient, state, c in zip(
            flats, inputs.rows, grads, inputs.state, inputs.coefficients, strict=True
        ):
            assert flat.step is not None
            flat.step.update(rows, gradient, state, c)
    return losses


def gradients(
    way: Way, task: Task, flats: Sequence[Flat], inputs: Inputs, shared: bool, mixed: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The losses of all trials, and the gradients of each flat's rows."""
    with torch.enable_grad():
        views = [view for flat, rows in zip(flats, inputs.rows, strict=True) for view in flat.views(rows.detach())]
        params = {name: view.detach().requires_grad_() for name, view in views}
        trained = list(params.values())
        params.update(inputs.others)
        way.train()
        with torch.autocast(inputs.rows[0].device.type, torch.bfloat16, enabled=mixed):
            losses: torch.Tensor = way.run(
                task.loss, params, inputs.buffers, inputs.batch, shared, inputs.keys, inputs.numbers
            )
        grads = iter(torch.autograd.grad(losses.sum(), trained))
    with torch.no_grad():
        made = []
        for flat in flats:
            pieces = []
            for _, gap in flat.lengths():
                pieces.append(next(grads).reshape(len(losses), -1))
                if gap:
                    pieces.append(pieces[-1].new_zeros(len(losses), gap))
            made.append(torch.cat(pieces, 1))
    return losses.detach(), made


def _kind(leaf: Any) -> Any:
    """A tensor is read anew at every step; what a batch holds besides was read once, and must be the same."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, bool | int | float | str | bytes | None) else id(leaf)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
