"""The energy of a study, in words and as a picture: its metric against the joules of its trials, with their front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from penstock.energy.cost import JOULES, legible
from penstock.log.history import History, TrialRecord
from penstock.log.ranking import sound
from penstock.report.format import value

WIDTH, HEIGHT, LEFT, BELOW = 1000, 300, 70, 40
STYLE = "<style>.point{fill:#8aa4d6}.front{fill:#c2410c}.line{stroke:#c2410c;fill:none}text{fill:currentColor}</style>"


def energy_facts(history: History) -> dict[str, Any]:
    """The facts of a study's energy that tables and ``--json`` show."""
    devices = {name: vars(one) for name, one in history.meters.devices.items()}
    unmetered = dict(history.settings.get("unmetered") or {})
    used = [trial.joules for trial in history.trials if trial.joules is not None]
    return {
        "joules": history.joules,
        "idle_joules": history.meters.idle if devices else None,
        "trial_joules": sum(used) / len(used) if used else None,
        "max_energy": history.settings.get("max_energy"),
        "meters": devices,
        "unmetered": {**unmetered, **{name: one["reason"] for name, one in devices.items() if one["reason"]}},
        "limited": [vars(one) for one in history.meters.limits.values()],
    }


def said(facts: Mapping[str, Any], carbon: float | None = None) -> list[tuple[str, str]]:
    """Lines of a summary, each with its name; ``carbon`` is grams of CO2 for a kWh.

    >>> facts = {"joules": 7.2e6, "idle_joules": 1.8e6, "trial_joules": 54e4, "max_energy": None, "meters": {},
    ...          "unmetered": {}, "limited": []}
    >>> for name, line in said(facts, carbon=400):
    ...     print(f"{name}: {line}")
    energy: 2 kWh, of it 0.5 kWh idle; 540 kJ a trial
    carbon: 800 g of CO2, at 400 g for a kWh
    """
    lines = []
    if facts["joules"] is not None:
        most = "" if facts["max_energy"] is None else f" of {legible(facts['max_energy'])}"
        idle = "" if facts["idle_joules"] is None else f", of it {legible(max(0.0, facts['idle_joules']))} idle"
        trial = "" if facts["trial_joules"] is None else f"; {facts['trial_joules'] / 1e3:.3g} kJ a trial"
        lines.append(("energy", f"{legible(facts['joules'])}{most}{idle}{trial}"))
        if carbon is not None:
            grams = facts["joules"] / JOULES["kWh"] * carbon
            lines.append(("carbon", f"{_grams(grams)} of CO2, at {carbon:g} g for a kWh"))
    for name, one in facts["meters"].items():
        limit = "" if one["limit"] is None else f", of a limit of {one['limit']:.0f} W"
        if one["watts"] > 0:
            lines.append(("power", f"{name}: {one['watts']:.0f} W on average, {one['most']:.0f} W at most{limit}"))
    for one in facts["limited"]:
        what = f" for {one['signature'][:8]} by {one['size']}" if one["signature"] else ""
        at = f"{one['device']}{what}: {one['limit']:.0f} W {'set' if one['set'] else 'would be best'}"
        lines.append(("limit", one["reason"] if not one["signature"] else f"{at}; {one['reason']}"))
    lines += [("not metered", f"{name}: {why}") for name, why in facts["unmetered"].items()]
    return lines


def _grams(grams: float) -> str:
    return f"{grams:.3g} g" if grams < 999.5 else f"{grams / 1000:.3g} kg"


def front(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that no other trial beats in both their metric and their joules, those of fewest joules first."""
    found: list[TrialRecord] = []
    known = [trial for trial in trials if trial.joules is not None and sound(trial)]
    for trial in sorted(known, key=lambda one: (one.joules or 0.0, -one.best_score, one.number)):
        if not found or trial.best_score > found[-1].best_score:
            found.append(trial)
    return found


def picture(history: History) -> str:
    """The metric of each trial against its joules, as SVG, with their front; empty where nothing was metered."""
    metric = history.metric
    trials = [trial for trial in history.targets if trial.joules is not None and sound(trial)]
    if not trials:
        return ""
    joules, values = [trial.joules or 0.0 for trial in trials], [trial.metrics[metric] for trial in trials]
    most, low, high = max(joules) or 1.0, min(values), max(values)

    def x(amount: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * amount / most

    def y(one: float) -> float:
        return HEIGHT - BELOW - (HEIGHT - BELOW - 20) * ((one - low) / (high - low) if high > low else 0.5)

    best = front(trials)
    at = " ".join(f"{x(one.joules or 0.0):.1f},{y(one.metrics[metric]):.1f}" for one in best)
    points = "".join(
        f'<circle class="{"front" if trial in best else "point"}" cx="{x(j):.1f}" cy="{y(v):.1f}" r="4"><title>trial '
        f"{trial.number}: {escape(metric)} {value(v)}, {legible(j)}</title></circle>"
        for trial, j, v in zip(trials, joules, values, strict=True)
    )
    return (
        f"<h2>{escape(metric)} against joules</h2>\n"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{STYLE}<polyline class="line" points="{at}"/>{points}'
        f'<text x="8" y="24">{value(high)}</text><text x="8" y="{HEIGHT - BELOW}">{value(low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">0</text>'
        f'<text x="{WIDTH - 20}" y="{HEIGHT - 8}" text-anchor="end">{legible(most)}</text></svg>'
    )
