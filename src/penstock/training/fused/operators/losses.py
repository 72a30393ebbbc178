"""Loss functions: one call gives the losses of all trials' elements or rows, then each trial has its own reduction."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch.nn import functional as F

from penstock.training.fused.stacked import Stacked, align, by_vmap, rule

_WEIGHTS = ("weight", "pos_weight")


def _trials(*values: Any) -> int:
    return next(v.trials for v in values if isinstance(v, Stacked))


def _reduced(lost: torch.Tensor, at: int, reduction: str) -> Stacked:
    """The losses of elements, with the trials along a dimension, reduced as ``reduction`` says for one trial."""
    others = [d for d in range(lost.ndim) if d != at]
    if reduction == "none" or not others:
        return Stacked(lost, at)
    return Stacked(lost.mean(others) if reduction == "mean" else lost.sum(others))


def _alike(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]


def _by_torch(func: Any, options: dict[str, Any]) -> bool:
    """Whether torch is to handle the call: a builtin, deprecated arguments, or a reduction that torch refuses."""
    if getattr(func, "__module__", None) != F.__name__:
        return True
    legacy = options.get("size_average") is not None or options.get("reduce") is not None
    return legacy or options["reduction"] not in ("none", "mean", "sum", *["batchmean"] * (func is F.kl_div))


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "poisson_nll_loss", "kl_div",
      "hinge_embedding_loss", "margin_ranking_loss",
      "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip
def _elementwise(func: Any, *tensors: Any, **options: Any) -> Any:
    if func is F.l1_loss:
        options["weight"] = _forgotten_weight()
    if _by_torch(func, options) or len({x.shape for x in tensors}) > 1:  # torch warns of sizes that differ
        return by_vmap(func, *tensors, **options)
    weights = {name: options[name] for name in _WEIGHTS if options.get(name) is not None}
    inner, at = align([*tensors, *weights.values()])
    inner = _alike(inner)
    named = dict(zip(weights, inner[len(tensors) :], strict=True))
    lost = func(*inner[: len(tensors)], **{**options, **named, "reduction": "none"})
    reduction = options["reduction"]
    if reduction == "batchmean":
        total, first = _reduced(lost, at, "sum"), tensors[0]
        return Stacked(total.whole / first.shape[0]) if first.ndim else total
    if reduction == "mean" and weights and func in (F.mse_loss, F.l1_loss):
        return Stacked(_reduced(lost, at, "sum").whole / _reduced(named["weight"], at, "sum").whole)
    return _reduced(lost, at, reduction)


def _forgotten_weight() -> Any:
    """``F.l1_loss`` does not pass its weight to a Tensor subclass (torch 2.11 to 2.13): it is read from the frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is F.l1_loss.__code__ and frame.f_locals.get("weight") is not None:
            return frame.f_locals["weight"]
        frame = frame.f_back
    return None


@rule("gaussian_nll_loss")
def _gaussian(func: Any, input: Any, target: Any, var: Any, full: bool, eps: float, reduction: str) -> Any:
    tensors = [input, target]
    if isinstance(var, torch.Tensor):
        if var.shape != input.shape and var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)  # one variance for the whole last dimension
        if var.ndim != input.ndim or sum(v for n, v in zip(input.shape, var.shape, strict=True) if n != v) > 1:
            raise ValueError("var is of incorrect size")
        tensors.append(var)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    inner, at = align(tensors)
    input, target, *given = _alike(inner)
    return _reduced(func(input, target, *(given or [var]), full=full, eps=eps, reduction="none"), at, reduction)


def _rows(value: Any, trials: int, batched: bool) -> torch.Tensor:
    """The rows of all trials one after another."""
    inner = value.moved(0) if isinstance(value, Stacked) else value.expand(trials, *value.shape)
    return inner.flatten(0, 1) if batched else inner


@rule("triplet_margin_loss", "cosine_embedding_loss", "multi_margin_loss", "multilabel_margin_loss")
def _row_wise(func: Any, *tensors: Any, **options: Any) -> Any:
    if _by_torch(func, options) or isinstance(options.get("weight"), Stacked) or not _rows_of(tensors):
        return by_vmap(func, *tensors, **options)
    trials, batched = _trials(*tensors), tensors[0].ndim == 2
    lost = func(*(_rows(x, trials, batched) for x in tensors), **{**options, "reduction": "none"})
    return _reduced(lost.unflatten(0, (trials, len(tensors[0]))) if batched else lost, 0, options["reduction"])


def _rows_of(tensors: tuple[Any, ...]) -> bool:
    first = tensors[0]
    return first.ndim in (1, 2) and all(x.shape in (first.shape, first.shape[:-1]) for x in tensors)


@rule("cross_entropy", "nll_loss")
def _classes(func: Any, input: Any, target: Any, *numbers: Any, **options: Any) -> Any:
    if _by_torch(func, options) or isinstance(options["weight"], Stacked):
        return by_vmap(func, input, target, *numbers, **options)
    weight, reduction, ignored = options["weight"], options["reduction"], options["ignore_index"]
    trials, batched = _trials(input, target), input.ndim > 1
    rows = _rows(input, trials, batched), _rows(target, trials, batched)
    lost = func(*rows, **{**options, "reduction": "none"})
    if batched:
        lost = lost.unflatten(0, (trials, input.shape[0]))
    if (
        reduction != "mean" or target.shape == input.shape
    ):  # targets of the input's shape are probabilities, which all count
        return _reduced(lost, 0, reduction)
    return Stacked(_reduced(lost, 0, "sum").whole / _counted(target, weight, ignored))


def _counted(target: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor:
    """The total weight of a trial's targets, by which the sum of their losses is divided."""
    classes = target.moved(0) if isinstance(target, Stacked) else target.unsqueeze(0)
    counts = classes != ignored
    if weight is not None:
        counts = weight.take(classes.where(counts, 0).long()) * counts
    return counts.flatten(1).sum(1) if counts.ndim > 1 else counts


@rule("linear_cross_entropy")
def _linear_classes(func: Any, input: Any, linear_weight: Any, target: Any, **options: Any) -> Any:
    bias, chunks, ignored = options.pop("linear_bias"), options.pop("options"), options.pop("ignore_index")
    if chunks is not None or linear_weight.ndim != 2:
        named = {"linear_bias": bias, "options": chunks, "ignore_index": ignored}
        return by_vmap(func, input, linear_weight, target, **named, **options)
    logits = F.linear(input, linear_weight, bias)
    return F.cross_entropy(logits, target, ignore_index=-100 if ignored is None else ignored, **options)


@rule("ctc_loss")
def _ctc(func: Any, log_probs: Any, targets: Any, *lengths: Any, **options: Any) -> Any:
    if _by_torch(func, options) or any(isinstance(x, Stacked) for x in (targets, *lengths)):
        return by_vmap(func, log_probs, targets, *lengths, **options)
    trials, batched = log_probs.trials, log_probs.ndim == 3
    rows = log_probs.moved(1).flatten(1, 2) if batched else log_probs.moved(1)
    each = [torch.as_tensor(x).reshape(-1).repeat(trials) for x in lengths]
    many = targets.repeat(
        trials, *[1] * (targets.ndim - 1)
    )  # in padded rows or one after another: the targets of all trials in turn
    lost = func(rows, many, *each, **{**options, "reduction": "none"})
    lost = lost.unflatten(0, (trials, log_probs.shape[1])) if batched else lost
    if options["reduction"] == "mean":
        divisor = torch.as_tensor(lengths[1], device=lost.device).clamp_min(1)
        lost = lost / divisor.to(lost.dtype)
    return _reduced(lost, 0, options["reduction"])
