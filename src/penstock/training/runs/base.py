"""A run: a bundle on its worker, until no trial is left in it.

A run is a generator of events, with None at every step boundary. Its bundle may be declared anew between two of them.
``solo.py`` trains one trial alone, ``fused.py`` several as one model, ``packed.py`` several such bundles in turn or on
streams of their own, and ``gang.py`` one trial on several workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.bundle import Bundle, Gathering, Limited, Placement, TrialFailed, WorkerEvent
from penstock.errors import StateError, StudyError, TaskError, trace

if TYPE_CHECKING:
    from penstock.training.limiting import Limiter
    from penstock.training.trainable import Trainable
    from penstock.training.worker import Worker

SAVING = 0.01  # the share of training time that states between reports may cost (invariant 5)
Events = Generator[WorkerEvent | Gathering | None, None, None]


class Run(ABC):
    """A bundle on its worker."""

    def __init__(self, worker: Worker, bundle: Bundle) -> None:
        self.worker, self.bundle = worker, bundle
        self.steps = 0  # that its trials have taken here in all, with those that are enqueued
        self.interrupted = 0  # how often something came between two steps, such as the end of a unit

    @abstractmethod
    def declare(self, bundle: Bundle) -> bool:
        """Let other trials be in the bundle, from the next boundary on; False where it is another bundle.

        Every trial of this bundle leaves then.
        """

    @abstractmethod
    def events(self) -> Events:
        """Train until no trial is left."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether no trial is left."""

    @property
    def kind(self) -> Hashable:
        """What runs have in common that take as long alone, and as much memory; None where nothing tells."""
        there = self.bundle
        return (type(self), there.signature, len(there.placements)) if there.signature else None

    @property
    def together(self) -> int:
        """How many trials train together, each of which takes the run's steps; 0 where they are of several kinds."""
        return 0

    @property
    def alike(self) -> tuple[str, int]:
        """What runs have in common whose steps take as long and draw as much, in words, and their number of trials.

        Without words, or with no trials, nothing can be measured of the run as a whole.
        """
        return self.bundle.signature, self.together

    @property
    def progress(self) -> Mapping[tuple[str, int], float]:
        """The steps that a trial took here so far, by what the part of the run that it is in is ``alike``."""
        return {self.alike: self.steps / max(1, self.together)}

    def limit(self, limiter: Limiter) -> Limited | None:
        """See to the power limit, between two steps."""
        return limiter.boundary(self)

    @property
    def certain(self) -> int:
        """How many steps are left until some trial has reached what it was granted, as far as that is known."""
        return 0

    @property
    def launches(self) -> bool:
        """Whether a step of this run takes the host hardly any time, as the device has all that it needs."""
        return False

    @property
    def busy(self) -> bool:
        """Whether the device still has so much of this run's work that the next step can wait."""
        return False

    @property
    def reading(self) -> Sequence[Trainable]:
        """The trials that read data now, one of each place."""
        return ()

    @property
    def settled(self) -> bool:
        """Whether its steps are as fast as they will soon be."""
        return True

    @property
    def awaits(self) -> bool:
        """Whether its steps will be faster once something is there that is made beside training."""
        return False

    @property
    def remade(self) -> int:
        """How often that was there."""
        return 0

    def wait(self) -> None:  # noqa: B027 (a run that enqueues nothing ahead is never busy)
        """Block until the run is not busy."""

    def put_off(self, wanted: bool) -> None:  # noqa: B027 (a run that takes nothing but steps has nothing to put off)
        """Take steps alone for a while, as they are timed: what else would come between two of them comes later."""

    def drain(self) -> None:  # noqa: B027 (the same)
        """Block until the device has computed everything that the run enqueued."""

    def step_seconds(self, launches: int) -> float | None:
        """The seconds of a step of a trial, by the device's own clock since it was put off; None without one.

        NaN until the device has computed so many launches.
        """
        return None


class OneTrial(Run):
    """A bundle of one trial, on one worker or on several."""

    def __init__(self, worker: Worker, bundle: Bundle) -> None:
        super().__init__(worker, bundle)
        (self.placement,) = bundle.placements
        self.budget, self.leaving = self.placement.budget, False
        self._over = False

    @property
    def over(self) -> bool:
        return self._over

    def declare(self, bundle: Bundle) -> bool:
        if any(same(p, self.placement) for p in bundle.placements):
            self.budget, self.leaving = bundle.placements[0].budget, False
            return True
        self.leaving = True
        return not bundle.placements


def same(one: Placement, other: Placement) -> bool:
    """Whether two placements are of one trial and attempt; their budgets may differ."""
    return key(one) == key(other)


def key(placement: Placement) -> tuple[int, int]:
    """The trial and attempt, which tell a placement from others."""
    return placement.trial, placement.attempt


def failed(placement: Placement, error: Exception) -> TrialFailed:
    """The event of a trial that an error ended."""
    return TrialFailed(
        placement.trial,
        placement.attempt,
        explain(error),
        died=out_of_memory(error),
        unwritten=isinstance(error, StudyError),
        lost=placement.state.file if isinstance(error, StateError) and placement.state is not None else "",
    )


def explain(error: Exception) -> str:
    """An error as text: its message alone where that says all."""
    if isinstance(error, TaskError | StudyError):
        return str(error)
    return trace(error)


def out_of_memory(error: Exception) -> bool:
    """Whether a retry on a freer device may help."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
