"""The catalogue of instance types: Penstock's own TOML file, and a user's over it, each value checked."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import StudyError
from penstock.numeric import finite, shown
from penstock.planning.cloud import MARKETS, Cloud, Instance, Offer
from penstock.planning.draws import Draws

OWN = Path(__file__).with_name("catalogue.toml")
CLOUD = ("billing", "minimum", "arrival", "preparing", "head", "data", "data_price", "most", "currency")
NEEDED = ("name", "type", "devices", "memory", "price")
INSTANCE = (*NEEDED, "spot", "losses", "provider", "dated")
TEXTS = ("name", "type", "provider", "dated")


@dataclass(frozen=True)
class Catalogue:
    """Instance types by name, and the settings of a cloud that the file gives."""

    instances: Mapping[str, Instance]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | str | None = None) -> Catalogue:
        """Penstock's catalogue, with the types and settings of a file of your own over it.

        >>> Catalogue.read().instances["p3.8xlarge"].devices
        4
        """
        made = _own()
        if path is not None and not isinstance(path, Path | str):
            raise StudyError(f"catalogue must be the path of a TOML file, got {shown(path)}.")
        if path is not None:
            over = _read(Path(path))
            made = cls({**made.instances, **over.instances}, {**made.settings, **over.settings})
        return made

    def cloud(self, names: Iterable[str], *, spot: bool = False, **settings: Any) -> Cloud:
        """A cloud of the types named: on demand, and on the spot market too where ``spot`` says so.

        >>> [offer.name for offer in Catalogue.read().cloud(["p3.8xlarge"], spot=True).offers]
        ['p3.8xlarge on-demand', 'p3.8xlarge spot']
        """
        found = [self.find(name) for name in dict.fromkeys(names)]
        markets = MARKETS if spot else MARKETS[:1]
        offers = tuple(Offer(one, market) for one in found for market in markets if market in one.prices)
        if found and not offers:
            raise StudyError(f"{found[0].name} has no on-demand price: allow the spot market with spot=True (--spot).")
        return Cloud(offers, **{**self.settings, **settings})

    def find(self, name: str) -> Instance:
        """The instance type of that name; refused with the nearest names where there is none."""
        if name not in self.instances:
            known = sorted(self.instances)
            near = get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(known[:8])}, …"
            raise StudyError(
                f"The catalogue has no instance type {shown(name)}: {hint}. Add it to a catalogue of your own "
                "(--catalogue FILE), or name another."
            )
        return self.instances[name]


@cache
def _own() -> Catalogue:
    return _read(OWN)


def _read(path: Path) -> Catalogue:
    """The catalogue in a file; refused with the file's name and the one thing that is to be mended."""
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StudyError(
            f"The catalogue {path} cannot be read ({error}): it is TOML with an [[instance]] for each type, which has "
            f"{_listed(NEEDED)}."
        ) from None
    try:
        return _catalogue(body)
    except StudyError as error:
        raise StudyError(f"The catalogue {path}: {error}") from None


def _catalogue(body: Mapping[str, Any]) -> Catalogue:
    if not body:
        raise StudyError(f"it is empty. Give an [[instance]] with {_listed(NEEDED)}, or a [cloud] with settings.")
    _known("it", body, ("instance", "cloud"), lambda one: one if one == "cloud" else "[[instance]]")
    tables, settings = body.get("instance", []), body.get("cloud", {})
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise StudyError("an instance type must be a table of its own, which begins with [[instance]].")
    if not isinstance(settings, dict):
        raise StudyError(f"cloud must be a table, which begins with [cloud], got {shown(settings)}.")
    made: dict[str, Instance] = {}
    for number, table in enumerate(tables, 1):
        one = _instance(table, f"the [[instance]] of number {number}")
        if one.name in made:
            raise StudyError(f"{one.name} is there twice: keep one [[instance]] of that name.")
        made[one.name] = one
    return Catalogue(made, _settings(settings))


def _settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cloud, of which ``Cloud`` checks the numbers."""
    _known("[cloud]", table, CLOUD)
    made: dict[str, Any] = dict(table)
    for key in ("arrival", "preparing"):
        if key in made:
            made[key] = _draws(key, made[key])
    some = Offer(Instance("any", "any", 1, 1, {"on-demand": 1.0}), "on-demand")
    Cloud((some,), **made)
    return made


def _draws(name: str, value: Any) -> Draws:
    """Seconds, or a table with their mean and std."""
    parts = value if isinstance(value, dict) else {"mean": value}
    if "mean" not in parts or parts.keys() - {"mean", "std"} or any(finite(one) is None for one in parts.values()):
        raise StudyError(f"{name} must be seconds, or a table of mean and std in seconds, got {shown(value)}.")
    try:
        return Draws(**parts)
    except StudyError as error:
        raise StudyError(f"{name}: {error}") from None


def _instance(table: Mapping[str, Any], nameless: str) -> Instance:
    where = table["name"] if isinstance(table.get("name"), str) and table["name"] else nameless
    _known(where, table, INSTANCE)
    if missing := [key for key in NEEDED if key not in table and not (key == "price" and "spot" in table)]:
        raise StudyError(f"{where} has no {_listed(missing)}: an instance type has {_listed(NEEDED)}.")
    for key in TEXTS:
        if key in table and not (isinstance(table[key], str) and table[key]):
            raise StudyError(f'{where}: {key} must be a text in quotes, such as "v100", got {shown(table[key])}.')
    if (memory := finite(table["memory"])) is None or memory <= 0:
        raise StudyError(f"{where}: memory must be above 0 GB a device, got {shown(table['memory'])}.")
    prices = {"on-demand": table.get("price"), "spot": table.get("spot")}
    return Instance(
        name=table["name"],
        type=table["type"],
        devices=table["devices"],
        memory=int(memory * 1e9),
        prices={market: price for market, price in prices.items() if price is not None},
        provider=table.get("provider", "own"),
        losses=table.get("losses", 0.0),
        dated=table.get("dated", ""),
    )


def _known(where: str, table: Mapping[str, Any], known: Collection[str], written: Callable[[str], str] = str) -> None:
    """Refuse a key that a table cannot have, with the nearest one that it can."""
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise StudyError(
                f"{where} has {shown(key)}{meant}, but can have {_listed(list(map(written, known)))} alone."
            )


def _listed(names: Collection[str]) -> str:
    """Names as a sentence lists them.

    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
