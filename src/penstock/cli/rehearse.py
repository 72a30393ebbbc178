"""A simulated cluster of devices like this machine's: trials share and spread there by the measurements made here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from penstock.engine.clocking import device_kind
from penstock.executors.simulated.settings import Simulated
from penstock.speed.curve import Curve
from penstock.speed.model import SpeedModel
from penstock.speed.profiles import Profile, Profiles
from penstock.tabulated import TabulatedTask
from penstock.task import FunctionTask, fingerprint

if TYPE_CHECKING:
    from penstock.bundle import Device
    from penstock.study import Study

APART = "no device is shared and no trial has several"


def rehearsal(study: Study, devices: int) -> tuple[Simulated, str]:
    """A cluster for a study, and a line that says where the curves of its trials come from.

    Each device is like the device of one of as many workers on this machine. So a study finds the same profiles there
    as here, and trials take as long there as they took here.
    """
    if isinstance(study.task, TabulatedTask):
        said = "Simulated: trials share and spread as their tables' own curves say, where they have one."
        return Simulated(devices), said
    if isinstance(study.task, FunctionTask):
        return Simulated(devices), f"Simulated: of a function nothing is measured, so {APART}."
    here, path = one_of(devices), study.dir / "profiles.jsonl"
    found = Profiles.open(path).of(fingerprint(study.task), device_kind(here))
    signatures = sorted({one.signature for one in found if one.kind in ("sharing", "scaling")})
    curves = {(signature, here.type): _curve(signature, here.type, found) for signature in signatures}
    cluster = Simulated(
        [replace(here, name=f"{here.type} {i}") for i in range(devices)],
        curves=curves,
        unit_seconds={one.signature: one.table[1] for one in found if one.kind == "unit"} or None,
        start=_mean(found, "moving", 0),
        stop=_mean(found, "moving", 1),
        opening=_mean(found, "opening", 0),
        kept=False,  # its devices have the types of real ones, and profiles of those must come from real runs
    )
    return cluster, _said(here, path, list(curves.values()))


def one_of(devices: int) -> Device:
    """The device that each worker has, if this machine has as many workers as ``devices``: they divide its cores."""
    from penstock.executors.local import find_devices

    here = find_devices()[0]
    if here.threads is None or devices == 1:
        return here
    return replace(here, threads=max(1, here.threads // devices), memory=here.memory // devices)


def _curve(signature: str, type: str, found: list[Profile]) -> Curve:
    """The curve that the speed model makes of a signature's profiles."""
    model = SpeedModel()
    model.know(0, signature)
    for one in found:
        if (one.signature, one.kind) == (signature, "sharing"):
            model.shared(signature, type, one.table, one.size)
        elif (one.signature, one.kind) == (signature, "scaling"):
            model.spread(signature, type, one.table)
    return model.curve(type, 0)


def _mean(found: list[Profile], kind: str, count: int) -> float:
    return fmean([one.table[count] for one in found if one.kind == kind] or [0.0])


def _said(here: Device, path: Path, curves: list[Curve]) -> str:
    if not curves:
        return (
            f"Simulated: {path} has nothing that was measured of this task on this machine's {here.type}, so {APART}. "
            "To measure it, run the study here first, without --on simulated."
        )
    models = f"{len(curves)} kinds of trial" if len(curves) > 1 else "1 kind of trial"
    most, widest = max(curve.most for curve in curves), max(curve.widest for curve in curves)
    trials = "1 trial" if most == 1 else f"{most} trials"
    spread = "1 device" if widest == 1 else f"{widest} devices"
    return (
        f"Simulated: as {path} has it of {models} on this machine's {here.type}, up to {trials} share a device and a "
        f"trial has up to {spread}."
    )
