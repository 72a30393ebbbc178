"""The configs of a bundle's trials, as the task's loss and metrics see them: one dict.

A bundle runs the loss once for all of its trials. A value that all trials have in common is read as it is. A value that
differs from trial to trial would be that of one trial, so reading it is refused, in whatever step it is read first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.training.comparing import compared
from penstock.training.data import ABSENT, ReadConfig
from penstock.training.fused.stacked import Unfusable
from penstock.trial import Config


class SharedConfig(ReadConfig):
    """The first trial's config, which refuses to be read where the others differ.

    >>> shared = SharedConfig([{"lr": 0.1, "depth": 2}, {"lr": 0.2, "depth": 2}]); shared["depth"]
    2
    """

    def __init__(self, configs: Sequence[Config]) -> None:
        super().__init__(configs[0])
        self._configs = configs
        self._same: dict[str, bool] = {}  # by name, as far as it was asked

    def __getitem__(self, name: str) -> Any:
        self._agree(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._agree(str(name))
        return super().__contains__(name)

    def _agree(self, name: str) -> None:
        if name not in self._same:
            values = [config.get(name, ABSENT) for config in self._configs]
            self._same[name] = len({compared(value) for value in values}) == 1
        if not self._same[name]:
            raise Unfusable(f'config["{name}"] differs from trial to trial, and was not read in the first batch')
