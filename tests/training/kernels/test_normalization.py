"""BatchNorm by kernels: against torch's own in float64, with residuals and activations, and inside a network."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
from penstock.training.fused.operators.kept import Kept, keep, waiting
from penstock.training.fused.per_trial import PerTrial
from penstock.training.fused.stacked import Stacked
from penstock.training.fused.ways import Native
from penstock.training.kernels import weighing
from penstock.training.kernels.choice import kernels
from penstock.training.kernels.moments import PARTS, SUMMING, moments, moments_twin, parts
from penstock.training.kernels.normalization import ACTIVATIONS, batch_norm, reduce, reduce_twin
from tests.training.kernels.poisoned import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTS = {0: lambda z: z, ACTIVATIONS["relu"]: F.relu, ACTIVATIONS["relu6"]: F.relu6}


def plain(y, weight, bias, residual, act):
    """What torch does for each trial."""
    made = []
    for i in range(len(y)):
        z = F.batch_norm(y[i].flatten(0, -2), None, None, weight[i], bias[i], True, 0.1, 1e-5).reshape(y[i].shape)
        made.append(ACTS[act](z if residual is None else z + residual[i]))
    return torch.stack(made)


def images(trials, examples, height, width, channels, far=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(trials, examples, height, width, channels, generator=generator) + far
    weight, bias = (torch.randn(trials, channels, generator=generator) for _ in range(2))
    return [value.to(DEVICE).requires_grad_() for value in (y, weight, bias)]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 3), st.integers(2, 5), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3, 8, 33]),
    st.sampled_from(sorted(ACTS)), st.booleans(), st.sampled_from([0.0, 100.0]), st.integers(0, 99),
)  # fmt: skip
def test_equals_torchs_in_float64(trials, examples, height, width, channels, act, added, far, seed):
    y, weight, bias = images(trials, examples, height, width, channels, far, seed)
    residual = torch.randn(y.shape, device=DEVICE, requires_grad=True) if added else None
    eps = torch.full((trials,), 1e-5, device=DEVICE)
    given = [y, weight, bias] + ([residual] if added else [])
    made, stats = batch_norm(y, weight, bias, eps, residual, act)
    d = torch.randn_like(made)
    ours = (made, *torch.autograd.grad(made, given, d))

    passed = torch.ones_like(made, dtype=torch.bool)
    if act:  # where the kernel's own result lies: at an activation's edge, rounding decides about a whole gradient
        passed = (made > 0) & (made < (6 if ACTS[act] is F.relu6 else torch.inf))

    def by_torch(dtype):
        wide = [value.detach().to(dtype).requires_grad_() for value in given]
        out = plain(*wide[:3], wide[3] if added else None, 0)
        through = torch.where(passed, out, 0)
        return (ACTS[act](out), *torch.autograd.grad(through, wide, d.to(dtype)))

    exact, theirs = by_torch(torch.float64), by_torch(torch.float32)
    rstd = torch.rsqrt(y.detach().flatten(1, -2).var(1, correction=0) + 1e-5)
    terms = float((d * (weight.detach() * rstd)[:, None, None, None]).norm())
    # A mean is a number of float32 too, after two roundings: all values are off by the same, in deviations.
    off = float((2.4e-7 * stats[0].abs() * rstd).max())
    shifted = off * max(terms, float(weight.detach()[:, None, None, None].expand(y.shape).norm()))
    for one, other, true in zip(*(map(torch.detach, made) for made in (ours, theirs, exact)), strict=True):
        # About as far off as torch's own, or by the rounding of what cancels out: of two values, nearly all does.
        rounding = 1e-6 * max(float(true.norm()), terms) + shifted
        assert float((one - true).norm()) <= 4 * float((other - true).norm()) + rounding
    wide = y.detach().double().flatten(1, -2)
    torch.testing.assert_close(stats[0].double(), wide.mean(1), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(stats[1].double(), wide.var(1), rtol=1e-4, atol=1e-7)


def test_moments_far_from_zero_in_many_parts(monkeypatch):
    """A mean ten thousand times the deviation: sums of squares around zero would have nothing left."""
    monkeypatch.setattr("penstock.training.kernels.moments.SUMMING", [SUMMING[0] | {"ELEMENTS": 16}])
    y = (1e4 + torch.randn(2, 3, 7, 5, 3)).to(DEVICE)
    exact = moments_twin(y.double())
    assert float((moments(y)[1].double() / exact[1] - 1).abs().max()) < 1e-3
    torch.testing.assert_close(moments(y)[0].double(), exact[0], rtol=2.4e-7, atol=0)  # two roundings


@pytest.mark.parametrize("shape", [(1, 5, 7, 6, 5), (2, 2, 3, 5, 70)])  # few channels; more channels than a program has
def test_numbers_that_follow_from_the_sums_of_all_parts(shape, monkeypatch):
    for module in ("moments", "normalization"):
        monkeypatch.setattr(f"penstock.training.kernels.{module}.SUMMING", [SUMMING[0] | {"ELEMENTS": 512}])
    trials, *_, channels = shape
    y, d = (torch.randn(shape, device=DEVICE) for _ in range(2))
    given = torch.randn(trials, 3 * channels, device=DEVICE)[:, channels : 2 * channels]  # as a parameter in its row
    each = torch.rand(trials, device=DEVICE)
    numbers = torch.randn(5, trials, channels, device=DEVICE)
    with poisoned():
        back, _ = reduce(d, y, None, numbers, 1)
        every = [moments(y), moments(y, given, None, each), moments(y, None, given, None, 0.3)]
    wide, eps = given.double(), each.double()
    exact = [(), (wide, None, eps), (None, wide, None, 0.3)]
    for found, known in zip(every, exact, strict=True):
        torch.testing.assert_close(found.double(), moments_twin(y.double(), *known), rtol=1e-5, atol=1e-6)
    true = reduce_twin(d.double(), y.double(), None, numbers.double(), 1)[0]
    assert float((back.double() - true).norm()) < 1e-5 * float(true.norm())


def test_a_trial_has_no_more_parts_than_are_combined():
    for blocks in SUMMING:
        grid, own = parts(torch.empty(1, 1024, 64, 64, 64, device="meta"), blocks)
        assert grid[0] <= PARTS < grid[0] * 2
        assert grid[0] * own["EACH"] * own["BR"] >= own["R"]


@pytest.mark.parametrize("added", [False, True])
def test_a_trial_that_diverges_leaves_the_others_bits(added):
    y, weight, bias = images(3, 2, 3, 3, 4)
    residual = torch.randn_like(y).requires_grad_() if added else None
    eps = torch.full((3,), 1e-5, device=DEVICE)

    def everything(y):
        made, _ = batch_norm(y, weight, bias, eps, residual, 1)
        wanted = [y, weight, bias] + ([residual] if added else [])
        return (made, *torch.autograd.grad(made, wanted, torch.ones_like(made)))

    with torch.no_grad():
        sick = y.clone()
        sick[1, 0, 0, 0, 0] = float("nan")
    for well, other in zip(everything(y), everything(sick.requires_grad_()), strict=True):
        assert torch.equal(well[::2], other[::2])
    assert torch.isnan(everything(sick)[0][1]).any()


def test_every_number_is_written_and_two_runs_are_equal():
    y, weight, bias = images(2, 3, 5, 3, 5)
    residual, eps = torch.randn_like(y).requires_grad_(), torch.full((2,), 1e-5, device=DEVICE)
    runs = []
    for _ in range(2):
        with poisoned():
            made, stats = batch_norm(y, weight, bias, eps, residual, 2)
            runs.append((made, stats, *torch.autograd.grad(made.sum(), [y, weight, bias, residual])))
    for one, other in zip(*runs, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


# In a network, where convolutions, BatchNorms and what follows them are the user's own code


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)
        self.conv3, self.bn3 = nn.Conv2d(4, 4, 1, 2), nn.BatchNorm2d(4, affine=False)
        self.deep, self.head = nn.Conv2d(4, 4, 3, 1, 1, groups=4), nn.Linear(4, 2)
        self.relu, self.relu6 = nn.ReLU(inplace=how == "in place"), nn.ReLU6(inplace=how == "in place")

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(x))
        if self.how == "in place":
            out += self.bn3(self.conv3(x))
        elif self.how == "both":  # the normalized images are read with and without what follows
            out = self.relu6(out) + out * self.bn3(self.conv3(x))
        elif self.how == "twice":  # one module keeps the statistics of two batches, in their order
            out = self.bn3(self.conv3(x)) + self.bn3(out * 2)
        elif self.how == "unread":  # and one whose result nobody reads keeps its statistics all the same
            self.bn3(self.conv3(x))
        elif self.how == "statistics":  # they are read and written in the forward, and by a view from before it
            mean, seen = self.bn2.running_mean, self.bn3.running_mean.detach()
            out = out + mean.reshape(-1, 1, 1) + self.bn2.num_batches_tracked
            self.bn3.running_mean.add_(2)
            last = self.bn3(self.conv3(x))
            out = self.bn2(out) + seen.reshape(-1, 1, 1) + self.bn2.running_var.sum() + last
        elif self.how == "doubled":  # it is added to itself, and counted once
            out = out + out
        elif self.how == "looked at":  # a convolution that takes no gradients, of images that do
            with torch.no_grad():
                seen = self.conv3(x).mean()
            x = x * (1 + seen)
            out = out + self.conv2(x)
        else:
            out = self.bn3(self.conv3(x)) + out
        out = self.relu6(out)
        return self.head(self.deep(out).mean((2, 3)))


HOW = ["plain", "in place", "both", "twice", "unread", "doubled", "looked at", "statistics", "numbers"]


@pytest.mark.parametrize("how", HOW)
def test_a_network_is_what_it_is_without_kernels(how):
    torch.manual_seed(0)
    models = [Block(how).to(DEVICE) for _ in range(2)]
    for model in models:
        model.bn1.momentum = None if how == "numbers" else 0.1  # the average of all batches
    x, y = torch.randn(3, 3, 5, 4, device=DEVICE), torch.randn(3, 2, device=DEVICE)

    def loss(model, batch, config):
        return (model(batch[0]) - batch[1]).square().mean()

    def step(wanted):
        params = {name: torch.stack([dict(m.named_parameters())[name].detach() for m in models]).requires_grad_()
                  for name, _ in models[0].named_parameters()}  # fmt: skip
        buffers = {name: torch.stack([dict(m.named_buffers())[name] for m in models])
                   for name, _ in models[0].named_buffers()}  # fmt: skip
        way = Native(copy.deepcopy(models[0]), {})
        way.train()
        for name, values in {"momentum": (0.1, 0.5), "eps": (1e-3, 1e-1)}.items() if how == "numbers" else ():
            number = PerTrial(name, values)
            number.give(Stacked(torch.tensor(values, dtype=torch.float64, device=DEVICE)))
            setattr(way.template.bn2, name, number)
        with kernels(wanted):
            losses = way.run(loss, params, buffers, (x, y), True, None, [])
            grads = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
        return losses, dict(zip(params, grads, strict=True)), buffers

    (losses, grads, buffers), (own, ours, kept) = step(False), step(True)
    torch.testing.assert_close(own, losses, rtol=1e-5, atol=1e-6)
    whole = sum(float(g.square().sum()) for g in grads.values() if g is not None) ** 0.5
    for name, grad in grads.items():
        assert (grad is None) == (ours[name] is None), name
        if grad is not None:
            assert float((grad - ours[name]).norm()) < 1e-5 * whole, name
    for name, stat in buffers.items():
        torch.testing.assert_close(kept[name], stat, rtol=1e-5, atol=1e-6)


def test_the_statistics_of_all_layers_are_written_together():
    ran = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    model = Block("plain").to(DEVICE)
    params = {name: torch.stack([p.detach()] * 2).requires_grad_() for name, p in model.named_parameters()}
    buffers = {name: torch.stack([value] * 2) for name, value in model.named_buffers()}
    way = Native(model, {})
    way.train()
    with kernels(True), Noting():
        way.run(lambda model, x, config: model(x).mean(), params, buffers, torch.ones(2, 3, 5, 4), True, None, [])
    together = ["aten._foreach_add_.Scalar"] + ["aten._foreach_mul_.Scalar", "aten._foreach_add_.List"] * 2  # momenta
    assert [name for name in ran if name.startswith("aten._foreach")] == together
    assert not {"aten.add_.Tensor", "aten.copy_.default", "aten.new_ones.default", "aten.zeros_like.default"} & {*ran}


def test_statistics_of_another_type_are_rounded_as_one_by_one():
    before, new = torch.rand(2, 50).half(), torch.rand(2, 50)
    with waiting():
        stat = Kept(before.clone())
        keep(stat, new, 0.3)
    assert torch.equal(stat.whole, before * (1 - 0.3) + new.half() * 0.3)


def test_nothing_that_waits_is_written_where_the_forward_fails():
    model = nn.BatchNorm2d(3).to(DEVICE)
    buffers = {name: torch.stack([value] * 2) for name, value in model.named_buffers()}
    params = {name: torch.stack([p.detach()] * 2).requires_grad_() for name, p in model.named_parameters()}
    before = {name: value.clone() for name, value in buffers.items()}
    way = Native(model, {})
    way.train()

    def loss(model, batch, config):
        made = model(batch * model.weight.reshape(-1, 1, 1)).sum()
        if config:
            raise ValueError
        return made

    for way.config in ({"fails": True}, {}):
        with kernels(True), suppress(ValueError):
            way.run(loss, params, buffers, torch.randn(2, 3, 2, 2, device=DEVICE), True, None, [])
        assert all(torch.equal(buffers[name], value) for name, value in before.items()) is bool(way.config)
    assert buffers["num_batches_tracked"].tolist() == [1, 1]


def test_the_gradient_of_a_residual_is_added_by_the_convolutions_kernel(monkeypatch):
    """Of images that a convolution and a residual both read, as in every block of a ResNet."""
    added = []
    real = weighing.convolve
    monkeypatch.setattr(weighing, "convolve", lambda *given: added.append(given[3] is not None) or real(*given))
    model = nn.Conv2d(2, 2, 3, padding=1, device=DEVICE)
    params = {name: torch.stack([p.detach()] * 2).requires_grad_() for name, p in model.named_parameters()}
    way = Native(model, {})
    way.train()

    def loss(model, batch, config):
        x = model(batch)
        return (model(x) + x).square().mean()

    with kernels(True):
        losses = way.run(loss, params, {}, torch.randn(2, 2, 4, 4, device=DEVICE), True, None, [])
    torch.autograd.grad(losses.sum(), list(params.values()))
    assert added == [False, False, True]  # twice there, and back to what was added


def test_what_a_convolution_reads_of_a_batch_norm_is_made_again_and_not_kept():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
    ).to(DEVICE)
    params = {name: torch.stack([p.detach()] * 2).requires_grad_() for name, p in model.named_parameters()}
    buffers = {name: value.expand(2, *value.shape).clone() for name, value in model.named_buffers()}
    kept = []
    way = Native(model, {})
    way.train()

    def loss(model, batch, config):
        return model(batch).square().mean()

    with kernels(True), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        losses = way.run(loss, params, buffers, torch.randn(2, 2, 4, 5, device=DEVICE), True, None, [])
    images = {value.data_ptr() for value in kept if value.shape == (2, 2, 4, 5, 3)}
    assert len(images) == 2  # what both convolutions make
    assert all(g.isfinite().all() for g in torch.autograd.grad(losses.sum(), list(params.values())))


def test_what_changes_its_input_in_place_is_refused():
    torch.manual_seed(0)
    model = nn.BatchNorm2d(3).to(DEVICE)

    def loss(model, batch, config):
        x = batch[0] * model.weight.reshape(-1, 1, 1)
        out = model(x)
        x.add_(1)  # before anybody has read what was made of it
        return out.mean()

    way = Native(model, {})
    way.train()
    params = {name: value.detach().expand(2, -1).clone().requires_grad_() for name, value in model.named_parameters()}
    buffers = {name: value.expand(2, *value.shape).clone() for name, value in model.named_buffers()}
    with kernels(True), pytest.raises(Exception, match="in place"):
        way.run(loss, params, buffers, (torch.randn(2, 3, 2, 2, device=DEVICE),), True, None, [])
