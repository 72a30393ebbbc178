"""The dry batch: what a task does wrong, said before any training."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from tests.tasks import Blobs


def run(task, **settings):
    settings = {"metric": "loss", "mode": "min", **settings}
    study = ps.Study(task, {"lr": ps.uniform(0, 1)}, algorithm=ps.Random(budget=1), trials=2, **settings)
    return study.run(progress=False)


def broken(**methods):
    return type("Broken", (Blobs,), methods)()


BAD = [
    (
        dict(loss=lambda s, m, b, c: F.cross_entropy(m(b[0]), b[1], reduction="none")),
        r"scalar tensor that depends on the model's parameters, got a Tensor of shape \(16,\): take its mean or sum",
    ),
    (
        dict(loss=lambda s, m, b, c: 0.5),
        "scalar tensor that depends on the model's parameters, got a float: take its mean or sum",
    ),
    (dict(loss=lambda s, m, b, c: None), "depends on the model's parameters, got None: take its mean or sum"),
    (dict(loss=lambda s, m, b, c: {"loss": 1}), "depends on the model's parameters, got a dict: take its mean or sum"),
    (dict(loss=lambda s, m, b, c: m(b[0]).detach().sum()), "does not depend on the model's parameters"),
    (dict(loss=lambda s, m, b, c: nn.Linear(6, 1)(b[0]).sum()), "does not depend on the model's parameters"),
    (
        dict(optimizer=lambda s, p, c: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
        "holds none of the model's parameters",
    ),
    (dict(optimizer=lambda s, p, c: "sgd"), "must return a torch optimizer, got a str: return one of the params"),
    (
        dict(optimizer=lambda s, p, c: None),
        r"optimizer, got None: return one of the params that it is given, such as torch.optim.SGD\(params, lr=0.1\)",
    ),
    (dict(model=lambda s, c: nn.ReLU()), "module without parameters|empty parameter list"),
    (dict(metrics=lambda s, m, b, c: {"loss": m(b[0])}), r"scalars, got a Tensor of shape \(7, 2\) for 'loss': take"),
    (dict(metrics=lambda s, m, b, c: {"loss": None}), "must return scalars, got None for 'loss': take its mean"),
    (dict(metrics=lambda s, m, b, c: 3.0), "must return a dict of scalars, got 3.0"),
    (
        dict(scheduler=lambda s, o, c: torch.optim.lr_scheduler.ReduceLROnPlateau(o, mode="max")),
        "mode='max', but the study's metric 'loss'",
    ),
    (dict(scheduler=lambda s, o, c: (None, "often")), 'must return a scheduler, .scheduler, "step"'),
    (dict(scheduler=lambda s, o, c: 3), "must return a torch scheduler or None, got int"),
    (dict(precision="fp8"), '"fp32", "bf16" or "fp16", got \'fp8\''),
    (dict(batch_size=1000), "is 1000, above its 90 training samples"),
]


@pytest.mark.parametrize(("methods", "said"), BAD)
def test_one_message_before_any_training_and_nothing_in_the_log(methods, said, tmp_path):
    with pytest.raises((ps.TaskError, ValueError), match=said):
        run(broken(**methods), dir=tmp_path / "studies")
    assert not list((tmp_path / "studies").glob("*/log.jsonl"))


def test_a_metric_that_the_task_never_reports():
    with pytest.raises(ps.StudyError, match="metric 'acc' is not reported by the task, which reports loss, accuracy"):
        run(Blobs(), metric="acc")


@pytest.mark.parametrize("missing", ["data", "model", "optimizer", "loss"])
def test_a_task_that_lacks_a_method_says_which(missing):
    with pytest.raises(ps.TaskError, match=rf"Broken must define {missing}\("):
        run(broken(**{missing: getattr(ps.Task, missing)}))


def test_a_state_that_no_checkpoint_can_hold():
    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self):
            return {"thing": object()}

    with pytest.raises(ps.TaskError, match="The scheduler state of Broken cannot be kept in a checkpoint"):
        run(broken(scheduler=lambda s, o, c: Odd(o, lambda e: 1.0)))


def test_the_dry_batch_leaves_no_mark_on_the_trial():
    seen = []

    class Seen(Blobs):
        def model(self, config):
            torch.rand(len(seen))  # draws from the generator, differently each time
            seen.append(config)
            return super().model(config)

    first = run(Seen())
    assert len(seen) >= 3
    assert first.trials[0].curve


def test_an_error_of_every_config_is_said_at_once_with_its_traceback(tmp_path):
    with pytest.raises(
        ps.TaskError, match=r"(?s)dry batch of each of the first 2 configs. With .*NameError: name 'typo'"
    ):
        run(broken(loss=lambda s, m, b, c: typo), dir=tmp_path)  # noqa: F821
    assert not list(tmp_path.iterdir())


def test_an_error_of_one_config_is_its_trials_alone():
    class Picky(Blobs):
        def loss(self, model, batch, config):
            if config["lr"] > 0.5:
                raise RuntimeError("too fast")
            return super().loss(model, batch, config)

    study = ps.Study(Picky(), {"lr": ps.grid([0.9, 0.1])}, metric="loss", mode="min", algorithm=ps.Grid(budget=1))
    assert [t.state for t in study.run(progress=False).trials] == ["failed", "finished"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="half precision trains on a CUDA device")
def test_half_precision_is_refused_on_a_cpu():
    with pytest.raises(ps.TaskError, match='precision is "fp16", which a CPU does not train: use "bf16" or "fp32"'):
        run(broken(precision="fp16"))


def test_a_task_whose_gradients_are_sparse_is_described():
    class Sparse(Blobs):
        def data(self, config):
            return tuple(((10 * x.abs()).long().clamp(max=49), y) for x, y in super().data(config))

        def model(self, config):
            return nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(24, 2))

        def optimizer(self, params, config):
            return torch.optim.SGD(params, lr=config["lr"])

    assert len(run(Sparse()).best.curve) == 1


def test_a_task_that_checkpoints_in_the_old_style_trains():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.last(torch.utils.checkpoint.checkpoint(self.body, self.first(x), use_reentrant=True))

    assert len(run(broken(model=lambda self, config: Checkpointed())).best.curve) == 1


def test_what_else_modules_save_is_in_a_trials_states():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(6, 2)
            self.count = 0

        def forward(self, x):
            self.count += self.training
            return super().forward(x)

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    result = run(broken(model=lambda self, config: Counting()))
    assert result.best.model().count > 0
