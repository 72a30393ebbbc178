"""How products follow each other in a model, seen by one batch: what the trace's sizes alone do not tell.

Two things follow. An output layer whose products nothing multiplies again is a last one: its initial values are zero in
a surrogate, as the outputs that a narrow model begins with are larger (Yang et al., "Tensor Programs V", appendix D.2).
Weights that are normalised before they are used are none: of zeros there is no direction.
And scores of attention sum over a head size that shrinks. A user divides them by the root of it; with width they should
go with 1/d, and as the target's at its own width. Where a head size is D in the target and d in its twin, scores that
have the factors a(D) and a(d) are to be multiplied by D/d · a(D)/a(d): the root of D/d, for the usual factor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.surrogate.internals import TorchDispatchMode, tree_leaves, tree_map_only
from penstock.surrogate.queries import Rows, query_rows
from penstock.training.random.generators import own_randomness, seed_everything

Run = Callable[[nn.Module, Any], Any]
Names = frozenset[Any]  # of parameters; the number of an attention, for what it gives
NONE: Names = frozenset()
MATRICES = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "linear": 0, "convolution": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
COPIES = ("clone", "_to_copy", "_unsafe_view")  # what else is no view, and gives a weight as it is
LAYERS = ("embedding", "lstm", "gru", "rnn", "conv", "bilinear")  # parts of names of other operators with weights
NUDGE = 0.05  # a deviation that weights get, as those of zero would hide what they multiply
CLOSE = 1e-9  # how far two losses in float64 lie apart, where they are equal but for rounding


@dataclass
class Attention:
    """The parameters that make its scores, its values and what is made of its output; its queries, scores' factor."""

    scores: Names
    left: Tensor
    factor: float
    values: Names = NONE
    out: Names = NONE

    @property
    def size(self) -> int:
        """The size of a head."""
        return self.left.shape[-1]


@dataclass(frozen=True)
class Flowed:
    """What was found: the parameters of last layers, biases; and by parameter, what attention multiplies it by.

    ``queries`` has the rows that make queries, in the target and in its twin.
    """

    last: frozenset[str] = NONE
    attention: Mapping[str, float] = field(default_factory=dict)
    biases: frozenset[str] = NONE
    queries: Mapping[str, tuple[Rows, Rows]] = field(default_factory=dict)


class _Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows tensors from product to product; ``times`` multiplies the scores of each attention."""

    def __init__(self, model: nn.Module, times: Mapping[int, float] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.times = times or {}
        self.products: set[str] = set()  # parameters that tensors are multiplied by
        self.biases: set[str] = set()
        self.again: set[Any] = set()  # sources of tensors that a product takes
        self.attentions: list[Attention] = []
        self._kept: list[Any] = []  # tensors, alive so that their ids stay their own
        self._weights: dict[int, Names] = {}  # parameters, and functions of them alone
        self._sources: dict[int, Names] = {}  # the parameters of the products that a tensor was last made by
        self._factor: dict[int, float] = {}  # numbers that a tensor was multiplied by since
        self._scores: dict[int, int] = {}  # the attention whose scores a tensor holds
        self._shares: dict[int, int] = {}  # the attention whose shares, after its softmax, a tensor holds
        for name, p in model.named_parameters():
            self._weights[id(p)] = frozenset((name,))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        made = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        results = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        self._kept += [*given, *results]
        if given and all(id(one) in self._weights for one in given):
            own = NONE.union(*(self._weights[id(one)] for one in given))
            self._tell(self._weights, results, own)
            if name not in COPIES and func._schema.returns[0].alias_info is None:  # such as weights that are normalised
                self.again |= own
        elif name in MATRICES:
            at = MATRICES[name]
            made = self._product(given[at], given[at + 1], [*given[:at], *given[at + 2 :]], made)
        elif any(part in name for part in LAYERS):
            self._take(given)
            self._tell(self._sources, results, NONE.union(*(self._weights.get(id(one), NONE) for one in given)))
        else:
            self._pass_on(name, args, given, results)
        return made

    def _product(self, left: Tensor, right: Tensor, others: list[Tensor], made: Tensor) -> Tensor:
        weights = [one for one in (left, right) if id(one) in self._weights]
        if weights:
            own = self._weights[id(weights[0])]
            self.products |= own
            taken = self._take([left, right])
            if len(taken) == 1 and isinstance(number := next(iter(taken)), int):
                self.attentions[number].out |= own
            biases = NONE.union(*(self._weights.get(id(one), NONE) for one in others))
            self.biases |= biases
            self._sources[id(made)] = own | biases
            return made
        shared = self._shares.get(id(left))
        self._take([left, right])
        if shared is not None:
            self.attentions[shared].values |= self._sources.get(id(right), NONE)
            self._sources[id(made)] = frozenset((shared,))
            return made
        number = len(self.attentions)
        sources = self._sources.get(id(left), NONE) | self._sources.get(id(right), NONE)
        factor = self._factor.get(id(left), 1.0) * self._factor.get(id(right), 1.0)
        self.attentions.append(Attention(sources, left, factor))
        if number in self.times:
            made = made * self.times[number]
        self._kept.append(made)
        self._scores[id(made)] = number
        return made

    def _take(self, given: list[Tensor]) -> Names:
        taken = NONE.union(*(self._sources.get(id(one), NONE) for one in given))
        self.again |= taken
        return taken

    def _pass_on(self, name: str, args: Any, given: list[Tensor], results: list[Tensor]) -> None:
        sources = [found for one in given if (found := self._sources.get(id(one)))]
        if sources and name.startswith("add"):  # a bias that is added apart
            added = [found for one in given if (found := self._weights.get(id(one)))]
            self.biases.update(*(found for one in given if one.ndim == 1 and (found := self._weights.get(id(one)))))
            sources += added
        if sources:
            self._tell(self._sources, results, NONE.union(*sources))
        if name.startswith("mul") and len(sources) > 1:  # each is then a factor of the other, as a weight is
            self._take(given)
        scores = {self._scores[id(one)] for one in given if id(one) in self._scores}
        shares = {self._shares[id(one)] for one in given if id(one) in self._shares}
        if len(scores) == 1:
            (number,) = scores
            if "softmax" in name:
                self._tell(self._shares, results, number)
                self.attentions[number].factor *= self._factor.get(id(given[0]), 1.0)
            else:
                self._tell(self._scores, results, number)
        elif len(shares) == 1:
            self._tell(self._shares, results, shares.pop())
        made = [one for one in given if id(one) in self._sources or id(one) in self._scores]
        if made:
            by = _number(args[1]) if name in ("mul", "div", "mul_", "div_") and len(args) > 1 else None
            factor = self._factor.get(id(made[0]), 1.0) * (1.0 if not by else by if name.startswith("mul") else 1 / by)
            self._tell(self._factor, results, factor)

    def _tell(self, about: dict[int, Any], results: list[Tensor], one: Any) -> None:
        about.update((id(result), one) for result in results)


def _number(one: Any) -> float | None:
    if isinstance(one, Tensor):
        return float(one) if one.numel() == 1 else None
    return float(one) if isinstance(one, int | float) else None


def flowed(target: nn.Module, narrow: nn.Module, run: Run, batch: Any, *, queries: bool = False) -> Flowed:
    """The last layers of a model, and the factors of its attention at a width; models of both are left as they are."""
    found = Flowed()
    with suppress(Exception), own_randomness():  # of a model that cannot be followed the table holds as it is
        (whole, *_), (twin, *_) = _follow(target, run, batch), _follow(narrow, run, batch)
        found = Flowed(frozenset(whole.products - whole.again), biases=frozenset(whole.biases))
        times = _times(whole.attentions, twin.attentions)
        by = _by_parameter(twin.attentions, times)
        if by and _same(narrow, run, batch, times, by):
            found = replace(found, attention=by)
            if queries:
                rows = [_follow(one, run, batch, by)[1] for one in (target, narrow)]
                both = {name: (rows[0][name], rows[1][name]) for name in rows[1] if name in rows[0]}
                found = replace(found, queries=both)
    return found


def _follow(model: nn.Module, run: Run, batch: Any, queries: Collection[str] = ()) -> tuple[_Flow, dict[str, Rows]]:
    """The flow of a model, and the rows of parameters that make queries, as far as they are asked for."""
    model = copy.deepcopy(model).train()
    seed_everything(0)
    flow = _Flow(model)
    with torch.set_grad_enabled(bool(queries)), sdpa_kernel(SDPBackend.MATH), flow:
        run(model, batch)
    if not queries:
        return flow, {}
    return flow, query_rows(
        dict(model.named_parameters()), queries, [(one.scores, one.left) for one in flow.attentions]
    )


def _times(whole: list[Attention], twin: list[Attention]) -> dict[int, float]:
    """What the scores of each attention are to be multiplied by, as far as its head size shrinks."""
    found = {}
    for number, (one, other) in enumerate(zip(whole, twin, strict=True)):
        alike = (one.scores, one.values, one.out) == (other.scores, other.values, other.out)
        if alike and other.out and one.size != other.size:
            times = one.size / other.size * one.factor / other.factor
            if abs(times - 1) > CLOSE:
                found[number] = times
    return found


def _by_parameter(twin: list[Attention], times: Mapping[int, float]) -> dict[str, float]:
    """The same as factors of parameters: by its root those that make queries, keys and values.

    Values have it too as one layer often makes all three; what takes the attention's output is divided by it.
    """
    found: dict[str, float] = {}
    for number, by in times.items():
        one = twin[number]
        for names, factor in ((one.scores | one.values, by**0.5), (one.out, by**-0.5)):
            for name in names:
                if found.setdefault(name, factor) != factor:
                    return {}
    return found


def _same(model: nn.Module, run: Run, batch: Any, times: Mapping[int, float], by: Mapping[str, float]) -> bool:
    """Whether the factors of parameters do what those of scores are to do, in float64, and with no weights of zero."""
    batch = tree_map_only(Tensor, lambda one: one.double() if one.is_floating_point() else one, batch)
    losses = []
    for factors in (None, by):
        own = copy.deepcopy(model).double().train()
        seed_everything(0)
        for name, p in own.named_parameters():
            p.data += NUDGE * torch.randn_like(p)
            p.data *= 1.0 if factors is None else factors.get(name, 1.0)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _Flow(own, times if factors is None else None):
            losses.append(float(run(own, batch)))
    return abs(losses[0] - losses[1]) <= CLOSE * abs(losses[0])
