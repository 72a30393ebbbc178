"""The nodes that can be bought: instance types with their prices, the way they are billed, and how soon they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.errors import StudyError
from penstock.numeric import finite, shown, whole
from penstock.planning.draws import NOTHING, Draws

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
                "There is no instance type to plan with: name at least one, e.g. instances=['p3.8xlarge'] "
                "(--instances p3.8xlarge)."
            )
        if self.billing not in ("instance", "function"):
            raise StudyError(f'billing must be "instance" or "function", got {shown(self.billing)}.')
        for name in ("minimum", "head", "data", "data_price"):
            if (made := finite(getattr(self, name))) is None or made < 0:
                raise StudyError(f"{name} must be 0 or more, got {shown(getattr(self, name))}.")
        if not isinstance(self.currency, str) or not self.currency:
            raise StudyError(f'currency must be a text in quotes, such as "USD", got {shown(self.currency)}.')
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
