"""How well a study's surrogates foretold twins of twice the width, in words."""

from __future__ import annotations

from penstock.algorithms.spearman import interval, spearman
from penstock.algorithms.transfer import CHECK, searched
from penstock.log.history import History, TrialRecord
from penstock.trial import score


def rank_check(history: History) -> tuple[int, float, tuple[float, float]] | None:
    """The pairs of a study's last rank check, their correlation and its interval; None where there is none yet."""
    wider = [one for one in history.surrogates if one.group == CHECK]
    if not wider:
        return None
    scale = wider[-1].scale
    pairs = []
    for one in wider:
        twin = next((o for o in history.surrogates if o.scale == 2 * scale and o.config == one.config), None)
        rows = [next((r for r in o.curve if r["budget"] == one.granted), {}) for o in (one, twin) if o is not None]
        if one.scale == scale and len(rows) == 2 and all(rows):
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
    own = [one for one in history.trials if searched(one.group)]
    scales = list(dict.fromkeys(one.scale for one in own)) if history.surrogates else []
    if len(scales) < 2:
        return ""
    what = "the target is tuned" if scales[-1] == 1 else f"begun again {scales[-1]} times narrower"
    return f"{' and '.join(map(str, scales[:-1]))} times narrower foretold too little: {what}"
