"""Torch's random functions, keyed: inside ``Keyed`` they draw by (trial seed, step, call), solo and fused alike.

A function that draws otherwise, such as one with a generator of the user's own, is noted, so that trials that call it
are not fused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from penstock.training.random import distributions
from penstock.training.random.attention import attention, multi_head_attention
from penstock.training.random.masks import SoloKeys, StepKeys, alpha_dropout, dropout, may_drop
from penstock.training.random.mentions import mentions_draws
from penstock.training.random.recurrent import recurrent

OWN = "of the task's own"  # how the note of a draw ends that is not torch's doing
CALLS = 1_000_003  # the most random calls of a validation batch: the next one counts from there


class Keyed(TorchFunctionMode):
    """Inside it, torch's random functions draw by ``keys``; every other call goes straight through.

    >>> with Keyed(StepKeys(1, 2)) as mode:
    ...     kept = F.dropout(torch.ones(2, 4), 0.5)
    >>> mode.used, mode.unkeyed
    (True, [])
    """

    def __init__(self, keys: StepKeys) -> None:
        super().__init__()
        self.keys = keys
        self.used = False  # a function that may draw by key was called, whatever its rate
        self.recomputed = False  # such a function was called in the backward: activation checkpointing
        self.unkeyed: list[str] = []  # functions that drew from torch's generators
        self.handled = False  # torch was asked for such a function, not a module that knows the mode
        self.in_backward = False
        self.scalars: dict[int, Tensor] = {}  # single uniform numbers, by id; kept, so that no other takes the id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handle = _HANDLERS.get(func)
        if handle is not None:
            self.handled = True
        elif (handle := _SOMETIMES.get(func)) is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handle(self, func, *args, **(kwargs or {}))

    def draw_by(self, keys: StepKeys) -> None:
        """Draw by other keys from now on."""
        self.keys = keys
        self.scalars.clear()

    def draws(self, name: str, x: Tensor | None = None, generator: torch.Generator | None = None) -> bool:
        """Whether a random function can be keyed; a generator, or a seed, of the task's own is left to torch."""
        self.used = self.handled = True
        if generator is None and not self.keys.seeded:
            return self.takes(x, name)
        self.drew(f"{name} with a {'seed' if generator is None else 'generator'} {OWN}")
        return False

    def takes(self, x: Tensor | None, name: str) -> bool:
        """Whether a call can be keyed; that of a lone trial cannot, inside a vmap or compiled function of the user."""
        self.used = True
        self.recomputed |= self.in_backward
        if isinstance(self.keys, SoloKeys) or not isinstance(self.keys.lo, Tensor):
            if torch.compiler.is_compiling() or (x is not None and x.is_nested) or _in_vmap():
                self.drew(name)
                return False
            self.look()
        return True

    def drew(self, name: str) -> None:
        """Note a function that drew from torch's generators."""
        if name not in self.unkeyed:
            self.unkeyed.append(name)

    def look(self) -> None:
        """Note that a function Penstock does not know has drawn from torch's generators, where that can be seen."""

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()`` with the mode still on: activation checkpointing runs the forward again from there."""
        if type(loss) is not Tensor or loss.numel() != 1:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        engine: Any = torch.autograd.Variable._execution_engine  # Tensor.backward turns every mode off
        self.in_backward = True
        try:
            engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
        finally:
            self.in_backward = False

    def gradients(self, loss: Tensor, wanted: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of a scalar as ``torch.autograd.grad`` gives them, with the mode still on."""
        engine: Any = torch.autograd.Variable._execution_engine
        self.in_backward = True
        try:
            made: tuple[Tensor | None, ...] = engine.run_backward(
                (loss,), (torch.ones_like(loss),), False, False, tuple(wanted), True, False
            )
        finally:
            self.in_backward = False
        return made


class Solo(Keyed):
    """The mode of one trial that trains alone; the calls of its first forward decide whether later ones need it.

    A mode costs a small model a tenth of its step. Where only plain ``nn.Dropout`` modules draw, they draw by
    key themselves, while the forward runs, and the mode is off.
    """

    def __init__(
        self, model: nn.Module, generators: Sequence[torch.Generator], function: Callable[..., Any] | None = None
    ) -> None:
        """``function`` is the method of the task that draws: where its code names a draw, the mode stays on."""
        super().__init__(StepKeys(0, 0))
        self.needed = True
        self.generators = self._watched = generators  # watched until the first forward is over
        plain = [m for m in model.modules() if type(m) is nn.Dropout and "forward" not in m.__dict__]
        self._stays = any(_must_stay(module, bool(plain)) for module in model.modules())
        self._stays = self._stays or (function is not None and mentions_draws(function, model))
        self._places = [] if self._stays else [(module.__dict__, _Forward(self, module)) for module in plain]

    def at(self, seed: int, step: int) -> Solo:
        """The same, keyed for one step; torch's generators are seeded for it too."""
        self.keys: SoloKeys = SoloKeys(seed, step)
        self.scalars.clear()
        self.keys.seed(self.generators)
        return self

    def batch(self, number: int) -> Solo:
        """The same for one of the validation batches of a step, wherever the batches before it are measured."""
        self.keys.count_from(number * CALLS)
        self.keys.seed(self.generators)
        return self

    def __enter__(self) -> Solo:
        for attributes, forward in self._places:
            attributes["forward"] = forward
        if self.needed:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.needed:
            super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for attributes, _ in self._places:
            attributes.pop("forward", None)
        if self._watched and raised[0] is None:
            self.look()
            self._watched = ()
            self.needed = self._stays or self.handled or bool(self.unkeyed)
            self._places = [] if self.needed else self._places

    def look(self) -> None:
        if self._watched and not self.unkeyed and any(map(_moved, self._watched)):
            self.drew("an operator that Penstock does not know")


class _Forward:
    """The forward of a plain ``nn.Dropout``, in place of its class's."""

    def __init__(self, mode: Keyed, module: nn.Dropout) -> None:
        self.mode, self.module = mode, module

    def __call__(self, input: Tensor) -> Tensor:
        if not self.module.training:
            return input
        out: Tensor = _functional(dropout, None, self.mode, F.dropout, input, self.module.p, True, self.module.inplace)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return partial(nn.Dropout.forward, deepcopy(self.module, memo))  # a copy of the model has plain modules


def unshared(unkeyed: Sequence[str]) -> str:
    """Why trials whose functions draw unkeyed are not fused, and what to do."""
    own = [name for name in unkeyed if name.endswith(OWN)]
    if own:
        return (
            f"{', '.join(own)} draws numbers that trials cannot share: without it, the draw is keyed by trial and step"
        )
    return f"{', '.join(unkeyed)} draws from torch's generator in a way that cannot be repeated for several trials"


def may_draw(module: nn.Module) -> bool:
    """Whether a module of torch's draws in training, where it is called."""
    if isinstance(module, nn.RNNBase):
        return bool(module.num_layers > 1 and module.dropout > 0)
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    return isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU) or "Fractional" in type(module).__name__


def _must_stay(module: nn.Module, beside_dropout: bool) -> bool:
    # Modules that may draw later, and modules that torch computes or compiles otherwise under a mode: all steps must be
    # computed in one way. Recurrent layers count as draws, so those after them have the numbers that a bundle's have.
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return type(module) is not nn.Dropout
    if isinstance(module, nn.RNNBase) and module.num_layers > 1 and beside_dropout:
        return True
    compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
    if compiled or isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
        return True
    return may_draw(module)


def _moved(generator: torch.Generator) -> bool:
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return not torch.equal(generator.get_state(), fresh.get_state())


def _in_vmap() -> bool:
    functorch = torch._C._functorch
    return any(level.key() == functorch.TransformType.Vmap for level in functorch.get_interpreter_stack() or ())


def _check(p: Any) -> None:
    if not isinstance(p, Tensor) and (p < 0.0 or p > 1.0):
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _functional(
    apply: Any, batched: int | None, mode: Keyed, func: Any, input: Any, p: Any = 0.5, training: bool | None = None,
    inplace: bool = False,
) -> Any:  # fmt: skip
    if training is None:  # a compiler passes the call on as it was written
        training = func is not F.alpha_dropout and func is not F.feature_alpha_dropout
    if not training and hasattr(p, "value"):
        return input  # torch would read the rate, which may differ from trial to trial
    if not training or not mode.takes(input, func.__name__):
        return func(input, p, training, inplace)
    _check(p)
    if batched is None:
        return apply(input, p, mode.keys, inplace=inplace)
    func(input, 0.0)  # torch's own checks and warnings
    if batched in (0, input.dim()):
        return apply(input, p, mode.keys, inplace=inplace)
    out = apply(input.unsqueeze(0), p, mode.keys, inplace=inplace)
    return input if inplace else out.squeeze(0)


def _builtin(apply: Any, inplace: bool, mode: Keyed, func: Any, input: Any, p: Any, train: bool) -> Any:
    if not train or not mode.takes(input, func.__name__):
        return func(input, p, train)
    _check(p)
    return apply(input, p, mode.keys, inplace=inplace)


def _attention(
    mode: Keyed, func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0,
    is_causal: bool = False, **more: Any,
) -> Any:  # fmt: skip
    if mode.takes(query, func.__name__):
        _check(dropout_p)
        if may_drop(dropout_p):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, keys=mode.keys, **more)
        mode.keys.next()
    return func(query, key, value, attn_mask, dropout_p, is_causal, **more)


def _multi_head_attention(mode: Keyed, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("training", True) and mode.takes(args[0], func.__name__):
        if may_drop(args[10]):
            return multi_head_attention(*args, **kwargs, keys=mode.keys)
        mode.keys.next()
    return func(*args, **kwargs)


def _compared(holds: Callable[[Any, Any], bool], mode: Keyed, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A comparison of one uniform number with a number that it lies below or above in any case.

    That is how a layer drop that is off looks: all trials go the same way, and nobody asks for the draw itself.
    """
    if len(args) == 2 and id(args[0]) in mode.scalars and type(args[1]) in (int, float):
        drawn, number = args
        least, most = holds(0.0, number), holds(_BELOW_ONE, number)
        if least == most:
            with _disable_current_modes():  # a constant, in a trace too
                return torch.full(drawn.shape, least, dtype=torch.bool, device=drawn.device)
    return func(*args, **kwargs)


def _draws(name: str, mode: Keyed, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    mode.drew(name)
    return func(*args, **kwargs)


_UNKEYED = ("binomial",)
_BELOW_ONE = 1 - 2.0**-53  # the largest number below 1
_COMPARISONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


def _handlers() -> dict[Any, Callable[..., Any]]:
    by_channel, alpha_by_channel = partial(dropout, channels=True), partial(alpha_dropout, channels=True)
    table: dict[Any, Callable[..., Any]] = {
        F.dropout: partial(_functional, dropout, None),
        F.alpha_dropout: partial(_functional, alpha_dropout, None),
        F.feature_alpha_dropout: partial(_functional, alpha_by_channel, None),
        F.dropout1d: partial(_functional, by_channel, 3),  # unbatched where it has fewer dimensions
        F.dropout2d: partial(_functional, by_channel, 0),  # never unbatched
        F.dropout3d: partial(_functional, by_channel, 5),
        F.scaled_dot_product_attention: _attention,
        F.multi_head_attention_forward: _multi_head_attention,
    }
    builtins = {"dropout": dropout, "alpha_dropout": alpha_dropout, "feature_dropout": by_channel}
    for name, apply in {**builtins, "feature_alpha_dropout": alpha_by_channel}.items():
        table[getattr(torch, name)] = partial(_builtin, apply, False)
        table[getattr(torch, name + "_")] = partial(_builtin, apply, True)
    table |= {getattr(home, name): partial(_draws, name) for home in (torch, Tensor) for name in _UNKEYED
              if hasattr(home, name)}  # fmt: skip
    return table | distributions.handlers()


def _sometimes() -> dict[Any, Callable[..., Any]]:
    """Functions that may draw, but that a model may call all the time without that."""
    table: dict[Any, Callable[..., Any]] = {
        getattr(torch, name): recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    }
    table |= dict.fromkeys((F.rrelu, torch.rrelu, torch.rrelu_), distributions.rrelu)
    for name, holds in _COMPARISONS.items():
        for func in (getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"__{name}__")):
            table[func] = partial(_compared, holds)
    return table


_HANDLERS = _handlers()
_SOMETIMES = _sometimes()
