"""The rules of functions of elements, along dimensions, of shapes and of matrices, each against trials alone."""

import pytest
import torch
import torch.nn.functional as F

from penstock.training.fused.operators.linear import by_product
from penstock.training.fused.refusing import Parted
from penstock.training.fused.stacked import Stacked
from tests.training.alone import Own, check, own, shared

UNARY = [
    torch.relu,
    F.relu,
    F.gelu,
    F.silu,
    F.leaky_relu,
    F.elu,
    F.hardswish,
    torch.tanh,
    torch.sigmoid,
    torch.exp,
    F.glu,
    torch.abs,
    F.softplus,
    F.relu6,
    F.hardtanh,
    F.mish,
    F.selu,
    F.logsigmoid,
    torch.square,
    torch.neg,
    torch.sin,
    lambda x: F.relu(x * 1.0, inplace=True),
    lambda x: F.leaky_relu(x * 1.0, 0.2, True),
    lambda x: -x,
    lambda x: x**2,
    lambda x: 2**x,
    lambda x: 1 - x,
    lambda x: 1 / (x.abs() + 1),
    lambda x: abs(x),
    lambda x: x.clamp(-0.5, 0.5),
    lambda x: x.clamp(min=0),
    lambda x: x > 0,
    lambda x: x.double(),
    lambda x: x.to(torch.float32),
    lambda x: x.float().mean(),
    lambda x: (x * 1.0).add_(1).mul_(2),
    lambda x: x.detach() * x,
    lambda x: torch.zeros_like(x) + x,
    lambda x: x.new_zeros(2, 2),
    lambda x: x.contiguous(),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.masked_fill(x > 0, 0.5),
    lambda x: x.data + x,
]


@pytest.mark.parametrize("function", UNARY)
@pytest.mark.parametrize("shape", [(4,), (2, 6), (2, 3, 4)])
def test_functions_of_one_tensor(function, shape):
    check(function, own(*shape))


BINARY = [
    torch.add,
    torch.sub,
    torch.mul,
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: a + b,
    lambda a, b: b - a,
    lambda a, b: a < b,
    torch.maximum,
    torch.max,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a == b,
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.add(a, b, alpha=2),
    lambda a, b: torch.add(input=a, other=b),
    lambda a, b: a.atan2(b),
    lambda a, b: torch.addcmul(a, b, b, value=0.5),
]


@pytest.mark.parametrize("function", BINARY)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((3, 4), (3, 4)),
        ((3, 4), (4,)),
        ((4,), (3, 4)),
        ((2, 3, 4), (3, 1)),
        ((2, 1, 4), (3, 4)),
        ((), (3, 4)),
        ((3,), ()),
    ],
)
def test_functions_of_two_tensors_broadcast_as_for_one_trial(function, first, second):
    check(function, own(*first), own(*second, seed=1))
    check(function, own(*first), shared(*second))
    check(function, shared(*first), own(*second))


def test_a_scalar_of_a_trial_does_not_change_the_type_of_a_tensor():
    check(lambda a, b: a * b, own(3, dtype=torch.float32), own(dtype=torch.float64))
    check(lambda a, b: a * b, own(3, dtype=torch.int64, seed=2), own(dtype=torch.float32))
    check(lambda a, b: a * b, shared(3, dtype=torch.float32), own(dtype=torch.float64))
    check(lambda a, b: a * b, own(dtype=torch.float32), shared(dtype=torch.float64))
    check(lambda a, b: a + b, own(2, 3, dtype=torch.bfloat16), own(3, dtype=torch.float32))


REDUCTIONS = [
    torch.sum,
    torch.mean,
    lambda x: x.sum(-1),
    lambda x: x.mean(dim=0),
    lambda x: x.mean((0, -1)),
    torch.amax,
    lambda x: x.max(),
    lambda x: x.max(1),
    lambda x: x.max(dim=-1, keepdim=True),
    lambda x: x.argmax(-1),
    lambda x: x.argmax(),
    lambda x: x.argmin(0),
    lambda x: F.softmax(x, -1),
    lambda x: F.log_softmax(x, dim=1),
    lambda x: x.softmax(0),
    lambda x: torch.softmax(x, dim=-1, dtype=torch.float64),
    lambda x: x.var(-1),
    lambda x: x.var(dim=1, unbiased=False),
    lambda x: x.std(),
    lambda x: torch.logsumexp(x, 1),
    lambda x: x.cumsum(1),
    lambda x: x.sort(-1),
    lambda x: x.sort(),
    lambda x: x.topk(2),
    lambda x: x.topk(2, 0),
    lambda x: x.norm(),
    lambda x: x.norm(dim=-1),
    lambda x: x.sum(dim=(1, 2), keepdim=True),
    lambda x: (x > 0).any(),
    lambda x: (x > 0).all(1),
    lambda x: F.normalize(x, dim=-1),
    lambda x: torch.linalg.vector_norm(x),
    lambda x: x.prod(0),
    lambda x: x.sum((0, 1, 2)),
    lambda x: x.mean(1).mean(0),
    lambda x: torch.flip(x, [1]),
    lambda x: torch.median(x, -1),
]


@pytest.mark.parametrize("function", REDUCTIONS)
def test_functions_along_dimensions(function):
    check(function, own(2, 3, 4), layouts=4)


SHAPES = [
    lambda x: x.view(2, 12),
    lambda x: x.reshape(-1),
    lambda x: x.reshape(2, 3, 2, 2),
    lambda x: x.view(6, -1),
    lambda x: x.flatten(1),
    lambda x: torch.flatten(x),
    lambda x: x.flatten(0, 1),
    lambda x: x.unflatten(2, (2, -1)),
    lambda x: x.unsqueeze(0),
    lambda x: x.unsqueeze(-1),
    lambda x: x.unsqueeze(1),
    lambda x: x.permute(2, 0, 1),
    lambda x: x.permute((0, 2, 1)),
    lambda x: x.transpose(0, 2),
    lambda x: x.transpose(-1, -2),
    lambda x: x.mT,
    lambda x: x[0],
    lambda x: x[:, 1],
    lambda x: x[..., -1],
    lambda x: x[:, None],
    lambda x: x[0, :, 1:3],
    lambda x: x[None, ..., ::2],
    lambda x: x[-1, -1, -1],
    lambda x: x[:, torch.tensor([0, 2])],
    lambda x: x[:, [0, 2]],
    lambda x: x.expand(5, 2, 3, 4),
    lambda x: x[:1].expand(7, -1, -1) if False else x[:1].expand(7, 3, 4),
    lambda x: x.repeat(1, 2, 1),
    lambda x: x.repeat(2, 1, 1, 1),
    lambda x: torch.cat([x, x], 1),
    lambda x: torch.cat((x, x * 2), -1),
    lambda x: torch.stack([x, x], 1),
    lambda x: x.split(2, -1),
    lambda x: x.chunk(2, dim=2),
    lambda x: list(x),
    lambda x: x.unbind(1),
    lambda x: x.select(1, 0),
    lambda x: x.narrow(2, 1, 2),
    lambda x: x.squeeze(),
    lambda x: x[:1].squeeze(0),
    lambda x: x.mean(1, keepdim=True).squeeze(1),
    lambda x: x.movedim(0, -1),
    lambda x: x.tril(),
    lambda x: torch.einsum("abc,abd->acd", x, x),
    lambda x: x.view(x.size(0), -1),
    lambda x: x.roll(1, 0),
    lambda x: x.reshape(2, 3, -1).transpose(1, 2).reshape(2, -1),
    lambda x: torch.cat([x, torch.ones(2, 3, 4).double()], 1),
    lambda x: x.view_as(torch.empty(4, 6)),
    lambda x: torch.ones(24).double().view_as(x) * x,
    lambda x: x.gather(1, torch.zeros(2, 1, 4).long()),
]


@pytest.mark.parametrize("function", SHAPES)
def test_functions_of_shapes(function):
    check(function, own(2, 3, 4), layouts=4)


@pytest.mark.parametrize("x", [(5, 4), (4,), (2, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(x, bias):
    for make_x in (own, shared):
        for weight in (own(6, 4, seed=1), shared(6, 4)):
            for b in (own(6, seed=2), shared(6)) if bias else (None,):
                if any(isinstance(v, Own) for v in (make_x(*x), weight, b)):
                    check(F.linear, make_x(*x), weight, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((3, 4), (2, 4, 5)),
    ],
)
def test_matrix_products(a, b):
    check(torch.matmul, own(*a), own(*b))
    check(lambda x, y: x @ y, own(*a), shared(*b))
    check(lambda x, y: x @ y, shared(*a), own(*b))


def test_other_products():
    check(torch.bmm, own(2, 3, 4), own(2, 4, 5))
    check(torch.addmm, own(5), own(3, 4), own(4, 5), alpha=2, beta=0.5)
    check(F.bilinear, own(3, 4), own(3, 5), own(2, 4, 5), own(2))
    check(F.prelu, own(2, 3, 4), own(3))
    check(F.prelu, own(2, 3, 4), own(1))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 1 if x.sum() > 0 else 0,
        lambda x: x.sum().item(),
        lambda x: float(x[0, 0]),
        lambda x: x.tolist(),
        lambda x: (x > 0.5).nonzero(),
        lambda x: torch.where(x > 0.5),
        lambda x: x.numpy(),
        lambda x: x[x > 0],
    ],
)
def test_trials_part_at_the_line_where_their_values_differ(function):
    with pytest.raises(Parted, match=r"test_operators.py:\d+"):
        function(Stacked(torch.linspace(-3, 4, 24).double().sin().view(4, 2, 3), 0))


def test_the_gradient_of_a_weight_lies_as_the_weight_does():
    """By the product that a GPU uses: an optimizer's step then reads both in the order of memory."""
    x, w = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(3, 6, 5, dtype=torch.float64)
    x, w = x.requires_grad_(), w.requires_grad_()
    made = by_product(x, w)
    g = torch.randn_like(made)
    ours, theirs = (torch.autograd.grad(out, [x, w], g) for out in (made, torch.bmm(x, w.mT)))
    torch.testing.assert_close(made, torch.bmm(x, w.mT))
    torch.testing.assert_close(ours, theirs)
    assert ours[1].is_contiguous()
