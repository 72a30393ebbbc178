"""Small jobs and clouds for tests of plans."""

from penstock.planning.cloud import Cloud, Instance, Offer
from penstock.planning.draws import NOTHING, Draws
from penstock.planning.spec import Job, Times, works
from penstock.speed.curve import Curve
from penstock.trial import Stage


def instance(name="big", devices=2, price=7200.0, *, spot=None, losses=0.0):
    """A type whose node costs ``price`` an hour: 7200 is 2 a second."""
    prices = {"on-demand": price} if spot is None else {"on-demand": price, "spot": spot}
    return Instance(name, "gpu", devices, 1, prices, losses=losses)


def cloud(*instances, most=6, minimum=0.0, arrival=NOTHING, preparing=NOTHING, **settings):
    offers = [Offer(one, market) for one in instances or (instance(),) for market in one.prices]
    return Cloud(tuple(offers), minimum=minimum, arrival=arrival, preparing=preparing, most=most, **settings)


def job(*stages, unit=10.0, curve=None, std=0.0, own=0.0, times=None, **settings):
    """A job of (trials, budget) stages, on one type of device."""
    curve = curve or Curve(scaling=(1, 0.6))
    made = times or {"gpu": (Times(Draws(unit, std), curve, Draws(1.0, own)),)}
    return Job(works([Stage(*stage) for stage in stages]), made, **settings)
