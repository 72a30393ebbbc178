"""Torch's random functions, made of keyed numbers: what each draws for a trial is in ``draws.py``.

Every function here is called as torch's is, behind the mode that keys it. Its tensors may be those of one trial, of one
trial under vmap, or of all trials of a bundle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.training.random import draws
from penstock.training.random.masks import StepKeys, dropout, rate

if TYPE_CHECKING:
    from penstock.training.random.keyed import Keyed

_ROUNDS = 12  # of a gamma's rejection, each of which accepts 95% or more: what is left is one in 4e15
_LARGEST = {torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8, torch.bool: 1}
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32}


# Functions that make a tensor


def _factory(make: Callable[..., Tensor], mode: Keyed, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``make(keys, args, dtype, device, kwargs)`` has the tensor; what torch's options say is done here."""
    given = dict(kwargs)
    generator, out = given.pop("generator", None), given.pop("out", None)
    device, dtype = given.pop("device", None), given.pop("dtype", None)
    needs_grad = given.pop("requires_grad", False)
    plain = not given.pop("names", None) and given.pop("layout", torch.strided) in (None, torch.strided)
    for name in ("pin_memory", "memory_format"):
        given.pop(name, None)
    if not plain:
        mode.drew(func.__name__)
    if not plain or not mode.draws(func.__name__, generator=generator):
        return func(*args, **kwargs)
    device = torch.get_default_device() if device is None else torch.device(device)
    made = make(mode, args, dtype, device, given)
    if out is not None:
        return mode.keys.write(out, made, func.__name__)
    return made.requires_grad_() if needs_grad else made


def _like(make: Callable[..., Tensor], mode: Keyed, func: Any, input: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    options = {"device": input.device, "dtype": input.dtype}
    options |= {name: value for name, value in kwargs.items() if value is not None}
    if options.get("layout", input.layout) is not torch.strided:
        mode.drew(func.__name__)
        return func(input, *args, **kwargs)
    options.pop("layout", None)

    def given(*_: Any, **__: Any) -> Any:
        return func(input, *args, **kwargs)

    given.__name__ = func.__name__
    return _factory(make, mode, given, *args, tuple(input.shape), **options)


def _size(args: Sequence[Any], given: dict[str, Any]) -> tuple[int, ...]:
    size = given.get("size", args)
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)


def _rand(mode: Keyed, args: Any, dtype: Any, device: torch.device, given: dict[str, Any]) -> Tensor:
    shape, dtype = _size(args, given), dtype or torch.get_default_dtype()
    if dtype in _REAL:
        real = draws.uniform(_REAL[dtype])
        return mode.keys.draw((*shape, 2), device, lambda bits: torch.view_as_complex(real(bits)))
    made = mode.keys.uniform(shape, device, dtype)
    if math.prod(shape) == 1:
        mode.scalars[id(made)] = made
    return made


def _randn(mode: Keyed, args: Any, dtype: Any, device: torch.device, given: dict[str, Any]) -> Tensor:
    return _normals(mode.keys, _size(args, given), dtype or torch.get_default_dtype(), device)


def _normals(keys: StepKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype not in _REAL:
        return keys.draw(shape, device, lambda bits: draws.normal(bits).to(dtype))
    half, real = math.sqrt(0.5), _REAL[dtype]  # real and imaginary parts share the variance of 1
    return keys.draw((*shape, 2), device, lambda bits: torch.view_as_complex(draws.normal(bits).mul_(half).to(real)))


def _randint(mode: Keyed, args: Any, dtype: Any, device: torch.device, given: dict[str, Any]) -> Tensor:
    *bounds, size = (*args, given["size"]) if "size" in given else args
    if "high" in given:
        bounds = [*bounds, *([given["low"]] if "low" in given else []), given["high"]]
    low, high = (0, *bounds)[-2:]
    if not low < high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    formula = draws.integers(int(low), int(high))
    return mode.keys.draw(tuple(size), device, lambda bits: formula(bits).to(dtype or torch.int64))


def _randperm(mode: Keyed, args: Any, dtype: Any, device: torch.device, given: dict[str, Any]) -> Tensor:
    count = args[0] if args else given["n"]
    return mode.keys.draw((count,), device, lambda bits: draws.permutation(bits).to(dtype or torch.int64))


def _normal(mode: Keyed, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``torch.normal``: of tensors, or of numbers and a size."""
    given = dict(zip(("mean", "std", "size"), args, strict=False)) | kwargs
    mean, std = (rate(given.get(name, default)) for name, default in (("mean", 0.0), ("std", 1.0)))
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]

    def make(mode: Keyed, args: Any, dtype: Any, device: torch.device, _: Any) -> Tensor:
        if "size" in given:
            shape, like = tuple(given["size"]), dtype or torch.get_default_dtype()
        else:
            sizes = [x.shape for x in tensors]
            shape = np.broadcast_shapes(*sizes)
            device, like = tensors[0].device, tensors[0].dtype
        with torch.no_grad():
            made: Tensor = mode.keys.draw(shape, device, draws.normal) * std + mean
            return made.to(like)

    if any(x.is_complex() for x in tensors) or given.get("dtype") in _REAL:
        mode.drew("normal")
        return func(*args, **kwargs)

    def torchs(*_: Any, **__: Any) -> Any:
        return func(*args, **kwargs)

    torchs.__name__ = "normal"
    return _factory(make, mode, torchs, **{k: v for k, v in given.items() if k not in ("mean", "std", "size")})


# Functions that write into their tensor. Each has a number for each element, from its own arguments.


def _in_place(
    make: Callable[..., Any], names: Sequence[str], mode: Keyed, func: Any, /, *args: Any, **kwargs: Any
) -> Any:
    given = dict(zip(("tensor", *names), args, strict=False)) | kwargs
    x, generator = given.pop("tensor"), given.pop("generator", None)
    if not mode.draws(func.__name__, x, generator):
        return func(*args, **kwargs)
    numbers = {_ALIASES.get(name, name): rate(value) for name, value in given.items()}
    with torch.no_grad():
        drawn = make(mode.keys, x, **numbers).to(x.dtype)
    return mode.keys.write(x, drawn, func.__name__)


_ALIASES = {"from": "low", "a": "low", "to": "high", "b": "high"}  # the last of each two are nn.init's


def _wide(keys: StepKeys, x: Tensor, formula: draws.Formula) -> Tensor:
    return keys.draw(tuple(x.shape), x.device, formula)


def _normal_(keys: StepKeys, x: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Any:
    if x.dtype in _REAL:
        return _normals(keys, tuple(x.shape), x.dtype, x.device) * std + mean
    return _wide(keys, x, draws.normal) * std + mean


def _uniform_(keys: StepKeys, x: Tensor, low: Any = 0.0, high: Any = 1.0) -> Any:
    return _wide(keys, x, draws.uniform(x.dtype)) * (high - low) + low


def _bernoulli_(keys: StepKeys, x: Tensor, p: Any = 0.5) -> Any:
    if not isinstance(p, Tensor) and not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    return _wide(keys, x, draws.uniform(torch.float64)) < p


def _exponential_(keys: StepKeys, x: Tensor, lambd: Any = 1.0) -> Any:
    return _wide(keys, x, draws.exponential) / lambd


def _geometric_(keys: StepKeys, x: Tensor, p: Any) -> Any:
    logarithm = torch.log1p(-p.double()) if isinstance(p, Tensor) else math.log1p(-p)
    return (_wide(keys, x, draws.exponential) / -logarithm).ceil().clamp(min=1.0)


def _cauchy_(keys: StepKeys, x: Tensor, median: Any = 0.0, sigma: Any = 1.0) -> Any:
    return torch.tan((_wide(keys, x, draws.inside) - 0.5) * math.pi) * sigma + median


def _log_normal_(keys: StepKeys, x: Tensor, mean: Any = 1.0, std: Any = 2.0) -> Any:
    return torch.exp(_normal_(keys, x, mean, std))


def _random_(keys: StepKeys, x: Tensor, low: Any = None, high: Any = None) -> Any:
    if low is None and high is None:
        high = (_LARGEST[x.dtype] if x.dtype in _LARGEST else torch.iinfo(x.dtype).max - 1) + 1
    elif high is None:
        low, high = None, low
    return _wide(keys, x, draws.integers(int(low or 0), int(high)))


# Functions of a tensor


def _of(make: Callable[..., Tensor], mode: Keyed, func: Any, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    given = dict(kwargs)
    generator, out = given.pop("generator", None), given.pop("out", None)
    if not mode.draws(func.__name__, x, generator):
        return func(x, *args, **kwargs)
    made = make(mode.keys, x, *map(rate, args), **given)
    return made if out is None else mode.keys.write(out, made, func.__name__)


@torch.no_grad()
def _bernoulli(keys: StepKeys, x: Tensor, p: Any = None) -> Tensor:
    made: Tensor = _bernoulli_(keys, x, x if p is None else p)
    return made.to(x.dtype)


@torch.no_grad()
def _multinomial(keys: StepKeys, x: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """Places by their weights: by the running sum of the weights, or those that come first in a race."""
    weights, lead = x.to(torch.float64), tuple(x.shape[:-1])
    if not 0 < num_samples <= (num_samples if replacement else x.shape[-1]):
        raise RuntimeError(f"cannot sample {num_samples} of {x.shape[-1]} without replacement")
    if not replacement and num_samples > 1:
        race = weights / keys.draw(tuple(x.shape), x.device, draws.exponential)
        return race.topk(num_samples, -1)[1]
    sums = weights.cumsum(-1)
    drawn = keys.draw((*lead, num_samples), x.device, draws.uniform(torch.float64)) * sums[..., -1:]
    return torch.searchsorted(sums, drawn, right=True).clamp(max=x.shape[-1] - 1)


@torch.no_grad()
def _poisson(keys: StepKeys, x: Tensor) -> Tensor:
    """The least count whose distribution function reaches a uniform number, looked for about its expansion."""
    mean, u = x.to(torch.float64), keys.draw(tuple(x.shape), x.device, draws.inside)
    z = torch.erfinv(u * 2 - 1) * math.sqrt(2)
    low = (mean + mean.sqrt() * z + (z * z - 1) / 6).floor() - 16
    for step in (16.0, 8.0, 4.0, 2.0, 1.0):
        below = torch.special.gammaincc((low + step).clamp(min=0.0), mean) < u  # counts below low + step are too few
        low = torch.where(below | (low + step <= 0), low + step, low)
    return low.clamp(min=0.0).to(x.dtype)


def _gamma(keys: StepKeys, x: Tensor) -> Tensor:
    """Marsaglia's and Tsang's rejection, all rounds at once; its gradient is torch's."""
    with torch.no_grad():
        made = _gammas(keys, x).to(x.dtype).clamp(min=torch.finfo(x.dtype).tiny)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return made
    slope = torch._standard_gamma_grad(x.detach(), made)
    return made + (x - x.detach()) * slope


def _gammas(keys: StepKeys, x: Tensor) -> Tensor:
    alpha, shape = x.detach().to(torch.float64), (_ROUNDS, *x.shape)
    z, u = (keys.draw(shape, x.device, formula) for formula in (draws.normal, draws.inside))
    small = alpha < 1
    d = torch.where(small, alpha + 1, alpha) - 1 / 3
    c = (d * 9).rsqrt()
    made = d
    for round in reversed(range(_ROUNDS)):
        v = (c * z[round] + 1).pow(3)
        taken = (v > 0) & (u[round].log() < z[round].square() * 0.5 + d - d * v + d * v.log())
        made = torch.where(taken, d * v, made)
    shrink = keys.draw(tuple(x.shape), x.device, draws.inside).pow(alpha.reciprocal())
    return torch.where(small, made * shrink, made)


@torch.no_grad()
def _dirichlet(keys: StepKeys, x: Tensor) -> Tensor:
    made = _gammas(keys, x).clamp(min=torch.finfo(torch.float64).tiny)
    return (made / made.sum(-1, keepdim=True)).to(x.dtype)


def _gumbel_softmax(
    mode: Keyed, func: Any, logits: Tensor, tau: Any = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Any:
    if not mode.draws("gumbel_softmax", logits):
        return func(logits, tau, hard, eps, dim)
    with torch.no_grad():
        gumbels = -_wide(mode.keys, logits, draws.exponential).log().to(logits.dtype)
    soft = ((logits + gumbels) / rate(tau)).softmax(dim)
    if not hard:
        return soft
    best = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(logits).scatter(dim, best, 1.0) - soft.detach() + soft


def _native_dropout(mode: Keyed, func: Any, input: Tensor, p: Any, train: bool | None) -> Any:
    if train is False or not mode.draws("native_dropout", input):
        return func(input, p, train)
    kept = dropout(torch.ones_like(input), p, mode.keys)
    return input * kept, kept != 0


def rrelu(
    mode: Keyed, func: Any, input: Tensor, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False,
    inplace: Any = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """``F.rrelu``, ``torch.rrelu`` and ``torch.rrelu_``."""
    generator = kwargs.pop("generator", None)
    if not training or not mode.draws("rrelu", input, generator):
        more = {} if generator is None else {"generator": generator}
        return func(input, lower, upper, training, *([inplace] if func is F.rrelu else []), **more)
    lower, upper = rate(lower), rate(upper)
    with torch.no_grad():
        slope = (_wide(mode.keys, input, draws.uniform(torch.float64)) * (upper - lower) + lower).to(input.dtype)
    made = torch.where(input <= 0, input * slope, input)
    return input.copy_(made) if inplace is True or func.__name__ == "rrelu_" else made


def _fractional_pool(dims: int, mode: Keyed, func: Any, input: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(("kernel_size", "output_size", "output_ratio", "return_indices"), args, strict=False)) | kwargs
    if given.get("_random_samples") is None and mode.draws(func.__name__, input):
        lead = (1, *input.shape[:1]) if input.dim() == dims + 1 else tuple(input.shape[:2])
        given["_random_samples"] = mode.keys.uniform((*lead, dims), input.device, input.dtype)
    return func(input, **given)


def _kaiming_uniform_(mode: Keyed, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    mode.drew("kaiming_uniform_")
    return func(*args, **kwargs)


def handlers() -> dict[Any, Callable[..., Any]]:
    """What the mode calls in place of each of torch's functions: ``handler(mode, function, *args, **kwargs)``."""
    in_place: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
        "normal_": (_normal_, ("mean", "std")), "uniform_": (_uniform_, ("from", "to")),
        "bernoulli_": (_bernoulli_, ("p",)), "exponential_": (_exponential_, ("lambd",)),
        "geometric_": (_geometric_, ("p",)), "cauchy_": (_cauchy_, ("median", "sigma")),
        "log_normal_": (_log_normal_, ("mean", "std")), "random_": (_random_, ("from", "to")),
    }  # fmt: skip
    by_name: dict[str, Callable[..., Any]] = {
        "rand": partial(_factory, _rand), "randn": partial(_factory, _randn),
        "randint": partial(_factory, _randint), "randperm": partial(_factory, _randperm),
        "rand_like": partial(_like, _rand), "randn_like": partial(_like, _randn),
        "randint_like": partial(_like, _randint), "normal": _normal,
        "bernoulli": partial(_of, _bernoulli), "multinomial": partial(_of, _multinomial),
        "poisson": partial(_of, _poisson), "_standard_gamma": partial(_of, _gamma),
        "_sample_dirichlet": partial(_of, _dirichlet), "native_dropout": _native_dropout,
        "gumbel_softmax": _gumbel_softmax,
        **{name: partial(_in_place, make, names) for name, (make, names) in in_place.items()},
        **{f"fractional_max_pool{d}d{more}": partial(_fractional_pool, d)
           for d in (2, 3) for more in ("", "_with_indices")},
    }  # fmt: skip
    table: dict[Any, Callable[..., Any]] = {}
    for home in (torch, Tensor, F, torch.nn.init):
        table |= {getattr(home, name): made for name, made in by_name.items() if hasattr(home, name)}
    table[torch.nn.init.kaiming_uniform_] = _kaiming_uniform_
    return table
