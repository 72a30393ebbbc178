"""Normalizations: one for all trials, folded into channels or examples; then each trial's own scale and shift.

``eps`` and ``momentum`` may differ from trial to trial: such a number carries the trials' own as ``.value``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from penstock.training.fused.operators.channelwise import into_batch, into_channels, out_of_batch, out_of_channels
from penstock.training.fused.operators.kept import LATER, Later, keep
from penstock.training.fused.operators.normalized import Normalized, Parts, inside
from penstock.training.fused.stacked import Stacked, name_of, refusal, rule
from penstock.training.kernels.choice import wanted

_ORDER = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_TORCH_ORDER = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")


@rule("batch_norm", "instance_norm")
def by_channel(func: Any, *args: Any, **kwargs: Any) -> Stacked:
    """Normalize by channel; torch.nn.functional and torch name and order the arguments differently."""
    order = _ORDER if func in (F.batch_norm, F.instance_norm) else _TORCH_ORDER
    given = dict(zip(order, args, strict=False)) | kwargs  # the argument left over says whether cuDNN may be used
    if "use_input_stats" in given:
        given["training"] = given["use_input_stats"]
    return _by_channel(name_of(func), *[given.get(name) for name in _ORDER])


def _by_channel(
    name: str, x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: Any, momentum: Any, eps: Any
) -> Stacked:
    trials = _trials(x, mean, var, weight, bias)
    if not isinstance(x, Stacked):
        x = Stacked(x.unsqueeze(1).expand(-1, trials, *x.shape[1:]), 1)
    running = [stat for stat in (mean, var) if training and stat is not None]
    if not all(isinstance(stat, Stacked) for stat in running):
        raise refusal(name, "it updates running statistics that the trials share")
    if name == "batch_norm" and training and x.ndim == 4 and x.at == 0 and wanted(x, x.shape.numel()):
        return _by_kernel(x, mean, var, weight, bias, momentum, eps)
    mean, var, weight, bias = (_flat(value, trials) for value in (mean, var, weight, bias))
    written, own_momentum, own_eps = (mean, var), _own(momentum), _own(eps)
    if (
        running and own_momentum is not None
    ):  # the call gives the statistics of this batch alone, to be weighed per trial
        written, momentum = (torch.zeros_like(mean), torch.zeros_like(var)), 1.0
    if own_eps is None:
        made = getattr(F, name)(into_channels(x), *written, weight, bias, training, momentum, eps)
    else:
        each = own_eps.repeat_interleave(x.shape[1])
        made = _by_steps(name, into_channels(x), *written, weight, bias, training, momentum, each)
    with torch.no_grad():
        for stat, flat, new in zip(running, (mean, var), written, strict=False):
            if new is not flat and own_momentum is not None:
                part = own_momentum.repeat_interleave(x.shape[1]).to(flat.dtype)
                flat.mul_(1 - part).add_(new * part)
            if not stat.moved(0).is_contiguous():  # then the statistics were written into a copy
                stat.moved(0).copy_(flat.view(trials, -1))
    return out_of_channels(made, trials)


def _by_kernel(x: Stacked, mean: Any, var: Any, weight: Any, bias: Any, momentum: Any, eps: Any) -> Stacked:
    """BatchNorm in training by Penstock's own kernel, with the residual and activation that follow it."""
    channels = x.shape[1]
    count = x.shape.numel() // channels
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    own_momentum, own_eps = _own(momentum), _own(eps)
    running = () if mean is None else (mean, var)
    later = LATER.get() or Later()
    for stat in running:
        later.settle(stat)

    def keep_both(stats: torch.Tensor) -> None:
        part = float(momentum) if own_momentum is None else own_momentum.to(stats.dtype).unsqueeze(1)
        for stat, new in zip(running, stats, strict=True):
            keep(stat, new, part)

    weight, bias = (
        value.moved(0) if isinstance(value, Stacked) else value if value is None else value.expand(x.trials, -1)
        for value in (weight, bias)
    )
    eps = float(eps) if own_eps is None else own_eps
    made = Normalized(Parts(inside(x), weight, bias, eps), running, keep_both if running else None)
    if not all(map(later.takes, running)):
        made.compute()
    return made


def _by_steps(
    name: str, x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: torch.Tensor
) -> torch.Tensor:
    """F.batch_norm or F.instance_norm, written out for an eps per channel."""
    wide, spatial = _wide(x), [1] * (x.ndim - 2)
    if training:
        dims = [dim for dim in range(x.ndim) if dim > 1 or (dim == 0 and name == "batch_norm")]
        variance, center = torch.var_mean(wide, dims, correction=0, keepdim=True)
        count = x.numel() // variance.numel()
        if mean is not None:
            with torch.no_grad():
                for stat, new in ((mean, center), (var, variance * (count / (count - 1)))):
                    stat.mul_(1 - momentum).add_(new.mean(0).flatten() * momentum)
    else:
        variance, center = var.reshape(-1, *spatial), mean.reshape(-1, *spatial)
    made = (wide - center) * torch.rsqrt(variance + eps.to(wide.dtype).reshape(-1, *spatial))
    return _scaled(made, 0, weight, bias, (-1, *spatial)).to(x.dtype)


@rule("layer_norm")
def layer_norm(
    func: Any, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, *cudnn: Any
) -> Stacked:
    return _trailing(F.layer_norm, input, tuple(normalized_shape), {"weight": weight, "bias": bias}, eps)


@rule("rms_norm")
def rms_norm(func: Any, input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Stacked:
    return _trailing(F.rms_norm, input, tuple(normalized_shape), {"weight": weight}, eps)


def _trailing(func: Any, x: Any, shape: tuple[int, ...], affine: dict[str, Any], eps: Any) -> Stacked:
    """Normalize over the last dimensions; the trials lie in front of them."""
    at = x.at if isinstance(x, Stacked) and x.at <= x.ndim - len(shape) else 0
    inner, own_eps = x.moved(at) if isinstance(x, Stacked) else x.unsqueeze(0), _own(eps)
    if own_eps is not None:
        each = own_eps.reshape(-1, *[1] * (x.ndim - at))
        made = _standard(inner, [-1 - n for n in range(len(shape))], each, func is F.layer_norm)
        made = made.to(func(inner.new_zeros(1), (1,)).dtype)
    elif not any(isinstance(value, Stacked) for value in affine.values()):
        return Stacked(func(inner, shape, **affine, eps=eps), at)
    else:
        made = func(inner, shape, eps=eps)
    return Stacked(_scaled(made, at, affine["weight"], affine.get("bias"), shape), at)


@rule("group_norm")
def group_norm(
    func: Any, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: Any = 1e-5, *cudnn: Any
) -> Stacked:
    x, own_eps, trials = input, _own(eps), _trials(input, weight, bias)
    scales = (-1, *[1] * (x.ndim - 2))
    if own_eps is not None:
        inner = x.moved(0) if isinstance(x, Stacked) else x.unsqueeze(0)
        groups = torch.unflatten(inner, 2, (num_groups, -1)).flatten(3)
        made = _standard(groups, [3], own_eps.reshape(-1, 1, 1, 1), True).reshape(-1, *x.shape)
        made = made.to(F.group_norm(inner.new_zeros(1, 2), 1).dtype)
        return Stacked(_scaled(made, 0, weight, bias, scales), 0)
    if not isinstance(x, Stacked):
        return Stacked(_scaled(F.group_norm(x, num_groups, eps=eps).unsqueeze(0), 0, weight, bias, scales), 0)
    if x.at == 1:
        weight, bias = _flat(weight, trials), _flat(bias, trials)
        return out_of_channels(F.group_norm(into_channels(x), num_groups * trials, weight, bias, eps), trials)
    normal = out_of_batch(F.group_norm(into_batch(x), num_groups, eps=eps), x)
    return Stacked(_scaled(normal.whole, normal.at, weight, bias, scales), normal.at)


def _trials(*values: Any) -> int:
    return next(value.trials for value in values if isinstance(value, Stacked))


def _own(number: Any) -> torch.Tensor | None:
    """The trials' own numbers, where they differ."""
    value = getattr(number, "value", None)
    return value.whole if isinstance(value, Stacked) else None


def _flat(value: Any, trials: int) -> Any:
    """A value per channel of each trial, for trials that are folded into channels."""
    if isinstance(value, Stacked):
        return value.moved(0).reshape(-1)
    return value if value is None else value.repeat(trials)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _standard(x: torch.Tensor, dims: list[int], eps: torch.Tensor, centered: bool) -> torch.Tensor:
    wide = _wide(x)
    eps = eps.to(wide.dtype)
    if not centered:
        return wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    return (wide - mean) * torch.rsqrt(variance + eps)


def _scaled(made: torch.Tensor, at: int, weight: Any, bias: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """x times weight plus bias, which have ``shape`` in a trial's last dimensions; trials are along ``at``."""

    def fit(value: Any) -> Any:
        if not isinstance(value, Stacked):
            return value.reshape(shape)
        between = made.ndim - 1 - at - len(shape)
        return value.moved(0).reshape(value.trials, *[1] * between, *shape)

    scaled = made if weight is None else made * fit(weight)
    return (scaled if bias is None else scaled + fit(bias)).to(made.dtype)


@rule("_weight_norm")
def weight_norm(func: Any, v: Any, g: Any, dim: int = 0) -> Any:
    """A weight of length ``g`` along all dimensions but one, or along all of them."""
    others = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    length = v.square().sum(others, keepdim=dim != -1).sqrt()
    return v * (g / length)
