"""Tables of vectors: one lookup for all trials, each in its own table."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from penstock.training.fused.stacked import Stacked, by_vmap, refusal, rule


class _Lookup(torch.autograd.Function):
    """``table[:, index]``, or an index per trial; a table laid out with gaps between the trials is not copied.

    Backward adds the rows up in a fixed order on every device, which plain indexing on several CPU threads does not.
    """

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, index: torch.Tensor, own: bool, padding: int, by_freq: bool) -> Any:
        # Indexing would count negative indices from the end, where torch's own embedding raises.
        torch._assert_async(index.ge(0).all(), "an index of an embedding is negative")
        ctx.save_for_backward(index)
        ctx.shape, ctx.own, ctx.padding, ctx.by_freq = table.shape, own, padding, by_freq
        return torch.ops.aten.index(table, _where(index, own))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        trials, rows, width = ctx.shape
        if grad.is_cuda and not ctx.by_freq:  # this kernel sorts the index once for all trials
            made = grad.new_zeros(ctx.shape)
            made = torch.ops.aten.index_put(made, _where(index, ctx.own), grad, True)
        else:
            place = _offset(index if ctx.own else index.unsqueeze(0), trials, rows).expand(grad.shape[:-1])
            made = torch.ops.aten.embedding_dense_backward(
                grad.reshape(-1, width), place.reshape(-1), trials * rows, -1, ctx.by_freq
            ).view(trials, rows, width)
        if ctx.padding >= 0:
            made[:, ctx.padding] = 0
        return made, None, None, None, None


def _where(index: torch.Tensor, own: bool) -> list[torch.Tensor | None]:
    if not own:
        return [None, index]
    return [torch.arange(len(index), device=index.device).view(-1, *[1] * (index.ndim - 1)), index]


def _offset(index: torch.Tensor, trials: int, rows: int) -> torch.Tensor:
    """The row of a trial's table, when all tables follow one another; the trials are in front."""
    start = torch.arange(0, trials * rows, rows, device=index.device, dtype=index.dtype)
    return index + start.view(-1, *[1] * (index.ndim - 1))


@rule("embedding")
def embedding(func: Any, *args: Any, **options: Any) -> Any:
    """The rows of each trial's table, by a shared index or one of its own."""
    if func is not F.embedding:  # torch.embedding has other arguments
        return _builtin(func, *args, **options)
    index, table = args
    if options["max_norm"] is not None:
        raise refusal("embedding", "max_norm changes the table while it is read; clip it after the step instead")
    if options["sparse"]:
        raise refusal("embedding", "sparse gradients cannot be stacked; leave sparse=False")
    if not isinstance(table, Stacked):
        return Stacked(func(index.whole, table, **options), index.at)
    padding = options["padding_idx"]
    if padding is not None and not -table.shape[0] <= padding < table.shape[0]:
        raise AssertionError("Padding_idx must be within num_embeddings")
    own = isinstance(index, Stacked)
    made = _Lookup.apply(  # type: ignore[no-untyped-call]
        table.moved(0),
        index.moved(0) if own else index,
        own,
        -1 if padding is None else padding % table.shape[0],
        options["scale_grad_by_freq"],
    )
    return Stacked(made)


def _builtin(
    func: Any, table: Any, index: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    padding = padding_idx if padding_idx >= 0 else None
    return F.embedding(index, table, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


@rule("embedding_bag")
def embedding_bag(func: Any, *args: Any, **options: Any) -> Any:
    """The bags of all trials one after another, looked up in their tables one after another."""
    if func is not F.embedding_bag:
        return by_vmap(func, *args, **options)
    index, table, offsets, weights = *args, options["offsets"], options["per_sample_weights"]
    if options["max_norm"] is not None:
        raise refusal("embedding_bag", "max_norm changes the table while it is read; clip it after the step instead")
    if options["sparse"]:
        raise refusal("embedding_bag", "sparse gradients cannot be stacked; leave sparse=False")
    if options["scale_grad_by_freq"]:  # torch 2.13 on a CPU divides by the frequencies of other rows
        raise refusal("embedding_bag", "scale_grad_by_freq cannot be done for several trials as torch does it for one")
    trials = next(x.trials for x in (index, table, offsets, weights) if isinstance(x, Stacked))
    place, padding = _in_front(index, trials), options["padding_idx"]
    if isinstance(table, Stacked):
        rows = table.shape[0]
        padding = None if padding is None else padding % rows
        own = _offset(place, trials, rows)
        # Padding is neither read nor learned, so the row of any trial will do.
        place = own if padding is None else torch.where(place == padding, padding, own)
        table = table.moved(0).flatten(0, 1)
    if offsets is not None:
        offsets = _offset(_in_front(offsets, trials), trials, index.shape[0]).flatten()
    if weights is not None:
        weights = _in_front(weights, trials).flatten(0, 1)
    # An offset that only ends the last bag begins a bag here, which is dropped below.
    given = {"offsets": offsets, "per_sample_weights": weights, "padding_idx": padding, "include_last_offset": False}
    made = func(place.flatten(0, 1), table, **{**options, **given})
    made = made.view(trials, len(made) // trials, made.shape[-1])
    return Stacked(made[:, :-1] if options["include_last_offset"] and index.ndim == 1 else made)


def _in_front(value: Any, trials: int) -> torch.Tensor:
    return value.moved(0) if isinstance(value, Stacked) else value.expand(trials, *value.shape)


@rule("one_hot")
def one_hot(func: Any, tensor: Stacked, num_classes: int = -1) -> Any:
    """The caller must say how many classes there are: the greatest index differs from trial to trial."""
    if num_classes < 0:
        raise refusal("one_hot", "the number of classes would depend on one trial's values; pass num_classes")
    return Stacked(func(tensor.whole, num_classes), tensor.at)
