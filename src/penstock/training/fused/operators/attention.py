"""Attention: the trials are folded into the batch, so that torch's own kernels do all of them at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from penstock.training.fused.stacked import Stacked, refusal, rule
from penstock.training.kernels.choice import wanted
from penstock.training.random.attention import multi_head_attention
from penstock.training.random.masks import StepKeys

MOST = 65535  # rows of a batch, the limit of a CUDA grid: with more, kernels fail (cuDNN's on an H200, torch 2.11)


@rule("scaled_dot_product_attention")
def attention(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Stacked:
    """Queries, keys, values and mask are each trial's own or shared; all dimensions before the heads are batch."""
    if dropout_p > 0.0:
        raise refusal("scaled_dot_product_attention", "its dropout was given no keys of trial and step")
    three = query, key, value
    trials = next(x.trials for x in (*three, attn_mask) if isinstance(x, Stacked))
    batch = torch.Size(np.broadcast_shapes(*(x.shape[:-3] for x in three)))  # torch's own imports sympy
    folded = [_fold(x, trials, batch) for x in three]
    mask = attn_mask
    if mask is not None:
        # A mask that is the same in the whole batch is left to torch to broadcast.
        same = not isinstance(mask, Stacked) and math.prod(mask.shape[:-3]) == 1
        mask = mask.reshape(mask.shape[-3:]) if same else _fold(mask, trials, batch)
    made = None
    if mask is None and wanted(folded[0]):
        made = _by_kernel(folded, is_causal, scale)
    if made is None:
        made = _in_parts(func, folded, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return Stacked(made.reshape(trials, *batch, *made.shape[1 if query.ndim > 2 else 2 :]))


def _fold(x: Any, trials: int, batch: torch.Size) -> torch.Tensor:
    """[trials · batch, heads, length, width], from [batch, heads, length, width] of one trial, or without the batch."""
    inner = x.moved(0) if isinstance(x, Stacked) else x.unsqueeze(0)
    own = (1,) * (2 + len(batch) + 1 - x.ndim) + tuple(x.shape)
    return inner.reshape(-1, *own).expand(trials, *batch, *own[-3:]).flatten(0, len(batch))


def _by_kernel(folded: list[torch.Tensor], causal: bool, scale: float | None) -> torch.Tensor | None:
    """Attention by Penstock's own kernel, where it takes such sizes."""
    from penstock.training.kernels.attention import attention, takes

    device = folded[0].device.type
    if torch.is_autocast_enabled(device):
        folded = [x.to(torch.get_autocast_dtype(device)) for x in folded]
    q, k, v = folded
    return attention(q, k, v, causal, scale) if takes(q, k, v, None, 0.0) else None


def _in_parts(func: Any, folded: list[torch.Tensor], mask: torch.Tensor | None, **options: Any) -> torch.Tensor:
    if len(folded[0]) <= MOST:
        return func(*folded, attn_mask=mask, **options)  # type: ignore[no-any-return]
    made = []
    for start in range(0, len(folded[0]), MOST):
        part = slice(start, start + MOST)
        rows = mask[part] if mask is not None and mask.ndim == 4 else mask
        made.append(func(*(x[part] for x in folded), attn_mask=rows, **options))
    return torch.cat(made)


@rule("multi_head_attention_forward")
def heads(func: Any, *args: Any, **options: Any) -> Any:
    """Attention of many heads, as ``keyed_attention`` writes it out; ``Keyed`` has taken calls that drop weights."""
    if options["training"] and args[10] > 0.0:
        raise refusal("multi_head_attention_forward", "its dropout was given no keys of trial and step")
    return multi_head_attention(*args, **{**options, "training": False}, keys=StepKeys(0, 0))


@rule("_nested_tensor_from_mask_left_aligned")
def left_aligned(func: Any, *args: Any) -> bool:
    """Answer no. ``nn.TransformerEncoder`` asks this before it makes nested tensors, for a fast path in evaluation."""
    return False
