"""What power limits would give: told at a study's end, where they are only observed (Zeus §5, observer mode)."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.energy.cost import Draw, Objective
from penstock.energy.power import Estimate, foreseen, limits
from penstock.engine.clocking import Pace
from penstock.log.events import Limited
from penstock.log.history import History

Table = Mapping[int, tuple[float, float]]  # by limit: seconds of a step, and watts
USUAL = 0.5  # the weight of energy for which a limit is told, where the study's objective is time alone


def observed(history: History, eta: float, pace: Pace) -> list[Limited]:
    """For each device with a power limit: the limit that would cost least, and what it would give.

    Where an earlier study tried limits for the trials of this one, that is known. Otherwise a limit above the draw
    would change nothing, and below it a model says what follows, with its error. Nothing is told where limits were set.
    """
    metered = [record for record in history.trials if record.joules is not None and record.device_seconds > 0]
    seconds = sum(record.device_seconds for record in metered)
    if not seconds or any(one.set for one in history.meters.limits.values()):
        return []
    watts, weight = sum(record.joules or 0.0 for record in metered) / seconds, eta or USUAL
    made = []
    for name, device in history.meters.devices.items():
        if device.range is None:
            continue
        tables = pace.measured_limits(name)
        made += [_known(name, what, table, Objective(weight, device.range[1])) for what, table in tables.items()]
        if not tables:
            found = foreseen(watts, limits(*device.range), Objective(weight, device.range[1]))
            said = _said(name, watts, device.range[1], weight, found)
            made.append(Limited(name, "", 0, found.limit, False, found.seconds, found.joules, found.error, reason=said))
    return made


def _known(device: str, what: tuple[str, int], table: Table, objective: Objective) -> Limited:
    """The best of the limits that an earlier study tried for a signature, in bundles of a size."""
    draws = {float(limit): Draw(*both) for limit, both in table.items()}
    found = foreseen(0.0, list(draws), objective, draws)
    reason = f"{found.seconds:.2f} times as long and {found.joules:.2f} of the joules, as was measured before"
    return Limited(device, *what, found.limit, False, found.seconds, found.joules, table=dict(table), reason=reason)


def _said(device: str, watts: float, most: float, eta: float, found: Estimate) -> str:
    draws = f"{device} draws {watts:.0f} W of {most:.0f} W while trials train"
    if found.joules == 1:
        return f"{draws}: by objective={eta:g} no lower limit would be better"
    return (
        f"{draws}: by objective={eta:g} a limit of {found.limit:.0f} W would be best; a step would take about "
        f"{found.seconds:.2f} times as long and {found.joules:.2f} of the joules, each ±{found.error:.0%}, by a model"
    )
