"""A study's plan: what it is made of, read from profiles, tables and logs, and the plan that a run follows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, cast

from penstock.arguments import check_flags, seconds
from penstock.engine.clocking import spread
from penstock.engine.decisions import Decider
from penstock.engine.following import Following, Late, of_log, plain
from penstock.errors import StudyError
from penstock.executors.base import Executor
from penstock.log.events import Asked, Devices, Placed, Reported
from penstock.log.history import History
from penstock.numeric import finite, shown
from penstock.planning.draws import NOTHING, Draws
from penstock.planning.plan import Plan, Purpose
from penstock.planning.spec import Job, Times, times_of, work_of
from penstock.settings import RunSettings
from penstock.speed.curve import Curve
from penstock.speed.profiles import Profiles
from penstock.tabulated import Tabulated, TabulatedTask
from penstock.task import FunctionTask, fingerprint, shards, task_name

if TYPE_CHECKING:
    from penstock.planning.catalogue import Catalogue
    from penstock.study import Study

DRAWS = 64  # trials of a table whose seconds are looked up
UnitSeconds = float | tuple[float, float] | Mapping[str, float | tuple[float, float]]
"""The seconds of a unit, or their mean and deviation; by instance where they differ."""


def as_plan(given: object) -> Plan:
    """A plan, or the one in a file."""
    if isinstance(given, Plan):
        return given
    if not isinstance(given, str | Path):
        raise StudyError(f"plan must be a plan of study.plan(...), or the file of one, got {shown(given)}.")
    try:
        return Plan.from_json(Path(given).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(
            f"Cannot read the plan {given} ({error}): make one with `penstock plan FILE --save plan.json`."
        ) from None


def purpose(study: Study) -> Purpose:
    """What a plan of a study is for."""
    return Purpose(task_name(study.task), fingerprint(study.task), repr(study.algorithm), study.trials or 0)


def followed(study: Study, plan: Plan | None, history: History, how: RunSettings) -> Following | None:
    """The plan that a run follows: the one that is given, as the log has it by now, or else the log's own."""
    if plan is not None:
        plan.require(purpose(study))
        if (
            wrong := [name for name in ("sharing", "scheduler", "growing", "packing") if name in how.changed()]
        ) or shards(study.task) > 1:
            what = f"{wrong[0]}= out" if wrong else "plan= out, as the task's shards fix them"
            raise StudyError(f"A plan decides how many devices each trial has: leave {what}.")
    if history.given is None and plan is None:
        return None
    late = cast(Late, how.late)
    if plan is not None and (history.given is None or history.given.plan != plain(plan)):
        return Following(plan, plan, late)
    assert history.given is not None
    assert history.planned is not None
    return Following(of_log(history.given), of_log(history.planned), late)


def able(following: Following | None, plan: Plan | None, executor: Executor, how: RunSettings) -> Following | None:
    """The plan, where the executor can get its nodes; a study that was planned elsewhere goes on here without it."""
    if following is None:
        return None
    needed = {stage.instance for stage in following.plan.stages}
    there = set(executor.instances())
    if needed <= there:
        return following
    if plan is None:
        return None
    have = f"which has {', '.join(sorted(there))}" if there else "which has no nodes that can be asked for"
    raise StudyError(
        f"The plan needs nodes of {', '.join(sorted(needed - there))}, got on={shown(how.on)}, {have}. Use a Ray "
        "cluster whose autoscaler makes nodes of types with these names (or with the label penstock.io/instance), or "
        "rehearse the plan on penstock.Simulated.of(plan) (--on simulated)."
    )


def plan_of(
    study: Study,
    *,
    deadline: float | str | None,
    max_cost: float | None,
    instances: Sequence[str] | None,
    spot: bool,
    confidence: float,
    catalogue: str | Path | None,
    unit_seconds: UnitSeconds | None,
    log: str | None,
    most: int | None,
) -> Plan:
    """A plan for a study; see ``Study.plan``."""
    from penstock.planning.catalogue import Catalogue
    from penstock.planning.planner import plan

    check_flags(spot=spot)
    book = Catalogue.read(catalogue)
    found, said = _times(study, unit_seconds, log)
    names = list(instances) if instances is not None else _measured(book, found)
    if instances is None and not names and (measured := [name for name in found if name]):
        raise StudyError(
            f"Units were measured on {', '.join(measured)}, and no instance type of the catalogue has such devices: "
            "add one to a catalogue of your own (--catalogue FILE), or name instances= (--instances) and their "
            "unit_seconds= (--unit-seconds)."
        )
    if isinstance(instances, str) or not all(isinstance(name, str) for name in names):
        raise StudyError(f"instances must be a list of names of the catalogue, got {shown(instances)}.")
    cloud = book.cloud(names, spot=spot, **({} if most is None else {"most": most}))
    works, more = work_of(study.algorithm, study.trials, learns=study._search(study.trials).learns)
    times: dict[str, tuple[Times, ...]] = {}
    assumed = [*more]
    for offer in cloud.offers:
        here = offer.instance
        key = next((name for name in found if name == here.name or alike(name, here.type)), "" if "" in found else None)
        if key is not None and here.name not in times:
            times[here.name] = found[key]
            assumed += said.get(key, ())
    if not times:
        raise StudyError(_nothing_measured(study, [offer.instance.type for offer in cloud.offers], found))
    start = _start(study, times)
    job = Job(works, times, start, purpose(study), tuple(dict.fromkeys(assumed)))
    return plan(job, cloud, deadline=seconds(deadline), max_cost=max_cost, confidence=confidence)


def alike(measured: str, type: str) -> bool:
    """Whether a device as it names itself is of a type of the catalogue: one name has all words of the other.

    >>> alike("Tesla V100-SXM2-16GB", "v100"), alike("NVIDIA H200", "h100"), alike("NVIDIA A100-SXM4-80GB", "a10")
    (True, False, False)
    """
    one, other = (set(re.findall("[a-z0-9]+", name.lower())) for name in (measured, type))
    return bool(one and other) and (other <= one or one <= other)


Found = dict[str, tuple[Times, ...]]
Said = dict[str, tuple[str, ...]]


def _times(study: Study, unit_seconds: UnitSeconds | None, log: str | None) -> tuple[Found, Said]:
    """The times of a study's units by type of device, or by "" where they are the same on all, and what is assumed."""
    if unit_seconds is not None:
        return _given(unit_seconds)
    if log is not None:
        return _logged(study, log)
    return _tabulated(study, study.task) if isinstance(study.task, TabulatedTask) else _profiled(study)


def _given(unit_seconds: UnitSeconds) -> tuple[Found, Said]:
    found: Found = {}
    said: Said = {}
    for name, one in unit_seconds.items() if isinstance(unit_seconds, Mapping) else [("", unit_seconds)]:
        pair = one if isinstance(one, tuple) else (one, 0.0)
        if len(pair) != 2 or any(finite(number) is None or number < 0 for number in pair):
            raise StudyError(
                "unit_seconds must be the seconds of a unit above 0, or their mean and deviation, by instance where "
                f"they differ, got {shown(unit_seconds)}."
            )
        made, more = times_of(name or "every instance", Draws(*pair))
        found[name], said[name] = (made,), ("a unit's seconds are as unit_seconds says", *more)
    return found, said


def _tabulated(study: Study, task: TabulatedTask) -> tuple[Found, Said]:
    """The times of a table's first draws, each signature with its own."""
    asked = Decider(study.algorithm, study._search(study.trials)).opened(study.trials)
    tables = [task.look_up(event.config) for event in asked if isinstance(event, Asked)][:DRAWS]
    made = []
    for signature in dict.fromkeys(table.signature for table in tables):
        ours = [table for table in tables if table.signature == signature]
        mean, units, trials = moments([list(_seconds(table)) for table in ours])
        curve = next((table.curve for table in ours if table.curve is not None), Curve())
        made.append(Times(Draws(mean, units), curve, Draws(1.0, trials / mean), float(len(ours)), signature))
    return {"": tuple(made)}, {"": ("a table's units take as long on every instance",)}


def _seconds(table: Tabulated) -> Sequence[float]:
    return table.seconds if isinstance(table.seconds, Sequence) else (table.seconds,)


def _profiled(study: Study) -> tuple[Found, Said]:
    """The times that earlier studies of the task measured, by type of device; the newest kind of each type counts."""
    path = study.dir / "profiles.jsonl"
    found: Found = {}
    said: Said = {}
    for device, profiles in Profiles.open(path).kinds(fingerprint(study.task)).items():
        type = re.split(r", (?:\d+ threads, )?torch ", device)[0]
        table = {(one.signature, one.kind): one.table for one in profiles}
        made, more = list[Times](), list[str]()
        for signature in dict.fromkeys(one.signature for one in profiles if one.kind == "unit"):
            mean, varies = table[signature, "unit"][1], table.get((signature, "spread"), {})
            times, assumed = times_of(
                type,
                Draws(mean, varies.get(0, 0.0)),
                table.get((signature, "sharing")),
                table.get((signature, "scaling")),
                factor=Draws(1.0, varies.get(1, 0.0) / mean),
                weight=varies.get(2, 1.0),
                signature=signature,
            )
            made.append(times)
            more += assumed
        if made:
            found[type], said[type] = tuple(made), tuple(more)
    return found, said


def _logged(study: Study, log: str) -> tuple[Found, Said]:
    """The times of the units that trials of another study trained alone, by the type of their devices."""
    from penstock.report.summary import events_of, study_dir

    if not isinstance(log, str) or not log:
        raise StudyError(f"log must be the name of a study that has run, got {shown(log)}.")
    units: dict[str, dict[int, list[float]]] = {}
    types: dict[str, str] = {}
    there: dict[int, tuple[str, float]] = {}  # by trial: the type of its device, and its last boundary
    for event in events_of(study_dir(study.dir, log, "dir=")):
        if isinstance(event, Devices):
            types |= {one["name"]: one["type"] for one in event.devices}
        elif isinstance(event, Placed):
            there.pop(event.trial, None)
            if event.share == 1:
                there[event.trial] = types.get(event.devices[0], ""), event.clock
        elif isinstance(event, Reported) and event.trial in there:
            type, since = there[event.trial]
            there[event.trial] = type, event.clock
            if event.clock > since:
                units.setdefault(type, {}).setdefault(event.trial, []).append(event.clock - since)
    found: Found = {}
    said: Said = {}
    for type, seen in units.items():
        mean, each, trials = moments(list(seen.values()))
        made, more = times_of(type, Draws(mean, each), factor=Draws(1.0, trials / mean))
        found[type], said[type] = (made,), more
    return found, said


def moments(units: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The mean of trials' units, the deviation of a trial's units, and that of the trials' means."""
    varies = spread(units)
    return fmean([fmean(some) for some in units]), varies.get(0, 0.0), varies.get(1, 0.0)


def _measured(book: Catalogue, found: Found) -> list[str]:
    """The instances of the catalogue on whose devices something was measured."""
    return [
        one.name
        for one in book.instances.values()
        if any(name == one.name or alike(name, one.type) for name in found if name)
    ]


def _start(study: Study, times: Mapping[str, object]) -> Draws:
    """The seconds that a trial takes to start, as they were measured."""
    profiles = Profiles.open(study.dir / "profiles.jsonl").kinds(fingerprint(study.task))
    seen = [one.table[0] for some in profiles.values() for one in some if one.kind == "moving"]
    return Draws(fmean(seen)) if seen else NOTHING


def _nothing_measured(study: Study, types: Sequence[str], found: Found) -> str:
    if isinstance(study.task, FunctionTask) and not found:
        return (
            "A function's units are not measured by profiles: say how long one takes with unit_seconds= "
            "(--unit-seconds), or name a study of it that has run, with log= (--log)."
        )
    have = f"there are times of {', '.join(found)}" if found else f"{study.dir / 'profiles.jsonl'} has none"
    return (
        f"Nothing says how long a unit takes on {' or '.join(dict.fromkeys(types))}: {have}. Run the study or "
        "`penstock profile FILE` on such a device, give unit_seconds= (--unit-seconds), or name a study's log= (--log)."
    )
