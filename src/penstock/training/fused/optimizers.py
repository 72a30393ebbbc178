"""One optimizer step for all trials of a bundle: torch's mathematics, with hyperparameters that differ by row.

The parameters of one param group lie in one tensor [trials, numbers], row after row, and so do their gradients and
each entry of the optimizer's state. Numbers that depend only on a trial's hyperparameters and step count are worked
out on the host in float64, as torch does. The rest is elementwise passes in place, in which no row sees another.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Rows = NDArray[Any]  # one number a trial, shape [F]
_NONE: Mapping[str, Rows] = MappingProxyType({})


class VectorStep(ABC):
    """One optimizer's step for all trials of a bundle at once, for one param group.

    >>> step = VECTORISED[torch.optim.SGD]({"momentum": False, "nesterov": False, "maximize": False})
    >>> numbers = {name: np.zeros(2) for name in step.numbers} | {"lr": np.array([0.1, 0.5])}
    >>> c = {name: torch.tensor(row)[:, None] for name, row in step.coefficients(numbers, np.zeros(2)).items()}
    >>> params = torch.zeros(2, 1, dtype=torch.float64)
    >>> step.update(params, torch.ones_like(params), {}, c)
    >>> params.tolist()
    [[-0.1], [-0.5]]
    """

    numbers: ClassVar[tuple[str, ...]]
    """The numbers that may differ by trial: keys of a param group. ``betas`` are ``beta1`` and ``beta2``, and first."""
    flags: ClassVar[tuple[str, ...]]
    """The settings that must be equal to fuse: keys of a param group, as truth values. A number is among them where
    torch keeps no state if it is 0."""
    counts: ClassVar[bool] = True
    """Whether torch's state has ``step``. Where it has none, a trial without state has seen 0 steps, another 1."""
    scalars: ClassVar[tuple[str, ...]] = ()
    """Names in torch's state of entries that are one number a trial, on the host."""
    state: tuple[str, ...]
    """Names in torch's state of entries that are shaped like the parameter."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self.maximize = bool(flags["maximize"])
        self.decoupled = bool(flags.get("decoupled_weight_decay", False))

    def initial(self, name: str, numbers: Mapping[str, float]) -> float:
        """The value of an entry of the state or scalars before a trial's first step."""
        return 0.0

    def coefficients(
        self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows] = _NONE
    ) -> dict[str, Rows]:
        """The numbers that ``update`` needs by trial, from the state before the step, which has seen so many ``steps``.

        A pass that would change no row is left out with its keys, so a captured graph holds for one set of keys.
        """
        decay, c = numbers["weight_decay"], {}
        if decay.any():
            if self.decoupled:
                c["keep"] = 1 - numbers["lr"] * decay
            else:
                c["weight_decay"] = decay
                if not decay.all():
                    c["decays"] = (decay != 0).astype(np.float64)
        return c | self._coefficients(numbers, steps, scalars)

    def advance(self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows]) -> dict[str, Rows]:
        """The scalars after the step, from the same arguments as ``coefficients``."""
        return {}

    @torch.no_grad()
    def update(self, params: Tensor, grads: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]) -> None:
        """Step in place. Tensors are [F, N], those of ``c`` are [F, 1] of the same dtype; ``grads`` is overwritten.

        It never waits for the device, and the kernels it launches depend on the flags and the keys of ``c`` alone.
        """
        if self.maximize:
            grads.neg_()
        if "keep" in c:
            params.mul_(c["keep"])
        elif "decays" in c:  # 0 · weight would still turn -0 into 0, and an infinite weight's gradient into NaN
            torch.where(c["decays"] != 0, torch.addcmul(grads, params, c["weight_decay"]), grads, out=grads)
        elif "weight_decay" in c:
            grads.addcmul_(params, c["weight_decay"])
        self._update(params, grads, state, c)

    @abstractmethod
    def _coefficients(self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows]) -> dict[str, Rows]:
        """The coefficients, without those of weight decay."""

    @abstractmethod
    def _update(self, params: Tensor, grads: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]) -> None:
        """The update after weight decay, towards smaller values."""


class SGD(VectorStep):
    numbers = ("lr", "momentum", "dampening", "weight_decay")
    flags = ("momentum", "nesterov", "maximize")
    counts = False

    def __init__(self, flags: Mapping[str, Any]) -> None:
        super().__init__(flags)
        self.momentum, self.nesterov = bool(flags["momentum"]), bool(flags["nesterov"])
        self.state = ("momentum_buffer",) if self.momentum else ()

    def _coefficients(self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows]) -> dict[str, Rows]:
        c = {"step": -numbers["lr"]}
        if self.momentum:
            c["momentum"] = numbers["momentum"]
            gain = np.where(steps == 0, 1, 1 - numbers["dampening"])  # the first gradient enters undampened
            if (gain != 1).any():
                c["gain"] = gain
        return c

    def _update(self, params: Tensor, grads: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]) -> None:
        if self.momentum:
            buffer = state["momentum_buffer"]
            torch.addcmul(grads * c["gain"] if "gain" in c else grads, buffer, c["momentum"], out=buffer)
            grads = grads.addcmul_(buffer, c["momentum"]) if self.nesterov else buffer
        params.addcmul_(grads, c["step"])


class Adam(VectorStep):
    """Adam and AdamW."""

    numbers = ("beta1", "beta2", "lr", "eps", "weight_decay")
    flags = ("amsgrad", "decoupled_weight_decay", "maximize")

    def __init__(self, flags: Mapping[str, Any]) -> None:
        super().__init__(flags)
        self.amsgrad = bool(flags["amsgrad"])
        self.state = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if self.amsgrad else ())

    def _coefficients(self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows]) -> dict[str, Rows]:
        correction1 = 1 - _power(numbers["beta1"], steps + 1)
        # m̂ / (√v̂ + ε) = √correction2 · m̂ / (√v + √correction2 · ε), which spares a pass over v.
        root = np.sqrt(1 - _power(numbers["beta2"], steps + 1))
        return _moments(numbers) | {"eps": root * numbers["eps"], "step": -numbers["lr"] / correction1 * root}

    def _update(self, params: Tensor, grads: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]) -> None:
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grads, c["weight1"])
        _average_square(square, grads, c["beta2"], c["weight2"], out=grads)
        if self.amsgrad:
            square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
        torch.sqrt(square, out=grads).add_(c["eps"])
        params.addcmul_(torch.div(mean, grads, out=grads), c["step"])


class NAdam(VectorStep):
    numbers = ("beta1", "beta2", "lr", "eps", "weight_decay", "momentum_decay")
    flags = ("decoupled_weight_decay", "maximize")
    scalars = ("mu_product",)
    state = ("exp_avg", "exp_avg_sq")

    def initial(self, name: str, numbers: Mapping[str, float]) -> float:
        return 1.0 if name == "mu_product" else 0.0

    def advance(self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows]) -> dict[str, Rows]:
        """The product in its array's dtype: torch's is rounded to the default dtype at every step."""
        product = scalars["mu_product"]
        return {"mu_product": product * self._mu(numbers, steps + 1).astype(product.dtype)}

    def _mu(self, numbers: Mapping[str, Rows], count: Rows) -> Rows:
        halved = 0.5 * _power(np.full(len(count), 0.96), count * numbers["momentum_decay"])
        return numbers["beta1"] * (1 - halved)

    def _coefficients(self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows]) -> dict[str, Rows]:
        now, after = self._mu(numbers, steps + 1), self._mu(numbers, steps + 2)
        product = self.advance(numbers, steps, scalars)["mu_product"].astype(np.float64)
        root = np.sqrt(1 - _power(numbers["beta2"], steps + 1))
        scale = -numbers["lr"] * root
        return _moments(numbers) | {
            "eps": root * numbers["eps"],
            "grad": scale * (1 - now) / (1 - product),
            "mean": scale * after / (1 - product * after),
        }

    def _update(self, params: Tensor, grads: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]) -> None:
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grads, c["weight1"])
        scratch = _average_square(square, grads, c["beta2"], c["weight2"], out=torch.empty_like(grads))
        torch.sqrt(square, out=scratch).add_(c["eps"])
        params.addcdiv_(grads.mul_(c["grad"]).addcmul_(mean, c["mean"]), scratch)


class RAdam(VectorStep):
    numbers = ("beta1", "beta2", "lr", "eps", "weight_decay")
    flags = ("decoupled_weight_decay", "maximize")
    state = ("exp_avg", "exp_avg_sq")

    def _coefficients(self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows]) -> dict[str, Rows]:
        count, beta2 = steps + 1, numbers["beta2"]
        power2 = _power(beta2, count)
        correction1, correction2 = 1 - _power(numbers["beta1"], count), 1 - power2
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * count * power2 / correction2
        plain = ~(length > 5)  # too few steps for a variance: no division by it
        with np.errstate(divide="ignore", invalid="ignore"):  # in plain rows
            rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            factor = np.where(plain, 1, np.sqrt(rectified * correction2))
        step = -numbers["lr"] / correction1 * factor
        return _moments(numbers) | {"eps": numbers["eps"], "plain": plain.astype(np.float64), "step": step}

    def _update(self, params: Tensor, grads: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]) -> None:
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grads, c["weight1"])
        _average_square(square, grads, c["beta2"], c["weight2"], out=grads)
        torch.sqrt(square, out=grads).add_(c["eps"]).masked_fill_(c["plain"] != 0, 1.0)
        params.addcmul_(torch.div(mean, grads, out=grads), c["step"])


class Adagrad(VectorStep):
    numbers = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value")
    flags = ("maximize",)
    state = ("sum",)

    def initial(self, name: str, numbers: Mapping[str, float]) -> float:
        return numbers["initial_accumulator_value"]

    def _coefficients(self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows]) -> dict[str, Rows]:
        return {"eps": numbers["eps"], "step": -numbers["lr"] / (1 + steps * numbers["lr_decay"])}

    def _update(self, params: Tensor, grads: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]) -> None:
        root = state["sum"].addcmul_(grads, grads).sqrt().add_(c["eps"])
        params.addcmul_(grads.div_(root), c["step"])


class RMSprop(VectorStep):
    numbers = ("lr", "alpha", "eps", "weight_decay", "momentum")
    flags = ("momentum", "centered", "maximize")

    def __init__(self, flags: Mapping[str, Any]) -> None:
        super().__init__(flags)
        self.momentum, self.centered = bool(flags["momentum"]), bool(flags["centered"])
        self.state = ("square_avg",)
        self.state += ("momentum_buffer",) if self.momentum else ()
        self.state += ("grad_avg",) if self.centered else ()

    def _coefficients(self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows]) -> dict[str, Rows]:
        alpha = numbers["alpha"]
        c = {"alpha": alpha, "weight": 1 - alpha, "eps": numbers["eps"], "step": -numbers["lr"]}
        return c | ({"momentum": numbers["momentum"]} if self.momentum else {})

    def _update(self, params: Tensor, grads: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]) -> None:
        square = state["square_avg"]
        scratch = _average_square(square, grads, c["alpha"], c["weight"], out=torch.empty_like(grads))
        if self.centered:
            mean = state["grad_avg"].lerp_(grads, c["weight"])
            square = torch.addcmul(square, mean, mean, value=-1, out=scratch)
        grads.div_(torch.sqrt(square, out=scratch).add_(c["eps"]))
        if self.momentum:
            grads = torch.addcmul(grads, state["momentum_buffer"], c["momentum"], out=state["momentum_buffer"])
        params.addcmul_(grads, c["step"])


class Adadelta(VectorStep):
    numbers = ("lr", "rho", "eps", "weight_decay")
    flags = ("maximize",)
    state = ("square_avg", "acc_delta")

    def _coefficients(self, numbers: Mapping[str, Rows], steps: Rows, scalars: Mapping[str, Rows]) -> dict[str, Rows]:
        return {"rho": numbers["rho"], "weight": 1 - numbers["rho"], "eps": numbers["eps"], "step": -numbers["lr"]}

    def _update(self, params: Tensor, grads: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]) -> None:
        square, deltas = state["square_avg"], state["acc_delta"]
        scratch = _average_square(square, grads, c["rho"], c["weight"], out=torch.empty_like(grads))
        grads.div_(torch.add(square, c["eps"], out=scratch).sqrt_())
        grads.mul_(torch.add(deltas, c["eps"], out=scratch).sqrt_())
        _average_square(deltas, grads, c["rho"], c["weight"], out=scratch)
        params.addcmul_(grads, c["step"])


VECTORISED: dict[type[torch.optim.Optimizer], type[VectorStep]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: Adam,
    torch.optim.NAdam: NAdam,
    torch.optim.RAdam: RAdam,
    torch.optim.Adagrad: Adagrad,
    torch.optim.RMSprop: RMSprop,
    torch.optim.Adadelta: Adadelta,
}


def vector_flags(optimizer: torch.optim.Optimizer) -> tuple[tuple[tuple[str, Any], ...], ...] | None:
    """The settings that optimizers must share to step as one, by param group; None where this one must step alone.

    A group's ``VectorStep`` is made with ``dict(flags)``.

    >>> vector_flags(torch.optim.Adagrad([torch.zeros(1)]))
    ((('kind', 'Adagrad'), ('maximize', False)),)
    """
    kind = VECTORISED.get(type(optimizer))
    if kind is None or not _plain_step(optimizer):
        return None
    start = "initial_accumulator_value"
    for group in optimizer.param_groups:
        if group.get("differentiable") or group.get("capturable") or any(p.is_complex() for p in group["params"]):
            return None
        # Settings that torch accepts in a param group, but does not heed as written.
        if group.get("momentum", 0) < 0 or group.get(start) != optimizer.defaults.get(start):
            return None
    named = ("kind", kind.__name__)
    return tuple((named, *((f, bool(group[f])) for f in kind.flags)) for group in optimizer.param_groups)


def _plain_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step is the one that torch wrote: neither replaced, nor hooked, nor patched in its class.

    A scheduler of torch's own wraps the step, to count that it was called.
    """
    cls = type(optimizer)
    step, own = inspect.unwrap(cls.step), optimizer.__dict__.get("step")
    if not any((step.__module__, step.__qualname__) == (c.__module__, f"{c.__name__}.step") for c in cls.__mro__):
        return False
    if own is not None and (not getattr(own, "_wrapped_by_lr_sched", False) or inspect.unwrap(own) is not step):
        return False
    return not hooked_step(optimizer) and "_init_group" not in optimizer.__dict__


def hooked_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether code of the user's own runs before or after an optimizer's step."""
    return any((optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *_GLOBAL_HOOKS))


_GLOBAL_HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


def read_numbers(group: Mapping[str, Any], kind: type[VectorStep]) -> tuple[float, ...]:
    """A param group's numbers, in the order of ``kind.numbers``.

    >>> read_numbers(torch.optim.Adadelta([torch.zeros(1)]).param_groups[0], Adadelta)
    (1.0, 0.9, 1e-06, 0.0)
    """
    names = kind.numbers
    if names[0] == "beta1":
        return tuple(map(float, [*group["betas"], *[group[name] for name in names[2:]]]))
    return tuple(map(float, [group[name] for name in names]))


@torch.no_grad()
def clip_rows(grads: Sequence[Tensor], max_norm: float) -> None:
    """Scale each trial's gradients, one row of every tensor, as ``clip_grad_norm_`` does: to this norm or less.

    >>> grads = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> clip_rows([grads], 1.0)
    >>> grads
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    norms = [torch.linalg.vector_norm(rows, dim=1, keepdim=True) for rows in grads]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.cat(norms, 1), dim=1, keepdim=True)
    scale = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    for rows in grads:
        rows.mul_(scale)


def _power(base: Rows, exponent: Rows) -> Rows:
    """By Python's own power, as torch has it: numpy's may differ in the last bit, which 1 - beta**t magnifies."""
    return np.array([b**e for b, e in zip(base.tolist(), exponent.tolist(), strict=True)])


def _moments(numbers: Mapping[str, Rows]) -> dict[str, Rows]:
    return {"weight1": 1 - numbers["beta1"], "beta2": numbers["beta2"], "weight2": 1 - numbers["beta2"]}


def _average_square(average: Tensor, x: Tensor, decay: Tensor, weight: Tensor, *, out: Tensor) -> Tensor:
    """average = decay · average + weight · x²; ``out``, which may be x itself, is left with the second term.

    Not a lerp: once x² overflows, the average stays infinite, as torch's does, and does not become NaN.
    """
    torch.mul(x, x, out=out).mul_(weight)
    torch.addcmul(out, average, decay, out=average)
    return out
