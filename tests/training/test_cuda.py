"""What only a CUDA device shows: where tensors live, mixed precision with a scaler, and going on from a state."""

import gc
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import penstock as ps
from penstock.log.events import Measured, Reported
from penstock.log.reader import read
from penstock.training.copying import brought
from penstock.training.fused import artifacts
from penstock.training.fused.compiled import CapturedStep
from penstock.training.fused.inductor import Inductor, inductor
from penstock.training.fused.recording import Pool, Recording
from penstock.training.fused.speeding import Speeding
from tests.tasks import Blobs
from tests.training.together import Together, Trials, farthest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPACE = {"lr": ps.loguniform(1e-3, 1)}


def run(task, algorithm, trials=4, sharing="solo", **settings):
    study = ps.Study(task, SPACE, metric="loss", mode="min", algorithm=algorithm, trials=trials, **settings)
    return study.run(progress=False, sharing=sharing)


def curves(result):
    return [[row["loss"] for row in trial.curve] for trial in result.trials]


class Half(Blobs):
    precision = "fp16"
    clip_grad_norm = 1.0


class Brain(Blobs):
    precision = "bf16"


@pytest.mark.parametrize("task", [Blobs(), Half(), Brain()], ids=lambda task: type(task).__name__)
def test_a_trial_that_was_paused_goes_on_as_if_it_had_not_been(task, monkeypatch):
    monkeypatch.setattr("penstock.training.trials.WARM_BYTES", 0)  # from disk
    whole = run(task, ps.Random(budget=4))
    paused = run(task, ps.ASHA(max_budget=4, reduction=2, concurrency=2))
    assert all(t.state in ("finished", "stopped") for t in paused.trials)
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


def test_trials_in_processes_find_what_they_find_alone_under_mps_where_it_starts():
    alone = run(Blobs(), ps.Random(budget=3), name="alone")
    with warnings.catch_warnings(record=True) as told:
        result = run(Blobs(), ps.Random(budget=3, concurrency=4), sharing="processes", name="processes")
    (said,) = [event.reason for event in read(result.dir / "log.jsonl") if isinstance(event, Measured)]
    assert said == "MPS runs their kernels side by side" or any("take turns" in str(one.message) for one in told)
    for one, other in zip(curves(result), curves(alone), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_more_workers_than_devices_are_refused():
    study = ps.Study(Blobs(), SPACE, metric="loss", mode="min", algorithm=ps.Random(budget=1), trials=1)
    with pytest.raises(ps.StudyError, match=r"workers=99 needs as many devices, and this machine has \d+"):
        study.run(workers=99, progress=False)


class Net(ps.Task):
    """Convolutions, normalization, dropout and attention, in float64."""

    batch_size, eval_batch_size = 16, 16

    def data(self, config):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(40, 3, 8, 8, generator=generator).double(), torch.randint(3, (40,), generator=generator)
        return (x[:32], y[:32]), (x[32:], y[32:])

    def model(self, config):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 8, 1), nn.MaxPool2d(2), nn.Flatten(2),
            nn.TransformerEncoderLayer(4, 2, 8, dropout=config["dropout"], batch_first=True), nn.Flatten(),
            nn.Dropout(config["dropout"]), nn.Linear(32, 3),
        ).double()  # fmt: skip

    def optimizer(self, params, config):
        return torch.optim.AdamW(params, lr=config["lr"])

    def loss(self, model, batch, config):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


FUSED = {"lr": ps.loguniform(1e-4, 1e-2), "dropout": ps.uniform(0, 0.5)}


class Narrowing(Blobs):
    """Layers that grow narrower: backward needs larger pieces of memory than those that it has just given back."""

    batch_size = 8192

    def data(self, config):
        x, y = torch.randn(8192, 6), torch.randint(2, (8192,))
        return (x, y), (x[:8], y[:8])

    def model(self, config):
        widths = [6, 512, 384, 256, 192, 128, 96]
        return nn.Sequential(
            *(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())), nn.Linear(96, 2)
        )


def held():
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_a_captured_step_holds_what_it_uses_and_nothing_of_it_stays():
    trials = Trials(Narrowing(), device=torch.device("cuda"))
    fused = Together().enter(*(trials.make(n, {"lr": 0.1}) for n in range(4))).step().step().fused

    def captured():
        fused.speeding.wanted = "captured"
        fused.step()
        assert not fused.recipe.refusals
        return held(), fused.fast.bytes

    captured()
    fused.fast.clear()
    before = held()  # with what libraries keep for themselves from the first on
    after, taken = captured()
    assert taken > 2**27
    assert after - before <= 1.1 * taken
    fused.fast.clear()
    assert held() == before


def test_after_work_that_cannot_be_recorded_all_else_is_as_before():
    x, pool = torch.ones(4, device="cuda"), Pool()
    torch.randn(1, device="cuda")  # its generator is there from the first draw on
    for _ in range(2):
        with pytest.raises(RuntimeError):
            Recording(lambda: (x * 2).sum().item(), [], pool)
        torch.randn(1, device="cuda")
    recorded = Recording(lambda: x * 2, [], pool)
    x.fill_(3)
    recorded.replay()
    assert torch.equal(recorded.made, torch.full_like(x, 6))


def test_garbage_is_not_collected_within_a_recording():
    """An older recording that is garbage would be freed there, which CUDA forbids."""
    x = torch.ones(4, device="cuda")
    held = [Recording(lambda: x * 3, [], Pool())]
    held[0].itself = held[0]

    def run():
        if torch.cuda.is_current_stream_capturing():
            held.clear()
            if gc.isenabled():  # and so might do it at any moment
                gc.collect()
        return x * 2

    recorded = Recording(run, [], Pool())
    x.fill_(3)
    recorded.replay()
    assert torch.equal(recorded.made, torch.full_like(x, 6))


def test_tensors_are_brought_to_the_host_as_they_are_each_with_memory_of_its_own():
    tree = {"a": torch.randn(3, 2), "b": [torch.tensor(7), torch.randn(()), torch.empty(0)], "c": "text"}
    there = tree_map(lambda one: one.cuda() if isinstance(one, torch.Tensor) else one, tree)
    back = brought(there)
    assert torch.equal(back["a"], tree["a"])
    assert all(map(torch.equal, back["b"], tree["b"]))
    assert back["c"] == "text"
    assert back["a"].untyped_storage().nbytes() == 24


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Compiled steps are taken whatever they save, from an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(CapturedStep, "seconds", lambda step, inputs: 1.0 if step.compiled else 2.0)
    monkeypatch.setattr(Inductor, "prepared", lambda self: True)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("faster", [None, "captured", "compiled"])
def test_fused_trials_learn_as_they_do_alone(faster, monkeypatch):
    consider, recipes, ready = Speeding.consider, [], Inductor.ready

    def there(self, traced):
        while not ready(self, traced) and self.failed is None:
            self.wait()
        return self.failed is None

    def wish(self, *given, **how):
        consider(self, *given, **how)
        self.wanted = faster
        recipes.append(self.recipe)

    monkeypatch.setattr(Speeding, "consider", wish)
    monkeypatch.setattr(Inductor, "ready", there)
    study = ps.Study(Net(), FUSED, metric="loss", mode="min", algorithm=ps.Random(budget=4), trials=5, name="solo")
    alone = study.run(progress=False, sharing="solo")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ps.SoloWarning)
        fused = study.replace(name="fused").run(progress=False, sharing="fused")
    assert recipes
    assert not any(recipe.refusals for recipe in recipes)
    taken = [one.faster for recipe in recipes for every in recipe.compiles.known.values() for one in every]
    assert any(taken) is (faster == "compiled")
    for one, other in zip(curves(alone), curves(fused), strict=True):
        assert one == pytest.approx(other, rel=1e-7)


@pytest.mark.usefixtures("compiled")
def test_a_captured_step_goes_on_until_the_compiled_one_is_there_and_takes_its_place():
    trials, together = Trials(Net(), device=torch.device("cuda")), Together()
    configs = [{"lr": 0.001 * (n + 1), "dropout": 0.1 * n} for n in range(3)]
    made = [trials.make(number, config) for number, config in enumerate(configs)]
    fused, speed = together.enter(*made).step(2).fused, together.fused.speeding
    speed.meet(made)
    speed.expect(10**9)
    together.step(3)
    assert [step.compiled for step in fused.fast.steps.values()] == [False]
    speed.took(2.0, 1000)
    assert speed.end_unit(10**9, fast=True, by_device=0.002)
    for _ in range(20):  # in which nothing is compiled yet
        together.step(0 if fused.leap(5) else 1)
        together.end_units()
        assert speed.compiles
        assert [step.compiled for step in fused.fast.steps.values()] == [False]
    while speed.compiles and speed.wanted is None:
        inductor().wait()
        speed.look()
    for _ in range(20):
        together.step(0 if fused.leap(5) else 1)
        together.end_units()
    assert [step.compiled for step in fused.fast.steps.values()] == [True]
    assert not together.recipe.refusals
    assert {file.is_file() for file in artifacts.folder().iterdir()} == {True}
    for number, trial in enumerate(made):
        alone, curve = trials.alone(number, configs[number], trial.step)
        assert farthest(fused.state(trial)["model"], alone.state(drawn=False)["model"])[0] < 1e-6
        assert together.curve(trial)[-1]["loss"] == pytest.approx(curve[-1]["loss"], rel=1e-6)


class Smoothed(Blobs):
    batch_size = 8

    def loss(self, model, batch, config):
        smooth = nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=config["lr"] / 2)
        return smooth / (1 + config["lr"])


def test_numbers_of_trials_reach_a_captured_step(monkeypatch):
    def consider(self, certain, pace, *, known=True):
        self._pace, self.wanted = None, "captured"

    monkeypatch.setattr(Speeding, "consider", consider)
    fused = run(Smoothed(), ps.SuccessiveHalving(max_budget=9, reduction=3), trials=9, sharing="fused")
    alone = run(Smoothed(), ps.SuccessiveHalving(max_budget=9, reduction=3), trials=9)
    for one, other in zip(curves(fused), curves(alone), strict=True):
        assert one == pytest.approx(other, rel=1e-3)
