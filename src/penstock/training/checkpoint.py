"""A trial's state as a file: written whole or not at all, and loaded without running anyone's code.

A file holds plain tensors, numbers and strings (``weights_only=True`` loads it): the model, the optimizer and the
scheduler as their ``state_dict`` gives them, the position in the data, and the random states as tensors and integers.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import torch

from penstock.errors import TaskError
from penstock.log.reading import content, lost, sum_of
from penstock.log.states import States
from penstock.trial import StateRef

State = dict[str, Any]


def save(state: State, states: States | Path | str, name: str) -> StateRef:
    """Write a state so that it is whole before its name exists."""
    buffer = io.BytesIO()  # all in one write: the zip writer seeks, which is slow on network file systems
    torch.save(state, buffer)
    written = buffer.getbuffer()
    States.of(states).write(name, written)
    return StateRef(name, state["unit"], state["step"], len(written), sum_of(written))


def load(states: States | Path | str, ref: StateRef) -> State:
    """The state that a reference names, on the CPU; ``restore`` brings it to the trial's device.

    A StateError says that the file is not the one that was written. Where it is that one and cannot be loaded all the
    same, training again would not help, and a TaskError says so.
    """
    states = States.of(states)
    found = content(states, ref)
    try:
        state: State = torch.load(io.BytesIO(found), map_location="cpu", weights_only=True)
        trial = state.pop("trial", None)
    except Exception as error:
        why = f"{type(error).__name__}: {_why(error)}"
        if ref.sum is None:
            raise lost(states, ref, why) from None
        raise TaskError(
            f"The state {states.where(ref.file)} cannot be loaded ({why}): expected tensors, numbers, strings and "
            "containers of them, in the form of this version of torch."
        ) from None
    if trial is not None and trial != ref.trial:
        raise lost(states, ref, f"it is of trial {trial}")
    return state


def copied(state: State) -> State:
    """A state as it would come back from its file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    copy: State = torch.load(buffer, map_location="cpu", weights_only=True)
    return copy


def check_loadable(state: State, what: str) -> None:
    """Refuse, before any training, a state that a checkpoint could not give back."""
    if _fault(state) is None:
        return
    for part, value in state.items():
        if (fault := _fault(value)) is not None:
            raise TaskError(
                f"The {part} state of {what} cannot be kept in a checkpoint: expected tensors, numbers, strings and "
                f"containers of them, and loading it back said: {fault}"
            )


def _fault(value: object) -> str | None:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        return _why(error)
    return None


def _why(error: Exception) -> str:
    """The part of torch's message that is about the state."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return f"it holds a {found[1]}" if found else str(error).strip().splitlines()[0]
