"""What a task does besides computing: whatever it is, a fused study gives the results of a solo one."""

import copy
import random
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.training.data import DataCache
from penstock.training.keeping import look
from penstock.training.loop import Training
from tests.studies import studies
from tests.tasks import blobs
from tests.training.together import farthest

SPACE = {"lr": ps.loguniform(0.01, 0.3), "scale": ps.uniform(0.5, 2.0)}


class Plain(ps.Task):
    """A small network in float64; the data have five batches and a short sixth."""

    batch_size = 16
    eval_batch_size = 40

    def data(self, config):
        x, y = blobs()
        return (x[:90].double(), y[:90]), (x[90:].double(), y[90:])

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def optimizer(self, params, config):
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9)

    def loss(self, model, batch, config):
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch, config):
        return {"loss": F.cross_entropy(model(batch[0]), batch[1])}


study = studies(Plain, SPACE, algorithm=ps.Random(budget=3), trials=4, keep=4)


def run(task, sharing):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.SoloWarning)
        return study(task(), name=f"{task.__name__}-{sharing}").run(progress=False, sharing=sharing)


def same(task, control=None):
    """Whether curves and last states are those of a solo study; gives the fused study's result.

    They agree to 1e-9, or to ten times what rounding does to ``control``, the same task with flipped batches.
    """
    within = 1e-9 if control is None else 10 * rounding(task, control)
    made = {sharing: run(task, sharing) for sharing in ("solo", "fused")}
    for one, other in zip(made["solo"].trials, made["fused"].trials, strict=True):
        assert one.config == other.config
        assert len(one.curve) == len(other.curve) == 3, other.error
        far, where = farthest([other.curve, other.last_state()], [one.curve, one.last_state()])
        assert far <= within, f"trial {one.number} is {far:.2g} from its run alone at {where}"
    return made["fused"]


def rounding(task, control):
    """How far rounding alone takes the states of a task's trials."""
    pairs = zip(run(task, "solo").trials, run(control, "solo").trials, strict=True)
    return max(farthest([a.curve, a.last_state()], [b.curve, b.last_state()])[0] for a, b in pairs)


# What only some batches do


class Sometimes(Plain):
    """A head that only the short last batch of an epoch reaches."""

    def model(self, config):
        return nn.ModuleDict({"body": super().model(config), "late": nn.Linear(6, 2).double()})

    def loss(self, model, batch, config):
        out = model["body"](batch[0])
        return F.cross_entropy(out + model["late"](batch[0]) if self.reached(batch) else out, batch[1])

    def reached(self, batch):
        return len(batch[0]) < 16

    def metrics(self, model, batch, config):
        return {"loss": F.cross_entropy(model["body"](batch[0]) + model["late"](batch[0]), batch[1])}


class SometimesAlike(Sometimes):
    """The same by the values of a batch, so that no shape tells."""

    def reached(self, batch):
        return bool(batch[0][0, 0] > 0.5)


class ReachedLess(SometimesAlike):
    """The head is reached at first, and not by every later batch."""

    def reached(self, batch):
        return bool(batch[0].sum() > -3)


@pytest.mark.parametrize("task", [Sometimes, SometimesAlike, ReachedLess])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_head_that_only_some_batches_reach(task, optimizer):
    class Task(task):
        def optimizer(self, params, config):
            return getattr(torch.optim, optimizer)(params, lr=config["lr"] / 10, weight_decay=0.1)

    same(Task)


class DrawsLate(Plain):
    """Noise that only some batches get."""

    def loss(self, model, batch, config):
        x = batch[0]
        if x[0, 0] > 0.5:
            x = x + 0.1 * torch.randn_like(x)
        return F.cross_entropy(model(x), batch[1])


class DropsLate(Plain):
    def loss(self, model, batch, config):
        x = F.dropout(batch[0], 0.5) if batch[0][0, 0] > 0.5 else batch[0]
        return F.cross_entropy(model(x), batch[1])


class DrawsLateInPython(Plain):
    def loss(self, model, batch, config):
        scale = random.random() if batch[0][0, 0] > 0.5 else 1.0
        return F.cross_entropy(model(batch[0] * scale), batch[1])


@pytest.mark.parametrize("task", [DrawsLate, DropsLate, DrawsLateInPython])
def test_a_draw_that_a_later_batch_makes_first(task):
    same(task)


class ReadsLate(Plain):
    """A value of the config that only some batches need."""

    def loss(self, model, batch, config):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * config["scale"] if batch[0][0, 0] > 0.5 else loss


class ReadsLateInMetrics(Plain):
    eval_batch_size = 20

    def metrics(self, model, batch, config):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss if len(batch[0]) == 20 else loss * config["scale"]}


@pytest.mark.parametrize("task", [ReadsLate, ReadsLateInMetrics])
def test_a_value_of_the_config_that_a_later_batch_reads_first(task):
    same(task)


# What is written in a forward or a loss


class Teacher(Plain):
    """A target network that the loss moves (Mean Teacher, BYOL, the soft target of DQN)."""

    def model(self, config):
        student = super().model(config)
        return nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})

    def loss(self, model, batch, config):
        with torch.no_grad():
            for slow, fast in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                slow.mul_(0.8).add_(fast, alpha=0.2)
        made = model["student"](batch[0])
        return F.cross_entropy(made, batch[1]) + F.mse_loss(made, model["teacher"](batch[0]))

    def metrics(self, model, batch, config):
        return {"loss": F.cross_entropy(model["teacher"](batch[0]), batch[1])}


class TeacherByData(Teacher):
    def loss(self, model, batch, config):
        for slow, fast in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
            slow.data = slow.data * 0.8 + fast.data * 0.2
        made = model["student"](batch[0])
        return F.cross_entropy(made, batch[1]) + F.mse_loss(made, model["teacher"](batch[0]))


class Clamps(Plain):
    """The loss changes trained weights in place."""

    def loss(self, model, batch, config):
        with torch.no_grad():
            model[0].weight.mul_(0.9)
        return super().loss(model, batch, config)


class ClampsLate(Plain):
    def loss(self, model, batch, config):
        if batch[0][0, 0] > 0.5:
            with torch.no_grad():
                model[0].weight.mul_(0.9)
        return super().loss(model, batch, config)


class Assigns(nn.Module):
    """A buffer that the forward assigns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6).double())

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class AssignsBuffer(Plain):
    def model(self, config):
        return nn.Sequential(Assigns(), *super().model(config))


class AssignsFromWeights(Plain):
    """A buffer that differs from trial to trial."""

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 6).double(), Assigns(), *super().model(config))


class CountsSteps(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        return x / (1 + self.steps)


class Counts(Plain):
    def model(self, config):
        return nn.Sequential(CountsSteps(), *super().model(config))


class CountsLate(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        if self.training and x[0, 0] > 0.5:
            self.steps += 1
        return x / (1 + self.steps)


class CountsLater(Plain):
    def model(self, config):
        return nn.Sequential(CountsLate(), *super().model(config))


@pytest.mark.parametrize(
    "task",
    [Teacher, TeacherByData, Clamps, ClampsLate, AssignsBuffer, AssignsFromWeights, Counts, CountsLater],
)
def test_what_a_forward_or_loss_writes(task):
    same(task)


# What is kept outside of the model


class KeepsOnTask(Plain):
    """What ``model`` keeps of the config, on the task."""

    def model(self, config):
        self.scale = config["scale"]
        return super().model(config)

    def loss(self, model, batch, config):
        return self.scale * super().loss(model, batch, config)

    def metrics(self, model, batch, config):
        return {"loss": self.scale * super().metrics(model, batch, config)["loss"]}


class KeepsOnClass(Plain):
    scale = 1.0

    def model(self, config):
        type(self).scale = config["scale"]
        return super().model(config)

    def loss(self, model, batch, config):
        return self.scale * super().loss(model, batch, config)

    def metrics(self, model, batch, config):
        return {"loss": self.scale * super().metrics(model, batch, config)["loss"]}


SCALE = 1.0


class KeepsGlobally(Plain):
    def model(self, config):
        global SCALE
        SCALE = config["scale"]
        return super().model(config)

    def loss(self, model, batch, config):
        return SCALE * super().loss(model, batch, config)

    def metrics(self, model, batch, config):
        return {"loss": SCALE * super().metrics(model, batch, config)["loss"]}


class Scaled(nn.Sequential):
    scale = 1.0


class KeepsOnModel(Plain):
    """On the class of the model."""

    def model(self, config):
        Scaled.scale = config["scale"]
        return Scaled(*super().model(config))

    def loss(self, model, batch, config):
        return model.scale * super().loss(model, batch, config)

    def metrics(self, model, batch, config):
        return {"loss": model.scale * super().metrics(model, batch, config)["loss"]}


class KeepsModule(Plain):
    """A target network that is no part of the model."""

    def model(self, config):
        made = super().model(config)
        self.target = copy.deepcopy(made)
        return made

    def loss(self, model, batch, config):
        made = model(batch[0])
        return F.cross_entropy(made, batch[1]) + F.mse_loss(made, self.target.to(batch[0])(batch[0]).detach())


class Scales(Plain):
    """Loss and metrics have the factor that ``factor`` finds."""

    def factor(self):
        raise NotImplementedError

    def loss(self, model, batch, config):
        return self.factor() * super().loss(model, batch, config)

    def metrics(self, model, batch, config):
        return {"loss": self.factor() * super().metrics(model, batch, config)["loss"]}


class KeepsInDict(Scales):
    def __init__(self):
        self.settings = {"of": {}}

    def model(self, config):
        self.settings["of"]["trial"] = config["scale"]
        return super().model(config)

    def factor(self):
        return self.settings["of"]["trial"]


SCALES = []


class KeepsInList(Scales):
    def model(self, config):
        SCALES.append(config["scale"])
        return super().model(config)

    def factor(self):
        return SCALES[-1]


class Settings:
    scale = 1.0


class KeepsInObject(Scales):
    def __init__(self):
        self.settings = Settings()

    def model(self, config):
        self.settings.scale = config["scale"]
        return super().model(config)

    def factor(self):
        return self.settings.scale


class KeepsOnAnotherClass(Scales):
    def model(self, config):
        Settings.scale = config["scale"]
        return super().model(config)

    def factor(self):
        return Settings.scale


@dataclass(frozen=True)
class Frozen:
    scale: float


class KeepsFrozen(Scales):
    """Settings that cannot be written, made anew for each trial."""

    def model(self, config):
        self.settings = Frozen(config["scale"])
        return super().model(config)

    def factor(self):
        return self.settings.scale


class KeepsInOptimizer(Scales):
    def optimizer(self, params, config):
        self.scale = config["scale"]
        return super().optimizer(params, config)

    def factor(self):
        return self.scale


class KeepsInScheduler(Scales):
    def scheduler(self, optimizer, config):
        self.scale = config["scale"]

    def factor(self):
        return self.scale


class KeepsInData(Scales):
    """What ``data`` keeps, which is called once for all trials that ask for the same data."""

    def data(self, config):
        self.scale = config["scale"]
        return super().data(config)

    def factor(self):
        return self.scale


class Told(Plain):
    """The same as these tasks do, from the config."""

    def loss(self, model, batch, config):
        return config["scale"] * super().loss(model, batch, config)

    def metrics(self, model, batch, config):
        return {"loss": config["scale"] * super().metrics(model, batch, config)["loss"]}


KEEPING = [KeepsOnTask, KeepsOnClass, KeepsGlobally, KeepsOnModel, KeepsInDict, KeepsInList, KeepsInObject,
           KeepsFrozen, KeepsOnAnotherClass, KeepsInOptimizer, KeepsInScheduler, KeepsInData]  # fmt: skip


@pytest.mark.parametrize("task", KEEPING)
@pytest.mark.parametrize("sharing", ["solo", "fused"])
def test_what_a_model_leaves_outside_of_itself_is_its_own_trials(task, sharing):
    right, made = ([trial.curve for trial in run(*how).trials] for how in ((Told, "solo"), (task, sharing)))
    assert farthest(right, made)[0] <= 1e-9


class ByScheduler(Scales):
    """A weight of the loss that a scheduler sets."""

    def scheduler(self, optimizer, config):
        def rate(unit):
            self.scale = 1 / (1 + unit * config["scale"])
            return 1.0

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def factor(self):
        return self.scale


@pytest.mark.parametrize(("task", "looks"), [(KeepsOnTask, False), (KeepsFrozen, False), (ByScheduler, True)])
def test_a_step_looks_at_what_its_task_keeps_only_where_a_scheduler_may_write_there(task, looks, monkeypatch):
    made = task()
    if not looks:
        made.scheduler = lambda optimizer, config: torch.optim.lr_scheduler.StepLR(optimizer, 1)
    device = torch.device("cpu")
    data, config = DataCache(made, 0, device), {"lr": 0.1, "scale": 2.0}
    trial = Training(made, 0, config, data.get(config), seed=0, device=device, metric="loss", mode="min")
    seen = []
    monkeypatch.setattr("penstock.training.keeping.look", lambda task: seen.append(task) or look(task))
    for _ in zip(range(8), trial.steps(), strict=False):
        pass
    assert bool(seen) is looks


class ByOptimizer(Scales):
    """A loss that reads the optimizer's learning rate."""

    def optimizer(self, params, config):
        self.used = super().optimizer(params, config)
        return self.used

    def scheduler(self, optimizer, config):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def factor(self):
        return 1 + self.used.param_groups[0]["lr"]


class Moves(Plain):
    """An object of the task that the loss moves, and reads."""

    def __init__(self):
        self.mean = Mean()

    def loss(self, model, batch, config):
        loss = super().loss(model, batch, config)
        if model.training:
            self.mean.steps += 1
        return loss


class Mean:
    steps = 0

    def __init__(self):
        self.steps = 0


NOTED = []


class Notes(Plain):
    """A list that the loss only adds to."""

    def loss(self, model, batch, config):
        NOTED.append(len(batch[0]))
        return super().loss(model, batch, config)


def test_what_a_loss_writes_inside_of_an_object_is_told_and_what_it_notes_is_no_obstacle():
    with pytest.warns(ps.SoloWarning, match="the loss or the metrics write self.mean.steps, which trials would share"):
        study(Moves(), name="told").run(progress=False, sharing="fused")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ps.SoloWarning)
        study(Notes(), name="noted").run(progress=False, sharing="fused")


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (ByScheduler, "LambdaLR writes self.scale, which the steps of all trials would share: keep it in a buffer"),
        (ByOptimizer, "making a trial leaves a SGD in self.used, which the steps of all trials would share"),
    ],
)
def test_what_a_scheduler_or_optimizer_shares_with_the_loss_is_its_own_trials(task, why):
    same(task)
    with pytest.warns(ps.SoloWarning, match=why):
        study(task(), name="told").run(progress=False, sharing="fused")


class KeepsInside(Plain):
    """The same as a task that keeps a module, as a part of the model."""

    def model(self, config):
        made = super().model(config)
        return nn.ModuleList([made, copy.deepcopy(made).requires_grad_(False)])

    def loss(self, model, batch, config):
        made = model[0](batch[0])
        return F.cross_entropy(made, batch[1]) + F.mse_loss(made, model[1](batch[0]))

    def metrics(self, model, batch, config):
        return {"loss": F.cross_entropy(model[0](batch[0]), batch[1])}


def test_a_module_that_is_left_outside_of_the_model_is_its_own_trials():
    right, made = ([trial.curve for trial in run(task, "fused").trials] for task in (KeepsInside, KeepsModule))
    assert farthest(right, made)[0] <= 1e-9


# Gradients


class Hooked(Plain):
    """Hooks on parameters."""

    def model(self, config):
        made = super().model(config)
        made[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        made[2].weight.register_hook(lambda gradient: gradient * config["scale"])
        return made


class HookedAfterwards(Plain):
    def model(self, config):
        made = super().model(config)

        def freeze(parameter):
            parameter.grad[0] = 0

        made[0].weight.register_post_accumulate_grad_hook(freeze)
        return made


@pytest.mark.parametrize("task", [Hooked, HookedAfterwards])
def test_hooks_on_parameters(task):
    same(task)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Reverses(Plain):
    """A gradient reversal whose first gradient is not finite, in a model that takes nothing but float32."""

    def data(self, config):
        (x, y), valid = super().data(config)
        return (x.float(), y), (valid[0].float(), valid[1])

    def model(self, config):
        return super().model(config).float()

    def loss(self, model, batch, config):
        assert batch[0].dtype == torch.float32
        return F.cross_entropy(model[2](torch.tanh(Reversed.apply(model[0](batch[0])))), batch[1])


class ReversesFlipped(Reverses):
    def loss(self, model, batch, config):
        return super().loss(model, tuple(part.flip(0) for part in batch), config)


class FirstIsNotFinite(Plain):
    """A gradient reversal; the first batch's gradients of some trials are not finite."""

    def loss(self, model, batch, config):
        made = F.cross_entropy(model[2](torch.tanh(Reversed.apply(model[0](batch[0])))), batch[1])
        return made + 0.01 * (model[0].bias[0].detach() * model[0].weight[0, 0]).clamp(min=0).sqrt()


@pytest.mark.parametrize(("task", "control"), [(Reverses, ReversesFlipped), (FirstIsNotFinite, None)])
def test_a_way_is_compared_even_where_that_is_hard(task, control):
    same(task, control)
