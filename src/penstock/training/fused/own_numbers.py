"""The numbers of configs and of the user's modules in one way: which there are, which a run is given, and its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from penstock.training.fused.configs import SharedConfig
from penstock.training.fused.held import set_attribute
from penstock.training.fused.numbers import Notes, Number, Plain, is_number, numbered
from penstock.training.fused.stacked import ask_first
from penstock.training.fused.watching import Numbered
from penstock.trial import Config


class OwnNumbers:
    """The numbers that differ from trial to trial, by name: ``config["alpha"]``, or path and name of an attribute.

    One that ever differed is a number from then on: the step of a trial alone is that of the next trial alone, too.
    An attribute's number is given to every run. A config's is given from the time on that it was read first: configs
    have numbers, such as the learning rate, that no loss reads.
    """

    def __init__(self, template: nn.Module) -> None:
        self.notes = Notes()
        self.given: dict[str, Sequence[Plain]] = {}  # the numbers of all trials, in the order of a run's
        self._template = template
        self._read: dict[str, None] = {}  # names in the config that were ever read as numbers
        self._configs: Sequence[Config] = ()
        self._now: dict[str, Number] = {}
        self._rows = 0, 0
        self._always: frozenset[str] = frozenset()  # names in the config
        self._attributes: frozenset[str] = frozenset()  # paths and names in modules

    def expect(self, names: frozenset[str], attributes: frozenset[str]) -> None:
        """Let these values of the config, and these attributes of modules, be numbers in any case."""
        self._always, self._attributes = names, attributes

    def vary(self, own: Sequence[Mapping[str, Plain]], configs: Sequence[Config]) -> SharedConfig:
        """Take up other trials: the numbers of their modules, and their configs, which are given as one."""
        self._configs, self.given, self._now = configs, {}, {}
        for attribute, value in own[0].items():
            rows = [one[attribute] for one in own]
            same = attribute not in self._attributes and all(row == value for row in rows)
            if not same:
                self._attributes |= {attribute}
            set_attribute(self._template, attribute, value if same else self._add(attribute, rows))
        read = [name for name in self._read if all(is_number(dict.get(config, name)) for config in configs)]
        for name in read:
            self._add(label(name), [config[name] for config in configs])
        return SharedConfig(configs, self._number, self._always.union(read))

    def _add(self, called: str, rows: Sequence[Plain]) -> Number:
        self.given[called] = rows
        made = self._now[called] = Number(called, rows, self.notes)
        return made

    def _number(self, name: str) -> Number:
        """The number that is read from the config now."""
        called = label(name)
        if called not in self._now:
            self._read[name] = None
            self._add(called, [config[name] for config in self._configs])
            raise Numbered
        return self._now[called]

    def at(self, first: int, last: int) -> None:
        """Take note of the rows of the next run."""
        self._rows = first, last

    def begin(self, values: Sequence[torch.Tensor]) -> None:
        """Begin a run, which is given the numbers of some rows."""
        ask_first(numbered if self.given else None)
        for (called, rows), value in zip(self.given.items(), values, strict=True):
            self._now[called].give(value, rows[slice(*self._rows)])

    def fixed(self) -> list[tuple[str, str, object]]:
        """The numbers of which steps took Python's own values."""
        return [(called, "rows", tuple(rows)) for called, rows in self.given.items() if called in self.notes.plain]


def label(name: str) -> str:
    """The name of a value of the config in messages."""
    return f'config["{name}"]'
