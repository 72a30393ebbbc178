"""The nodes that can be bought: instance types with their prices, the way they are billed, and how soon they come."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from penstock.errors import StudyError
from penstock.numeric import finite, shown, whole
from penstock.planning.draws import NOTHING, Draws

OWN = Path(__file__).with_name("catalogue.toml")
MARKETS = ("on-demand", "spot")


@dataclass(frozen=True)
class Instance:
    """A type of node: its ``devices`` of one ``type``, each with ``memory`` bytes, and an hour's price by market.

    ``type`` is the accelerator as ``Device.type`` has it, such as "v100". ``losses`` is how often a spot node is taken
    away, per hour. ``dated`` is the day of its prices.
    """

    name: str
    type: str
    devices: int
    memory: int
    prices: Mapping[str, float]
    provider: str = "own"
    losses: float = 0.0
    dated: str = ""

    def __post_init__(self) -> None:
        if (count := whole(self.devices)) is None or count < 1:
            raise StudyError(f"{self.name}: devices must be a whole number above 0, got {shown(self.devices)}.")
        if not self.prices:
            raise StudyError(f'{self.name} has no price: give "on-demand", "spot" or both, in money an hour.')
        for market, price in self.prices.items():
            if market not in MARKETS:
                raise StudyError(f'{self.name}: a market is "on-demand" or "spot", got {shown(market)}.')
            if (made := finite(price)) is None or made <= 0:
                raise StudyError(f"{self.name}: the {market} price must be above 0 an hour, got {shown(price)}.")
        if (losses := finite(self.losses)) is None or losses < 0:
            raise StudyError(f"{self.name}: losses must be 0 or more an hour, got {shown(self.losses)}.")


@dataclass(frozen=True)
class Offer:
    """Nodes that can be bought: an instance type on a market, at a ``price`` an hour."""

    instance: Instance
    market: str

    @property
    def price(self) -> float:
        return self.instance.prices[self.market]

    @property
    def losses(self) -> float:
        """How often such a node is lost, per hour."""
        return self.instance.losses if self.market == "spot" else 0.0

    @property
    def name(self) -> str:
        return f"{self.instance.name} {self.market}"


@dataclass(frozen=True)
class Cloud:
    """The offers that a plan may use, and what a provider charges and takes (RubberBand §2.2 and §4.1).

    A node comes ``arrival`` seconds after it was asked for (SCALE), and is of use ``preparing`` seconds later
    (INIT_INSTANCE). By ``billing`` per "instance", a node is paid from when it comes until it goes, for ``minimum``
    seconds at least; per "function", a device is paid while it trains. ``head`` is an hour's price of the head node,
    paid as long as the study runs. Each node that comes reads ``data`` GB, at ``data_price`` a GB. ``most`` is how many
    nodes there can be at once.
    """

    offers: tuple[Offer, ...]
    billing: Literal["instance", "function"] = "instance"
    minimum: float = 60.0
    arrival: Draws = NOTHING
    preparing: Draws = NOTHING
    head: float = 0.0
    data: float = 0.0
    data_price: float = 0.0
    most: int = 64
    currency: str = "USD"

    def __post_init__(self) -> None:
        if not self.offers:
            raise StudyError(
                "There is no instance type to plan with: name at least one, e.g. instances=['p3.8xlarge']."
            )
        if self.billing not in ("instance", "function"):
            raise StudyError(f'billing must be "instance" or "function", got {shown(self.billing)}.')
        for name in ("minimum", "head", "data", "data_price"):
            if (made := finite(getattr(self, name))) is None or made < 0:
                raise StudyError(f"{name} must be 0 or more, got {shown(getattr(self, name))}.")
        if (most := whole(self.most)) is None or most < 1:
            raise StudyError(f"most must be a whole number of nodes above 0, got {shown(self.most)}.")

    @property
    def dated(self) -> str:
        """The oldest day on which a price was looked up."""
        return min((one.instance.dated for one in self.offers if one.instance.dated), default="")

    @property
    def assumed(self) -> tuple[str, ...]:
        """What a plan takes for granted of the cloud, in sentences."""
        made = [
            f"a node of {offer.name} is taken to be lost {offer.losses:g} times an hour"
            for offer in self.offers
            if offer.losses
        ]
        if self.arrival.mean or self.preparing.mean:
            come, ready = self.arrival.expected, self.preparing.expected
            made.append(
                f"a node is taken to come {come:.0f} s after it was asked for, and to be of use {ready:.0f} s later"
            )
        return tuple(made)


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
        made = _read(OWN)
        if path is not None:
            over = _read(Path(path))
            made = cls({**made.instances, **over.instances}, {**made.settings, **over.settings})
        return made

    def cloud(self, names: Iterable[str], *, spot: bool = False, **settings: Any) -> Cloud:
        """A cloud of the types named: on demand, and on the spot market too where ``spot`` says so.

        >>> [offer.name for offer in Catalogue.read().cloud(["p3.8xlarge"], spot=True).offers]
        ['p3.8xlarge on-demand', 'p3.8xlarge spot']
        """
        found = [self.find(name) for name in names]
        markets = MARKETS if spot else MARKETS[:1]
        offers = tuple(Offer(one, market) for one in found for market in markets if market in one.prices)
        return Cloud(offers, **{**self.settings, **settings})

    def find(self, name: str) -> Instance:
        """The instance type of that name; refused with the nearest names where there is none."""
        if not self.instances:
            raise StudyError(
                "The catalogue has no instance type: add an [[instance]] with name, type, devices and price."
            )
        if name not in self.instances:
            near = get_close_matches(name, self.instances, n=3, cutoff=0.4)
            hint = (
                f"the nearest are {', '.join(near)}"
                if near
                else f"there are {', '.join(sorted(self.instances)[:8])}, …"
            )
            raise StudyError(
                f"The catalogue has no instance type {shown(name)}: {hint}. Add it to a catalogue of your own "
                "(--catalogue FILE), or name another."
            )
        return self.instances[name]


@cache
def _read(path: Path) -> Catalogue:
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
        tables = body.pop("instance", [])
        if not isinstance(tables, list):
            raise ValueError("instance must be written as [[instance]]")
        made = [_instance(one) for one in tables]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(
            f"The catalogue {path} cannot be read ({error}): it is TOML with an [[instance]] for each type, which has "
            "name, type, devices, memory (GB) and price."
        ) from None
    settings = dict(body.pop("cloud", {}))
    unknown = [*body, *(settings.keys() - KNOWN)]
    if unknown:
        raise StudyError(
            f"The catalogue {path} has {unknown[0]!r}, which is none of its settings: [cloud] has "
            f"{', '.join(sorted(KNOWN))}."
        )
    for name in ("arrival", "preparing"):
        if name in settings:
            settings[name] = _draws(settings[name])
    return Catalogue({one.name: one for one in made}, settings)


KNOWN = {"billing", "minimum", "arrival", "preparing", "head", "data", "data_price", "most", "currency"}


def _draws(value: Any) -> Draws:
    """Seconds, or a table with their mean and std."""
    return Draws(**value) if isinstance(value, dict) else Draws(value)


def _instance(table: Mapping[str, Any]) -> Instance:
    prices = {"on-demand": table.get("price"), "spot": table.get("spot")}
    return Instance(
        name=str(table["name"]),
        type=str(table["type"]),
        devices=table["devices"],
        memory=int(table["memory"] * 1e9),
        prices={market: price for market, price in prices.items() if price is not None},
        provider=str(table.get("provider", "own")),
        losses=table.get("losses", 0.0),
        dated=str(table.get("dated", "")),
    )
