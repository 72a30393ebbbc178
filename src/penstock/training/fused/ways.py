"""Two ways to run a task's own loss for all trials of a bundle at once, with one contract.

``Native`` hands the loss a module whose parameters are ``Stacked``: every operator has a grouped form. ``General`` maps
the loss over the trials with ``torch.vmap``. Both give one loss per trial, and leave the gradients to an ordinary
backward of their sum, so that each trial's gradient is its own.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

import penstock.training.fused.operators  # noqa: F401  registers the rules of the native way
from penstock.training.fused.operators.normalized import waiting
from penstock.training.fused.per_trial import PER_TRIAL, PerTrial
from penstock.training.fused.stacked import Stacked, Unfusable
from penstock.training.random.keyed import Keyed
from penstock.training.random.masks import StepKeys, base, keep, rate
from penstock.trial import Config

Tensors = Mapping[str, torch.Tensor]
Function = Callable[[nn.Module, Any, Config], Any]  # Task.loss or Task.metrics


class Way(ABC):
    """Runs a function of a task for the trials in some rows."""

    name: str
    takes_all = False  # whether every per-trial number can differ

    def __init__(self, template: nn.Module, config: Config) -> None:
        self.template = copy.deepcopy(template)  # a module of its own: its parameters are replaced
        self.config = config
        self.random = {True: True, False: True}  # whether a forward in training, or else, draws; known after a first
        self._sites: list[PerTrial] = []
        self._made: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.fixed: tuple[tuple[str, str, object], ...] = ()  # the numbers that all trials have in common now

    def train(self) -> None:
        """Training mode, as of the user's module."""
        if not self.template.training:
            self.template.train()

    def eval(self) -> None:
        """Evaluation mode."""
        if self.template.training:
            self.template.eval()

    def release(self) -> None:  # noqa: B027
        """Let go of the tensors of the last run."""

    def vary(self, models: Sequence[nn.Module]) -> None:
        """Read from the trials' own modules the numbers that may differ from trial to trial."""
        self._sites, self._made = [], {}
        fixed = []
        own = [dict(model.named_modules()) for model in models]
        for path, module in self.template.named_modules():
            for attribute, both in PER_TRIAL.get(type(module), ()):
                values = [getattr(modules[path], attribute) for modules in own]
                if all(v == values[0] for v in values):
                    setattr(module, attribute, values[0])
                    fixed.append((path, attribute, values[0]))
                    continue
                if not both and not self.takes_all:
                    raise Unfusable(
                        f"{path}.{attribute} differs from trial to trial, which the {self.name} way cannot do"
                    )
                site = PerTrial(f"{path}.{attribute}", [float(value) for value in values])
                setattr(module, attribute, site)
                self._sites.append(site)
        self.fixed = tuple(fixed)

    @property
    def varying(self) -> tuple[str, ...]:
        """The names of the numbers that differ from trial to trial now."""
        return tuple(site.name for site in self._sites)

    def numbers(self, first: int, last: int, device: torch.device) -> list[torch.Tensor]:
        """The numbers that differ from trial to trial, of some rows."""
        found = self._made.get((first, last))
        if found is None:
            rows = [torch.tensor(site.every[first:last], dtype=torch.float64) for site in self._sites]
            found = self._made[first, last] = [values.to(device) for values in rows]
        return found

    def _drew(self, drawing: Keyed) -> None:
        if drawing.unkeyed:
            raise Unfusable(f"{', '.join(drawing.unkeyed)} draws from one generator for all trials")
        training = self.template.training
        self.random[training] = drawing.used

    @abstractmethod
    def run(
        self,
        function: Function,
        params: Tensors,
        buffers: Tensors,
        batch: Any,
        shared: bool,
        keys: torch.Tensor | None,
        numbers: Sequence[torch.Tensor],
    ) -> Any:
        """The function's result for every trial: tensors with the trials in front.

        ``params`` and ``buffers`` have the trials in front, and so has the batch unless it is ``shared``. ``keys`` are
        the keys of the step, [trials, 2], or None where nothing is random; ``numbers`` come from ``self.numbers``.
        """


class Native(Way):
    """Every operator for all trials at once, on ``Stacked`` parameters."""

    name = "native"
    takes_all = True

    def __init__(self, template: nn.Module, config: Config) -> None:
        super().__init__(template, config)
        self._params = list(_places(self.template, "_parameters"))
        self._buffers = list(_places(self.template, "_buffers"))
        self._recurrent = [m for m in self.template.modules() if isinstance(m, nn.RNNBase)]
        self._held: tuple[Tensors, Tensors] | None = None

    def run(
        self,
        function: Function,
        params: Tensors,
        buffers: Tensors,
        batch: Any,
        shared: bool,
        keys: torch.Tensor | None,
        numbers: Sequence[torch.Tensor],
    ) -> Any:
        trials = len(next(iter(params.values())))
        if self._held is None or self._held[0] is not params or self._held[1] is not buffers:
            self._hold(params, buffers)
        for site, value in zip(self._sites, numbers, strict=True):
            site.give(Stacked(value, 0))
        given = batch if shared else tree_map(_stacked, batch)
        training = self.template.training
        with waiting():
            if keys is None and (training or not self._sites):  # a mode would cost a small model a tenth of its step
                made = function(self.template, given, self.config)
            else:  # the mode ignores rates, which may differ from trial to trial, in evaluation
                lo, hi = (0, 0) if keys is None else (keys[:, 0], keys[:, 1])
                drawing = Keyed(BundleKeys(lo, hi) if training else NoKeys(lo, hi))
                with drawing:
                    made = function(self.template, given, self.config)
                self._drew(drawing)
        return tree_map(lambda out: _in_front(out, trials), made)

    def release(self) -> None:
        self._held = None

    def _hold(self, params: Tensors, buffers: Tensors) -> None:
        made = {name: Stacked(tensor, 0) for name, tensor in {**params, **buffers}.items()}
        for registry, short, name in (*self._params, *self._buffers):
            registry[short] = made[name]
        for module in self._recurrent:  # torch's recurrent modules keep a list of weights beside the registry
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
            module._flat_weight_refs = [weakref.ref(weight) for weight in module._flat_weights if weight is not None]
        self._held = params, buffers


class BundleKeys(StepKeys):
    """The keys of all trials: a call makes one mask for each trial."""

    def mask(self, shape: Sequence[int], device: torch.device, p: Any) -> torch.Tensor:
        apart = (-1, *[1] * len(shape))
        of = rate(p)
        lo, hi = (half.view(apart) for half in (self.lo, self.hi) if isinstance(half, torch.Tensor))
        rates = of.moved(0).view(apart) if isinstance(of, Stacked) else of
        return Stacked(keep(base(shape, device), lo, hi, self.next(), rates), 0)


class NoKeys(StepKeys):
    """The keys of metrics, which may ask for a dropout of rate 0 but draw nothing."""

    def mask(self, shape: Sequence[int], device: torch.device, p: Any) -> torch.Tensor:
        raise Unfusable("metrics that draw at random are those of one trial")


class General(Way):
    """The whole function under ``torch.vmap``."""

    name = "general"

    def __init__(self, template: nn.Module, config: Config) -> None:
        super().__init__(template, config)
        self._call = _Call(self.template, config)
        self._places = {name: f"model.{name}" for name, _ in self.template.named_parameters()}
        self._places.update({name: f"model.{name}" for name, _ in self.template.named_buffers()})

    def run(
        self,
        function: Function,
        params: Tensors,
        buffers: Tensors,
        batch: Any,
        shared: bool,
        keys: torch.Tensor | None,
        numbers: Sequence[torch.Tensor],
    ) -> Any:
        state = {self._places[name]: tensor for name, tensor in {**params, **buffers}.items()}
        drawing = Keyed(StepKeys(0, 0))

        def one(state: Tensors, batch: Any, key: torch.Tensor | None, numbers: Sequence[torch.Tensor]) -> Any:
            for site, value in zip(self._sites, numbers, strict=True):
                site.give(value)
            kind = StepKeys if self.template.training else NoKeys
            drawing.draw_by(kind(0, 0) if key is None else kind(key[0], key[1]))
            with drawing:
                return functional_call(self._call, dict(state), (function, batch))

        in_dims = (0, None if shared else 0, None if keys is None else 0, 0 if numbers else None)
        try:
            made = torch.vmap(one, in_dims=in_dims)(state, batch, keys, numbers)
        except Unfusable:
            raise
        except Exception as error:
            raise Unfusable(_first_line(error)) from error
        self._drew(drawing)
        return made


class _Call(nn.Module):
    """The called module, of which the model is a submodule, so that a loss may touch the model's own submodules."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(self, function: Function, batch: Any) -> Any:
        return function(self.model, batch, self.config)


def _places(template: nn.Module, registry: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Every place of a parameter or buffer: the registry, the name in it, and the name in the whole module."""
    first: dict[int, str] = {}
    for prefix, module in template.named_modules():
        held = getattr(module, registry)
        for short, tensor in held.items():
            if tensor is not None:
                name = f"{prefix}.{short}" if prefix else short
                yield held, short, first.setdefault(id(tensor), name)  # a shared tensor goes by its first name


def _stacked(leaf: Any) -> Any:
    return Stacked(leaf, 0) if isinstance(leaf, torch.Tensor) else leaf


def _in_front(out: Any, trials: int) -> Any:
    if isinstance(out, Stacked):
        return out.moved(0)
    return out.expand(trials, *out.shape) if isinstance(out, torch.Tensor) else out


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
