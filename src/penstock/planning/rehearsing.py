"""A simulated cloud that is as a plan takes the real one to be: its nodes, delays and losses, and its trials' times."""

from __future__ import annotations

from typing import Any

from penstock.executors.simulated.nodes import NodeType, Seconds
from penstock.planning.cloud import Cloud
from penstock.planning.draws import Draws
from penstock.planning.spec import Job
from penstock.speed.curve import Curve


def simulation(job: Job, cloud: Cloud) -> dict[str, Any]:
    """The settings of ``Simulated`` for a job on a cloud.

    Trials of a table have the table's seconds, at the speed of their device type; other trials have the job's.
    """
    types = {offer.instance.name: offer.instance for offer in cloud.offers}
    nodes = [
        NodeType(
            offer.instance.name,
            offer.instance.devices,
            offer.instance.type,
            offer.instance.memory,
            offer.price,
            offer.market,
            _seconds(cloud.arrival),
            _seconds(cloud.preparing),
            offer.losses,
        )
        for offer in cloud.offers
    ]
    curves: dict[tuple[str, str], Curve] = {}
    units: dict[str, float] = {}
    speeds: dict[str, float] = {}
    first: dict[str, float] = {}  # the seconds of a unit of each signature on the first type of device
    varying = 0.0, 0.0
    for instance in types.values():
        for one in job.on(instance):
            mean = one.unit.expected
            speeds.setdefault(instance.type, first.setdefault(one.signature, mean) / mean)
            units.setdefault(one.signature, mean)
            curves[one.signature, instance.type] = one.curve
            own, each = one.factor.deviation / one.factor.expected, one.unit.deviation / mean
            varying = max(varying[0], own), max(varying[1], each)
    known = next(iter(units.values())) if set(units) == {""} else units
    if set(units) == {""}:  # all trials are alike: a table's trials have a signature of their own
        curves |= {("tabulated", type): curve for (_, type), curve in curves.items()}
    how = {"curve": next(iter(curves.values()))} if len(set(curves.values())) == 1 else {"curves": curves}
    return {
        "instances": nodes,
        **how,
        "speeds": speeds,
        "unit_seconds": known,
        "varying": varying,
        "start": job.start.expected,
        "kept": False,
    }


def _seconds(draws: Draws) -> Seconds:
    return (draws.expected, draws.deviation) if draws.deviation else draws.expected
