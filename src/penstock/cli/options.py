"""The arguments and options of the command line, each written once for all commands that take it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

HOME = Path(".penstock")


class Sharing(StrEnum):
    """How trials share a device."""

    auto = "auto"
    solo = "solo"
    fused = "fused"
    packed = "packed"
    processes = "processes"
    distributed = "distributed"


class Scheduler(StrEnum):
    """Which scheduler divides the devices among trials."""

    waterfill = "waterfill"
    dynamic_fluid = "dynamic_fluid"
    static_fluid = "static_fluid"
    fifo = "fifo"


class Growing(StrEnum):
    """Which trial grows onto idle devices first."""

    best = "best"
    evenly = "evenly"


class Packing(StrEnum):
    """Which trials join a pack first."""

    nearest = "nearest"
    random = "random"
    batch_size = "batch_size"


class Lateness(StrEnum):
    """What to do once a plan's deadline cannot be kept."""

    finish = "finish"
    stop = "stop"
    pay = "pay"


class Power(StrEnum):
    """What to do about power limits."""

    observe = "observe"
    limit = "limit"


class Format(StrEnum):
    """The formats that a log can be exported to."""

    csv = "csv"
    tensorboard = "tensorboard"


# Studies and where they lie

File = Annotated[Path, typer.Argument(metavar="FILE", help="A Python file whose module has a `study`.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The study's name, as `penstock list` shows it.")]
Latest = Annotated[str | None, typer.Argument(metavar="[NAME]", help="The latest study unless given.")]
Dir = Annotated[Path, typer.Option(help="The folder that holds the studies.")]
OwnDir = Annotated[Path | None, typer.Option(help="The folder that holds the studies.")]  # the file's unless given
States = Annotated[str | None, typer.Option(help="Where states are kept: a folder, or a URL such as s3://bucket/path.")]

# Limits and changes

Trials = Annotated[int | None, typer.Option(min=1, help="How many trials in all, resumes included.")]
Deadline = Annotated[str | None, typer.Option(help="Time the study may use in all: 90s, 10m, 2h.")]
Target = Annotated[float | None, typer.Option(help="Stop once the metric reaches this.")]
Scale = Annotated[
    int | None,
    typer.Option("--surrogate", metavar="SCALE", help="Tune twins of the model that are so many times narrower."),
]
MaxFailures = Annotated[
    int | None, typer.Option(min=0, help="The most trials that may fail: one more, and the study ends as failed.")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import the file that the log names, although it lies outside of this folder.")
]
AllowChanges = Annotated[bool, typer.Option("--allow-changes", help="Go on although task, space or algorithm changed.")]

# Where and how a study runs: the fields of `RunSettings`

On = Annotated[
    str,
    typer.Option(
        metavar="local|ray|ray://HOST:PORT|simulated",
        help="local: this machine. ray: a Ray cluster. simulated: devices that are not there, in no time.",
    ),
]
Devices = Annotated[int | None, typer.Option(min=1, help="How many simulated devices; 8 unless given.")]
Workers = Annotated[int | None, typer.Option(min=1, help="How many devices, with a process each; on Ray at most.")]
Weight = Annotated[float, typer.Option(min=0.001, help="The study's part of a Ray cluster beside other studies.")]
HowShared = Annotated[
    Sharing,
    typer.Option(
        help="solo: one trial a device. fused: many as one model. packed: unlike ones too. processes: a process each. "
        "auto: what pays, measured."
    ),
]
HowPacked = Annotated[Packing | None, typer.Option(help="Which trials join a pack first; the nearest unless given.")]
Similarity = Annotated[float | None, typer.Option(help="How far from its pack's first trial a config may be.")]
ActiveThreads = Annotated[
    float | None, typer.Option(help="The most percent of a GPU's threads for each process of --sharing processes.")
]
HowScheduled = Annotated[
    Scheduler, typer.Option(help="How trials divide the devices; fifo: one trial a device, in the order of asking.")
]
HowGrown = Annotated[
    Growing, typer.Option(help="Which trial gets idle devices first, where they pay: the best, or the one with fewest.")
]
MixedTypes = Annotated[bool, typer.Option("--mixed-types", help="Let a trial's devices be of several types.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Decide nothing by measured times, so that a seed gives one result.")
]

Late = Annotated[
    Lateness, typer.Option(help="Once a plan's deadline cannot be kept: finish cheaply, stop, or pay up to its cost.")
]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan to follow, as `penstock plan --save` writes it.")]

MaxEnergy = Annotated[str | None, typer.Option(help="Energy the devices may use in all: 500kJ, 300Wh, 2kWh.")]
HowPowered = Annotated[
    Power | None, typer.Option(help="observe: tell which power limit would be best. limit: try limits, and set it.")
]

# Output

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and no progress.")]
OneObject = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
OneList = Annotated[bool, typer.Option("--json", help="One JSON list on stdout.")]
