"""Pickles that a sampler wrote into the log: checked before Optuna reads them.

Optuna's CMA-ES keeps its optimizer as a pickle, in hex, cut into attributes "cma:optimizer:0", "…:1" and so on. To
read a pickle is to run it, and a log may come from anywhere. The reader here builds optimizers, numbers and plain
arrays and nothing else: a pickle that it has read does no more where Optuna reads the same bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

import numpy

from penstock.errors import StudyError
from penstock.log.events import Wrote

OPTIMIZERS = {("cmaes._cma", "CMA"), ("cmaes._sepcma", "SepCMA"), ("cmaes._cmawm", "CMAwM")}
OPTIMIZER = "optimizer"  # is in Optuna's keys of pickles, such as "cma:optimizer" and "sepcma:optimizer"
NUMBERS = {"b1", "i4", "i8", "u4", "u8", "f4", "f8"}  # types of arrays whose bytes are numbers and no addresses
PLAIN = (3, "<", None, None, None, -1, -1, 0)  # what numpy writes of each of them besides


class Foreign(pickle.UnpicklingError):
    """A pickle holds something else than an optimizer."""


def check(written: Iterable[Wrote]) -> None:
    """Refuse attributes from a log with a pickle in them that is no optimizer; no code in it is run.

    A sampler writes a pickle once. A second value for one of its pieces is refused, because Optuna may read the pickle
    before the second value comes.
    """
    pieces: dict[tuple[int | None, str], dict[int, Any]] = {}
    for event in written:
        base, _, number = event.key.rpartition(":")
        whole = not number.isdecimal() or number != str(int(number))
        where = (event.trial, event.key if whole else base)
        values, at = pieces.setdefault(where, {}), 0 if whole else int(number)
        if OPTIMIZER in event.key and values.get(at, event.value) != event.value:
            raise StudyError(_message(*where, "two values"))
        values[at] = event.value
    for (trial, key), values in pieces.items():
        try:
            data = bytes.fromhex("".join(values[number] for number in sorted(values)))
            _Reader(io.BytesIO(data)).load()
        except Foreign as error:
            raise StudyError(_message(trial, key, f"a pickle with {error}, which would run when it is read")) from None
        except ImportError:
            continue  # without the package nothing reads it
        except Exception as error:  # any text, as far as it is not an optimizer's
            if OPTIMIZER in key:
                raise StudyError(_message(trial, key, f"nothing that can be read ({error})")) from None


def _message(trial: int | None, key: str, what: str) -> str:
    where = "the study" if trial is None else f"trial {trial}"
    return (
        f"The log has in {key!r} of {where} {what}: expected the state of Optuna's CMA-ES sampler, as it was written. "
        "Put the log back as it was, or start a new study under another name."
    )


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in OPTIMIZERS:
            return super().find_class(module, name)
        made = MADE.get((module.replace("numpy.core", "numpy._core"), name))  # an older numpy has the other name
        if made is None:
            raise Foreign(f"{module}.{name}")
        return made


class _Type:
    """The type of an array: one of numbers, in the machine's order, without anything that numpy could add to it."""

    def __init__(self, code: str) -> None:
        self.type = numpy.dtype(code)

    def __setstate__(self, state: object) -> None:
        if state not in (PLAIN, (3, "|", *PLAIN[2:])):
            raise Foreign(f"a type of {state}")


class _Array(numpy.ndarray[Any, Any]):
    """An array that ``_array`` has made. No pickle can make one in another way, as NDARRAY cannot be called."""

    def __setstate__(self, state: Any) -> None:
        version, shape, kind, fortran, data = state
        if not isinstance(kind, _Type) or type(data) is not bytes:
            raise Foreign("an array that is none of numbers")
        super().__setstate__((version, shape, kind.type, fortran, data))


def _dtype(code: str, align: bool = False, copy: bool = False) -> _Type:
    if code not in NUMBERS or align:
        raise Foreign(f"an array of {code!r}")
    return _Type(code)


NDARRAY = object()  # in place of the class, whose first argument may be memory at any address


def _array(kind: object, shape: tuple[int, ...], code: bytes) -> _Array:
    if kind is not NDARRAY or shape != (0,) or code != b"b":
        raise Foreign(f"an array made from {kind}")
    return _Array((0,), numpy.int8)


def _scalar(kind: _Type, data: bytes) -> Any:
    if not isinstance(kind, _Type) or type(data) is not bytes or len(data) != kind.type.itemsize:
        raise Foreign("a number that is none")
    return numpy.frombuffer(data, kind.type)[0]


def _from_buffer(data: bytes | bytearray, kind: _Type, shape: tuple[int, ...], order: str) -> Any:
    if not isinstance(kind, _Type) or type(data) not in (bytes, bytearray) or order not in ("C", "F"):
        raise Foreign("an array that is none of numbers")
    return numpy.frombuffer(data, kind.type).reshape(shape, order="F" if order == "F" else "C")


MADE: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): NDARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
}
