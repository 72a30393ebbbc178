"""Torch's random functions by key: the same numbers for a trial however it runs, and of the right distribution."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import distributions as D
from torch import nn

import penstock.training.fused.operators  # noqa: F401  registers the rules of the native way
from penstock.seeds import key, step_key
from penstock.training.fused.keys import BundleKeys, MappedKeys
from penstock.training.fused.stacked import Stacked
from penstock.training.random import draws
from penstock.training.random.keyed import Keyed
from penstock.training.random.masks import StepKeys, halves

CPU = torch.device("cpu")
X = torch.linspace(-2, 2, 12, dtype=torch.float64).view(3, 4)
PAIRS = [halves(step_key(key(3, "trial", number), 11)) for number in range(3)]
LO, HI = (torch.tensor(column, dtype=torch.int32) for column in zip(*PAIRS, strict=True))


def bits(shape=(1 << 16,), seed=1, step=0, call=0):
    return draws.bits(draws.index(shape, CPU), *halves(step_key(seed, step)), call)


def split(value, mask=(1 << 64) - 1):
    """splitmix64's hash, in Python's own numbers."""
    value &= mask
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & mask
    return value ^ value >> 31


class TestBits:
    def test_are_the_hash_in_pythons_own_numbers(self):
        for call in (0, 1, 77):
            lo, hi = halves(step_key(5, 6))
            begin = split((hi << 32) + (lo & 0xFFFFFFFF) + (call + 1) * 0xD1B54A32D192ED03)
            expected = [split(begin + i * 0x9E3779B97F4A7C15) for i in range(60)]
            found = draws.bits(draws.index((3, 4, 5), CPU), lo, hi, call).flatten().tolist()
            assert [value & (1 << 64) - 1 for value in found] == expected

    def test_tensors_of_keys_give_those_of_numbers(self):
        for call in (0, 5):
            alone = torch.stack([draws.bits(draws.index((4, 5), CPU), lo, hi, call) for lo, hi in PAIRS])
            wide = [half.view(-1, 1, 1) for half in (LO, HI)]
            assert torch.equal(draws.bits(draws.index((4, 5), CPU), *wide, call), alone)

    def test_do_not_change(self):  # or a study that is resumed goes on differently
        with Keyed(StepKeys(1, 2)):
            assert torch.randint(0, 1000, (6,)).tolist() == INTEGERS
            assert torch.rand(2, dtype=torch.float64).tolist() == UNIFORMS
            assert torch.allclose(torch.randn(2, dtype=torch.float64), torch.tensor(NORMALS, dtype=torch.float64))


INTEGERS = [197, 301, 317, 289, 757, 255]
UNIFORMS = [0.9013894789349903, 0.14833945596617637]
NORMALS = [-0.5896028352187901, -0.5964510873408763]


def two_lines():
    noise = torch.empty(3, 4)
    noise.normal_()
    return noise * 1


def branch():
    return torch.ones(()) if torch.rand([]) < 0.0 else torch.zeros(())


DRAWS = {
    "rand": lambda x: torch.rand(3, 4),
    "rand of a list": lambda x: torch.rand([2, 3], dtype=torch.float64),
    "rand by size": lambda x: torch.rand(size=(2,)),
    "one": lambda x: torch.rand([]) + 0,
    "randn": lambda x: torch.randn(5),
    "bfloat16": lambda x: torch.randn(3, 4, dtype=torch.bfloat16),
    "complex": lambda x: torch.randn(3, dtype=torch.cfloat),
    "half": lambda x: torch.rand(3, 4, dtype=torch.half),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint": lambda x: torch.randint(3, (7,)),
    "randint by name": lambda x: torch.randint(-3, high=9, size=(7,)),
    "randint_like": lambda x: torch.randint_like(x, 3, 7),
    "randint of a type": lambda x: torch.randint(2, 5, (3,), dtype=torch.int8),
    "randperm": lambda x: torch.randperm(9),
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal of a number": lambda x: torch.normal(0.0, x.abs()),
    "normal of numbers": lambda x: torch.normal(1.0, 2.0, (4,)),
    "normal by name": lambda x: torch.normal(mean=x, std=0.1),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of a number": lambda x: x.bernoulli(0.3),
    "bernoulli_": lambda x: torch.empty(3, 4).bernoulli_(0.5).div_(0.5),
    "new": lambda x: x.new_empty(3, 1).bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda x: torch.empty(3, 4).bernoulli_(x.sigmoid()),
    "bool": lambda x: torch.empty(3, 4, dtype=torch.bool).bernoulli_(0.5),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "many": lambda x: torch.multinomial(x.sigmoid(), 9, True),
    "multinomial of one": lambda x: torch.multinomial(x[0].sigmoid(), 1),
    "multinomial of shared": lambda x: torch.multinomial(torch.ones(5), 3),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(0, 0.1),
    "uniform_": lambda x: x.clone().uniform_(-1, 2),
    "uniform_ by name": lambda x: torch.empty(4).uniform_(to=3),
    "random_": lambda x: torch.empty(5, dtype=torch.int64).random_(3, 9),
    "random_ of all": lambda x: torch.empty(5).random_(),
    "random_ below": lambda x: torch.empty(5, dtype=torch.uint8).random_(4),
    "poisson": lambda x: torch.poisson(x.exp()),
    "out": lambda x: torch.rand(4, out=torch.empty(4)) * 1,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, 0.5),
    "hard": lambda x: F.gumbel_softmax(x, hard=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x.clone(), training=True, inplace=True),
    "init": lambda x: nn.init.normal_(torch.empty(4), std=0.1),
    "init uniform": lambda x: nn.init.uniform_(x.clone(), b=3),
    "pool": lambda x: F.fractional_max_pool2d(x.repeat(1, 3, 3), 2, 4),
    "two lines": lambda x: two_lines(),
    "branch": lambda x: branch(),
    "Normal": lambda x: D.Normal(x, x.abs() + 0.1).rsample(),
    "Normal shared": lambda x: D.Normal(0.0, 1.0).sample((3,)),
    "Categorical": lambda x: D.Categorical(logits=x).sample((2,)),
    "Bernoulli": lambda x: D.Bernoulli(logits=x).sample(),
    "Gamma": lambda x: D.Gamma(x.abs() + 0.1, 1.0).rsample(),
    "Beta": lambda x: D.Beta(0.3, 0.3).sample(),
    "Dirichlet": lambda x: D.Dirichlet(x.abs() + 0.1).sample(),
    "Gumbel": lambda x: D.Gumbel(x, 1.0).rsample(),
    "Laplace": lambda x: D.Laplace(x, 1.0).rsample(),
    "Exponential": lambda x: D.Exponential(x.abs() + 0.1).rsample(),
    "RelaxedBernoulli": lambda x: D.RelaxedBernoulli(torch.tensor(0.5), logits=x).rsample(),
    "MultivariateNormal": lambda x: D.MultivariateNormal(x, torch.eye(4).double()).rsample(),
    "OneHotCategorical": lambda x: D.OneHotCategorical(logits=x).sample(),
    "StudentT": lambda x: D.StudentT(x.exp()).rsample(),
    "Poisson": lambda x: D.Poisson(x.exp()).sample(),
    "Cauchy": lambda x: D.Cauchy(x, 1.0).rsample(),
    "LogNormal": lambda x: D.LogNormal(x, 1.0).rsample(),
    "Uniform": lambda x: D.Uniform(x, x + 1).rsample(),
}


def alone(draw, number=0, x=X, calls=1):
    with Keyed(StepKeys(*PAIRS[number])) as mode:
        made = [draw(x) for _ in range(calls)][-1]
    assert mode.unkeyed == []
    assert mode.used
    return made


def assert_same(made, rows):
    assert made.dtype == rows.dtype
    assert made.shape == rows.shape
    assert torch.equal(made, rows)


class TestFunctions:
    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    @pytest.mark.parametrize("name", DRAWS)
    def test_the_same_numbers_alone_in_a_bundle_and_under_vmap(self, name):
        draw, inputs = DRAWS[name], torch.stack([X + number for number in range(3)])
        before = torch.get_rng_state()
        rows = torch.stack([alone(draw, number, x) for number, x in enumerate(inputs)])
        with Keyed(BundleKeys(LO, HI)) as mode:
            made = draw(Stacked(inputs, 0))
        assert_same(made.moved(0) if isinstance(made, Stacked) else made.expand(3), rows)
        assert mode.unkeyed == []

        def one(x, lo, hi):
            with Keyed(MappedKeys(lo, hi)):
                return draw(x)

        if name not in ("Beta", "Dirichlet"):  # an autograd.Function that vmap does not take
            assert_same(torch.vmap(one)(inputs, LO, HI), rows)
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("name", sorted({*DRAWS} - {"branch"}))
    def test_calls_and_trials_differ_and_repeat(self, name):
        def many(x):
            return torch.stack([DRAWS[name](x) for _ in range(9)])

        first = alone(many)
        assert torch.equal(alone(many), first)
        runs = [first, alone(many, calls=2), alone(many, calls=3), alone(many, 1), alone(many, 2)]
        assert len({tuple(run.flatten().tolist()) for run in runs}) == 5

    def test_shapes_and_types_are_torchs(self):
        for name, draw in DRAWS.items():
            torchs, keyed = draw(X), alone(draw)
            assert (keyed.shape, keyed.dtype) == (torchs.shape, torchs.dtype), name

    def test_in_place_functions_give_their_tensor(self):
        for x in (torch.empty(4), torch.empty(2, 6)[:, ::2]):
            assert alone(lambda x: x.normal_(), x=x) is x
            assert torch.equal(x.flatten()[:3], alone(lambda _, x=x: torch.randn(x.shape)).flatten()[:3])
        shared = torch.empty(4)
        with Keyed(BundleKeys(LO, HI)):
            assert shared.normal_() is shared
            assert (shared.trials, shared.shape) == (3, (4,))

    @pytest.mark.parametrize(
        "make",
        [lambda t: t[0], lambda t: t.data, lambda t: t.view(4), lambda t: t.detach()],
        ids=["row", "data", "view", "detached"],
    )
    def test_memory_that_others_see_is_not_drawn_into_for_all_trials(self, make):
        kept = torch.zeros(2, 2)
        with Keyed(BundleKeys(LO, HI)), pytest.raises(Exception, match="into a tensor that trials share"):
            make(kept).normal_()

    def test_gradients(self):
        x = X.exp().requires_grad_()
        sample = alone(lambda x: torch._standard_gamma(x), x=x)
        (found,) = torch.autograd.grad(sample.sum(), x)
        assert torch.equal(found, torch._standard_gamma_grad(x.detach(), sample.detach()))
        with Keyed(BundleKeys(LO, HI)):
            stacked = torch._standard_gamma(Stacked(x.expand(3, 3, 4), 0))
        assert torch.allclose(torch.autograd.grad(stacked.whole[0].sum(), x)[0], found)
        soft = alone(lambda x: F.gumbel_softmax(x, hard=True), x=x)
        (found,) = torch.autograd.grad((soft * X).sum(), x)
        assert torch.equal(soft.sum(-1), torch.ones(3))
        assert found.abs().max() > 1e-3
        slope = alone(lambda x: F.rrelu(x, training=True), x=-x)
        assert torch.allclose(torch.autograd.grad(slope.sum(), x)[0] * x, slope)

    def test_a_comparison_that_no_draw_changes_is_the_same_for_all(self):
        with Keyed(BundleKeys(LO, HI)):
            u = torch.rand(())
            for held, result in (
                (u < 0.0, False), (u <= -1, False), (u < 1.0, True), (u >= 0.0, True), (u > 1, False),
            ):  # fmt: skip
                assert type(held) is torch.Tensor
                assert bool(held) is result
            assert u._made is None  # nobody has asked for it
            for undecided in (u < 0.5, u <= 0.0, u > 0.0):
                assert isinstance(undecided, Stacked)

    def test_wrong_arguments_are_refused(self):
        for wrong in (
            lambda x: torch.randint(3, 3, (2,)), lambda x: x.clone().bernoulli_(1.5), lambda x: torch.multinomial(x, 9),
        ):  # fmt: skip
            with pytest.raises(RuntimeError):
                alone(wrong)


MANY = 1 << 16
WIDE = torch.float64
SHAPES = (0.05, 0.4, 1.0, 2.5, 40.0)


def of(distribution, draw):
    return distribution, draw


CONTINUOUS = {
    "rand": of(stats.uniform, lambda: torch.rand(MANY, dtype=WIDE)),
    "rand in float32": of(stats.uniform, lambda: torch.rand(MANY)),
    "randn": of(stats.norm, lambda: torch.randn(MANY)),
    "normal": of(stats.norm(2, 3), lambda: torch.normal(2.0, 3.0, (MANY,))),
    "uniform_": of(stats.uniform(-1, 3), lambda: torch.empty(MANY, dtype=WIDE).uniform_(-1, 2)),
    "exponential_": of(stats.expon(scale=0.5), lambda: torch.empty(MANY, dtype=WIDE).exponential_(2.0)),
    "cauchy_": of(stats.cauchy(1, 2), lambda: torch.empty(MANY, dtype=WIDE).cauchy_(1.0, 2.0)),
    "log_normal_": of(stats.lognorm(0.5, scale=math.e), lambda: torch.empty(MANY, dtype=WIDE).log_normal_(1.0, 0.5)),
    **{f"gamma {a}": of(stats.gamma(a), lambda a=a: torch._standard_gamma(torch.full((MANY,), a, dtype=WIDE)))
       for a in SHAPES},
    **{f"beta {a}": of(stats.beta(a, 2 * a), lambda a=a: D.Beta(a, 2 * a).sample((MANY,)).double())
       for a in SHAPES[1:]},
}  # fmt: skip


DISCRETE = {
    "bernoulli": of(stats.bernoulli(0.3), lambda: torch.full((MANY,), 0.3).bernoulli()),
    "bernoulli_": of(stats.bernoulli(0.9), lambda: torch.empty(MANY).bernoulli_(0.9)),
    "randint": of(stats.randint(-3, 8), lambda: torch.randint(-3, 8, (MANY,))),
    "geometric_": of(stats.geom(0.3), lambda: torch.empty(MANY).geometric_(0.3)),
    **{f"poisson {a}": of(stats.poisson(a), lambda a=a: torch.poisson(torch.full((MANY,), a))) for a in SHAPES},
    "multinomial": of(stats.rv_discrete(values=([0, 2, 3], [0.5, 0.2, 0.3])),
                      lambda: torch.multinomial(torch.tensor([5.0, 0.0, 2.0, 3.0, 0.0]), MANY, True)),
    "rows": of(stats.rv_discrete(values=([0, 1, 2], [0.2, 0.7, 0.1])),
               lambda: torch.multinomial(torch.tensor([0.2, 0.7, 0.1]).expand(MANY, 3), 1)[:, 0]),
    "race": of(stats.rv_discrete(values=([0, 1, 2], [0.2, 0.7, 0.1])),
               lambda: torch.multinomial(torch.tensor([0.2, 0.7, 0.1]).expand(MANY, 3), 2)[:, 0]),
    "randperm": of(stats.randint(0, 5), lambda: torch.stack([torch.randperm(5) for _ in range(400)])[:, 2]),
}  # fmt: skip


class TestStatistics:
    @pytest.mark.parametrize("name", CONTINUOUS)
    def test_numbers_have_their_distribution(self, name):
        distribution, draw = CONTINUOUS[name]
        found = alone(lambda _: draw()).double().numpy()
        assert stats.kstest(found, distribution.cdf).pvalue > 1e-3

    @pytest.mark.parametrize("name", DISCRETE)
    def test_counts_have_their_distribution(self, name):
        distribution, draw = DISCRETE[name]
        values, seen = np.unique(alone(lambda _: draw()).double().numpy(), return_counts=True)
        expected = distribution.pmf(values) * seen.sum()
        assert expected.sum() > 0.999 * seen.sum()  # no value is left out that should be there
        often = expected > 5
        seen, expected = seen[often], expected[often]
        assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-3

    def test_the_tails_of_a_normal(self):
        found = torch.cat([draws.normal(bits((1 << 18,), seed)) for seed in range(8)]).abs()
        for far in (3.0, 4.0, 4.5):
            expected = 2 * stats.norm.sf(far) * found.numel()
            assert abs(int((found > far).sum()) - expected) < 4 * math.sqrt(expected)
        ends = torch.tensor([-(1 << 63), (1 << 63) - 1, -1, 0])
        assert draws.normal(ends).abs().max() < 8.3
        assert draws.inside(ends).min() > 0
        assert draws.inside(ends).max() < 1
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            assert draws.uniform(dtype)(ends).max() < 1

    def test_poisson_is_the_inverse_of_its_distribution(self):
        u = draws.inside(torch.cat([bits((1000,)), torch.tensor([-(1 << 30), 1 << 30, 1 << 62])]))
        for mean in (0.0, 1e-4, 0.3, 2.0, 11.0, 300.0, 1e5):

            class Fixed(StepKeys):
                def draw(self, shape, device, formula):
                    return u

            with Keyed(Fixed(0, 0)):
                found = torch.poisson(torch.full(u.shape, mean, dtype=torch.float64))
            assert found.tolist() == np.maximum(stats.poisson.ppf(u.numpy(), mean), 0).tolist()

    @pytest.mark.parametrize("apart", ["element", "row", "call", "step", "trial", "stream"])
    def test_nothing_is_correlated(self, apart):
        """Neighbours by any part of the key: numbers, their squares, and their lowest bits."""
        found = []
        for i in range(40):
            one = bits(seed=key(i), step=2)
            other = {
                "element": lambda one=one: one.roll(1), "row": lambda one=one: one.roll(256),
                "call": lambda i=i: bits(seed=key(i), step=2, call=1), "step": lambda i=i: bits(seed=key(i), step=3),
                "trial": lambda i=i: bits(seed=key(i) + 1, step=2), "stream": lambda i=i: bits(seed=key(i) ^ 1, step=2),
            }[apart]()  # fmt: skip
            changes = (
                draws.normal, lambda b: (draws.normal(b).square() - 1) / math.sqrt(2),
                lambda b: ((b >> 11) & 1).double() * 2 - 1,
            )  # fmt: skip
            found += [float((change(one) * change(other)).sum()) / 256 for change in changes]
        assert max(map(abs, found)) < 4.5
        assert 0.7 < sum(z * z for z in found) / len(found) < 1.4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    def test_the_numbers_of_a_cpu(self):
        for name, draw in DRAWS.items():
            with torch.device("cuda"):
                made = alone(draw, x=X.cuda())
            assert torch.allclose(made.cpu().to(torch.cdouble), alone(draw).to(torch.cdouble), rtol=1e-6, atol=1e-12), (
                name
            )

    def test_in_a_graph_with_keys_that_change(self):
        lo, hi = LO.cuda(), HI.cuda()

        def draw():
            with Keyed(BundleKeys(lo, hi)):
                u = torch.rand([])  # on the CPU: nobody asks for it
                noise = torch.randn(100, device="cuda") if u >= 0.0 else None
                noise = noise + torch.empty(100, device="cuda").bernoulli_(0.5)
                return (noise + torch.randint(9, (100,), device="cuda")).whole

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            draw()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = draw()
        first = draw()
        graph.replay()
        assert torch.equal(out, first)
        lo.add_(3)
        graph.replay()
        assert torch.equal(out, draw())
        assert not torch.equal(out, first)
