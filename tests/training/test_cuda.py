"""What only a CUDA device shows: where tensors live, mixed precision with a scaler, and going on from a state."""

import pytest
import torch

import penstock as ps
from penstock.events import Reported, read
from tests.tasks import Blobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPACE = {"lr": ps.loguniform(1e-3, 1)}


def run(task, algorithm, trials=4, **settings):
    study = ps.Study(task, SPACE, metric="loss", mode="min", algorithm=algorithm, trials=trials, **settings)
    return study.run(progress=False)


def curves(result):
    return [[row["loss"] for row in trial.curve] for trial in result.trials]


class Half(Blobs):
    precision = "fp16"
    clip_grad_norm = 1.0


class Brain(Blobs):
    precision = "bf16"


@pytest.mark.parametrize("task", [Blobs(), Half(), Brain()], ids=lambda task: type(task).__name__)
def test_a_trial_that_was_paused_goes_on_as_if_it_had_not_been(task, monkeypatch):
    monkeypatch.setattr("penstock.training.worker.WARM_BYTES", 0)  # from disk
    whole = run(task, ps.Random(budget=4))
    paused = run(task, ps.ASHA(max_budget=4, reduction=2, concurrency=2))
    assert all(t.state in ("finished", "paused") for t in paused.trials)
    assert max(map(len, curves(paused))) == 4
    for some, every in zip(curves(paused), curves(whole), strict=True):
        assert some == every[: len(some)]


def test_data_and_model_are_on_the_device_and_the_best_model_on_the_cpu():
    seen = set()

    class Seen(Blobs):
        def loss(self, model, batch, config):
            seen.update({batch[0].device.type, next(model.parameters()).device.type})
            return super().loss(model, batch, config)

    result = run(Seen(), ps.Random(budget=1))
    assert seen == {"cuda"}
    assert {p.device.type for p in result.best.model().parameters()} == {"cpu"}
    (first, *_) = [e for e in read(result.dir / "log.jsonl") if isinstance(e, Reported)]
    assert first.usage.peak_bytes > 0


def test_donors_states_are_taken_over_on_the_device():
    result = run(Half(), ps.PBT(population=4, max_budget=4, interval=1), trials=None)
    assert [t.state for t in result.trials] == ["finished"] * 4


def test_more_workers_than_devices_are_refused():
    study = ps.Study(Blobs(), SPACE, metric="loss", mode="min", algorithm=ps.Random(budget=1), trials=1)
    with pytest.raises(ps.StudyError, match=r"workers=99 needs as many devices, and this machine has \d+"):
        study.run(workers=99, progress=False)
