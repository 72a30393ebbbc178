"""Which configs of a space can be fused with each other, and in what the others differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.bundle import Description

SHOWN = 12  # groups that are told one by one


@dataclass(frozen=True)
class Group:
    """Configs whose trials can be fused, by their signature; without one, trials that train solo for a reason.

    ``reason`` says in what the signature differs from one before it; it is empty for the first.
    """

    signature: str
    configs: int
    reason: str


def group(descriptions: Sequence[Description]) -> list[Group]:
    """The groups of some configs, the largest first.

    >>> group([Description(signature="a"), Description(signature="a"), Description(reason="it draws")])
    [Group(signature='a', configs=2, reason=''), Group(signature='', configs=1, reason='it draws')]
    """
    counts: dict[tuple[str, str], int] = {}
    reasons: dict[str, str] = {}
    for one in descriptions:
        reason = one.reason or "its trial fails" if one.signature is None else ""
        counts[one.signature or "", reason] = counts.get((one.signature or "", reason), 0) + 1
        reasons.setdefault(one.signature or "", one.unlike[1])
    made = [Group(name, count, reason or reasons[name]) for (name, reason), count in counts.items()]
    return sorted(made, key=lambda one: -one.configs)


def said(groups: Sequence[Group]) -> str:
    """The groups, a line each.

    >>> print(said([Group("ab12", 3, ""), Group("", 1, "it draws")]))
    Of 4 configs, 3 can be fused with others, in 1 group:
      3 configs  ab12
      1 config   solo: it draws
    """
    total, alike = sum(one.configs for one in groups), [one for one in groups if one.signature and one.configs > 1]
    fused = sum(one.configs for one in alike)
    number = f"{len(alike)} group{'' if len(alike) == 1 else 's'}"
    lines = [f"Of {total} configs, {fused} can be fused with others, in {number}:"]
    for one in groups[:SHOWN]:
        why = f": {one.reason}" if one.reason else ""
        lines.append(f"  {one.configs} config{' ' if one.configs == 1 else 's'}  {one.signature[:12] or 'solo'}{why}")
    if (more := len(groups) - SHOWN) > 0:
        lines.append(f"  and {more} more groups: see --json")
    return "\n".join(lines)
