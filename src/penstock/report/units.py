"""The seconds of a unit of each signature, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.report.format import value


@dataclass(frozen=True)
class Unit:
    """The mean ``seconds`` of a unit of a signature, alone on a device, with its evaluation and saving.

    ``deviation`` is that of a trial's units, and ``apart`` that of the trials' means. ``configs`` of the sample have
    the signature. ``seconds`` is None where no unit was timed, and ``reason`` says why.
    """

    signature: str
    configs: int
    seconds: float | None = None
    deviation: float = 0.0
    apart: float = 0.0
    reason: str = ""


def said(units: Sequence[Unit]) -> str:
    """The units, a line each.

    >>> print(said([Unit("ab12", 3, 0.5, 0.01), Unit("", 1, reason="its trial fails")]))
    A unit alone on a device, with its evaluation and saving:
      3 configs  ab12: 500 ms, ±2% from unit to unit and ±0% from trial to trial
      1 config   solo: its trial fails
    """
    lines = ["A unit alone on a device, with its evaluation and saving:"]
    for one in units:
        found = one.reason
        if one.seconds is not None:
            each, apart = one.deviation / one.seconds, one.apart / one.seconds
            found = (
                f"{value(1000 * one.seconds)} ms, ±{each:.0%} from unit to unit and ±{apart:.0%} from trial to trial"
            )
        lines.append(
            f"  {one.configs} config{' ' if one.configs == 1 else 's'}  {one.signature[:12] or 'solo'}: {found}"
        )
    return "\n".join(lines)
