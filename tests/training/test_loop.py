"""The training loop: one trial on one device."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.seeds import key, step_key
from penstock.training.checkpoint import load, save
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.training.random.keyed import CALLS
from penstock.training.random.masks import base, halves, keep
from tests.tasks import Augmented, Blobs, Noisy, blobs

CPU = torch.device("cpu")
CONFIG = {"lr": 0.05}


def training(task, config=CONFIG, trial=3, seed=5, metric="loss", mode="min"):
    data = DataCache(task, seed, CPU).get(config)
    return Training(task, trial, config, data, seed=seed, device=CPU, metric=metric, mode=mode)


def take(run, steps):
    """Train some steps; the reports among them."""
    return [metrics for _, metrics in zip(range(steps), run.steps(), strict=False) if metrics is not None]


def curve(run, until):
    rows = []
    for metrics in run.steps():
        if metrics is not None:
            rows.append(metrics)
            if run.unit == until:
                return rows
    raise AssertionError("training ended")


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def test_equals_the_same_loop_written_by_hand():
    x, y = blobs()
    torch.manual_seed(key(5, "weights", 3))
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Identity(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    step, rows = 0, []
    for epoch in range(3):
        order = torch.randperm(90, generator=torch.Generator().manual_seed(key(5, "order", epoch)))
        model.train()
        for rows_of_batch in order.split(16):
            optimizer.zero_grad()
            hidden = model[:3](x[rows_of_batch])
            kept = keep(base(hidden.shape, CPU), *halves(step_key(key(5, "trial", 3), step)), 0, 0.3)
            F.cross_entropy(model[4](hidden * (kept * (1 / 0.7))), y[rows_of_batch]).backward()
            optimizer.step()
            scheduler.step()
            step += 1
        model.eval()
        with torch.no_grad():
            rows.append(F.cross_entropy(model(x[90:]), y[90:]).item())
    run = training(Blobs())
    assert [row["loss"] for row in curve(run, 3)] == pytest.approx(rows, rel=1e-6)
    assert same(run.model.state_dict(), model.state_dict())
    assert step == 18  # 90 rows in batches of 16: the last, shorter batch is kept


def test_every_step_is_a_place_to_stop():
    whole = training(Noisy())
    rows = curve(whole, 2)
    for stop in range(1, 13):
        first = training(Noisy())
        before = take(first, stop)
        state = first.state()
        second = training(Noisy())
        second.restore(state, inherited=False)
        after = curve(second, 2) if second.unit < 2 else []
        assert before + after == rows, stop
        assert same(second.state()["model"], whole.state()["model"]), stop


def test_the_batch_size_only_cuts_the_order():
    data = DataCache(Blobs(), 0, CPU).get(CONFIG)
    whole = torch.cat([x for x, _ in data.train.batches(2, 0, 90)])
    assert torch.equal(torch.cat([x for x, _ in data.train.batches(2, 0, 16)]), whole)
    assert torch.equal(torch.cat([x for x, _ in data.train.batches(2, 32, 7)]), whole[32:])
    assert not torch.equal(torch.cat([x for x, _ in data.train.batches(3, 0, 90)]), whole)


def test_weights_depend_on_seed_and_number_alone():
    assert same(training(Blobs()).model.state_dict(), training(Blobs(), config={"lr": 1.0}).model.state_dict())
    assert not same(training(Blobs()).model.state_dict(), training(Blobs(), trial=4).model.state_dict())
    assert not same(training(Blobs()).model.state_dict(), training(Blobs(), seed=6).model.state_dict())


def test_dropout_is_keyed_by_trial_and_step():
    run = training(Blobs())
    masks = []
    run.model[3].register_forward_hook(lambda _, args, out: masks.append(out == 0) if run.model.training else None)
    curve(run, 1)
    again = training(Blobs())
    again.restore(deepcopy(run.state()), inherited=False)
    torch.rand(1000)  # whatever else draws from the generator moves nothing
    masks_again = []
    again.model[3].register_forward_hook(
        lambda _, args, out: masks_again.append(out == 0) if again.model.training else None
    )
    curve(run, 2)
    curve(again, 2)
    assert same(masks[6:], masks_again)


class Watched(Blobs):
    """Functional dropout in loss and metrics, whose masks it keeps."""

    def model(self, config):
        return nn.Linear(6, 2)

    def loss(self, model, batch, config):
        self.drawn = [*getattr(self, "drawn", []), F.dropout(torch.ones(50), 0.5)]
        return super().loss(model, batch, config)

    def metrics(self, model, batch, config):
        self.measured = [*getattr(self, "measured", []), F.dropout(torch.ones(50), 0.5)]
        return super().metrics(model, batch, config)


def by_hand(seed, step, call=0):
    return keep(base((50,), CPU), *halves(step_key(seed, step)), call, 0.5) * 2.0


def test_functional_dropout_is_keyed_too_in_a_stream_of_its_own_for_metrics():
    run = training(task := Watched())
    curve(run, 2)
    seed = key(5, "trial", 3)
    assert same(task.drawn, [by_hand(seed, step) for step in range(12)])
    batches = 5  # 30 rows in batches of 7
    calls = [batch * CALLS for batch in range(batches)]  # whoever has a batch draws the same for it
    assert same(task.measured, [by_hand(seed ^ 1, step, call) for step in (6, 12) for call in calls])
    assert run.randomness.used
    assert run.eval_randomness.used


def test_every_evaluation_of_a_closure_draws_the_same():
    class Quasi(Watched):
        batch_size = 90

        def optimizer(self, params, config):
            return torch.optim.LBFGS(params, max_iter=4)

        def scheduler(self, optimizer, config):
            return None

    run = training(task := Quasi())
    take(run, 2)
    drawn = torch.stack(task.drawn)
    assert len(drawn) > 4
    assert len(drawn.unique(dim=0)) == 2  # one of each step


def test_what_the_forward_drew_is_there_to_be_read():
    class Rand(Blobs):
        def loss(self, model, batch, config):
            return super().loss(model, batch, config) * (1 + 0.1 * torch.rand(()))

    run = training(Blobs())
    take(run, 3)
    assert (run.randomness.used, run.randomness.unkeyed, run.randomness.needed) == (True, [], False)
    run = training(Rand())
    assert run.randomness.unkeyed == []
    rows = curve(run, 2)
    assert (run.randomness.used, run.randomness.unkeyed, run.randomness.needed) == (True, [], True)
    assert run.eval_randomness.unkeyed == []
    assert curve(training(Rand()), 2) == rows


def test_random_samples_of_a_dataset_are_no_draws_of_the_metrics():
    run = training(Augmented())
    curve(run, 1)
    assert run.randomness.unkeyed == []
    assert run.eval_randomness.unkeyed == []


class Whole(Blobs):
    def model(self, config):  # without BatchNorm, whose running statistics a recomputed forward moves twice
        return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 2))


class Recomputed(Whole):
    def loss(self, model, batch, config):
        x, y = batch
        return F.cross_entropy(model[4](checkpoint(model[:4], x, use_reentrant=False)), y)


def test_activation_checkpointing_changes_nothing():
    run, whole = training(Recomputed()), training(Whole())
    assert curve(run, 2) == curve(whole, 2)
    assert (run.randomness.recomputed, whole.randomness.recomputed) == (True, False)


class Attends(Blobs):
    """Attention with dropout, whose forward differs a little under a mode in evaluation."""

    def model(self, config):
        encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)
        return nn.Sequential(nn.Unflatten(1, (1, 6)), encoder, nn.Flatten(), nn.Dropout1d(0.1), nn.Linear(6, 2))


def test_a_transformer_is_keyed_and_goes_on_with_the_same_bits():
    run = training(Attends())
    rows = curve(run, 3)
    assert (run.randomness.unkeyed, run.randomness.needed, run.eval_randomness.needed) == ([], True, True)
    first = training(Attends())
    before = take(first, 9)
    second = training(Attends())
    second.restore(first.state(), inherited=False)
    torch.rand(100)
    assert before + curve(second, 3) == rows


def test_batch_size_comes_from_the_config_before_the_task():
    run = training(Blobs(), config={"lr": 0.05, "batch_size": 30})
    curve(run, 1)
    assert run.step == 3


@pytest.mark.parametrize(
    ("size", "said"), [(91, "above its 90 training samples"), (0, "above 0, got 0"), (1.5, "got 1.5")]
)
def test_a_batch_size_that_cannot_be(size, said):
    with pytest.raises(ps.TaskError, match=said):
        training(Blobs(), config={"lr": 0.1, "batch_size": size})


def test_a_unit_may_be_a_number_of_steps():
    class Steps(Blobs):
        unit_steps = 4

    run = training(Steps())
    rows = curve(run, 5)  # 20 steps over 18 an epoch: a unit that spans two epochs
    assert (run.step, run.epoch, run.place, len(rows)) == (20, 3, 32, 5)


def test_plateau_receives_the_studys_metric():
    class Plateau(Blobs):
        def scheduler(self, optimizer, config):
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)

    run = training(Plateau(), metric="accuracy", mode="max")
    rows = curve(run, 4)
    assert run.scheduler.best == max(row["accuracy"] for row in rows)


def test_gradients_are_clipped():
    class Clipped(Blobs):
        clip_grad_norm = 1e-3

        def optimizer(self, params, config):
            return torch.optim.SGD(params, lr=1.0)

        def scheduler(self, optimizer, config):
            return None

    run = training(Clipped())
    before = {k: v.clone() for k, v in run.model.named_parameters()}
    next(run.steps())
    moved = torch.cat([(v - before[k]).detach().flatten() for k, v in run.model.named_parameters()])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_mixed_precision_runs_the_forward_in_bfloat16():
    kinds = set()

    class Mixed(Blobs):
        precision = "bf16"

        def loss(self, model, batch, config):
            x, y = batch
            logits = model(x)
            kinds.add(logits.dtype)
            return F.cross_entropy(logits, y)

    run = training(Mixed())
    curve(run, 1)
    assert kinds == {torch.bfloat16}
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_an_optimizer_that_needs_a_closure():
    class Quasi(Blobs):
        batch_size = 90

        def model(self, config):
            return nn.Linear(6, 2)

        def optimizer(self, params, config):
            return torch.optim.LBFGS(params, max_iter=5)

        def scheduler(self, optimizer, config):
            return None

    run = training(Quasi())
    untrained = run.evaluate()
    assert curve(run, 1)[0]["loss"] < untrained["loss"]


def test_the_best_weights_are_those_that_were_measured():
    run = training(Blobs(), config={"lr": 1.0})
    rows = curve(run, 8)
    best = min(range(8), key=lambda i: rows[i]["loss"])
    assert best < 7, "the last unit must not be the best for this test to say anything"
    state = run.state()
    run.model.load_state_dict(state["best"]["model"])
    assert run.evaluate() == rows[best]
    assert state["best"]["unit"] == best + 1


def test_a_donors_state_takes_over_per_parameter_state_alone(tmp_path):
    donor = training(Blobs(), config={"lr": 0.5, "momentum": 0.5})
    curve(donor, 2)
    ref = save(donor.state(), tmp_path, "donor.pt")
    heir = training(Blobs(), config={"lr": 0.01, "momentum": 0.8}, trial=9)
    heir.restore(load(tmp_path, ref), inherited=True)
    assert same(heir.model.state_dict(), donor.model.state_dict())
    assert same(heir.optimizer.state_dict()["state"], donor.optimizer.state_dict()["state"])
    assert heir.optimizer.param_groups[0]["momentum"] == 0.8
    assert heir.optimizer.param_groups[0]["lr"] == 0.01
    assert (heir.unit, heir.step, heir.epoch) == (2, 12, 2)
    assert heir.best_unit == 0


def test_nan_in_the_loss_is_a_metric_and_not_an_error():
    class Diverges(Blobs):
        def loss(self, model, batch, config):
            return super().loss(model, batch, config) * float("nan")

    (row,) = curve(training(Diverges()), 1)
    assert row["loss"] != row["loss"]
