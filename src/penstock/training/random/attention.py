"""Attention with keyed dropout, in plain operations: for one trial, and for all trials of a bundle at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.training.random.masks import StepKeys, dropout, may_drop


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    keys: StepKeys,
) -> Tensor:
    """``F.scaled_dot_product_attention`` in plain operations, with keyed dropout of its weights."""
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("scaled_dot_product_attention: attn_mask must be None where is_causal is True.")
        causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device)
        attn_mask = causal.tril()
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = (query * (query.size(-1) ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
        else:
            scores = scores + attn_mask
        blank = (scores == -math.inf).all(-1, keepdim=True)  # a query that may look at no key gives 0, as in torch
        weights = torch.softmax(scores.masked_fill(blank, 0.0), -1).masked_fill(blank, 0.0)
    return dropout(weights, dropout_p, keys) @ value


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: Any,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    keys: StepKeys,
) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` in plain operations, with keyed dropout; in training it counts as one call."""
    batched = query.dim() == 3
    if not batched:
        alone = query is key and key is value
        query = query.unsqueeze(1)
        key, value = (query, query) if alone else (key.unsqueeze(1), value.unsqueeze(1))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, batch, width = query.shape
    split = (batch, num_heads, -1, width // num_heads)
    if width != embed_dim_to_check or width % num_heads:
        raise AssertionError(
            f"expected an embedding dimension of {embed_dim_to_check} that {num_heads} heads divide, got {width}"
        )
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _added(attn_mask, query.dtype)
    if mask is not None:
        whole = (length, key.size(0)) if mask.dim() == 2 else (batch * num_heads, length, key.size(0))
        if mask.shape != whole:
            raise RuntimeError(f"expected an attn_mask of shape {whole}, got {tuple(mask.shape)}")
        mask = mask if mask.dim() == 2 else mask.reshape(batch, num_heads, length, -1)
    padding = _added(key_padding_mask, query.dtype)

    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = _projected((query, key, value), weights, in_proj_bias)
    elif query is key and key is value:
        q, k, v = F.linear(query, _given(in_proj_weight), in_proj_bias).chunk(3, -1)
    else:
        q, k, v = _projected((query, key, value), _given(in_proj_weight).chunk(3), in_proj_bias)
    if (bias_k is None) != (bias_v is None):
        raise AssertionError("bias_k and bias_v go together: give both or none")
    extra = int(bias_k is not None) + add_zero_attn
    if bias_k is not None and bias_v is not None:
        if static_k is not None or static_v is not None:
            raise AssertionError("bias cannot be added to a static key or value.")
        k = torch.cat([k, bias_k.expand(-1, batch, -1)])
        v = torch.cat([v, bias_v.expand(-1, batch, -1)])
    q, k, v = (x.reshape(x.size(0), batch, num_heads, -1).permute(1, 2, 0, 3) for x in (q, k, v))
    k = k if static_k is None else static_k.reshape(split)
    v = v if static_v is None else static_v.reshape(split)
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if extra:
        mask = None if mask is None else F.pad(mask, (0, extra))
        padding = None if padding is None else F.pad(padding, (0, extra))
    if padding is not None:
        padding = padding.unsqueeze(1).unsqueeze(1)
        mask = padding if mask is None else mask + padding

    drops = training and may_drop(dropout_p)
    if training and not drops:
        keys.next()
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.size(-1))) @ k.transpose(-2, -1)
        heads = torch.softmax(scores if mask is None else scores + mask, -1)
        heads = dropout(heads, dropout_p, keys) if drops else heads
        out = heads @ v
    elif drops:
        out = attention(q, k, v, mask, dropout_p, causal, keys=keys)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
    shown = None
    if need_weights:
        shown = heads.mean(1) if average_attn_weights else heads
        shown = shown if batched else shown.squeeze(0)
    return out if batched else out.squeeze(1), shown


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _given(weight: Tensor | None) -> Tensor:
    if weight is None:
        raise AssertionError("a projection weight is None")
    return weight


def _projected(inputs: Iterable[Tensor], weights: Iterable[Tensor | None], bias: Tensor | None) -> list[Tensor]:
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(x, _given(w), b) for x, w, b in zip(inputs, weights, biases, strict=True)]
