"""A state's content, read whole and compared with the line of the log that names it.

The sum is a CRC-32. It is there for accidents: flipped bits, truncated and swapped files, disks that give back zeros.
Somebody who changes states on purpose can change the log too.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, StateError

if TYPE_CHECKING:
    from penstock.log.states import States
    from penstock.trial import StateRef

PAUSES = (0.05, 0.25, 1.0)  # seconds before each repeated read: a network file system may fail for a moment


def sum_of(content: bytes | memoryview) -> int:
    """The sum of a state's content."""
    return zlib.crc32(content)


def content(states: States, ref: StateRef) -> bytes:
    """The content of a state, in one read. A read that fails is repeated, and then a StateError says why it failed.

    The whole content is in memory for a while, as it is when a state is written.
    """
    for pause in (*PAUSES, None):
        try:
            with states.read(ref.file) as file:
                found = file.read(ref.bytes + 1)
        except FileNotFoundError:
            raise lost(states, ref, "it is not there") from None
        except (OSError, PenstockError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            why = _wrong(found, ref)
            if not why:
                return found
        if pause is not None:
            time.sleep(pause)
    raise lost(states, ref, why)


def _wrong(found: bytes, ref: StateRef) -> str:
    if len(found) != ref.bytes:
        return f"it has {'more' if len(found) > ref.bytes else len(found)} bytes"
    return "" if ref.sum in (None, sum_of(found)) else "its content is not the one that was written"


def lost(states: States, ref: StateRef, why: str) -> StateError:
    """The error of a state that cannot be used."""
    return StateError(
        f"The state {states.where(ref.file)} cannot be read ({why}): expected the {ref.bytes} bytes that were written."
    )
