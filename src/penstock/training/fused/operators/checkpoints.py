"""Activation checkpointing, whose second forward runs in the backward: it draws what the first one drew.

By then the mode that keys draws is over. So the mode of the first forward is entered again, from the same call on. In
a step in parts the module holds the parameters of the part that ran last, so that nothing is computed again there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint

from penstock.training.fused.parting import in_parts
from penstock.training.random.keyed import Keyed
from penstock.training.random.masks import SoloKeys, StepKeys

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
_plain: Any = checkpoint._checkpoint_without_reentrant_generator


def _keyed(function: Any, preserve: bool, contexts: Contexts, *given: Any, **named: Any) -> Iterator[None]:
    if in_parts():
        yield
        return
    for mode in _modes():
        contexts = _again(contexts, mode.keys, mode.keys.calls)
    yield from _plain(function, preserve, contexts, *given, **named)


def _modes() -> list[Keyed]:
    stack: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in stack if isinstance(mode, Keyed)]


def _again(contexts: Contexts, keys: StepKeys, calls: int) -> Contexts:
    """The contexts of both forwards, of which the second one draws by the keys of the first."""

    def both() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, second = contexts()
        return first, _within(second, keys, calls)

    return both


@contextmanager
def _within(context: AbstractContextManager[Any], keys: StepKeys, calls: int) -> Iterator[None]:
    with context:
        if _modes() and isinstance(keys, SoloKeys) and keys.counted:  # which finds its call by torch's generator
            yield
            return
        own = copy.copy(keys)
        own.count_from(calls)
        with Keyed(own):
            yield


checkpoint._checkpoint_without_reentrant_generator = _keyed  # type: ignore[assignment]
