"""A device whose work can be recorded, on a CPU: a recording is called at every replay."""

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


def record(monkeypatch, kind=Called):
    """Let steps be recorded."""
    monkeypatch.setattr(recording, "Recording", kind)
    monkeypatch.setattr(recording, "records", lambda device: True)


def accelerate(monkeypatch, kind=Called):
    """Let workers believe that they have a device whose work can be recorded."""
    record(monkeypatch, kind)
    monkeypatch.setattr(Worker, "on_gpu", True)
    monkeypatch.setattr(Worker, "synchronize", lambda self: None)
