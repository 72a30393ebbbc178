"""The random generators a trial can draw from: seeded, kept and brought back. Imports no torch of its own accord."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, and of numpy and torch where they are in use."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


class Standing:
    """Where the global generators stand now."""

    def __init__(self) -> None:
        self._numpy, self._torch = sys.modules.get("numpy"), sys.modules.get("torch")
        self._of_python = random.getstate()
        self._of_numpy = self._numpy.random.get_state() if self._numpy else None
        self._of_torch = self._torch.get_rng_state() if self._torch else None
        in_use = self._torch is not None and self._torch.cuda.is_initialized()
        self._of_cuda = self._torch.cuda.get_rng_state_all() if self._torch and in_use else []

    def bring_back(self) -> None:
        """Let the generators stand there again."""
        random.setstate(self._of_python)
        if self._numpy:
            self._numpy.random.set_state(self._of_numpy)
        if self._torch:
            self._torch.set_rng_state(self._of_torch)
            if self._of_cuda:
                self._torch.cuda.set_rng_state_all(self._of_cuda)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Leave the global generators as they were, whatever the block draws from them."""
    before = Standing()
    try:
        yield
    finally:
        before.bring_back()


def position() -> tuple[object, ...]:
    """Where Python's and numpy's generators stand: equal positions mean that nothing was drawn in between."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, keys, place, has_gauss, cached = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), place, has_gauss, cached


def random_state(*, with_torch: bool) -> dict[str, Any]:
    """The states of Python's and numpy's generators, as tensors and numbers that a checkpoint can hold.

    A function's state has torch's too; in a task's training those are set anew at every step.
    """
    import numpy
    import torch

    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = tuple[Any, ...](numpy.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(keys.astype("int64")),
            "place": int(place),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    if with_torch:
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Bring back the states that ``random_state`` gave."""
    import numpy
    import torch

    python, parts = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = parts["keys"].numpy().astype("uint32")
    numpy.random.set_state((parts["kind"], keys, parts["place"], parts["has_gauss"], parts["cached"]))
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
