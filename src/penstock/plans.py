"""A study's plan: what it is made of, read from profiles, tables and logs, and the plan that a run follows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.engine.following import Following, Late, of_log, plain
from penstock.errors import StudyError
from penstock.executors.base import Executor
from penstock.log.history import History
from penstock.numeric import shown
from penstock.planning.plan import Plan, Purpose
from penstock.settings import RunSettings
from penstock.task import fingerprint, shards, task_name

if TYPE_CHECKING:
    from penstock.study import Study


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
    assert history.given is not None and history.planned is not None
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
        f"The plan needs nodes of {', '.join(sorted(needed - there))}, got on={shown(how.on)}, {have}. Use a Ray cluster "
        "whose autoscaler makes nodes of types with these names (or with the label penstock.io/instance), or rehearse "
        "the plan on penstock.Simulated.of(plan) (--on simulated)."
    )
