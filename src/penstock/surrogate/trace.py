"""Which dimensions of a model grow with its width, found by one batch through the model with symbols for sizes.

Every size of every parameter and buffer becomes a symbol of its own, and so do whole numbers that modules hold, such as
a head size. A batch of fake tensors then goes through the task's loss: whatever torch demands to be equal ties symbols
to each other, to numbers, or to products and sums of others. A symbol grows with width if a product of a parameter sums
over it: classes, vocabularies and positions are never summed over, and sizes of the data are numbers. Nothing is
computed, and the traced model is thrown away (Hydro §4.1 edits torch.fx graphs instead).
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from sysconfig import get_path
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from penstock.errors import TaskError
from penstock.surrogate.internals import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    TorchDispatchMode,
    enable_python_dispatcher,
    tree_leaves,
    tree_map_only,
    without_looks,
    without_onednn,
)
from penstock.surrogate.quick import InParts, quick
from penstock.surrogate.settings import NARROWEST
from penstock.surrogate.sizes import Size, chosen, settled, symbols_of, value_of

OF_TORCH = {
    *("groups", "num_heads", "embed_dim", "head_dim", "kdim", "vdim", "hidden_size", "input_size", "num_features"),
    *("in_features", "out_features", "in_channels", "out_channels", "embedding_dim", "d_model"),
}
LISTS = {"normalized_shape", "unflattened_size"}


class Place(NamedTuple):
    """A number of a model: the size of a tensor along a dimension, or an attribute of a module, or a part of one."""

    module: str
    name: str
    part: int | None = None


class Unanalysable(TaskError):
    """A model whose growing dimensions cannot be found."""


@dataclass(frozen=True)
class Traced:
    """What was found of a model.

    ``sizes`` and ``attributes`` have an expression for each number, ``known`` the symbols' values in the target, and
    ``growing`` the symbols that grow with width. ``summed`` are the dimensions of parameters that products sum over,
    ``looked_up`` the parameters whose rows an embedding looks up.
    """

    sizes: Mapping[Place, Size]
    attributes: Mapping[Place, Size]
    known: Mapping[Any, int]
    growing: frozenset[Any]
    summed: frozenset[Place]
    looked_up: frozenset[tuple[str, str]]
    added: Mapping[Any, float] = field(default_factory=dict)  # what a concatenation with data adds to a symbol's width
    _found: dict[tuple[Any, float], int] = field(default_factory=dict, compare=False)  # as every trial asks for them
    tied: str = ""  # the first line of the user's that ties a size to a number

    def at(self, size: Size, scale: float) -> int:
        """A number of the model, ``scale`` times narrower."""
        if not isinstance(size, sympy.Basic):
            return int(size)
        if (size, scale) not in self._found:
            self._found[size, scale] = int(value_of(size, self.values(scale, self.growing)))
        return self._found[size, scale]

    def values(self, scale: float, growing: frozenset[Any]) -> dict[Any, int]:
        """The symbols' values in a narrower model, if these grow; a part that data have added to a width stays."""
        added = {s: self.added.get(s, 0.0) for s in growing}
        narrow = {s: max(1, round((self.known[s] - more) / scale + more)) for s, more in added.items()}
        return {**self.known, **narrow}

    def grows(self, place: Place) -> bool:
        """Whether a dimension grows with width."""
        size = self.sizes.get(place, 0)
        return bool(symbols_of(size) & self.growing)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which dimensions products sum over, and which tables are looked up."""

    def __init__(self, env: ShapeEnv) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.env = env
        self.tied = ""  # the first line of the user's that ties a size to a number, other than by a product
        self.summed: list[Size] = []  # of two tensors, with the sizes as they were written
        self.heads: list[Size] = []  # what products of two activations sum over
        self.tables: list[tuple[Size, ...]] = []
        # Parameters and functions of them alone, by their ids, which the tensors keep; and the parameters' own sizes.
        self.derived: dict[int, tuple[Any, tuple[Size, ...]]] = {}
        self.outside: list[tuple[int, Size]] = []  # sizes of used outputs, and how many products came before
        self._outputs: dict[int, tuple[int, Any]] = {}  # what outermost modules gave, until it is used

    def derive(self, one: Any, sizes: Iterable[Size]) -> None:
        self.derived[id(one)] = one, tuple(dict.fromkeys(sizes))

    def give(self, output: Any) -> None:
        """Note what an outermost module gives: its sizes count once it is used."""
        for one in tree_leaves(output):
            if isinstance(one, Tensor):
                self._outputs[id(one)] = len(self.summed), one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        for products, one in (self._outputs.pop(id(one)) for one in given if id(one) in self._outputs):
            self.outside += [(products, _raw(size)) for size in one.shape]
        if name in _PRODUCTS:
            self._product(*[one for one in args if isinstance(one, Tensor)][-2:])
        elif name == "convolution":
            self.summed.append(_raw(args[1].shape[0 if args[6] else 1]))
        elif name.startswith("_scaled_dot_product"):
            self.heads += [_raw(args[0].shape[-1]), _raw(args[2].shape[-1])]
        elif name == "embedding":
            self.tables.append(tuple(_raw(n) for n in args[0].shape))
        known = len(self.env.guards)
        made = (quick(func, args) or func)(*args, **(kwargs or {}))
        if not self.tied and name not in _PRODUCTS and any(map(_is_tie, self.env.guards[known:])):
            self.tied = _line(traceback.extract_stack())
        if given and all(id(one) in self.derived for one in given):
            own = [size for one in given for size in self.derived[id(one)][1]]
            for one in tree_leaves(made):
                self.derive(one, own)
        return made

    def _product(self, left: Tensor, right: Tensor) -> None:
        """Note what is summed over of the operand that comes from a parameter; of two such, of the right one."""
        sizes = {id(left): left.shape[-1], id(right): right.shape[max(0, right.ndim - 2)]}
        weights = [one for one in (right, left) if id(one) in self.derived]
        if weights:
            self.summed.append(self._own(weights[0], _raw(sizes[id(weights[0])])))
        elif left.ndim == 3:
            self.heads.append(_raw(left.shape[-1]))

    def _own(self, weight: Tensor, size: Size) -> Size:
        """A size of a weight as its parameter has it: ``einsum`` shapes a weight by the sizes of what it meets."""
        own = self.derived[id(weight)][1]
        if size in own or not isinstance(size, sympy.Basic):
            return size
        return next((one for one in own if self.env.simplify(one) == self.env.simplify(size)), size)


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}


def _is_tie(guard: Any) -> bool:
    """Whether a guard says that one symbol is a number."""
    equal = isinstance(guard.expr, sympy.Eq)
    return equal and guard.expr.lhs.is_Symbol and bool(guard.expr.rhs.is_Integer)


def _raw(size: Any) -> Size:
    """A size as it was written where its tensor was made, before it was tied to others."""
    return size.node._expr if isinstance(size, torch.SymInt) else int(size)


class _Symbols:
    """A model whose sizes are symbols, and so are whole numbers from ``least`` on that the user's modules hold."""

    def __init__(self, model: nn.Module, least: int | None) -> None:
        self.env = ShapeEnv(duck_shape=False)
        self.fake = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.made: dict[Place, Any] = {}
        self.attributes: dict[Place, Any] = {}
        self.known: dict[Any, int] = {}
        tensors: dict[int, Any] = {}
        with self.fake:
            for path, module in model.named_modules():
                for name, p in list(module._parameters.items()):
                    if p is not None:
                        if id(p) not in tensors:
                            empty = self._empty(path, module, name, p)
                            tensors[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
                        setattr(module, name, tensors[id(p)])
                for name, b in list(module._buffers.items()):
                    if b is not None:
                        if id(b) not in tensors:
                            tensors[id(b)] = self._empty(path, module, name, b)
                        module._buffers[name] = tensors[id(b)]
        if least is not None:
            for path, module in model.named_modules():
                self._hold(path, module, least)

    def _symbol(self, place: Place, size: int) -> Any:
        source = ConstantSource(f"{place.module}.{place.name}.{place.part}")
        symbol: Any = self.env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        if isinstance(symbol, sympy.Symbol):
            self.known[symbol] = size
        return self.env.create_symintnode(symbol, hint=size, source=source)

    def _empty(self, path: str, module: nn.Module, name: str, like: Tensor) -> Tensor:
        sizes: list[Any] = []
        for part, size in enumerate(like.shape):
            place = Place(path, name, part)
            window = isinstance(module, _ConvNd) and part > 1
            sizes.append(size if size < 2 or window else self._symbol(place, size))
            if isinstance(sizes[-1], torch.SymInt):
                self.made[place] = sizes[-1]
        return torch.empty(sizes, dtype=like.dtype)

    def _hold(self, path: str, module: nn.Module, least: int) -> None:
        own = not type(module).__module__.startswith("torch.nn.")
        for name, value in list(vars(module).items()):
            if name.startswith("_"):
                continue
            if type(value) is int and value > 1 and (name in OF_TORCH or (own and value >= least)):
                vars(module)[name] = self.attributes[Place(path, name)] = self._symbol(Place(path, name), value)
            elif type(value) in (tuple, list, torch.Size) and (own or name in LISTS):
                if not value or not all(type(one) is int for one in value):
                    continue
                parts: list[Any] = list(value)
                for part, one in enumerate(value):
                    if one >= (least if own else 2):
                        place = Place(path, name, part)
                        parts[part] = self.attributes[place] = self._symbol(place, one)
                vars(module)[name] = parts if isinstance(value, list) else tuple(parts)

    def simple(self, size: Any) -> Size:
        if isinstance(size, torch.SymInt):
            size = size.node._expr
        if not isinstance(size, sympy.Basic):
            return int(size)
        found = self.env.simplify(size)
        return int(found) if found.is_number else found


def trace(model: nn.Module, run: Callable[[nn.Module, Any], object], batch: Any) -> Traced:
    """Find what grows with width in a model, by ``run``, the task's loss, of one batch; the model is left as it is."""
    try:
        copy.deepcopy(model)
    except Exception as error:
        raise Unanalysable(
            f"The model cannot be analysed, as it cannot be copied{where(error)}: {_first_line(error)} Of weights that "
            "are made anew in each forward, those by torch.nn.utils.parametrizations can."
        ) from error
    for least in (NARROWEST, 2):  # small numbers are windows and strides, mostly: as symbols they cost much time
        with suppress(Exception):  # some code takes plain numbers alone
            found = _trace(copy.deepcopy(model), run, batch, least)
            if found.growing:
                return found
    try:
        return _trace(copy.deepcopy(model), run, batch, None)
    except Exception as error:
        raise Unanalysable(f"The model cannot be analysed{where(error)}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    if "data-dependent" in str(error):
        return "it depends on the values of tensors, and only sizes are known here. Define narrow(config, scale)."
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def where(error: Exception) -> str:
    """The last line of the user's own code on an error's way, as " (file.py:12)"; nothing where there is none."""
    line = _line(traceback.extract_tb(error.__traceback__))
    return f" ({line})" if line else ""


def _line(frames: traceback.StackSummary) -> str:
    users = [one for one in frames if _users(one.filename)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""


def _users(file: str) -> bool:
    of_python = file.startswith(get_path("stdlib")) and "site-packages" not in file
    libraries = ("/penstock/", "/torch/", "<frozen", "/sympy/")
    return not of_python and not any(part in file for part in libraries) and file.endswith(".py")


def _trace(model: nn.Module, run: Callable[[nn.Module, Any], object], batch: Any, least: int | None) -> Traced:
    symbols = _Symbols(model, least)
    watch = _Watch(symbols.env)
    with symbols.fake:
        fake = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), batch)
    depth = [0]

    def enter(module: nn.Module, args: Any) -> None:
        depth[0] += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        depth[0] -= 1
        if not depth[0]:
            watch.give(output)

    for parameter in model.parameters():
        watch.derive(parameter, map(_raw, parameter.shape))
    for module in model.modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    with (
        without_onednn(),
        without_looks(),
        torch.no_grad(),
        symbols.fake,
        enable_python_dispatcher(),
        InParts(),
        watch,
    ):
        run(model, fake)
    return _found(symbols, watch)


def _found(symbols: _Symbols, watch: _Watch) -> Traced:
    written = {symbol.node._expr: place for place, symbol in symbols.made.items()}
    summed = frozenset(written[one] for one in watch.summed if one in written)
    tables = frozenset((written[rows].module, written[rows].name) for rows, *_ in watch.tables if rows in written)
    sizes = {place: symbols.simple(symbol) for place, symbol in symbols.made.items()}
    attributes = {place: symbols.simple(symbol) for place, symbol in symbols.attributes.items()}
    heads = {symbols.simple(size) for size in watch.heads}
    alone = {one for size in heads for one in symbols_of(size) if size == one}
    own = {one for size in sizes.values() for one in symbols_of(size)}
    growing = set()
    for place in summed:
        growing |= chosen(sizes[place], alone, {s.node._expr for s in symbols.made.values()})
    for products, size in watch.outside:  # what the outermost modules give stays, unless a parameter sums over it later
        later = {s for one in watch.summed[products:] if one in written for s in symbols_of(symbols.simple(one))}
        growing -= symbols_of(symbols.simple(size)) - later
    found = Traced(sizes, attributes, symbols.known, frozenset(growing), summed, tables, tied=watch.tied)
    guards = [symbols.env.simplify(guard.expr) for guard in symbols.env.guards]
    return settled(found, guards, heads, own)
