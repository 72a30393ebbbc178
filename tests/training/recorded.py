"""A device whose work can be recorded, on a CPU: a recording is called at every replay."""

import torch

from penstock.training.fused import recording
from penstock.training.worker import Worker


class Called:
    """Stands for a recording: what was to be recorded is called at every replay."""

    def __init__(self, run, written, pool):
        with recording.unchanged(written):
            self.made = run()
        self.run, self.bytes = run, 0

    def replay(self):
        self.made = self.run()

    def timed(self):
        return 1.0


def record(monkeypatch, kind=Called, *, reading=True):
    """Let steps be recorded; ``reading``: Python may read tensors meanwhile, which CUDA forbids."""

    class Strict(kind or Called):
        def __init__(self, *given):
            with monkeypatch.context() as while_recording:
                for name in ("tolist", "item"):
                    while_recording.setattr(torch.Tensor, name, lambda tensor: 1 / 0, raising=False)
                super().__init__(*given)

    monkeypatch.setattr(recording, "Recording", kind if reading else Strict)
    monkeypatch.setattr(recording, "records", lambda device: True)


def accelerate(monkeypatch, kind=Called, *, reading=True):
    """Let workers believe that they have a device whose work can be recorded."""
    record(monkeypatch, kind, reading=reading)
    monkeypatch.setattr(Worker, "on_gpu", True)
    monkeypatch.setattr(Worker, "synchronize", lambda self: None)
