"""The one rule for the best trial, which tables, results, pages, Optuna's views and ``best.pt`` all follow.

A trial is as good as its best report. Of two trials with equal best reports, the one with the lower number is better. A
trial that reported a metric that is not finite is never the best, nor is a trial that failed before a state with its
best report was saved: there would be no model to show for it. A diverged trial of PBT that takes over a donor's state
begins anew, and only its later reports count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.log.history import History, TrialRecord

ENDED = ("finished", "stopped")  # trials that can no longer diverge


def sound(record: TrialRecord) -> bool:
    """Whether a trial can be the best: it reported, never diverged, and did not fail before its state was saved."""
    lost = record.status == "failed" and record.best_state is None
    return record.best_unit > 0 and not record.diverged and not lost


def ranked(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The trials that can be the best, in order from the best."""
    return sorted(filter(sound, records), key=_place)


def leading(history: History) -> list[TrialRecord]:
    """A study's trials that can be the best, from the best; after them its surrogates, from the best."""
    return ranked(history.targets) + ranked(history.surrogates)


def ranks(records: Iterable[TrialRecord]) -> dict[int, int]:
    """The rank of each trial that can be the best, by its number: 1 is the best."""
    return {record.number: rank for rank, record in enumerate(ranked(records), 1)}


def no_best(history: History) -> str:
    """Why none of a study's trials is the best, and what to do about it."""
    trials, ended = history.targets or history.trials, history.ended
    if ended is None:
        return f"No trial has reported a finite {history.metric!r} yet, so none is best: look again later."
    end = {"deadline": "ended at its deadline", "interrupted": "was interrupted"}.get(ended, "ended")
    if ended != "failed" and not history.targets and any(one.best_unit and sound(one) for one in history.surrogates):
        later = ", with a later deadline" if ended == "deadline" else ""
        return (
            f"No model of full width was trained, so none is best: the study {end} while its {len(trials)} surrogates "
            f"were. Go on with it{later}."
        )
    failed = [trial for trial in trials if trial.status == "failed"]
    diverged = [trial for trial in trials if trial.status != "failed" and trial.curve and not sound(trial)]
    width = " at full width" if history.surrogates else ""
    silent = len(trials) - len(failed) - len(diverged)
    counts = {"failed": len(failed), "diverged": len(diverged), "had not reported" + width: silent}
    some = [(what, count) for what, count in counts.items() if count]
    if len(some) > 1:
        why = f"of {len(trials)} trials {', '.join(f'{count} {what}' for what, count in some)}, and the study {end}"
    elif failed or diverged:
        why = f"{'its only trial' if len(trials) == 1 else f'all {len(trials)} trials'} {some[0][0]}"
    else:
        why = f"the study {end} before any report"
    if failed:
        last = "".join((failed[0].error or "").strip().splitlines()[-1:])
        todo = f"Mend the error and run the study under another name. The error of trial {failed[0].number}: {last}"
    elif diverged:
        todo = "Leave the configs that diverge out of the space, such as high learning rates."
    else:
        todo = "Go on with it, with a later deadline." if ended == "deadline" else "Go on with it."
    seen = any(trial.best_unit for trial in trials)  # by trials that diverged later, or failed without a state
    none = "No trial can be the best" if seen else f"No trial reported a finite {history.metric!r}, so none is best"
    return f"{none}: {why}. {todo}"


def _place(record: TrialRecord) -> tuple[float, int]:
    return -record.best_score, record.number


class Ranking:
    """The best ``count`` of the trials that it was shown, in order from the best; it is told of each change."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.top: tuple[TrialRecord, ...] = ()

    @property
    def best(self) -> TrialRecord | None:
        """The best trial, where there is one."""
        return self.top[0] if self.top else None

    def show(self, record: TrialRecord, trials: Iterable[TrialRecord]) -> None:
        """Rank a trial that has changed; ``trials`` are all of them, in case it leaves its place to another."""
        there = record in self.top
        if there and not sound(record):
            self.top = tuple(ranked(trials)[: self.count])
        elif there or len(self.top) < self.count or _place(record) < _place(self.top[-1]):
            self.top = tuple(ranked({*self.top, record})[: self.count])


class Leaders:
    """The best ``count`` of a study's targets or surrogates; and those of the ended ones, as a best one may diverge."""

    def __init__(self, trials: Sequence[TrialRecord], count: int = 1, *, narrow: bool) -> None:
        self.trials, self.narrow = trials, narrow
        self.ranking, self._ended = Ranking(count), Ranking(count)

    @property
    def top(self) -> tuple[TrialRecord, ...]:
        """The best trials, then those that follow where one of these diverges."""
        return self.ranking.top + self._ended.top

    def show(self, record: TrialRecord) -> None:
        """Rank a trial that has changed."""
        self.ranking.show(record, (one for one in self.trials if bool(one.variant) == self.narrow))
        if record.status in ENDED:
            ended = (one for one in self.trials if one.status in ENDED and bool(one.variant) == self.narrow)
            self._ended.show(record, ended)
