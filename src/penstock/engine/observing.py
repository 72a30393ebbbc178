"""What power limits would give: told at a study's end, where they are only observed (Zeus §5, observer mode)."""

from __future__ import annotations

from penstock.energy.cost import Objective
from penstock.energy.power import Estimate, foreseen, limits
from penstock.log.events import Limited
from penstock.log.history import History

USUAL = 0.5  # the weight of energy for which a limit is told, where the study's objective is time alone


def observed(history: History, eta: float) -> list[Limited]:
    """For each device with a power limit: the limit that would cost least, and what it would give.

    A limit above the draw would change nothing. Below it a model says what follows, with its error.
    """
    metered = [record for record in history.trials if record.joules is not None and record.device_seconds > 0]
    seconds = sum(record.device_seconds for record in metered)
    if not seconds:
        return []
    watts, weight = sum(record.joules or 0.0 for record in metered) / seconds, eta or USUAL
    made = []
    for name, device in history.meters.devices.items():
        if device.range is not None:
            found = foreseen(watts, limits(*device.range), Objective(weight, device.range[1]))
            said = _said(name, watts, device.range[1], weight, found)
            made.append(Limited(name, "", 0, found.limit, False, found.seconds, found.joules, found.error, reason=said))
    return made


def _said(device: str, watts: float, most: float, eta: float, found: Estimate) -> str:
    draws = f"{device} draws {watts:.0f} W of {most:.0f} W while trials train"
    if found.joules == 1:
        return f"{draws}: by objective={eta:g} no lower limit would be better"
    return (
        f"{draws}: by objective={eta:g} a limit of {found.limit:.0f} W would be best; a step would take about "
        f"{found.seconds:.2f} times as long and {found.joules:.2f} of the joules, each ±{found.error:.0%}, by a model"
    )
