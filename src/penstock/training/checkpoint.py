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
from penstock.log.states import States
from penstock.trial import StateRef

State = dict[str, Any]


def save(state: State, states: States | Path | str, name: str) -> StateRef:
    """Write a state so that it is whole before its name exists."""
    buffer = io.BytesIO()  # all in one write: the zip writer seeks, which is slow on network file systems
    torch.save(state, buffer)
    States.of(states).write(name, buffer.getbuffer())
    return StateRef(name, state["unit"], state["step"], buffer.tell())


def load(states: States | Path | str, ref: StateRef) -> State:
    """The state that a reference names, on the CPU; ``restore`` brings it to the trial's device."""
    states = States.of(states)
    try:
        with states.read(ref.file) as file:
            state: State = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TaskError(
            f"The state {states.where(ref.file)} cannot be read ({type(error).__name__}: {_why(error)}): expected the "
            f"{ref.bytes} bytes that the log names, and in them tensors, numbers, strings and containers of them. "
            "Restore the file, or start the study under another name."
        ) from None
    return state


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
