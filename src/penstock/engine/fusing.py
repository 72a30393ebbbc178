"""Which trials can be fused and how many of them: what workers described and measured, kept for the engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version

from penstock import __version__
from penstock.bundle import Description, Device, Measured
from penstock.errors import SoloWarning
from penstock.executors.base import Executor
from penstock.log.history import TrialRecord
from penstock.speed.profiles import Profile, Profiles
from penstock.trial import Config

UNKNOWN = 64  # trials in a bundle of which nothing is measured yet
LARGEST = 512  # trials in any bundle
ALL_UNLIKE = 8  # trials of which no two could be fused are no accident
GAIN = 0.1  # of a step's time, for which a bundle is split
HELD = 0.4  # of a device's memory may be the states of a bundle; the rest is for what a step computes


class Suspects:
    """Trials that died together, of which one at least kills its worker: halved by each death until that one is alone.

    >>> suspects = Suspects()
    >>> for trial in (4, 7, 8):
    ...     suspects.fell("bundle 1", trial)
    >>> suspects.bisect()
    >>> [suspects.half([trial]) for trial in (4, 7, 8, 9)]
    [1, 1, 2, 0]
    """

    def __init__(self) -> None:
        self._fallen: dict[str, list[int]] = {}  # by bundle, since the last bisection
        self._half: dict[int, int] = {}
        self._halves = 0

    def fell(self, bundle: str, trial: int) -> None:
        """A trial died in a bundle of several."""
        self._fallen.setdefault(bundle, []).append(trial)

    def bisect(self) -> None:
        """Those of each bundle are two halves from now on; none is fused with anybody outside of its own."""
        for trials in self._fallen.values():
            middle = (len(trials) + 1) // 2
            for half in (trials[:middle], trials[middle:]):
                self._halves += 1
                self._half.update(dict.fromkeys(half, self._halves))
        self._fallen.clear()

    def acquit(self, trial: int) -> None:
        """A trial came further: it may be fused with anybody again."""
        self._half.pop(trial, None)

    def half(self, trials: Iterable[int]) -> int:
        """The half of these trials, which are together; 0 where none of them is a suspect."""
        return next((self._half[trial] for trial in trials if trial in self._half), 0)


class Fusing:
    """Signatures of trials, and bundle sizes of signatures.

    ``forced`` takes the largest bundles without measuring, which is what ``sharing="fused"`` asks for.
    """

    def __init__(self, executor: Executor, profiles: Profiles, task: str, *, forced: bool) -> None:
        self.executor, self.profiles, self.task, self.forced = executor, profiles, task, forced
        self.devices: dict[str, str] = {}  # their kinds; lost ones too: what was measured there may still be told
        self.memory: dict[str, int] = {}
        self.look(executor.devices())
        self.suspects = Suspects()
        self._bytes: dict[str, int] = {}  # of one trial's state, by signature
        self._described: dict[int, tuple[Config, Description]] = {}
        self._measured: dict[tuple[str, str], Measured] = {}  # by this study, of a signature on a kind of device
        self._said: set[str] = set()
        self._new: list[str] = []

    def look(self, devices: Iterable[Device]) -> None:
        """These devices there are; what is known of their kinds holds for those that come later."""
        for device in devices:
            self.devices[device.name], self.memory[device.name] = kind(device), device.memory

    def describe(self, records: Iterable[TrialRecord]) -> None:
        """Learn the signatures of trials whose configs are new."""
        new = [r for r in records if r.number not in self._described or self._described[r.number][0] != r.config]
        if not new:
            return
        for record, description in zip(new, self.executor.describe([r.config for r in new], train=False), strict=True):
            self._described[record.number] = (record.config, description)
            if description.signature is None:
                self._say(description.reason)
            else:
                self._bytes[description.signature] = description.bytes or 1
        found = [one.signature for _, one in self._described.values() if one.signature is not None]
        if len(found) >= ALL_UNLIKE and len(set(found)) == len(found):
            self._say(
                "no two of them are alike: their modules' attributes differ, or the values that loss, metrics or data "
                "read from the config"
            )

    def of(self, trial: int) -> Description:
        """What is known of a trial."""
        return self._described[trial][1]

    def limit(self, signature: str, device: str) -> int:
        """The most trials that a bundle of a signature may hold on a device."""
        room = max(1, int(HELD * self.memory[device]) // max(1, self._bytes.get(signature, 1)))
        if (found := self._found(signature, device)) is not None:
            return min(room, found.size)
        if self.forced:
            return min(room, LARGEST)
        profile = self._profile(signature, device)
        return min(room, UNKNOWN if profile is None else profile.size)

    def size(self, signature: str, device: str) -> int | None:
        """How many trials a step computes at once, or None where the worker is to measure it."""
        known = self.forced or self._found(signature, device) or self._profile(signature, device)
        if not known:
            return None
        return self.limit(signature, device)

    def reason(self, signature: str, device: str) -> str:
        """Where a bundle's size comes from, for a person."""
        if (found := self._found(signature, device)) is not None:
            return found.reason
        if self.forced:
            return 'asked for by sharing="fused"'
        profile = self._profile(signature, device)
        return "" if profile is None else f"measured before: {profile.reason}"

    def refusals(self) -> list[str]:
        """Why trials train solo, as far as that was not told before."""
        new, self._new = self._new, []
        return new

    def take(self, measured: Measured, device: str) -> None:
        """Keep what a worker found out, for this study and the next."""
        self._measured[measured.signature, self.devices[device]] = measured
        if measured.way == "solo" and measured.size == 1:
            self._say(measured.reason)
            self._new.clear()  # it is in the log as measured
        if measured.table:
            what = (measured.kind, measured.table, measured.size, measured.way, measured.reason)
            self.profiles.put(Profile(self.task, self.devices[device], measured.signature, *what))

    def splits(self, signature: str, device: str, trials: int, parts: int) -> bool:
        """Whether a step of ``trials`` takes much longer than one of a part of them, as far as that was measured."""
        known = self._found(signature, device) or self._profile(signature, device)
        if known is None or not known.table:
            return False
        fewer = -(-trials // parts)
        whole = min((t for count, t in known.table.items() if count >= trials), default=max(known.table.values()))
        part = min((t for count, t in known.table.items() if count >= fewer), default=whole)
        return part < (1 - GAIN) * whole

    def alike(self, device: str) -> list[str]:
        """The devices that what was measured on this one holds for."""
        return [name for name, kind in self.devices.items() if kind == self.devices[device]]

    def _found(self, signature: str, device: str) -> Measured | None:
        return self._measured.get((signature, self.devices[device]))

    def _profile(self, signature: str, device: str) -> Profile | None:
        return self.profiles.get(self.task, self.devices[device], signature, "sharing")

    def _say(self, reason: str) -> None:
        """Once for each reason: trials that train solo cost more than the user may expect."""
        if reason and reason not in self._said:
            self._said.add(reason)
            self._new.append(reason)
            warnings.warn(f"Trials that cannot be fused train solo: {reason.rstrip('.')}.", SoloWarning, stacklevel=2)


def kind(device: Device) -> str:
    """All that a step's time depends on besides the task."""
    return f"{device.type}, {device.memory >> 30} GiB, torch {_torch()}, penstock {__version__}"


@cache
def _torch() -> str:
    return version("torch")
