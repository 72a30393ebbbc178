"""The search space: a dict of domains and constants, or a define-by-run function that asks for them.

A draw is a function of (seed, number, name) alone, so adding a parameter changes no other parameter's draws.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from penstock.domains import Choice, Domain, choice, floats, ints, kept, mark, one_of, optunas, parse, uncalled
from penstock.errors import PenstockError, SpaceError, told
from penstock.numeric import legible, scalars, shown
from penstock.seeds import key
from penstock.trial import Config, plain

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MOST_CONFIGS = 1_000_000  # a larger grid is a mistake: its trials would not fit in memory


@dataclass(frozen=True)
class Space:
    """The space that a study searches; ``Space.of`` makes one from a dict or a function.

    >>> import penstock as ps
    >>> Space.of({"width": ps.randint(1, 9), "depth": 3}).draw(seed=0, number=7)
    {'width': 4, 'depth': 3}
    """

    domains: dict[str, Domain]
    constants: dict[str, Any]
    function: Callable[..., Any] | None = None

    @classmethod
    def of(cls, spec: Any) -> Space:
        """The space that a user's dict or define-by-run function describes."""
        if isinstance(spec, Space):
            return spec
        if callable(spec):
            return cls({}, {}, spec)
        if not isinstance(spec, Mapping):
            raise SpaceError(
                "The space must be a dict such as {'lr': ps.loguniform(1e-4, 1)} or a function of an Optuna trial, "
                f"got {shown(spec)}."
            )
        try:
            parts = {name: _part(name, value) for name, value in spec.items()}
        except RecursionError:
            raise SpaceError("The space has a value that contains itself, which the log cannot keep.") from None
        domains = {name: part for name, part in parts.items() if isinstance(part, Domain)}
        if not domains:
            raise SpaceError(
                f"The space has nothing to tune, {shown(spec)} is all constant: add a parameter such as "
                "'lr': ps.loguniform(1e-4, 1)."
            )
        return cls(domains, {name: part for name, part in parts.items() if name not in domains})

    @classmethod
    def read(cls, description: Any) -> Space | None:
        """The space with the domains in a description by ``describe``; None where they cannot be read from it.

        >>> Space.read({"lr": "loguniform(0.0001, 1)", "layers": "2"})
        Space(domains={'lr': loguniform(0.0001, 1)}, constants={}, function=None)
        """
        if not isinstance(description, Mapping):
            return None
        try:
            parts = {name: parse(text) for name, text in description.items()}
        except (SyntaxError, TypeError, ValueError, LookupError, SpaceError):
            return None
        return cls({name: domain for name, domain in parts.items() if domain is not None}, {})

    def draw(self, seed: int, number: int) -> Config:
        """The config of trial ``number``, independent of every other trial's."""

        def answer(name: str, domain: Domain) -> Any:
            return domain.at(_random(seed, "draw", number, name))

        if self.function is not None:
            return self.suggest(answer, number)[0]
        return self._with_constants({name: answer(name, domain) for name, domain in self.domains.items()})

    def suggest(self, answer: Callable[[str, Domain], Any], number: int = 0) -> tuple[Config, dict[str, Domain]]:
        """Call the define-by-run function; gives the config that it makes from the answers, and its domains."""
        assert self.function is not None
        trial = Suggestions(number, answer)
        try:
            returned = self.function(trial)
        except (PenstockError, _Unanswered):
            raise
        except (Exception, SystemExit) as error:
            raise SpaceError(
                f"{self._called()} raised {told(error)}, when it was asked for the config of trial {number}: mend it, "
                "then run the study again."
            ) from error
        if not trial.params or not isinstance(returned, dict | None):
            raise SpaceError(
                f"{self._called()} must suggest a parameter, such as trial.suggest_float('lr', 1e-4, 1), and return a "
                f"dict or nothing; it suggested {list(trial.params)} and returned {shown(returned)}."
            )
        more = {}
        for name, value in (returned or {}).items():
            _check_kept(name, value)
            more[name] = value = scalars(value)
            if name in trial.params and mark(value) != mark(trial.params[name]):
                raise SpaceError(  # the log must have the suggested value, for a resumed sampler to learn from it
                    f"{self._called()} suggested {name}={trial.params[name]!r} and returned {name}={shown(value)}: "
                    "give one of them another name."
                )
        return {**trial.params, **more}, trial.domains

    def finish(self, params: Mapping[str, Any]) -> Config:
        """The config that an Optuna sampler's parameters stand for; only for a dict."""
        return self._with_constants({name: domain.real(params[name]) for name, domain in self.domains.items()})

    def restore(self, config: Config) -> Config:
        """A config as it was before the log turned it into JSON: choices and constants are the user's objects again."""
        if self.function is not None:
            again = self._again(config)
            return again[0] if again and mark(again[0]) == mark(config) else config
        parts = self.domains | {name: Choice((value,)) for name, value in self.constants.items()}
        return {n: parts[n].real(v) if n in parts and parts[n].holds(v) else v for n, v in config.items()}

    def distributions(self) -> dict[str, BaseDistribution]:
        """The parameters as Optuna's samplers see them; only for a dict."""
        return {name: domain.distribution() for name, domain in self.domains.items()}

    def params(self, config: Config) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """A config's parameters that lie in the space, and their distributions, as Optuna sees them."""
        domains = self.domains
        if self.function is not None:
            again = self._again(config)
            domains = again[1] if again else {}
        domains = {n: domain for n, domain in domains.items() if n in config and domain.holds(config[n])}
        labels = {name: domain.label(domain.real(config[name])) for name, domain in domains.items()}
        return labels, {name: domain.distribution() for name, domain in domains.items()}

    def grid_size(self) -> int:
        """How many configs the grid has."""
        self._needs_dict("Grid")
        sizes = []
        for name, domain in self.domains.items():
            if domain.size is None:
                raise SpaceError(
                    f"Grid cannot enumerate {name}={domain}: use ps.grid([...]), ps.choice([...]), ps.quniform(...) or "
                    "ps.randint(...), or another algorithm."
                )
            sizes.append(domain.size)
        if prod(sizes) > MOST_CONFIGS:
            raise SpaceError(
                f"Grid takes at most {MOST_CONFIGS} configs, got {shown(prod(sizes))}: use fewer values, or Random."
            )
        return prod(sizes)

    def grid_point(self, number: int) -> Config:
        """The config of that number in the grid: the last name changes fastest.

        >>> import penstock as ps
        >>> Space.of({"a": ps.grid([1, 2]), "b": ps.grid("xyz".split("y"))}).grid_point(2)
        {'a': 2, 'b': 'x'}
        """
        values = []
        for domain in reversed(self.domains.values()):
            number, k = divmod(number, domain.size or 1)
            values.append(domain.point(k))
        return self._with_constants(dict(zip(self.domains, reversed(values), strict=True)))

    def perturb(self, config: Config, seed: int, number: int, generation: int, resample: float = 0.25) -> Config:
        """PBT's explore: each parameter is drawn anew or moved a little, and stays in the space."""
        self._needs_dict("PBT")
        perturbed = {}
        for name, domain in self.domains.items():
            anew, u = (_random(seed, what, number, generation, name) for what in ("resample", "perturb"))
            known = name in config and domain.holds(config[name])
            perturbed[name] = domain.nudge(config[name], u) if known and anew >= resample else domain.at(u)
        return self._with_constants(perturbed)

    def check(self, config: Config) -> None:
        """Refuse a config of the log that is not in this space; a function's space may hold any config."""
        if self.function is not None:
            return
        for name in [*self.domains, *self.constants, *config]:
            if name not in config:
                problem = f"has no {name!r}, which the space has"
            elif name in self.domains and not self.domains[name].holds(config[name]):
                problem = f"has {name}={config[name]!r}, which is not in {self.domains[name]}"
            elif name in self.constants and mark(self.constants[name]) != mark(config[name]):
                problem = f"has {name}={config[name]!r}, which the space has as {self.constants[name]!r}"
            elif name not in self.domains and name not in self.constants:
                problem = f"has {name}={config[name]!r}, which the space has not"
            else:
                continue
            raise SpaceError(f"A config of the log {problem}: restore the space, or start a study of another name.")

    def describe(self) -> dict[str, str] | str:
        """A description of the space that the log keeps, so that a change is noticed.

        >>> import penstock as ps
        >>> Space.of({"lr": ps.loguniform(1e-4, 1), "layers": 2}).describe()
        {'lr': 'loguniform(0.0001, 1)', 'layers': '2'}
        """
        if self.function is None:
            return {**{n: repr(d) for n, d in self.domains.items()}, **{n: mark(c) for n, c in self.constants.items()}}
        try:
            source = inspect.getsource(self.function)
        except (OSError, TypeError):
            code = getattr(self.function, "__code__", None)
            source = f"{code.co_code!r} {plain(code.co_consts)!r}" if code else ""
        name = self._called("__qualname__")
        return f"{name} {blake2b(source.encode(), digest_size=4).hexdigest()}"

    def _called(self, by: str = "__name__") -> str:
        """The name of the function."""
        return str(getattr(self.function, by, getattr(type(self.function), by)))

    def _with_constants(self, params: Config) -> Config:
        return {**params, **self.constants}

    def _needs_dict(self, who: str) -> None:
        if self.function is not None:
            raise SpaceError(f"{who} needs a dict, got the function {self._called()}: write the space as a dict.")

    def _again(self, config: Config) -> tuple[Config, dict[str, Domain]] | None:
        """The function called with the answers in ``config``; None where it asks for others, or fails."""

        def answer(name: str, domain: Domain) -> Any:
            if name not in config or not domain.holds(config[name]):
                raise _Unanswered(name)
            return domain.real(config[name])

        try:
            return self.suggest(answer)
        except (_Unanswered, SpaceError):
            return None


class _Unanswered(Exception):
    """A define-by-run function asks for a value that is not there."""


@dataclass
class Suggestions:
    """The part of an Optuna trial that a define-by-run function sees; ``answer`` gives the values.

    >>> Suggestions(0, lambda name, domain: domain.at(0.5)).suggest_float("dropout", 0, 1)
    0.5
    """

    number: int
    answer: Callable[[str, Domain], Any]
    params: Config = field(default_factory=dict)
    domains: dict[str, Domain] = field(default_factory=dict)

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False) -> Any:
        return self._suggest(name, floats(f"suggest_float of {name!r}", low, high, step, log=log, from_low=True))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> Any:
        return self._suggest(name, ints(f"suggest_int of {name!r}", low, high, step, log=log))

    def suggest_categorical(self, name: str, choices: Iterable[Any]) -> Any:
        return self._suggest(name, one_of(f"suggest_categorical of {name!r}", choices))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Ignored: return a dict to put more into the config."""

    def _suggest(self, name: str, domain: Domain) -> Any:
        if name not in self.params:
            _check_name(name)
            self.domains[name] = domain
            self.params[name] = self.answer(name, domain)
        return self.params[name]


def _part(name: Any, value: Any) -> Any:
    """The domain of a value in the user's dict, or the value itself where it is a constant."""
    _check_name(name)
    if isinstance(value, Domain):
        return value
    for kind in (kind.__name__ for kind in type(value).__mro__ if kind.__module__ == "optuna.distributions"):
        if kind == "CategoricalDistribution":
            return choice(value.choices)
        if kind in ("FloatDistribution", "IntDistribution"):
            return optunas(kind, value.low, value.high, value.log, value.step)
    if type(value).__module__.startswith("ray.tune"):
        raise SpaceError(
            f"{name} is Ray Tune's own {shown(value)}: use Penstock's of the same name, such as ps.uniform."
        )
    if called := uncalled(value):
        raise SpaceError(f"{name} must be a range or a constant, got {called}: call it with its arguments.")
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
        raise SpaceError(
            f"{name} must be a range or a constant, got the function {value.__name__}, which is not called: choose "
            "among functions by ps.choice([...]), or make the whole space one function of an Optuna trial."
        )
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if any(isinstance(_part(name, part), Domain) for part in inner):
        raise SpaceError(
            f"{name} has a range inside {shown(value)}, where it would not be tuned: give it a name of its own."
        )
    _check_kept(name, value)
    return scalars(value)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise SpaceError(f"A parameter's name must be a string, got {shown(name)}: write {shown(str(name))}.")
    if name != legible(name):
        raise SpaceError(f"A parameter's name must be text that can be printed, got {shown(name)}.")


def _check_kept(name: object, value: object) -> None:
    """Refuse a constant that the log could not keep."""
    _check_name(name)
    try:
        kept(scalars(value))
    except RecursionError:
        raise
    except Exception as error:
        raise SpaceError(
            f"{name} has a value that the log cannot keep, {shown(value)} ({error}): use another."
        ) from None


def _random(*parts: object) -> float:
    return (key(*parts) >> 10) / 2**53
