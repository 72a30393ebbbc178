"""Numbers that differ from trial to trial: values of a config that a loss reads, and attributes of the user's modules.

Where a trial alone has a Python number, a bundle has a ``Number``. Torch's functions of elements compute with a tensor
of all trials' numbers. Other functions of torch are called for one trial after another, with its own Python number.
Where Python itself needs a number, for a shape or a branch, all trials must have the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from penstock.training.fused.refusing import where_called
from penstock.training.fused.stacked import Stacked, by_rows, name_of, refusal, rule_of

Plain = float | int


def is_number(value: object) -> bool:
    """Whether a value is a plain number, which a trial may have as its own."""
    return type(value) in (float, int)


@dataclass
class Notes:
    """How numbers were used, by name; kept from step to step."""

    plain: set[str] = field(default_factory=set)  # numbers of which a step took Python's values
    needed: dict[str, str] = field(default_factory=dict)  # numbers that all trials must have in common, with the line
    outcomes: dict[str, str] = field(default_factory=dict)  # comparisons that were made, and what came of them
    compared: set[str] = field(default_factory=set)  # the numbers in these

    def take(self, number: Number) -> None:
        """Note that a step took the Python values of a number, so that a captured step would keep them."""
        self.plain.update(number.roots)

    def need(self, number: Number) -> None:
        """Note that a number must be the same for all trials."""
        self.take(number)
        for root in number.roots:
            self.needed.setdefault(root, where_called())

    def compare(self, number: Number, said: str, holds: bool) -> None:
        """Note a comparison: trials of a bundle must all have its outcome."""
        self.take(number)
        self.compared.update(number.roots)
        self.outcomes[f"{said} at {where_called()}"] = str(holds)


class Number:
    """A number of each trial: ``rows`` are Python's, ``value`` is a tensor of them.

    >>> notes = Notes()
    >>> alpha = Number("alpha", [0.25, 0.5], notes)
    >>> (1 - alpha).rows, (torch.ones(2) * alpha).moved(0).tolist(), alpha > 0
    ([0.75, 0.5], [[0.25, 0.25], [0.5, 0.5]], True)
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[Plain],
        notes: Notes,
        roots: frozenset[str] | None = None,
        make: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.name, self.notes = name, notes
        self.rows = list(rows)
        self.roots = frozenset([name]) if roots is None else roots
        self._make, self._value = make, None if make is not None else self._tensor()

    def _tensor(self) -> torch.Tensor:
        return Stacked(torch.tensor(self.rows, dtype=torch.float64), 0)

    def give(self, value: torch.Tensor, rows: Sequence[Plain]) -> None:
        """Let it be the numbers of ``rows``, or of a part of them, which lie in a tensor on their device."""
        self._value = Stacked(value, 0)
        if len(rows) == len(value):
            self.rows = list(rows)
        else:  # read back from the tensor, where Python's integers are floats
            whole = all(type(row) is int for row in rows)
            self.rows = [int(row) if whole else row for row in value.tolist()]

    @property
    def value(self) -> torch.Tensor:
        """The numbers as a scalar of every trial, in float64."""
        if self._value is None:
            assert self._make is not None
            self._value = self._make()
        return self._value

    @property
    def whole(self) -> bool:
        """Whether it is of Python's integers."""
        return all(type(row) is int for row in self.rows)

    # Arithmetic of Python's

    def _with(self, op: Callable[[Any, Any], Any], other: Any, *, reflected: bool = False) -> Any:
        if isinstance(other, torch.Tensor) or not (isinstance(other, Number) or is_number(other)):
            return NotImplemented  # a tensor's own method is asked then, and finds a Number

        def both(mine: Any, others: Any) -> Any:
            return op(others, mine) if reflected else op(mine, others)

        others = other.rows if isinstance(other, Number) else [other] * len(self.rows)
        roots = self.roots | (other.roots if isinstance(other, Number) else frozenset())
        rows = [both(mine, own) for mine, own in zip(self.rows, others, strict=True)]
        return Number(
            self.name, rows, self.notes, roots,
            lambda: both(self.value, other.value if isinstance(other, Number) else other),
        )  # fmt: skip

    def __neg__(self) -> Number:
        return Number(self.name, [-row for row in self.rows], self.notes, self.roots, lambda: -self.value)

    def __abs__(self) -> Number:
        return Number(self.name, [abs(row) for row in self.rows], self.notes, self.roots, lambda: self.value.abs())

    def __pos__(self) -> Number:
        return self

    # Where Python needs one number

    def plainly(self) -> Plain:
        """The number as Python's, where all trials have the same."""
        self.notes.need(self)
        if any(row != self.rows[0] for row in self.rows):
            raise refusal(self.name, "it differs from trial to trial, and a plain number is needed here")
        return self.rows[0]

    def __float__(self) -> float:
        return float(self.plainly())

    def __int__(self) -> int:
        return int(self.plainly())

    def __index__(self) -> int:
        return operator.index(self.plainly())  # type: ignore[arg-type]

    def __round__(self, digits: int | None = None) -> Plain:
        return round(self.plainly(), digits)

    def __hash__(self) -> int:
        return hash(self.plainly())

    def __format__(self, spec: str) -> str:
        return format(self.plainly(), spec)

    def __str__(self) -> str:
        return str(self.plainly())

    def __repr__(self) -> str:
        return f"Number({self.name!r})"

    def __bool__(self) -> bool:
        return bool(self._holds(operator.ne, 0, "!="))

    def _holds(self, op: Callable[[Any, Any], bool], other: Any, sign: str) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        others = other.rows if isinstance(other, Number) else [other] * len(self.rows)
        outcomes = [bool(op(mine, own)) for mine, own in zip(self.rows, others, strict=True)]
        said = f"{self.name} {sign} {other.name if isinstance(other, Number) else other!r}"
        if any(holds != outcomes[0] for holds in outcomes):
            raise refusal(said, "it holds for some trials and not for others: use torch.where in place of a branch")
        self.notes.compare(self, said, outcomes[0])
        if isinstance(other, Number):
            self.notes.compare(other, said, outcomes[0])
        return outcomes[0]

    # In torch's functions

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return called(func, args, kwargs or {})


def _arithmetic(name: str) -> None:
    op = getattr(operator, name)
    setattr(Number, f"__{name}__", lambda self, other: self._with(op, other))
    setattr(Number, f"__r{name}__", lambda self, other: self._with(op, other, reflected=True))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _arithmetic(_name)


def _comparison(name: str, sign: str) -> None:
    op = getattr(operator, name)
    setattr(Number, f"__{name}__", lambda self, other: self._holds(op, other, sign))


for _name, _sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    _comparison(_name, _sign)


# Torch's functions with numbers among their arguments

_CARRIED = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
            "feature_dropout", "leaky_relu", "elu", "celu", "batch_norm", "layer_norm", "group_norm"}  # fmt: skip
_ELEMENTWISE = {"add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "floor_divide",
                "pow", "float_power", "remainder", "fmod", "maximum", "minimum", "fmax", "fmin", "lerp", "where",
                "clamp", "clip", "clamp_min", "clamp_max", "masked_fill", "atan2", "hypot", "xlogy",
                "copysign"}  # fmt: skip
_NAMES = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "truediv": "div", "pow": "pow", "mod": "remainder",
          "floordiv": "floor_divide"}  # fmt: skip
_OPERATORS = {
    f"__{more}{name}__": f"{bare}{'_' * (more == 'i')}" for name, bare in _NAMES.items() for more in ("", "r", "i")
}
_COMPARED = {"eq", "ne", "lt", "le", "gt", "ge", "less", "greater", "less_equal", "greater_equal", "not_equal"}
_OPERATORS |= {f"__{name}__": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_CLAMPS = {"clamp", "clip"}
_SHAPES = {"interpolate", "upsample", "pad", "view", "reshape", "expand", "repeat", "topk", "arange", "linspace"}
_HALVES = (torch.bfloat16, torch.float16)


def numbered(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """What a function gives for numbers among its arguments; NotImplemented where there are none."""
    for value in args:
        if type(value) is Number:
            return called(func, args, kwargs or {})
    if kwargs:
        for value in kwargs.values():
            if type(value) is Number:
                return called(func, args, kwargs)
    return NotImplemented


def called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch whose arguments have numbers that differ from trial to trial."""
    name = name_of(func)
    bare = _OPERATORS.get(name, name)
    if bare == "cross_entropy" and isinstance(kwargs.get("label_smoothing"), Number):
        return _smoothed(func, args, dict(kwargs))
    if bare in _CARRIED and isinstance(args[0], torch.Tensor):
        return rule_of(func)(func, _of_trials(args[0], _trials(args, kwargs)), *args[1:], **kwargs)
    alone = bare.removesuffix("_")
    if alone in _ELEMENTWISE | _COMPARED:
        return _elementwise(func, alone, bare != alone, args, dict(kwargs))
    return _one_by_one(func, name, args, kwargs)


def _trials(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return next(len(leaf.rows) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Number))


def _of_trials(x: torch.Tensor, trials: int) -> Stacked:
    return x if isinstance(x, Stacked) else Stacked(x.expand(trials, *x.shape), 0)


def _elementwise(func: Any, name: str, in_place: bool, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if name in ("add", "sub") and isinstance(alpha := kwargs.get("alpha"), Number):
        return func(args[0], args[1] * alpha)
    if name == "masked_fill" and not in_place:
        (x, mask, value) = (*args, *kwargs.values())
        return torch.where(mask, value, x)
    first = 1 if name == "where" else 0
    tensors = [v for v in (*args[first:], *kwargs.values()) if isinstance(v, torch.Tensor)]
    common = _common(tensors)
    through = common in _HALVES and not in_place and name not in _COMPARED

    def given(value: Any) -> Any:
        if isinstance(value, Number):
            return value.value.to(_scalar_type(common, value.whole) if not through else torch.float32)
        if name in _CLAMPS and is_number(value):
            return torch.tensor(value, dtype=torch.float32 if through else common, device=tensors[0].device)
        if through and isinstance(value, torch.Tensor) and value.dtype == common:
            return value.float()
        return value

    made = func(*map(given, args), **{key: given(value) for key, value in kwargs.items()})
    return made.to(common) if through else made


def _common(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The type of tensors that a number of Python's meets: it has no say among types of its kind."""
    types = [t.dtype for t in tensors if t.ndim] or [t.dtype for t in tensors]
    common = types[0] if types else torch.get_default_dtype()
    for dtype in types[1:]:
        common = torch.promote_types(common, dtype)
    return common


def _scalar_type(common: torch.dtype, whole: bool) -> torch.dtype:
    if common.is_floating_point or common.is_complex:
        return common
    if whole:
        return torch.int64 if common == torch.bool else common
    return torch.get_default_dtype()


def _smoothed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A cross entropy is linear in its label smoothing, whatever its targets, weights and reduction."""
    smoothing = kwargs.pop("label_smoothing")
    given = (_of_trials(args[0], len(smoothing.rows)), *args[1:])
    sharp, smooth = (rule_of(func)(func, *given, **kwargs, label_smoothing=whole) for whole in (0.0, 1.0))
    return sharp * (1 - smoothing) + smooth * smoothing


def _one_by_one(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function for one trial after another; integers, and sizes, must be the same for all."""
    found = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Number)]

    def plain(leaf: Any) -> Any:
        return leaf.plainly() if isinstance(leaf, Number) and (leaf.whole or name in _SHAPES) else leaf

    left = [number for number in found if not (number.whole or name in _SHAPES)]
    args, kwargs = tree_map(plain, (tuple(args), dict(kwargs)))
    if not left:
        return func(*args, **kwargs)
    writes = name.endswith("_") and not name.endswith("__")
    if writes and args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], Stacked):
        raise refusal(name, "it writes each trial's own values into a tensor that they share; clone it")
    for number in left:
        number.notes.take(number)
    rows: Iterator[int] = count()

    def one(*own: Any, trials: Any, **named: Any) -> Any:
        row = next(rows)

        def mine(leaf: Any) -> Any:
            return leaf.rows[row] if isinstance(leaf, Number) else leaf

        own, named = tree_map(mine, (own, named))
        return func(*own, **named)

    one.__name__ = name
    return by_rows(one, *args, trials=left[0].value, **kwargs)
