"""Which values of its config a task reads, so that data are loaded once for all trials that read the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.trial import Config

ABSENT = "a value that is not there"


class ReadConfig(Config):
    """A config that remembers which of its values were read.

    >>> config = ReadConfig({"lr": 0.1, "noise": 0.0}); config["noise"]; config.read
    0.0
    {'noise': 0.0}
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.read: Config = {}

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.read.setdefault(name, value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if self.__contains__(name) else default

    def __contains__(self, name: object) -> bool:
        there = super().__contains__(name)
        self.read.setdefault(str(name), super().__getitem__(str(name)) if there else ABSENT)
        return there

    def pop(self, name: str, *default: Any) -> Any:
        value = self.get(name)
        taken = super().pop(name, *default)
        return value if value is not None else taken

    def setdefault(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else super().setdefault(name, default)

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.get(name)
        return super().__iter__()

    def keys(self) -> Any:
        iter(self)
        return super().keys()

    def copy(self) -> Config:
        return {name: self[name] for name in dict.keys(self)}

    def values(self) -> Any:
        return self.copy().values()

    def items(self) -> Any:
        return self.copy().items()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()
