"""A trial's state on disk: written whole or not at all, and loaded without running anyone's code.

A file holds plain tensors, numbers and strings (``weights_only=True`` loads it): the model, the optimizer and the
scheduler as their ``state_dict`` gives them, the position in the data, and the random states as tensors and integers.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from penstock.errors import TaskError
from penstock.trial import StateRef

State = dict[str, Any]


def save(state: State, dir: Path, name: str) -> StateRef:
    """Write a state so that it is whole before its name exists.

    It is not synced: a power loss may take a state that the log names, and its trial then trains again to where it was.
    The engine syncs those that take the place of an older one.
    """
    partial = dir / f"{name}.partial"
    buffer = io.BytesIO()  # one write of the whole: the zip writer seeks, which is slow on network file systems
    torch.save(state, buffer)
    try:
        file = partial.open("wb", buffering=0)
    except FileNotFoundError:
        dir.mkdir(parents=True, exist_ok=True)
        file = partial.open("wb", buffering=0)
    with file:
        rest = buffer.getbuffer()
        while rest:
            rest = rest[file.write(rest) :]
    partial.replace(dir / name)
    return StateRef(name, state["unit"], state["step"], buffer.tell())


def load(dir: Path, ref: StateRef) -> State:
    """The state that a reference names, on the CPU: what takes it over brings it to its own device."""
    path = dir / ref.file
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TaskError(
            f"The state {path} cannot be read ({type(error).__name__}: {error}): expected the {ref.bytes} bytes that "
            "the log names. Restore the file, or start the study under another name."
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
        return str(error).strip().splitlines()[0]
    return None
