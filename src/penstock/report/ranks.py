"""How well a study's surrogates foretold twins of twice the width, in words."""

from __future__ import annotations

from penstock.algorithms.spearman import interval, spearman
from penstock.algorithms.transfer import CHECK, searched
from penstock.log.history import History, TrialRecord
from penstock.surrogate.settings import Surrogate
from penstock.trial import is_reduced, scale_of, score


def _searched(history: History) -> list[TrialRecord]:
    """The trials that were searched by, neither of a rank check nor of the race."""
    return [one for one in history.trials if searched(one.group)]


def present_search(history: History) -> list[TrialRecord]:
    """The trials of the search that goes on or was the last: surrogates of one variant, or targets in their place."""
    every = _searched(history)
    return [one for one in every if one.variant == every[-1].variant]


def rank_check(history: History) -> tuple[int, float, tuple[float, float]] | None:
    """The pairs of a study's last rank check, their correlation and its interval; None where there is none yet."""
    searched = [one for one in _searched(history) if one.variant]
    last = [one for one in searched if one.variant == searched[-1].variant]
    wider = [one for one in history.surrogates if one.group == CHECK and one.number > last[0].number] if last else []
    pairs = []
    for one in wider:
        twin = next((other for other in last if other.config == one.config), None)
        rows = [next((r for r in o.curve if r["budget"] == one.granted), {}) for o in (one, twin) if o is not None]
        if len(rows) == 2 and all(rows):
            pairs.append([score(row, history.metric, history.mode) for row in rows])
    if len(pairs) < 4:
        return None
    known = spearman(*zip(*pairs, strict=True))
    return len(pairs), known, interval(known, len(pairs))


def in_search(history: History) -> list[TrialRecord]:
    """The surrogates of the search that began last, without those of its rank check."""
    own = [one for one in history.surrogates if searched(one.group)]
    return [one for one in own if one.scale == own[-1].scale]


def said_surrogates(history: History) -> str:
    """How many surrogates a study has had, and how much narrower those of the last search were."""
    narrow = f", {found[-1].scale} times narrower" if (found := in_search(history)) else ""
    return f"{len(history.surrogates)}{narrow}; {len(history.targets)} targets"


def said_rank(history: History) -> str:
    """The rank check on one line; nothing where there is none."""
    if (found := rank_check(history)) is None:
        return ""
    count, known, (low, high) = found
    return f"the order of {count} at twice the width: Spearman {known:.2f} ({low:.2f} to {high:.2f})"


def said_fallback(history: History) -> str:
    """That a search began again, because its surrogates foretold too little; nothing where it did not.

    >>> said_fallback(History())
    ''
    """
    variants = list(dict.fromkeys(one.variant for one in _searched(history))) if history.surrogates else []
    if len(variants) < 2:
        return ""
    last = scale_of(variants[-1])
    what = "the target is tuned" if last == 1 else f"begun again {last} times narrower"
    plain = " and ".join(str(scale_of(one)) for one in variants[:-1] if not is_reduced(one))
    if not is_reduced(variants[0]):
        return f"{plain} times narrower foretold too little: {what}"
    fewer = f"{scale_of(variants[0])} times narrower and with fewer {Surrogate.of(history.settings['surrogate']).fewer}"
    also = f", and {plain} times narrower alone," if plain else ""
    return f"{fewer}{also} foretold too little: {what}{'' if plain or last == 1 else ' alone'}"
