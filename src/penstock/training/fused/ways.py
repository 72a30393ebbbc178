"""Two ways to run a task's own loss for all trials of a bundle at once, with one contract.

``Native`` hands the loss a module whose parameters are ``Stacked``: every operator has a grouped form. ``General`` maps
the loss over the trials with ``torch.vmap``. Both give one loss per trial, and leave the gradients to an ordinary
backward of their sum, so that each trial's gradient is its own.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

import penstock.training.fused.operators  # noqa: F401  registers the rules of the native way
from penstock.task import Task
from penstock.training.copying import copied
from penstock.training.data import handed_out
from penstock.training.fused.configs import SharedConfig
from penstock.training.fused.held import attributes_of, configs_of, hold, set_attribute
from penstock.training.fused.keys import BundleKeys, NoKeys
from penstock.training.fused.numbers import Notes, Plain
from penstock.training.fused.operators.kept import Kept, waiting
from penstock.training.fused.operators.scripts import refuse_scripts
from penstock.training.fused.own_numbers import OwnNumbers, label
from penstock.training.fused.parting import Parting
from penstock.training.fused.per_trial import PER_TRIAL, PerTrial
from penstock.training.fused.promoting import demote, promoted
from penstock.training.fused.stacked import Stacked, Unfusable
from penstock.training.fused.watching import Drawing, Drew
from penstock.training.keeping import may_draw_outside
from penstock.training.loop import Training
from penstock.training.random.keyed import Keyed, may_draw, unshared
from penstock.training.random.mentions import mentions_draws
from penstock.trial import Config

Tensors = Mapping[str, torch.Tensor]
Function = Callable[[nn.Module, Any, Config], Any]  # Task.loss or Task.metrics


class Way(ABC):
    """Runs a function of a task for the trials in some rows."""

    name: str
    takes_all = False  # whether every per-trial number can differ

    def __init__(self, template: nn.Module, config: Config) -> None:
        refuse_scripts(template)
        self.template = copied(template)  # a module of its own: its parameters are replaced
        self.template.train()  # which the user's own module may do in a way of its own
        self.config = SharedConfig([config])
        self._attributes: Mapping[str, Plain] = {}  # numbers of the user's modules that all trials share now
        self.random = {True: True, False: True}  # whether a forward in training, or else, draws; known after a first
        # Where a module may draw in a later step, or a mode is on in any case, there are always keys to draw by.
        self._may_draw = any(map(may_draw, template.modules()))
        self._sites: list[PerTrial] = []
        self._made: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._drawing = Drawing(python=True)
        self._varied: set[str] = set()  # sites at which trials ever differed: their rates stay a step's inputs
        self._fixed: tuple[tuple[str, str, object], ...] = ()  # numbers of torch's modules that all trials share now
        self.parting = Parting()

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

    def settle(self) -> None:  # noqa: B027
        """Write the buffers that the last run assigned, once its backward is over."""

    def watch(self, task: Task) -> None:
        """Look for draws from Python's and numpy's generators at every run, if the task's code may draw from these."""
        self._drawing = Drawing(python=may_draw_outside(task))

    def vary(self, trials: Sequence[Training]) -> None:
        """Read from the trials' own modules and configs the values that may differ from trial to trial."""
        models, configs = [trial.model for trial in trials], [trial.config for trial in trials]
        self._sites, self._made = [], {}
        fixed = []
        own = [dict(model.named_modules()) for model in models]
        for path, module in self.template.named_modules():
            for attribute, both in PER_TRIAL.get(type(module), ()):
                values = [getattr(modules[path], attribute) for modules in own]
                site = f"{path}.{attribute}"
                if all(v == values[0] for v in values) and not (site in self._varied and values[0]):
                    setattr(module, attribute, values[0])
                    fixed.append((path, attribute, values[0]))
                    continue
                if not both and not self.takes_all:
                    raise Unfusable(
                        f"{f'{path}.{attribute}'.lstrip('.')} differs from trial to trial, which the {self.name} way "
                        "cannot do"
                    )
                self._varied.add(site)
                own_values = PerTrial(site, [float(value) for value in values])
                setattr(module, attribute, own_values)
                self._sites.append(own_values)
        self._fixed = tuple(fixed)
        found = [attributes_of(model) for model in models]
        names = [name for name in found[0] if all(name in other for other in found)]
        self._vary_numbers([{name: own[name] for name in names} for own in found], configs)
        self._attributes = attributes_of(self.template)
        for name in configs_of(models[0], configs[0]):
            hold(self.template, name, self.config)

    def _vary_numbers(self, own: Sequence[Mapping[str, Plain]], configs: Sequence[Config]) -> None:
        """The attributes of the user's modules, and the config; refuses attributes that differ."""
        self.config = SharedConfig(configs)
        for name, value in own[0].items():
            if any(other[name] != value for other in own):
                raise Unfusable(f"{name} differs from trial to trial, which the {self.name} way cannot do")
            set_attribute(self.template, name, value)

    @property
    def fixed(self) -> tuple[tuple[str, str, object], ...]:
        """The numbers that a step takes as they are now, so that one that was made once holds for these alone."""
        return self._fixed

    @property
    def varying(self) -> tuple[str, ...]:
        """The names of the numbers that differ from trial to trial now."""
        return tuple(site.name for site in self._sites)

    @property
    def read(self) -> tuple[str, ...]:
        """The names of the values of the config that runs for these trials took as they are."""
        numbers = set(self.varying)
        return tuple(name for name in self.config.read if label(name) not in numbers)

    def plain(self, read: Sequence[str]) -> tuple[object, ...]:
        """The numbers of modules, and the values in the config that were ``read``, as the trials have them now.

        A step that was made once has these in it, so that it holds for other trials with the same alone.
        """
        return (self._attributes, *map(self.config.common, read))

    def numbers(self, first: int, last: int, device: torch.device) -> list[torch.Tensor]:
        """The numbers that differ from trial to trial, of some rows."""
        found = self._made.get((first, last))
        if found is None:
            rows = [torch.tensor(every[first:last], dtype=torch.float64) for every in self._every()]
            found = self._made[first, last] = [values.to(device) for values in rows]
        return found

    def _every(self) -> list[Sequence[float]]:
        """The numbers of all trials, for each number that a run is given."""
        return [site.every for site in self._sites]

    def _drew(self, drawing: Keyed, function: Function) -> None:
        if drawing.unkeyed:
            raise Unfusable(unshared(drawing.unkeyed))
        training = self.template.training
        may_draw = training and (self._may_draw or mentions_draws(function, self.template))
        self.random[training] = drawing.used or may_draw

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
        self._assigned: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers and the values that they are to have
        self._given: list[tuple[dict[str, Any], str, str, Stacked]] = []  # the places of buffers, and what is there
        self._averaging = [m for m in self.template.modules() if isinstance(m, _BatchNorm) and m.momentum is None]
        self._own = OwnNumbers(self.template)

    def expect(self, names: frozenset[str], attributes: frozenset[str]) -> None:
        """Let some values of the config, and attributes of modules, be numbers even where all trials have the same."""
        self._own.expect(names, attributes)

    @property
    def notes(self) -> Notes:
        """How the numbers of configs and of the user's modules were used."""
        return self._own.notes

    def _vary_numbers(self, own: Sequence[Mapping[str, Plain]], configs: Sequence[Config]) -> None:
        self.config = self._own.vary(own, configs)

    @property
    def fixed(self) -> tuple[tuple[str, str, object], ...]:
        return (*self._fixed, *self._own.fixed())

    @property
    def varying(self) -> tuple[str, ...]:
        return (*super().varying, *self._own.given)

    def numbers(self, first: int, last: int, device: torch.device) -> list[torch.Tensor]:
        self._own.at(first, last)
        found = self._made.get((first, last))
        if found is not None and len(found) != len(self._sites) + len(self._own.given):
            self._made = {}  # a number was read for the first time
        return super().numbers(first, last, device)

    def _every(self) -> list[Sequence[float]]:
        return [*super()._every(), *self._own.given.values()]

    def vary(self, trials: Sequence[Training]) -> None:
        super().vary(trials)
        for module in self._averaging:
            if module.track_running_stats:
                module.momentum = Cumulative(module)

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
        def together(params: Tensors, buffers: Tensors, batch: Any, keys: Any, numbers: Any) -> Any:
            return self._together(function, params, buffers, batch, shared, keys, numbers)

        if not self.template.training:  # trials that part are measured one by one
            return together(params, buffers, batch, keys, numbers)
        made, self._assigned = self.parting.run(
            together, lambda: self._assigned, params, buffers, batch, shared, keys, numbers
        )
        return made

    def _together(
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
        self._own.begin(numbers[len(self._sites) :])
        if promoted():
            demote()
        if self._held is None or self._held[0] is not params or self._held[1] is not buffers:
            self._hold(params, buffers)
        for site, value in zip(self._sites, numbers, strict=False):
            site.give(Stacked(value, 0))
        given = handed_out(batch) if shared else tree_map(_stacked, batch)
        training, self._assigned = self.template.training, []
        looked = self._drawing.look()
        try:
            with waiting():
                if keys is None and (training or not self._sites):  # a mode costs a small model a tenth of its step
                    made = function(self.template, given, self.config)
                    if self._drawing.drew(looked):
                        self.random[training] = True
                        raise Drew
                else:  # the mode ignores rates, which may differ from trial to trial, in evaluation
                    lo, hi = (0, 0) if keys is None else (keys[:, 0], keys[:, 1])
                    drawing = Keyed(BundleKeys(lo, hi) if training else NoKeys(lo, hi))
                    with drawing:
                        made = function(self.template, given, self.config)
                    self._drew(drawing, function)
                    if self._drawing.drew(looked):
                        raise Unfusable("an operator that Penstock does not know draws from torch's generator")
        except BaseException:
            self._held = None  # the module may hold tensors that were assigned half-way
            raise
        for registry, short, name, held in self._given:
            if registry.get(short) is not held:
                self._assigned.append((held.moved(0), _assigned(name, held, registry.get(short))))
                registry[short] = held
        return tree_map(lambda out: _in_front(out, trials), made)

    def release(self) -> None:
        self._held = None
        self._given = []

    def settle(self) -> None:
        for buffer, value in self._assigned:
            buffer.copy_(value)
        self._assigned = []

    def _hold(self, params: Tensors, buffers: Tensors) -> None:
        made = {name: Stacked(tensor, 0) for name, tensor in params.items()}
        made |= {name: Kept(tensor, 0) for name, tensor in buffers.items()}
        for registry, short, name in (*self._params, *self._buffers):
            registry[short] = made[name]
        for module in self._recurrent:  # torch's recurrent modules keep a list of weights beside the registry
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
            module._flat_weight_refs = [weakref.ref(weight) for weight in module._flat_weights if weight is not None]
        self._held = params, buffers
        self._given = [(registry, short, name, made[name]) for registry, short, name in self._buffers]


class Cumulative(PerTrial):
    """The momentum of a BatchNorm without one: a trial's average is over all batches that it has seen."""

    def __new__(cls, module: _BatchNorm) -> Cumulative:
        return float.__new__(cls, "nan")

    def __init__(self, module: _BatchNorm) -> None:
        self._module = module
        super().__init__("momentum", ())

    @property
    def value(self) -> torch.Tensor | None:
        seen = self._module.num_batches_tracked
        return None if seen is None else 1.0 / seen.to(torch.float64)

    @value.setter
    def value(self, value: torch.Tensor | None) -> None:
        pass


def _assigned(name: str, held: Stacked, new: Any) -> torch.Tensor:
    """The value that the forward assigned to a buffer (``self.mean = ...``), a row a trial."""
    if not isinstance(new, torch.Tensor) or new.shape != held.shape or new.dtype != held.dtype:
        what = f"{list(new.shape)} {new.dtype}" if isinstance(new, torch.Tensor) else repr(new)
        raise Unfusable(f"the forward makes the buffer {name}, {list(held.shape)} {held.dtype}, another kind: {what}")
    value: torch.Tensor = _in_front(new, held.trials)
    return value.detach()


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
