"""Before kernels are trusted: on a real batch, each trial's gradients and buffers must be about as good as torch's own.

How good is told by the same in full float32: a step in bfloat16 or TF32 is off by what rounding does to it,
with kernels as without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.task import Task
from penstock.training.fused.compiled import Inputs, gradients
from penstock.training.fused.flat import Flat
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import Way
from penstock.training.kernels.choice import kernels

TIMES, MORE = 3.0, 1e-4  # how much farther off than torch's a trial's gradient may be, and in parts of its length
ROWS = 8  # that are computed in full float32 at once, which takes more memory


def check(way: Way, task: Task, flats: Sequence[Flat], inputs: Inputs, shared: bool) -> None:
    """Refuse kernels whose gradients or buffers are farther from those in full float32 than torch's are."""
    mixed = task.precision == "bf16"
    with inputs.unchanged():
        exact = [_exact(way, task, flats, inputs, shared), _kept(inputs)]
    off = []
    for wanted in (False, True):
        with inputs.unchanged(), kernels(wanted):
            made = [torch.cat(gradients(way, task, flats, inputs, shared, mixed)[1], 1), _kept(inputs)]
            off.append([(one.double() - right).norm(dim=1) for one, right in zip(made, exact, strict=True)])
        del made
    way.release()
    for what, right, torchs, ours in zip(("gradients", "buffers"), exact, *off, strict=True):
        length = right.norm(dim=1)
        bad = torch.isfinite(length) & torch.isfinite(torchs) & ~(ours <= TIMES * torchs + MORE * length)
        if bool(bad.any()):
            worst = int(torch.where(bad, ours / length, 0).argmax())
            raise Unfusable(
                f"the {what} of trial {worst} of the bundle are off by {float(ours[worst] / length[worst]):.2g}, "
                f"where torch's own operators are off by {float(torchs[worst] / length[worst]):.2g}"
            )


def _exact(way: Way, task: Task, flats: Sequence[Flat], inputs: Inputs, shared: bool) -> torch.Tensor:
    made = []
    with _full_float32(), kernels(False):
        for first in range(0, len(inputs.rows[0]), ROWS):
            part = inputs.part(first, first + ROWS, shared)
            made.append(torch.cat(gradients(way, task, flats, part, shared, False)[1], 1).double())
    return torch.cat(made)


def _kept(inputs: Inputs) -> torch.Tensor:
    """What the trials' modules keep of the batches they have seen, such as the statistics of a BatchNorm."""
    trials = len(inputs.rows[0])
    kept = [rows.double().reshape(trials, -1) for rows in inputs.buffers.values() if rows.is_floating_point()]
    return torch.cat([*kept, torch.zeros(trials, 0, device=inputs.rows[0].device)], 1)


@contextmanager
def _full_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
