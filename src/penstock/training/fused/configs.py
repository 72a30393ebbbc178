"""The configs of a bundle's trials, as the task's loss and metrics see them: one dict.

A bundle runs the loss once for all of its trials. A value that all trials have in common is read as it is. A number
that differs from trial to trial is read as a ``Number``. Any other value would be that of one trial, so reading it is
refused, in whatever step it is read first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from penstock.training.comparing import compared
from penstock.training.fused.numbers import is_number
from penstock.training.fused.stacked import Unfusable
from penstock.training.reads import ABSENT, ReadConfig
from penstock.trial import Config


class SharedConfig(ReadConfig):
    """The first trial's config. Where the others differ, ``number`` is asked for the value, or reading it is refused.

    >>> shared = SharedConfig([{"lr": 0.1, "depth": 2}, {"lr": 0.2, "depth": 2}]); shared["depth"]
    2
    """

    def __init__(
        self, configs: Sequence[Config], number: Callable[[str], Any] | None = None, asked: frozenset[str] = frozenset()
    ) -> None:
        """``asked`` names values that are read as numbers even where all trials have the same."""
        super().__init__(configs[0])
        self._configs, self._number, self._asked = configs, number, asked
        self._same: dict[str, bool] = {}  # by name, as far as it was asked

    def __getitem__(self, name: str) -> Any:
        if self._agree(name) and name not in self._asked:
            return super().__getitem__(name)
        if self._number is not None and all(is_number(config.get(name)) for config in self._configs):
            self.read.setdefault(name, None)
            return self._number(name)
        raise Unfusable(f'config["{name}"] differs from trial to trial, and was not read in the first batch')

    def common(self, name: str) -> Hashable:
        """A value that all trials have in common, as it compares; reads nothing."""
        return compared(dict.get(self, name, ABSENT)) if self._agree(name) else None

    def __contains__(self, name: object) -> bool:
        there = [name in config for config in self._configs]
        if any(there) and not all(there):
            raise Unfusable(f'config["{name}"] is there for some trials and not for others')
        return there[0]

    def _agree(self, name: str) -> bool:
        if name not in self._same:
            values = [config.get(name, ABSENT) for config in self._configs]
            self._same[name] = len({compared(value) for value in values}) == 1
        return self._same[name]
