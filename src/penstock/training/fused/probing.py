"""Which numbers of a trial only enter arithmetic, so that each trial of a bundle may have its own.

The loss and the metrics run once as in a bundle of this one trial. A ``Number`` stands for every number of the config
that they read, and for every one among the attributes of the user's modules. A number that Python asked for, for a
shape or as the key of a dict, must be equal for all trials that are fused, and so must the outcomes of comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.seeds import step_key
from penstock.training.fused.held import attributes_of, configs_of
from penstock.training.fused.numbers import Notes, Plain, is_number
from penstock.training.fused.own_numbers import label
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.watching import Numbered
from penstock.training.fused.ways import Function, Native
from penstock.training.fused.wording import line_of
from penstock.training.keeping import untouched
from penstock.training.loop import Training
from penstock.training.random.generators import own_randomness
from penstock.training.random.masks import halves
from penstock.trial import Config


@dataclass(frozen=True)
class Probed:
    """The numbers that may differ from trial to trial, by name, and what must be equal besides."""

    free: frozenset[str] = frozenset()
    outcomes: tuple[str, ...] = ()
    compared: frozenset[str] = frozenset()  # the numbers that were compared: their outcomes hold for these values
    lines: dict[str, str] = field(default_factory=dict)  # where a number was needed that is not free


def probe(training: Training, read: Config) -> Probed:
    """Look for the free numbers among ``read``, values of the config that loss and metrics read, and attributes."""
    names = frozenset(name for name, value in read.items() if is_number(value))
    held, tried, lines = configs_of(training.model, training.config), frozenset[str](), dict[str, str]()
    for whole in (True, False):  # much of Python and torch takes nothing but an integer for one
        attributes = frozenset(attributes_of(training.model, whole=whole))
        every = frozenset([*map(label, names), *attributes, *held])
        if every and every != tried:
            try:
                notes = _notes(training, names, attributes)
            except Unfusable:  # for another reason, which is told once trials are trained together
                lines = {}
            except Exception as error:
                lines = dict.fromkeys(every, line_of(error).removeprefix(" at "))
            else:
                outcomes = tuple(sorted(f"{said}: {holds}" for said, holds in notes.outcomes.items()))
                return Probed(every - notes.needed.keys(), outcomes, frozenset(notes.compared), dict(notes.needed))
        tried = every
    return Probed(lines={name: line for name, line in lines.items() if line})  # nothing is free


def _notes(training: Training, names: frozenset[str], attributes: frozenset[str]) -> Notes:
    """How loss and metrics use some numbers of a trial."""
    task = training.task
    with own_randomness(), untouched(task):
        way = Native(training.model, training.config)  # which runs a copy
        way.expect(names, attributes)
        way.vary([training])
        params, buffers = (_row(training.model.named_parameters()), _row(training.model.named_buffers()))
        for name, p in training.model.named_parameters():
            params[name].requires_grad_(p.requires_grad)  # a loss may compute gradients itself
        batch = next(iter(training.data.train.batches(0, 0, training.batch_size)))
        valid, _ = next(iter(training.data.valid.all(task.eval_batch_size)))
        keys = torch.tensor([halves(step_key(training.seed, 0))], dtype=torch.int32).to(training.device)

        def run(function: Function, given: Any) -> None:
            with suppress(Numbered), training.autocast():
                numbers = way.numbers(0, 1, training.device)
                way.run(function, params, buffers, given, True, keys, numbers)
                way.settle()
                return
            run(function, given)

        way.train()
        run(task.loss, batch)
        way.eval()
        with torch.no_grad():
            run(task.metrics, valid)
    return way.notes


def _row(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().unsqueeze(0) for name, tensor in tensors}


def numbers_of(config: Config, model: nn.Module) -> dict[str, Plain]:
    """The numbers of a trial by name, as ``Probed`` has them; and modules' configs, which have no number to compare."""
    own = {label(name): value for name, value in dict.copy(config).items() if is_number(value)}
    return {**own, **attributes_of(model), **dict.fromkeys(configs_of(model, config), 0)}


def masked(looks: list[str], names: frozenset[str]) -> list[str]:
    """A model's ``attributes`` without the values of some numbers.

    >>> masked(["module 1 Scale", " by 0.5", " k 3", " depth 2"], frozenset(["1.by", "1.k"]))
    ['module 1 Scale', ' by a number', ' k a whole number', ' depth 2']
    """
    path, made = "", []
    for line in looks:
        first, _, text = line.lstrip().partition(" ")
        if line.startswith("module "):
            path = text.partition(" ")[0]
        elif line.startswith(" ") and f"{path}.{first}".lstrip(".") in names and first not in ("parameter", "buffer"):
            kind = text.partition("{")[0] if "{" in text else ""  # of a dict that is read as the config
            line = f" {first} a {'whole ' if text.removeprefix('-').isdecimal() else ''}number{kind and f' of {kind}'}"
        made.append(line)
    return made
