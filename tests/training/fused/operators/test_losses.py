"""Every loss in every reduction, for stacked trials as for each alone."""

import itertools
import warnings

import pytest
import torch
from torch.nn import functional as F

from penstock.training.fused.stacked import Stacked, Unfusable
from tests.training.alone import Own, check, own, shared

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")  # a loop over the trials inside vmap

REDUCTIONS = ["none", "mean", "sum"]


def labels(*shape, classes=5, seed=0):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def own_labels(*shape, classes=5, seed=0):
    return Own(labels(3, *shape, classes=classes, seed=seed))


def positive(*shape, seed=0):
    return shared(*shape, seed=seed).abs() + 0.1


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(4, 5), (5,), (4, 5, 3), (4, 5, 2, 3), (0, 5)])
@pytest.mark.parametrize("options", [{}, {"weight": positive(5)}, {"label_smoothing": 0.2},
                                     {"weight": positive(5), "label_smoothing": 0.2, "ignore_index": 2}])  # fmt: skip
def test_cross_entropy_of_indices(reduction, shape, options):
    target_shape = shape[:-1] if len(shape) == 1 else (shape[0], *shape[2:])
    options = {**options, "reduction": reduction}
    for target in (labels(*target_shape, seed=2), own_labels(*target_shape, seed=3)):
        check(lambda x, t: F.cross_entropy(x, t, **options), own(*shape), target)
    check(lambda x, t: F.cross_entropy(x, t, **options), shared(*shape), own_labels(*target_shape))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(4, 5), (5,), (4, 5, 3)])
def test_cross_entropy_of_probabilities(reduction, shape):
    for options in ({}, {"weight": positive(5)}, {"label_smoothing": 0.2}):

        def loss(x, y, options=options):
            return F.cross_entropy(x, y.softmax(-1), reduction=reduction, **options)

        check(loss, own(*shape), shared(*shape, seed=1))
        check(loss, own(*shape), own(*shape, seed=1))
        check(loss, shared(*shape, seed=1), own(*shape))


def test_each_trial_divides_by_what_it_counts_itself():
    target = torch.tensor([[0, -100, -100], [1, 2, 0], [-100, -100, -100]])
    for weight in (None, positive(4)):
        check(lambda x, t, weight=weight: F.cross_entropy(x, t, weight=weight), own(3, 4), Own(target))
    check(lambda x, t: F.cross_entropy(x, t, ignore_index=2), own(6, 4), labels(6, classes=4))


def test_a_class_weight_of_each_trial_is_left_to_vmap():
    weight = Stacked(torch.tensor([[1.0, 2.0], [3.0, 1.0]]))
    x = torch.tensor([[[1.0, 2.0]], [[0.5, 0.0]]])
    made = F.cross_entropy(Stacked(x), torch.tensor([1]), weight=weight, reduction="sum").moved(0)
    alone = [F.cross_entropy(x[i], torch.tensor([1]), weight=weight.whole[i], reduction="sum") for i in range(2)]
    torch.testing.assert_close(made, torch.stack(alone))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll(reduction):
    for options in ({}, {"weight": positive(5)}, {"ignore_index": 1}):

        def loss(x, t, options=options):
            return F.nll_loss(x.log_softmax(1 if x.ndim > 1 else 0), t, reduction=reduction, **options)

        check(loss, own(4, 5), labels(4))
        check(loss, own(4, 5, 2), own_labels(4, 2))
        check(loss, own(5), labels())
    check(torch._C._nn.nll_loss, own(4, 5), labels(4), None, 1, -100)  # the builtin of the same name


PAIRS = {
    "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss,
    "smooth_l1 0": lambda x, y, **o: F.smooth_l1_loss(x, y, beta=0.0, **o),
    "smooth_l1 beta": lambda x, y, **o: F.smooth_l1_loss(x, y, beta=0.3, **o),
    "huber delta": lambda x, y, **o: F.huber_loss(x, y, delta=0.3, **o),
    "poisson": F.poisson_nll_loss,
    "poisson full": lambda x, y, **o: F.poisson_nll_loss(x, y.abs() * 3, full=True, **o),
    "kl": lambda x, y, **o: F.kl_div(x.log_softmax(-1), y.softmax(-1), **o),
    "kl log": lambda x, y, **o: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True, **o),
    "bce": lambda x, y, **o: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **o),
    "bce logits": lambda x, y, **o: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **o),
    "hinge": lambda x, y, **o: F.hinge_embedding_loss(x, y.detach().sign(), **o),
    "soft margin": lambda x, y, **o: F.soft_margin_loss(x, y.detach().sign(), **o),
    "ranking": lambda x, y, **o: F.margin_ranking_loss(x, y, (x - y).detach().sign(), margin=0.4, **o),
    "gaussian": lambda x, y, **o: F.gaussian_nll_loss(x, y, y.exp(), **o),
    "gaussian full": lambda x, y, **o: F.gaussian_nll_loss(x, y, 0.5, full=True, eps=1e-3, **o),
    "multilabel": lambda x, y, **o: F.multilabel_soft_margin_loss(x, y.sigmoid(), **o),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "batchmean"])
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_losses_of_pairs(name, reduction):
    loss = PAIRS[name]
    if reduction == "batchmean" and not name.startswith("kl"):
        with pytest.raises((Unfusable, ValueError)):
            loss(Stacked(torch.rand(2, 3)), torch.rand(3), reduction=reduction)
        return
    for shape in ((4, 5), (5,), (2, 3, 4)):
        check(lambda x, y: loss(x, y, reduction=reduction), own(*shape), own(*shape, seed=1))
        check(lambda x, y: loss(x, y, reduction=reduction), own(*shape), shared(*shape, seed=1))
    check(lambda x, y: loss(x, y, reduction=reduction), shared(2, 3), own(2, 3, seed=1))
    if name != "multilabel":  # of one number per trial
        check(lambda x, y: loss(x.sum(), y.sum(), reduction=reduction), own(5), own(5, seed=1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_weighted_regression(loss, reduction):
    check(
        lambda x, y, w: loss(x, y, weight=w.abs(), reduction=reduction), own(4, 5), shared(4, 5), shared(4, 5, seed=1)
    )
    check(lambda x, y, w: loss(x, y, weight=w.abs(), reduction=reduction), own(4, 5), shared(4, 5), own(4, 5, seed=1))
    check(lambda x, y, w: loss(x, y, weight=w.abs(), reduction=reduction), shared(4), shared(4), own(4, seed=1))


def test_the_weight_of_l1_survives_a_function_mode_in_between():
    class Through(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x, weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 0.0])
    with Through():
        made = F.l1_loss(Stacked(x), torch.zeros(2), weight=weight)
    assert made.whole.tolist() == [1.0, 3.0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weighted_binary_cross_entropy(reduction):
    target = shared(4, 5).sigmoid()
    for shape, (one, other) in itertools.product([(5,), (4, 1), (4, 5)], [(own, shared), (shared, own), (own, own)]):
        check(
            lambda x, w, p: F.binary_cross_entropy_with_logits(
                x, target, weight=w.detach().abs(), pos_weight=p.detach().abs(), reduction=reduction
            ),
            own(4, 5), one(*shape, seed=1), other(*shape, seed=2), layouts=1,
        )  # fmt: skip
    for weight in (positive(5), positive(4, 1)):
        check(lambda x, w=weight: F.binary_cross_entropy(x.sigmoid(), target, w, reduction=reduction), own(4, 5))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gaussian_with_a_variance_of_its_own_shape(reduction):
    def loss(x, y, v):
        return F.gaussian_nll_loss(x, y, v.exp(), reduction=reduction)

    for shape in ((4, 5), (4, 1), (4,)):
        check(loss, own(4, 5), shared(4, 5), own(*shape, seed=1))
        check(loss, shared(4, 5), own(4, 5), shared(*shape, seed=1))
    with pytest.raises(ValueError, match="negative"):
        F.gaussian_nll_loss(Stacked(torch.zeros(2, 3)), torch.zeros(3), -torch.ones(3))
    with pytest.raises(ValueError, match="incorrect size"):
        F.gaussian_nll_loss(Stacked(torch.zeros(2, 4, 3)), torch.zeros(4, 3), torch.ones(3))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_of_rows(reduction):
    for shape in ((4, 5), (5,)):
        sign = labels(*shape[:-1], classes=2) * 2 - 1
        for options in ({}, {"p": 1, "swap": True, "margin": 2.0}):
            check(lambda *x, o=options: F.triplet_margin_loss(*x, **o, reduction=reduction),
                  own(*shape), shared(*shape), own(*shape, seed=2))  # fmt: skip
        check(lambda x, y, t: F.cosine_embedding_loss(x, y, t, margin=0.1, reduction=reduction),
              own(*shape), shared(*shape), sign)  # fmt: skip
        check(lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), own(*shape), own_labels(*shape))
        for options in ({}, {"p": 2, "margin": 0.5, "weight": positive(5)}):
            check(lambda x, t, o=options: F.multi_margin_loss(x, t, **o, reduction=reduction),
                  own(*shape), labels(*shape[:-1]))  # fmt: skip
    check(lambda *x: F.triplet_margin_with_distance_loss(*x, reduction=reduction), own(4, 5), own(4, 5), shared(4, 5))
    check(F.cosine_similarity, own(4, 5), shared(4, 5))
    check(F.pairwise_distance, own(4, 5), shared(4, 5))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ctc(reduction):
    def loss(x, *rest, **options):
        return F.ctc_loss(x.log_softmax(-1), *rest, reduction=reduction, **options)

    targets, lengths = torch.tensor([[1, 2, 3], [2, 2, 0], [4, 0, 0]]), torch.tensor([3, 2, 1])
    together = torch.tensor([1, 2, 3, 2, 2, 4])
    check(loss, own(7, 3, 5), targets, torch.tensor([7, 6, 5]), lengths)
    check(loss, own(7, 3, 5), together, (7, 6, 5), (3, 2, 1))
    check(loss, own(7, 3, 5), targets, torch.tensor([7, 2, 5]), lengths, zero_infinity=True)
    check(loss, own(7, 3, 5), targets, torch.tensor([7, 6, 5]), torch.tensor([3, 0, 1]))
    check(loss, own(7, 5), torch.tensor([1, 2]), torch.tensor(6), torch.tensor(2), blank=4)
    check(loss, own(7, 5), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="new in torch 2.13")
def test_linear_cross_entropy():
    check(lambda x, w, b: F.linear_cross_entropy(x, w, labels(4), linear_bias=b, label_smoothing=0.1),
          shared(4, 3), own(5, 3), own(5))  # fmt: skip
    check(lambda x, w: F.linear_cross_entropy(x, w, labels(4, 2), ignore_index=1), own(4, 3), own(5, 2, 3))


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:size_average and reduce")
def test_what_is_left_to_torch():
    check(F.mse_loss, own(4, 5), shared(5))  # broadcasts, with a warning
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # slow
        check(lambda x, y: F.triplet_margin_loss(x, x * 2, y), own(4, 5), shared(1, 5))
    check(lambda x, y: F.mse_loss(x, y, size_average=False), own(4, 5), shared(4, 5))
    check(lambda x: F.cross_entropy(x, labels(4), reduce=False), own(4, 5))
    check(lambda x, y: torch.binary_cross_entropy_with_logits(x, y.sigmoid()), own(4), shared(4))
    with pytest.raises((Unfusable, ValueError)):
        F.binary_cross_entropy(Stacked(torch.rand(2, 3)), torch.rand(2, 3))
    with pytest.raises((Unfusable, ValueError)):
        F.cross_entropy(Stacked(torch.rand(2, 3, 4)), labels(3), reduction="avg")


CASTABLE = {
    "cross entropy": lambda x, y: F.cross_entropy(x, labels(4)),
    "cross entropy none": lambda x, y: F.cross_entropy(x, labels(4), reduction="none"),
    "probabilities": lambda x, y: F.cross_entropy(x, y.softmax(-1)),
    "nll": lambda x, y: F.nll_loss(x, labels(4), reduction="sum"),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, x * 2),
    "cosine": lambda x, y: F.cosine_embedding_loss(x, y, labels(4, classes=2) * 2 - 1),
    "multi margin": lambda x, y: F.multi_margin_loss(x, labels(4)),
    "multilabel margin": lambda x, y: F.multilabel_margin_loss(x, labels(4, 5)),
    **{f"{name} {how}": lambda x, y, name=name, how=how: PAIRS[name](x, y, reduction=how)
       for name in PAIRS for how in REDUCTIONS},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_types_under_autocast_are_those_of_one_trial(dtype):
    x = torch.rand(2, 4, 5)
    for name, loss in CASTABLE.items():
        with torch.autocast("cpu", torch.bfloat16):
            try:
                alone = loss(x[0].to(dtype), x[1].to(dtype))
            except RuntimeError:
                continue  # no kernel for this type
            made = loss(Stacked(x.to(dtype)), x[1].to(dtype))
        assert made.dtype == alone.dtype, name
        torch.testing.assert_close(made.moved(0)[0], alone, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_a_trial_that_diverges_changes_no_bit_of_the_others():
    ctc = {"ctc": lambda x, y: F.ctc_loss(x.log_softmax(-1), torch.tensor([1, 2]), torch.tensor(4), torch.tensor(2))}
    for name, loss in {**CASTABLE, **ctc}.items():
        if name in ("bce none", "bce mean", "bce sum"):
            continue  # torch itself raises
        results = []
        for value in (0.5, float("nan")):
            x = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(1)) + 0.1
            x[1] = value
            x.requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = loss(Stacked(x), torch.rand(4, 5, generator=torch.Generator().manual_seed(2))).moved(0)
            made.sum().backward()
            results.append((made.detach()[[0, 2]], x.grad[[0, 2]]))
        assert torch.equal(results[0][0], results[1][0]), name
        assert torch.equal(results[0][1], results[1][1]), name
