"""The facts about training a signature's trials together that were found out, kept from bundle to bundle."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch

from penstock.training.fused.audit import Audits
from penstock.training.fused.batches import Shapes
from penstock.training.fused.compiles import Compiles
from penstock.training.fused.general import General
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.watching import Again
from penstock.training.fused.ways import Native, Way
from penstock.training.fused.wording import line_of, plainly

Kind = tuple[
    tuple[str, ...], Shapes
]  # the names of the numbers that differ from trial to trial, and the batch's shapes


@dataclass
class Recipe:
    """How the trials of one signature are trained together, as far as it is known."""

    ways: list[type[Way]] = field(default_factory=lambda: [Native, General])
    way: Way | None = None  # it holds the numbers of one bundle's trials
    taken: bool = False  # by a bundle in training: another one at the same time needs a recipe of its own
    agreed: set[Kind] = field(default_factory=set)  # the kinds of step in which the way was compared
    proven: set[Hashable] = field(default_factory=set)  # what was compared in any bundle of the signature
    refusals: list[str] = field(default_factory=list)  # why a way, or a faster step, cannot be taken
    idle: frozenset[str] = frozenset()  # parameters that the loss does not reach
    own: bool = False  # whether the trials' own optimizers step, one after another
    refused: bool = False  # whether trials were sent on to train solo
    unclear: bool = False  # whether no trial's gradients were finite when a way was to be found
    writes: bool = False  # whether the loss was seen to write trained weights
    stepped: bool = False  # whether a plain step was ever taken
    alone: str | None = None  # why trials are measured one by one
    size: int | None = None  # the most trials that a step computes at once
    reason: str = ""  # why this size, as it was told last
    told: tuple[str, str | None, int] | None = None  # the way, ``alone`` and how many refusals, as they were told last
    compilable: bool = True
    capturable: bool = True
    pace: tuple[int, float] | None = None  # how many trials took a plain step last, and its seconds
    kernels: dict[int, bool] = field(default_factory=dict)  # by trials: whether Penstock's own kernels are used
    audits: Audits = field(default_factory=Audits)
    compiles: Compiles = field(default_factory=Compiles)  # of all bundles of the signature

    def beside(self) -> Recipe:
        """The same for another bundle at the same time, whose way is its own; what was ``proven`` holds for both."""
        ways, refusals, kernels = list(self.ways), list(self.refusals), dict(self.kernels)
        return replace(self, ways=ways, refusals=refusals, kernels=kernels, agreed=set(), way=None, taken=False)

    def of_another_size(self) -> Recipe:
        """What holds for trials of another batch size too. Their steps are compared and timed by themselves."""
        known = self.beside()
        return replace(
            known,
            proven=set(),
            size=None,
            reason="",
            told=None,
            pace=None,
            stepped=False,
            kernels={},
            compiles=Compiles(),
        )

    def take(self) -> None:
        """Begin to train a bundle by it."""
        self.taken = True

    def give_back(self) -> None:
        """The bundle is over."""
        self.taken = False

    @property
    def named(self) -> str:
        """The name of the way, for a person."""
        return "solo" if self.way is None else self.way.name

    @property
    def news(self) -> bool:
        """Whether the way, how trials are measured, or what cannot be done has changed since it was told."""
        return self.told != (self.named, self.alone, len(self.refusals))

    def tell(self, reason: str) -> str:
        """The reason for the size with all that was refused, as it is told now."""
        self.reason, self.told = reason, (self.named, self.alone, len(self.refusals))
        if self.refusals:
            reason += f"; not {'; not '.join(self.refusals)}"
        if self.way is not None and self.way.parting.reason:
            reason += f"; in parts, because of {self.way.parting.reason}"
        if self.way is None and self.unclear:
            reason += "; no way is taken yet, as the gradients of no trial are finite"
        if self.alone is not None:
            reason += f"; measured one by one, because of {self.alone}"
        return reason

    def choose(self, attempt: Callable[[type[Way]], Way]) -> Way:
        """Take the first way that an attempt does not refuse; the refusals of others are noted."""
        while self.ways:
            kind = self.ways[0]
            try:
                self.way = attempt(kind)
            except (torch.OutOfMemoryError, Again):
                raise
            except Exception as error:
                self.refusals.append(f"{kind.name}: {first_line(error)}")
                self.ways.pop(0)
            else:
                return self.way
        reasons = {said.split(": ", 1)[1] for said in self.refusals}  # one that holds for every way is said once
        raise Unfusable(reasons.pop() if len(reasons) == 1 else "; ".join(self.refusals))

    def set_aside(self, names: frozenset[str]) -> None:
        """Note parameters that the loss does not reach; every kind of step is compared anew, as it may reach them."""
        self.idle |= names
        self.agreed.clear()

    def step_alone(self) -> None:
        """Let the trials' own optimizers step, as they do not all step the same parameters in the same way."""
        self.own, self.idle = True, frozenset()
        self.agreed.clear()

    def agree(self, kind: Kind) -> None:
        """Note a kind of step in which the way was compared."""
        self.agreed.add(kind)

    def has_stepped(self) -> None:
        """Note a plain step that was taken."""
        self.stepped = True

    def cannot_tell(self) -> None:
        """Note that no trial's gradients were finite, so that a way could not be compared."""
        self.unclear = True

    def refuse(self) -> None:
        """Note that trials are not to be trained in this way."""
        self.refused = True

    def expect_writes(self) -> None:
        """Note that the loss writes trained weights: they are kept before each step, for the case of an error."""
        self.writes = True

    def limit(self, size: int) -> None:
        """Let a step compute no more trials at once."""
        self.size = size

    def measure_alone(self, reason: str) -> None:
        """Let trials be measured one by one."""
        self.alone = reason

    def rule_out(self, *steps: str) -> None:
        """Make no more steps of these kinds: "compiled", "captured"."""
        self.compilable = self.compilable and "compiled" not in steps
        self.capturable = self.capturable and "captured" not in steps

    def take_pace(self, trials: int, seconds: float) -> None:
        """Note the seconds of a plain step of so many trials."""
        self.pace = trials, seconds

    def use_kernels(self, trials: int, used: bool) -> None:
        """Note whether steps of about so many trials use Penstock's own kernels."""
        self.kernels[trials] = used


def first_line(error: Exception) -> str:
    """The first line of an error; with its class and the line of code where it is not one of Penstock's."""
    if isinstance(error, Unfusable):
        return str(error).strip().splitlines()[0]
    return f"{plainly(error)}{line_of(error)}"
