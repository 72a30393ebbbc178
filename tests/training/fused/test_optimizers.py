"""Vectorised optimizer steps: every row as torch's own optimizer would have it alone."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from penstock.training.fused.optimizers import VECTORISED, clip_rows, read_numbers, vector_flags

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a division by 0 on the host

SHAPES = [(3, 2), (5,), ()]  # a trial's parameters
N = 12


def _cases():
    """Every optimizer with every combination of its flags; SGD's and RMSprop's momentum is one of them."""
    for optimizer, kind in VECTORISED.items():
        flags = [f for f in kind.flags if not (optimizer is torch.optim.AdamW and f == "decoupled_weight_decay")]
        for values in product([False, True], repeat=len(flags)):
            case = dict(zip(flags, values, strict=True))
            if optimizer is torch.optim.SGD and case["nesterov"] and not case["momentum"]:
                continue  # torch refuses it
            names = [f for f in flags if case[f]]
            yield pytest.param(optimizer, case, id="-".join([optimizer.__name__, *names]))


CASES = list(_cases())
PLAIN = [case for case in CASES if not case.values[1]["maximize"]]
every = pytest.mark.parametrize(("optimizer", "flags"), CASES)
every_plain = pytest.mark.parametrize(("optimizer", "flags"), PLAIN)


def draw(optimizer, flags, rng, **given):
    """Random hyperparameters, as the optimizer's arguments."""
    flags = dict(flags)
    drawn = {"lr": 10 ** rng.uniform(-3, -1), "weight_decay": rng.choice([0.0, rng.uniform(0.01, 0.5)])}
    if "momentum" in flags:
        drawn["momentum"] = rng.uniform(0.1, 0.95) if flags.pop("momentum") else 0.0
    match optimizer.__name__:
        case "SGD":
            drawn["dampening"] = 0.0 if flags["nesterov"] else rng.choice([0.0, rng.uniform(0.1, 0.9)])
        case "Adam" | "AdamW" | "NAdam" | "RAdam":
            # RAdam rectifies no step with 0.6, where its rule would divide by 0, and some with the others.
            drawn["betas"] = (float(rng.uniform(0.5, 0.95)), float(rng.choice([0.6, 0.9, 0.97, 0.9999])))
            if optimizer is torch.optim.NAdam:
                drawn["momentum_decay"] = rng.uniform(0.001, 0.1)
        case "Adagrad":
            drawn |= {"lr_decay": rng.uniform(0, 0.5), "initial_accumulator_value": rng.uniform(0, 0.5)}
        case "RMSprop":
            drawn["alpha"] = rng.uniform(0.5, 0.99)
        case "Adadelta":
            drawn["rho"] = rng.uniform(0.5, 0.99)
    if optimizer is not torch.optim.SGD:
        drawn["eps"] = 10 ** rng.uniform(-8, -2)
    return {k: v if k == "betas" else float(v) for k, v in drawn.items()} | flags | given


class Bundle:
    """Trials stepped at once, with torch's own optimizer for each beside them."""

    def __init__(self, optimizer, arguments, generator, dtype=torch.float64):
        self.optimizer, self.generator, self.dtype = optimizer, generator, dtype
        self.kind, trials = VECTORISED[optimizer], len(arguments)
        self.alone = [None] * trials
        self.step = None
        self.params = torch.empty(trials, N, dtype=dtype)
        self.steps = np.zeros(trials)
        for row, each in enumerate(arguments):
            self.enter(row, each)

    def enter(self, row, arguments):
        """A fresh trial takes a row."""
        shapes = [torch.randn(shape, generator=self.generator, dtype=torch.float64) for shape in SHAPES]
        parameters = [nn.Parameter(p.to(self.dtype)) for p in shapes]
        self.alone[row] = self.optimizer(parameters, **arguments)
        (flags,) = vector_flags(self.alone[row])
        if self.step is None:
            self.flags, self.step = flags, self.kind(dict(flags))
            self.state = {name: torch.empty_like(self.params) for name in self.step.state}
            number = np.float64 if torch.get_default_dtype() == torch.float64 else np.float32
            self.scalars = {name: np.empty(len(self.steps), number) for name in self.step.scalars}
        assert flags == self.flags
        self.params[row] = flat(parameters)
        self.steps[row] = 0
        numbers = dict(zip(self.kind.numbers, read_numbers(self.group(row), self.kind), strict=True))
        for name, tensor in (self.state | self.scalars).items():
            tensor[row] = self.step.initial(name, numbers)

    def group(self, row):
        return self.alone[row].param_groups[0]

    def gradients(self):
        grads = torch.randn(self.params.shape, generator=self.generator, dtype=torch.float64)
        return grads.to(self.dtype)

    def coefficients(self):
        rows = [read_numbers(self.group(row), self.kind) for row in range(len(self.steps))]
        numbers = dict(zip(self.kind.numbers, np.array(rows).T, strict=True))
        return numbers, self.step.coefficients(numbers, self.steps, self.scalars)

    def vectorised(self, grads):
        numbers, rows = self.coefficients()
        c = {name: torch.tensor(values, dtype=self.dtype)[:, None] for name, values in rows.items()}
        self.scalars = self.step.advance(numbers, self.steps, self.scalars)
        self.steps += 1
        self.step.update(self.params, grads.clone(), self.state, c)

    def by_torch(self, grads):
        for optimizer, row in zip(self.alone, grads, strict=True):
            parameters = optimizer.param_groups[0]["params"]
            for p, g in zip(parameters, row.split([p.numel() for p in parameters]), strict=True):
                p.grad = g.reshape(p.shape)
            optimizer.step()

    def assert_as_torch(self, rtol=1e-10, atol=1e-13):
        for row, optimizer in enumerate(self.alone):
            parameters = optimizer.param_groups[0]["params"]
            of = [optimizer.state.get(p, {}) for p in parameters]
            names = set(self.state) | set(self.scalars) | ({"step"} if self.step.counts else set())
            assert all(set(entries) == names for entries in of)
            close = {"rtol": rtol, "atol": atol, "equal_nan": True}
            torch.testing.assert_close(self.params[row], flat(parameters), **close)
            for name, tensor in self.state.items():
                torch.testing.assert_close(tensor[row], flat([entries[name] for entries in of]), **close)
            for name, values in self.scalars.items():
                assert all(entries[name] == float(values[row]) for entries in of)
            if self.step.counts:
                assert all(entries["step"] == self.steps[row] for entries in of)


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def bits(tensor):
    return tensor.view(torch.int64).clone()


def seeded(*parts):
    seed = [sum(map(ord, str(part))) for part in parts]
    return np.random.default_rng(seed), torch.Generator().manual_seed(sum(seed))


@every
@pytest.mark.parametrize("trials", [1, 2, 5])
def test_every_row_is_as_if_alone(optimizer, flags, trials):
    rng, generator = seeded(optimizer.__name__, flags, trials)
    # foreach and fused change no mathematics, so trials with and without them may meet.
    bundle = Bundle(optimizer, [draw(optimizer, flags, rng, foreach=bool(i % 2)) for i in range(trials)], generator)
    for step in range(20):
        if step == 7:
            bundle.enter(trials - 1, draw(optimizer, flags, rng))
        for row in range(trials):  # what schedulers do: warm-up from 0, and OneCycleLR's momentum
            group = bundle.group(row)
            if step == 3 and group["lr"]:
                group["lr_kept"], group["lr"] = group["lr"], 0.0
            elif step != 3:
                group["lr"] = group.pop("lr_kept", group["lr"]) * float(rng.uniform(0.8, 1.2))
            if step == 10 and "betas" in group:
                group["betas"] = (group["betas"][0] * 0.9, group["betas"][1])
            elif step == 10 and "momentum" in group:
                group["momentum"] *= 0.9
        grads = bundle.gradients()
        bundle.vectorised(grads)
        bundle.by_torch(grads)
        if step in (0, 5, 7, 19):
            bundle.assert_as_torch()


def test_momentum_of_nesterov_sees_the_dampened_gradient_and_the_step_the_whole_one():
    rng, generator = seeded("dampened")
    flags = {"momentum": True, "nesterov": True, "maximize": False}
    bundle = Bundle(torch.optim.SGD, [draw(torch.optim.SGD, flags, rng) for _ in range(3)], generator)
    for row in range(3):
        bundle.group(row)["dampening"] = 0.2 * row  # torch refuses it as an argument and takes it from a param group
    for _ in range(5):
        grads = bundle.gradients()
        bundle.vectorised(grads)
        bundle.by_torch(grads)
    bundle.assert_as_torch()


def test_nadam_rounds_its_product_to_the_default_dtype():
    rng, generator = seeded("product")
    torch.set_default_dtype(torch.float64)
    try:
        bundle = Bundle(torch.optim.NAdam, [draw(torch.optim.NAdam, {}, rng) for _ in range(3)], generator)
        for _ in range(9):
            grads = bundle.gradients()
            bundle.vectorised(grads)
            bundle.by_torch(grads)
        bundle.assert_as_torch()
        assert bundle.scalars["mu_product"].dtype == np.float64
    finally:
        torch.set_default_dtype(torch.float32)


@every_plain
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_in_its_row(optimizer, flags, bad):
    ends = []
    for hurt in (False, True):
        rng, generator = seeded(optimizer.__name__, flags)
        bundle = Bundle(optimizer, [draw(optimizer, flags, rng) for _ in range(4)], generator)
        for step in range(8):
            grads = bundle.gradients()
            if hurt and step == 5:
                grads[1, 3] = bad
            clip_rows([grads[:, :5], grads[:, 5:]], 1.0)
            if hurt and step == 2:
                grads[1] = bad
            bundle.vectorised(grads)
        ends.append([bits(t) for t in (bundle.params, *bundle.state.values())])
    for fine, beside in zip(*ends, strict=True):
        assert torch.equal(fine[[0, 2, 3]], beside[[0, 2, 3]])
    assert not torch.equal(ends[0][0][1], ends[1][0][1])


@every_plain
def test_a_row_without_weight_decay_keeps_its_bits_beside_one_with_it(optimizer, flags):
    ends = []
    for decay in (0.0, 0.1):
        rng, generator = seeded(optimizer.__name__, flags)
        arguments = [draw(optimizer, flags, rng, weight_decay=decay * i) for i in range(3)]
        bundle = Bundle(optimizer, arguments, generator)
        bundle.params[0, :2] = torch.tensor([float("inf"), -0.0])
        for _ in range(3):
            grads = bundle.gradients()
            grads[:, 1:4] = -0.0
            bundle.vectorised(grads)
        ends.append([bits(t[0]) for t in (bundle.params, *bundle.state.values())])
    for without, beside in zip(*ends, strict=True):
        assert torch.equal(without, beside)


@every_plain
def test_a_gradient_whose_square_overflows_does_what_it_does_in_torch(optimizer, flags):
    rng, generator = seeded(optimizer.__name__, flags)
    bundle = Bundle(optimizer, [draw(optimizer, flags, rng) for _ in range(3)], generator, torch.float32)
    for step in range(9):
        grads = bundle.gradients()
        if step == 6:
            grads[1, 3:9] = 1e30
        bundle.vectorised(grads)
        bundle.by_torch(grads)
    bundle.assert_as_torch(1e-3, 1e-5)


@every
def test_an_update_asks_nothing_of_the_device(optimizer, flags):
    """Where it did, a tensor without values would raise, and a captured graph would hold one answer for ever."""
    rng, generator = seeded(optimizer.__name__, flags)
    bundle = Bundle(optimizer, [draw(optimizer, flags, rng) for _ in range(3)], generator)
    for decay in (0.0, 0.1):
        bundle.group(0)["weight_decay"] = decay
        c = {name: torch.empty(3, 1, device="meta") for name in bundle.coefficients()[1]}
        state = {name: torch.empty(3, N, device="meta") for name in bundle.state}
        bundle.step.update(torch.empty(3, N, device="meta"), torch.empty(3, N, device="meta"), state, c)


@every_plain
def test_a_pass_that_no_row_needs_is_left_out(optimizer, flags):
    rng, generator = seeded(optimizer.__name__, flags)
    given = {"dampening": 0.0} if optimizer is torch.optim.SGD else {}
    arguments = [draw(optimizer, flags, rng, weight_decay=0.0, **given) for _ in range(2)]
    bundle = Bundle(optimizer, arguments, generator)
    keys = set(bundle.coefficients()[1])
    assert not keys & {"weight_decay", "decays", "keep", "gain"}
    coupled = not bundle.step.decoupled
    bundle.group(1)["weight_decay"] = 0.1
    assert set(bundle.coefficients()[1]) == keys | ({"weight_decay", "decays"} if coupled else {"keep"})
    bundle.group(0)["weight_decay"] = 0.2
    assert set(bundle.coefficients()[1]) == keys | ({"weight_decay"} if coupled else {"keep"})


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e9])
@pytest.mark.parametrize("cuts", [[12], [5, 4, 3]])
def test_clips_each_row_as_torch_clips_a_trial(max_norm, cuts):
    grads = torch.randn(6, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads *= torch.logspace(-3, 3, 6, dtype=torch.float64)[:, None]
    grads[1, 4], grads[2, 7], grads[3] = float("nan"), float("inf"), 0
    groups = [g.clone() for g in grads.split(cuts, 1)]
    clip_rows(groups, max_norm)
    for row, clipped in zip(grads, torch.cat(groups, 1), strict=True):
        parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
        for p, g in zip(parameters, row.split([p.numel() for p in parameters]), strict=True):
            p.grad = g.reshape(p.shape).clone()
        nn.utils.clip_grad_norm_(parameters, max_norm)
        expected = flat([p.grad for p in parameters])
        torch.testing.assert_close(clipped, expected, rtol=1e-13, atol=0, equal_nan=True)


class MyAdam(torch.optim.Adam):
    pass


def weight(**keywords):
    return nn.Parameter(torch.zeros(2, **keywords))


def test_an_optimizer_that_is_not_torchs_plain_one_steps_alone():
    hooked = [torch.optim.SGD([weight()]), torch.optim.SGD([weight()])]
    hooked[0].register_step_pre_hook(lambda *_: None)
    hooked[1].register_step_post_hook(lambda *_: None)
    for optimizer in (
        torch.optim.LBFGS([weight()]),
        MyAdam([weight()]),
        torch.optim.Adamax([weight()]),
        *(kind([weight()], differentiable=True) for kind in VECTORISED),
        torch.optim.Adam([weight()], capturable=True),
        torch.optim.Adam([{"params": [weight()]}, {"params": [weight()], "differentiable": True}]),
        torch.optim.SGD([weight(dtype=torch.complex64)]),
        torch.optim.RMSprop([{"params": [weight()], "momentum": -0.1}]),
        torch.optim.Adagrad([{"params": [weight()], "initial_accumulator_value": 0.1}]),
        *hooked,
    ):
        assert vector_flags(optimizer) is None


def test_flags_differ_where_the_mathematics_or_the_state_does():
    def flags(kind, **keywords):
        return vector_flags(kind([weight()], **keywords))

    optim = torch.optim
    for kind, keywords in (
        (optim.SGD, {"momentum": 0.9}),
        (optim.SGD, {"maximize": True}),
        (optim.RMSprop, {"momentum": 0.9}),
        (optim.RMSprop, {"centered": True}),
        (optim.Adam, {"amsgrad": True}),
        (optim.Adam, {"decoupled_weight_decay": True}),
        (optim.NAdam, {"decoupled_weight_decay": True}),
        (optim.RAdam, {"decoupled_weight_decay": True}),
    ):
        assert flags(kind) != flags(kind, **keywords)
    assert flags(optim.SGD, momentum=0.9) != flags(optim.SGD, momentum=0.9, nesterov=True)
    assert flags(optim.NAdam) != flags(optim.RAdam)
    assert flags(optim.Adam) != flags(optim.AdamW)

    assert flags(optim.SGD, momentum=0.9, lr=1) == flags(optim.SGD, momentum=0.1, weight_decay=0.1, dampening=0.5)
    assert flags(optim.AdamW) == flags(optim.AdamW, lr=torch.tensor(0.1), betas=(0.5, 0.6), foreach=False)
    assert flags(optim.AdamW) == flags(optim.AdamW, fused=True)
    two = optim.SGD([{"params": [weight()]}, {"params": [weight()], "momentum": 0.5}])
    assert vector_flags(two) == (*flags(optim.SGD), *flags(optim.SGD, momentum=0.9))
    assert len({flags(kind) for kind in VECTORISED}) == len(VECTORISED)  # hashable


def test_numbers_are_floats_in_their_order():
    group = torch.optim.AdamW([weight()], lr=torch.tensor(0.5), betas=(0.1, 0.2), eps=1).param_groups[0]
    read = read_numbers(group, VECTORISED[torch.optim.AdamW])
    assert read == (0.1, 0.2, 0.5, 1.0, 0.01)
    assert all(type(number) is float for number in read)
    for optimizer, kind in VECTORISED.items():
        group = optimizer([weight()]).param_groups[0]
        own = {k: v for k, v in group.items() if isinstance(v, float | int) and not isinstance(v, bool)}
        own |= dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
        assert dict(zip(kind.numbers, read_numbers(group, kind), strict=True)) == own
