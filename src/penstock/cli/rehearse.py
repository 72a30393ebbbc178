"""A simulated cluster of devices like this machine's: trials share and spread there as was measured here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.fusing import kind
from penstock.executors.simulated.settings import Simulated
from penstock.speed.curve import Curve, measured
from penstock.speed.profiles import Profiles
from penstock.tabulated import TabulatedTask
from penstock.task import FunctionTask, fingerprint

if TYPE_CHECKING:
    from penstock.bundle import Device
    from penstock.study import Study

APART = "no device is shared and no trial has several"


def rehearsal(study: Study, devices: int) -> tuple[Simulated, str]:
    """A cluster of so many devices for a study, and a line that says where the curves of its trials come from."""
    if isinstance(study.task, TabulatedTask):
        said = "Simulated: trials share and spread as their tables' own curves say, where they have one."
        return Simulated(devices), said
    if isinstance(study.task, FunctionTask):
        return Simulated(devices), f"Simulated: of a function nothing is measured, so {APART}."
    from penstock.executors.local import find_devices

    here, path = find_devices()[0], study.dir / "profiles.jsonl"
    found = Profiles.open(path).of(fingerprint(study.task), kind(here))
    cluster = Simulated(devices, memory=here.memory)
    tables = {(one.signature, one.kind): one.table for one in found}
    signatures = {one.signature for one in found if one.kind in ("sharing", "scaling")}
    curves = {
        (signature, cluster.type): measured(
            tables.get((signature, "sharing"), {}), tables.get((signature, "scaling"), {})
        )[0]
        for signature in sorted(signatures)
    }
    return Simulated(devices, memory=here.memory, curves=curves), _said(here, path, list(curves.values()))


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
