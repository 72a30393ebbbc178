"""Who can fuse with whom, and where: trials of equal signature train as one bundle, one bundle a device."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Limit = Callable[[str, str], int]


@dataclass(frozen=True)
class Candidate:
    """A trial that waits: whom it can fuse with, where it stands in the data, how much work a step of it is.

    ``position`` is its epoch and its place in that epoch's order: trials at the same position share a batch.
    ``weight`` is its batch size. ``asked`` is one more with each asking, so that it tells how many came in between.
    Where a worker died, one of its trials may be to blame: the trials of a ``half`` above 0 fuse among themselves only.
    """

    trial: int
    signature: str | None
    position: tuple[int, int]
    weight: int
    asked: int = 0
    half: int = 0


@dataclass(frozen=True)
class Running:
    """A bundle that is on a device now."""

    bundle: str
    device: str
    signature: str | None
    trials: int
    half: int = 0


@dataclass(frozen=True)
class Gathering:
    """Trials to place together: into the running ``bundle``, or as a new one where that is None."""

    device: str
    bundle: str | None
    trials: tuple[int, ...]
    signature: str | None


def group(
    devices: Sequence[str], running: Sequence[Running], waiting: Sequence[Candidate], limit: Limit
) -> list[Gathering]:
    """Gather the trials that wait, which come in the order of asking, into bundles: adaptive fusion, Hydro §4.3.

    ``limit(signature, device)`` is the most trials that a bundle may hold there; 1: they run solo, like a trial without
    a signature, which is a group of its own. So is a half of suspects.

    - A free device goes to a group that has none, the heaviest first, and then to the group whose devices carry
      most; a group weighs batch size × trials (Hydro's B × N), those that run already included. So every group has a
      device while there are enough, and none idles while a trial waits.
    - A group's trials go to its emptiest bundle, running or new: they spread over its devices before they fuse deeper.
    - Where not all fit, those at the position of the one that has waited longest come first, then those at the most
      common position. New bundles are filled from one position where one suffices.
    - Before all that, nobody starves. Heavy groups, and running bundles that are always open, could keep others
      waiting for as long as their trials come back. So while a group has no place for its eldest, that one is overtaken
      only by what was asked for less than a round after it, a round being as many askings as trials wait and run now.
      What came later enters no bundle, so that bundles drain, and counts for no device. A trial that comes back comes
      with a new ``asked``: nobody is overtaken by more than a round, however often the others come back.

    >>> waiting = [Candidate(trial, "a", (0, 0), 32) for trial in range(7)]
    >>> [g.trials for g in group(["gpu 0", "gpu 1", "gpu 2"], [], waiting, lambda signature, device: 8)]
    [(0, 1, 2), (3, 4), (5, 6)]
    """
    place = {device: i for i, device in enumerate(devices)}
    running = [one for one in running if one.device in place]
    taken = {one.device for one in running}
    groups = _groups(running, waiting)
    patience = len(waiting) + sum(one.trials for one in running)
    given = _share(groups, [device for device in devices if device not in taken], patience)
    placing = [(one, _places(one, new, limit)) for one, new in zip(groups, given, strict=True)]
    late = min((one.members[0].asked for one, places in placing if not places), default=math.inf) + patience
    gatherings = []
    for one, places in placing:
        if places:
            members = [member for member in one.members if member.asked < late]
            gatherings += _gather(members, places, one.signature)
    return sorted(gatherings, key=lambda gathering: place[gathering.device])


@dataclass(frozen=True)
class _Group:
    signature: str | None
    members: tuple[Candidate, ...]
    bundles: tuple[Running, ...]

    @property
    def load(self) -> int:
        return sum(m.weight for m in self.members) + self.members[0].weight * sum(b.trials for b in self.bundles)


@dataclass(frozen=True)
class _Place:
    device: str
    bundle: str | None
    trials: int
    room: int


def _groups(running: Sequence[Running], waiting: Sequence[Candidate]) -> list[_Group]:
    members: dict[tuple[str | int, int], list[Candidate]] = {}
    for i, candidate in enumerate(waiting):  # a trial without a signature goes by its place in the queue
        members.setdefault((i if candidate.signature is None else candidate.signature, candidate.half), []).append(
            candidate
        )
    bundles: dict[tuple[str | int, int], list[Running]] = {}
    for one in running:
        if one.signature is not None:
            bundles.setdefault((one.signature, one.half), []).append(one)
    return [_Group(ours[0].signature, tuple(ours), tuple(bundles.get(key, ()))) for key, ours in members.items()]


def _share(groups: Sequence[_Group], free: Sequence[str], patience: int) -> list[list[str]]:
    """The free devices that each group gets, one for its eldest, one for the next, and so on.

    Ties go to the group that has waited longest, which comes first.
    """
    given: list[list[str]] = [[] for _ in groups]
    loads = [one.load for one in groups]
    for device in free:
        asked = {
            i: one.members[len(given[i])].asked for i, one in enumerate(groups) if len(given[i]) < len(one.members)
        }
        late = min(asked.values(), default=0) + patience
        able = [i for i in asked if asked[i] < late]
        if not able:
            break
        without = [i for i in able if not given[i] and not groups[i].bundles]
        heaviest = max(without or able, key=lambda i: loads[i] / max(1, len(given[i]) + len(groups[i].bundles)))
        given[heaviest].append(device)
    return given


def _places(one: _Group, new: Sequence[str], limit: Limit) -> list[_Place]:
    """Where a group's trials can go; a trial that a limit has no room for alone is still tried alone."""
    if one.signature is None:
        return [_Place(device, None, 0, 1) for device in new]
    places = [_Place(device, None, 0, max(1, limit(one.signature, device))) for device in new]
    for bundle in one.bundles:
        most = limit(one.signature, bundle.device)
        if most > max(1, bundle.trials):
            places.append(_Place(bundle.device, bundle.bundle, bundle.trials, most - bundle.trials))
    return places


def _gather(members: Sequence[Candidate], places: Sequence[_Place], signature: str | None) -> list[Gathering]:
    sizes = [0] * len(places)
    emptiest = [(place.trials, i) for i, place in enumerate(places)]  # at equal counts the new ones, which come first
    heapq.heapify(emptiest)
    for _ in range(min(len(members), sum(place.room for place in places))):
        trials, i = heapq.heappop(emptiest)
        sizes[i] += 1
        if sizes[i] < places[i].room:
            heapq.heappush(emptiest, (trials + 1, i))
    queue = {member.trial: i for i, member in enumerate(members)}
    hands = _deal(members, sizes)
    return [
        Gathering(place.device, place.bundle, tuple(sorted((m.trial for m in hand), key=queue.__getitem__)), signature)
        for place, hand in zip(places, hands, strict=True)
        if hand
    ]


def _deal(members: Sequence[Candidate], sizes: Sequence[int]) -> list[list[Candidate]]:
    """Hands of these sizes, from few positions each; the largest chooses first, and of equal ones the first."""
    first, *others = _alike(members) or [[]]
    chosen = [one for ones in (first, *sorted(others, key=len, reverse=True)) for one in ones][: sum(sizes)]
    left = _alike(chosen)
    hands: list[list[Candidate]] = [[] for _ in sizes]
    turns = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    for i in turns:
        enough = [ones for ones in left if len(ones) >= sizes[i]]
        if enough:  # the position that is used up by it, or else the most common one
            source = max(enough, key=lambda ones: (len(ones) == sizes[i], len(ones)))
            hands[i] = source[: sizes[i]]
            del source[: sizes[i]]
    rest = [one for ones in left for one in ones]
    for i in turns:
        if not hands[i]:
            hands[i], rest = rest[: sizes[i]], rest[sizes[i] :]
    return hands


def _alike(members: Sequence[Candidate]) -> list[list[Candidate]]:
    alike: dict[tuple[int, int], list[Candidate]] = {}
    for member in members:
        alike.setdefault(member.position, []).append(member)
    return list(alike.values())
