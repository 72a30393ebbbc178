"""Random small networks from every operator that can be fused, with an optimizer, and the task that trains them.

A bundle is a network, an optimizer and the seed that decides the rest; its trials differ in their hyperparameters, in
the numbers of torch's modules that may differ, and in their scheduler.
"""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

import penstock as ps

ROWS, BATCH, CLASSES = 11, 4, 3

# Networks: blocks that take one kind of tensor and give one. A block is made from the shape of its input (without the
# examples), a source of structure that is the same for all trials, and one trial's own numbers.

BLOCKS = {}  # name -> (kind, make)


def block(kind):
    def register(make):
        BLOCKS[make.__name__] = kind, make
        return make

    return register


class Apply(nn.Module):
    """A function with plain arguments as a module."""

    def __init__(self, function, *args, **kwargs):
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs

    def forward(self, x):
        return self.function(x, *self.args, **self.kwargs)


class Weighted(nn.Module):
    """A functional form: ``function(x, weight, bias, ...)`` with parameters of its own."""

    def __init__(self, function, weight, bias, **options):
        super().__init__()
        self.function, self.options = function, options
        self.weight = nn.Parameter(torch.randn(weight) * 0.4)
        self.bias = nn.Parameter(torch.randn(bias) * 0.1)

    def forward(self, x):
        return self.function(x, self.weight, self.bias, **self.options)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Tempered(nn.Module):
    """A parameter without dimensions, as a learned temperature is."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x):
        return x * self.scale


class Dropped(nn.Module):
    """F.dropout with the rate of a module that it keeps for nothing else."""

    def __init__(self, p, function):
        super().__init__()
        self.rate, self.function = nn.Dropout(p), function

    def forward(self, x):
        return self.function(x, self.rate.p, self.training)


# Vectors


@block("vector")
def linear(shape, pick, own):
    out = pick([3, 5, 8])
    return nn.Linear(shape[0], out, bias=pick([True, False])), (out,)


@block("vector")
def functional_linear(shape, pick, own):
    return Weighted(F.linear, (4, shape[0]), (4,)), (4,)


@block("vector")
def residual(shape, pick, own):
    (width,) = shape
    return Residual(nn.Sequential(nn.LayerNorm(width, eps=own.eps), nn.Linear(width, width), nn.Tanh())), shape


class Tied(nn.Module):
    """One weight, read twice: as a module under two names, and transposed by a function."""

    def __init__(self, width):
        super().__init__()
        self.encode = self.alias = nn.Linear(width, width)

    def forward(self, x):
        return F.linear(torch.tanh(self.alias(self.encode(x))), self.encode.weight.t())


@block("vector")
def tied(shape, pick, own):
    return Tied(*shape), shape


@block("vector")
def frozen(shape, pick, own):
    layer = nn.Linear(*shape, 5)
    (layer.weight if pick([True, False]) else layer).requires_grad_(False)
    return layer, (5,)


class Idle(nn.Module):
    """Holds parameters that the loss does not reach, before and behind one that it does."""

    def __init__(self, width):
        super().__init__()
        self.before = nn.Parameter(torch.ones(3))
        self.used = nn.Linear(width, width)
        self.behind = nn.Linear(width, 2)

    def forward(self, x):
        return self.used(x)


@block("vector")
def idle(shape, pick, own):
    return Idle(*shape), shape


class Tracked(nn.Module):
    """Buffers of its own, written in the forward; one of them is in no state_dict."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.tensor(0), persistent=False)

    def forward(self, x):
        if self.training:
            self.count += 1
            self.mean.mul_(0.8).add_(x.detach().mean(0), alpha=0.2)
        return x - self.mean


@block("vector")
def tracked(shape, pick, own):
    return Tracked(*shape), shape


@block("vector")
def batch_norm(shape, pick, own):
    return nn.BatchNorm1d(*shape, eps=own.eps, momentum=own.momentum, affine=pick([True, True, False])), shape


class FunctionalBatchNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, self.weight, None, self.training, 0.3)


@block("vector")
def functional_batch_norm(shape, pick, own):
    return FunctionalBatchNorm(*shape), shape


@block("vector")
def layer_norm(shape, pick, own):
    return nn.LayerNorm(shape, eps=own.eps), shape


@block("vector")
def functional_layer_norm(shape, pick, own):
    return Apply(F.layer_norm, shape), shape


@block("vector")
def to_image(shape, pick, own):
    return nn.Sequential(nn.Linear(*shape, 2 * 5 * 5), nn.Unflatten(1, (2, 5, 5))), (2, 5, 5)


@block("vector")
def to_sequence(shape, pick, own):
    return nn.Sequential(nn.Linear(*shape, 12), Apply(torch.Tensor.reshape, -1, 3, 4)), (3, 4)


# Activations and dropout, which take any shape


def in_place(kind, number, inplace):
    """Some operators need what they gave for their gradient, so what is changed in place is a copy."""
    return nn.Sequential(Apply(torch.clone), kind(number, inplace=True)) if inplace else kind(number)


@block("any")
def leaky_relu(shape, pick, own):
    return in_place(nn.LeakyReLU, own.slope, pick([False, True])), shape


@block("any")
def elu(shape, pick, own):
    # The gradient of torch's own celu has its alpha in float32 (derivatives.yaml), so that is the same for all here.
    return pick([nn.ELU(own.slope + 0.5), nn.CELU(1.3)]), shape


@block("any")
def prelu(shape, pick, own):
    return nn.PReLU(shape[0] if pick([True, False]) else 1), shape


@block("any")
def temperature(shape, pick, own):
    return Tempered(), shape


@block("any")
def activation(shape, pick, own):
    return pick([nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Hardswish, nn.Mish, nn.SELU, nn.Tanh])(), shape


@block("any")
def functional_activation(shape, pick, own):
    return Apply(pick([F.relu, F.gelu, F.silu, torch.tanh, F.softsign, F.leaky_relu, F.elu, F.hardtanh])), shape


@block("any")
def softmax(shape, pick, own):
    return pick([nn.Softmax, nn.LogSoftmax])(dim=-1), shape


@block("any")
def dropout(shape, pick, own):
    return in_place(nn.Dropout, own.rate, pick([False, True])), shape


@block("any")
def alpha_dropout(shape, pick, own):
    return pick([nn.AlphaDropout, nn.FeatureAlphaDropout])(own.rate), shape


@block("any")
def functional_dropout(shape, pick, own):
    return Dropped(own.rate, pick([F.dropout, F.alpha_dropout, F.feature_alpha_dropout])), shape


# Images


@block("image")
def conv2d(shape, pick, own):
    out, groups = pick([(4, 1), (6, 2), (2, 2)])
    convolution = nn.Conv2d(shape[0], out, pick([1, 3]), padding=1, groups=groups if shape[0] % 2 == 0 else 1)
    return nn.Sequential(convolution, nn.Upsample(size=(5, 5))), (out, 5, 5)


@block("image")
def strided_conv2d(shape, pick, own):
    convolution = nn.Conv2d(shape[0], 4, 3, stride=2, padding=1, dilation=1, padding_mode=pick(["zeros", "reflect"]))
    return nn.Sequential(convolution, Apply(F.interpolate, (5, 5))), (4, 5, 5)


@block("image")
def functional_conv2d(shape, pick, own):
    return Weighted(F.conv2d, (3, shape[0], 3, 3), (3,), padding="same"), (3, *shape[1:])


@block("image")
def conv_transpose2d(shape, pick, own):
    layer = nn.ConvTranspose2d(shape[0], 3, 2, stride=2, output_padding=pick([0, 1]))
    return nn.Sequential(layer, nn.AdaptiveAvgPool2d(5)), (3, 5, 5)


@block("image")
def batch_norm2d(shape, pick, own):
    return nn.BatchNorm2d(shape[0], eps=own.eps, momentum=own.momentum), shape


@block("image")
def group_norm(shape, pick, own):
    return nn.GroupNorm(2 if shape[0] % 2 == 0 else 1, shape[0], eps=own.eps), shape


@block("image")
def dropout2d(shape, pick, own):
    return pick([nn.Dropout2d(own.rate), Dropped(own.rate, F.dropout2d)]), shape


@block("image")
def dropout3d(shape, pick, own):
    return nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Dropout3d(own.rate), nn.Flatten(1, 2)), shape


@block("image")
def pool2d(shape, pick, own):
    pool = pick([nn.MaxPool2d(2, 1), nn.AvgPool2d(2, 1), Apply(F.max_pool2d, 2, 1), nn.LPPool2d(2, 2, 1)])
    return nn.Sequential(pool, nn.ZeroPad2d((0, 1, 0, 1))), shape


@block("image")
def adaptive_pool2d(shape, pick, own):
    return nn.Sequential(pick([nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])(2), nn.Flatten()), (shape[0] * 4,)


@block("image")
def image_residual(shape, pick, own):
    (width, *_) = shape
    inner = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width, momentum=own.momentum), nn.ReLU()]
    return Residual(nn.Sequential(*inner)), shape


@block("image")
def to_series(shape, pick, own):
    return nn.Flatten(2), (shape[0], shape[1] * shape[2])


# Series: channels by time


@block("series")
def conv1d(shape, pick, own):
    out = pick([2, 4])
    return nn.Sequential(nn.Conv1d(shape[0], out, 3, padding=1, dilation=1), nn.AdaptiveAvgPool1d(6)), (out, 6)


@block("series")
def functional_conv1d(shape, pick, own):
    return Weighted(F.conv1d, (3, shape[0], 3), (3,), padding=1), (3, shape[1])


@block("series")
def conv_transpose1d(shape, pick, own):
    return nn.Sequential(nn.ConvTranspose1d(shape[0], 3, 3, stride=2), nn.AdaptiveMaxPool1d(6)), (3, 6)


@block("series")
def series_batch_norm(shape, pick, own):
    return nn.BatchNorm1d(shape[0], eps=own.eps, momentum=own.momentum), shape


@block("series")
def series_group_norm(shape, pick, own):
    return pick([nn.GroupNorm(1, shape[0], eps=own.eps), nn.InstanceNorm1d(shape[0], affine=True)]), shape


@block("series")
def dropout1d(shape, pick, own):
    return nn.Dropout1d(own.rate), shape


@block("series")
def pool1d(shape, pick, own):
    return nn.Sequential(pick([nn.MaxPool1d(2, 1), nn.AvgPool1d(2, 1)]), nn.ConstantPad1d((1, 0), 0.5)), shape


@block("series")
def series_to_sequence(shape, pick, own):
    return nn.Sequential(nn.Linear(shape[1], 4), Apply(torch.Tensor.contiguous)), (shape[0], 4)


# Sequences: time by features


class Recurrent(nn.Module):
    def __init__(self, kind, width, out, **options):
        super().__init__()
        self.layer = kind(width, out, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0]


@block("sequence")
def rnn(shape, pick, own):
    layer = Recurrent(nn.RNN, shape[1], 4, nonlinearity=pick(["tanh", "relu"]), num_layers=pick([1, 2]))
    return layer, (shape[0], 4)


@block("sequence")
def lstm(shape, pick, own):
    return Recurrent(nn.LSTM, shape[1], 2, bidirectional=True, bias=pick([True, False])), (shape[0], 4)


@block("sequence")
def gru(shape, pick, own):
    return Recurrent(nn.GRU, shape[1], 4, num_layers=pick([1, 2])), (shape[0], 4)


class Attends(nn.Module):
    def __init__(self, width, p, weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=p, batch_first=True)
        self.weights = weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.weights)[0]


@block("sequence")
def multihead_attention(shape, pick, own):
    return nn.Sequential(nn.Linear(shape[1], 4), Attends(4, own.rate, pick([True, False]))), (shape[0], 4)


@block("sequence")
def transformer_layer(shape, pick, own):
    layer = nn.TransformerEncoderLayer(
        4, 2, 6, own.rate, pick([F.relu, F.gelu]), own.eps, batch_first=True, norm_first=pick([True, False])
    )
    return nn.Sequential(nn.Linear(shape[1], 4), layer), (shape[0], 4)


class DotProduct(nn.Module):
    """Heads cut by hand, with a dropout rate and a mask."""

    def __init__(self, width, p, causal):
        super().__init__()
        self.project, self.rate, self.causal = nn.Linear(width, 12), nn.Dropout(p), causal

    def forward(self, x):
        batch, time, _ = x.shape
        q, k, v = self.project(x).view(batch, time, 3, 2, 2).permute(2, 0, 3, 1, 4)
        p = self.rate.p if self.training else 0.0
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return made.transpose(1, 2).flatten(2)


@block("sequence")
def dot_product_attention(shape, pick, own):
    return DotProduct(shape[1], own.rate, pick([True, False])), (shape[0], 4)


@block("sequence")
def sequence_layer_norm(shape, pick, own):
    return nn.LayerNorm(shape[1], eps=own.eps), shape


@block("sequence")
def sequence_linear(shape, pick, own):
    return nn.Linear(shape[1], 4), (shape[0], 4)


@block("sequence")
def to_vector(shape, pick, own):
    return pick([(nn.Flatten(), (shape[0] * shape[1],)), (Apply(torch.mean, 1), (shape[1],))])


@block("sequence")
def sequence_to_series(shape, pick, own):
    return Apply(torch.transpose, 1, 2), (shape[1], shape[0])


# Tokens


@block("tokens")
def embedding(shape, pick, own):
    return nn.Embedding(7, 4, padding_idx=pick([None, 0])), (*shape, 4)


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, x):
        return F.embedding(x, self.table)


@block("tokens")
def functional_embedding(shape, pick, own):
    return Looked(), (*shape, 4)


class Language(nn.Module):
    """An embedding whose table is also the weight behind it, which a sequence of tokens has for its logits."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


@block("tokens")
def tied_embedding(shape, pick, own):
    return Language(), (*shape, 7)


@block("tokens")
def embedding_bag(shape, pick, own):
    return nn.EmbeddingBag(7, 4, mode=pick(["sum", "mean"])), (4,)


INPUTS = {"vector": (6,), "image": (2, 5, 5), "series": (3, 6), "sequence": (3, 4), "tokens": (4,)}
FOLLOWING = {  # the kinds of what blocks give, where it is not what they took
    **dict.fromkeys(("to_image",), "image"),
    **dict.fromkeys(("to_sequence", "series_to_sequence", "embedding", "functional_embedding"), "sequence"),
    **dict.fromkeys(("tied_embedding",), "sequence"),
    **dict.fromkeys(("to_series", "sequence_to_series"), "series"),
    **dict.fromkeys(("adaptive_pool2d", "to_vector", "embedding_bag"), "vector"),
}


class Scaled(nn.Module):
    """Before a slope, or what is written in place: in the batch itself, which all share, neither can differ."""

    def __init__(self, shape):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x):
        return x * self.scale


class Own:
    """The numbers of one trial that torch's modules may have; those that only the native way takes may be alike."""

    def __init__(self, bundle, number, place):
        rng, shared = random.Random(f"{bundle.seed} {number} {place}"), random.Random(f"{bundle.seed} {place}")
        self.rate = rng.choice([0.0, rng.uniform(0.05, 0.6), rng.uniform(0.05, 0.6)])
        rng = shared if bundle.alike else rng
        self.slope, self.momentum = rng.uniform(0.05, 0.9), rng.uniform(0.05, 0.9)
        self.eps = 10 ** rng.uniform(-6, -2)


@dataclass(frozen=True)
class Bundle:
    """All that is random about a bundle of trials."""

    input: str
    blocks: tuple[str, ...]
    trials: int
    optimizer: str
    groups: int
    clip: float | None
    unit_steps: int | None
    loss: str
    alike: bool  # all trials have the same slopes, eps and momentum, which the general way needs
    seed: int

    def network(self, number):
        shape, layers = INPUTS[self.input], []
        if {"leaky_relu", "elu", "dropout"} & set(self.blocks) and self.input != "tokens":
            layers.append(Scaled(shape))
        for place, name in enumerate(self.blocks):
            structure = random.Random(f"{self.seed} structure {place}")
            layer, shape = BLOCKS[name][1](shape, structure.choice, Own(self, number, place))
            layers.append(layer)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(torch.Size(shape).numel(), CLASSES))


OPTIMIZERS = {
    "sgd": (optim.SGD, {}),
    "momentum": (optim.SGD, {"momentum": (0.3, 0.95), "dampening": (0.0, 0.4)}),
    "nesterov": (optim.SGD, {"momentum": (0.3, 0.95), "nesterov": True}),
    "adam": (optim.Adam, {"betas": True, "eps": (1e-8, 1e-3)}),
    "amsgrad": (optim.Adam, {"betas": True, "amsgrad": True, "fused": False}),
    "fused adam": (optim.Adam, {"betas": True, "fused": True}),
    "adamw": (optim.AdamW, {"betas": True, "maximize": True}),
    "nadam": (optim.NAdam, {"betas": True, "momentum_decay": (1e-3, 0.1), "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {"betas": True}),
    "adagrad": (optim.Adagrad, {"lr_decay": (0.0, 0.1), "initial_accumulator_value": (0.0, 0.5)}),
    "rmsprop": (optim.RMSprop, {"alpha": (0.8, 0.99), "centered": True, "momentum": (0.1, 0.5)}),
    "adadelta": (optim.Adadelta, {"rho": (0.8, 0.99)}),
    "adamax": (optim.Adamax, {"betas": True}),  # these two step on views
    "asgd": (optim.ASGD, {"t0": (1.0, 9.0)}),
}
SCHEDULERS = {
    "none": lambda o, rng: None,
    "unit": lambda o, rng: schedules.StepLR(o, rng.choice([1, 2]), rng.uniform(0.3, 0.9)),
    "step": lambda o, rng: (schedules.CosineAnnealingLR(o, rng.randint(5, 30)), "step"),
    "cycle": lambda o, rng: (schedules.OneCycleLR(o, rng.uniform(0.01, 0.05), 100, pct_start=0.1), "step"),
    "plateau": lambda o, rng: schedules.ReduceLROnPlateau(o, "min", rng.uniform(0.3, 0.9), patience=0),
    "sequence": lambda o, rng: (
        schedules.SequentialLR(o, [schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.9)], [rng.randint(2, 8)]),
        "step",
    ),
}


class Network(ps.Task):
    batch_size, eval_batch_size = BATCH, 3

    def __init__(self, bundle):
        self.bundle, self.clip_grad_norm, self.unit_steps = bundle, bundle.clip, bundle.unit_steps

    def data(self, config):
        generator = torch.Generator().manual_seed(self.bundle.seed)
        shape = (ROWS + 5, *INPUTS[self.bundle.input])
        if self.bundle.input == "tokens":
            x = torch.randint(7, shape, generator=generator)
        else:
            x = torch.randn(shape, generator=generator)
        y = torch.randint(CLASSES, shape[:1], generator=generator)
        return (x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:])

    def model(self, config):
        return self.bundle.network(config["number"])

    def optimizer(self, params, config):
        rng = random.Random(f"{self.bundle.seed} optimizer {config['number']}")
        kind, arguments = OPTIMIZERS[self.bundle.optimizer]
        given = {"lr": 10 ** rng.uniform(-3.5, -1.5), "weight_decay": rng.choice([0.0, rng.uniform(0.001, 0.1)])}
        for name, value in arguments.items():
            if name == "betas":
                given["betas"] = rng.uniform(0.5, 0.95), rng.uniform(0.8, 0.999)
            else:
                given[name] = rng.uniform(*value) if isinstance(value, tuple) else value
        if self.bundle.groups == 1:
            return kind(params, **given)
        wide = {"params": [p for p in params if p.ndim > 1]}
        narrow = {"params": [p for p in params if p.ndim < 2], "lr": given["lr"] * rng.uniform(0.3, 3)}
        return kind([wide, narrow], **given)

    def scheduler(self, optimizer, config):
        rng = random.Random(f"{self.bundle.seed} scheduler {config['number']}")
        names = sorted(SCHEDULERS)
        if not ("betas" in optimizer.defaults or optimizer.defaults.get("momentum")):
            names.remove("cycle")  # it would set a momentum
        return SCHEDULERS[rng.choice(names)](optimizer, rng)

    def loss(self, model, batch, config):
        x, y = batch
        out = model(x.clone())  # which some change in place
        match self.bundle.loss:
            case "squares":
                return F.mse_loss(out, F.one_hot(y, CLASSES).double())
            case "smooth":
                return F.cross_entropy(out, y, label_smoothing=0.1)
            case "margin":
                return F.multi_margin_loss(out, y)
        return F.nll_loss(out.log_softmax(-1), y)

    def metrics(self, model, batch, config):
        x, y = batch
        out = model(x.clone())
        return {"loss": F.cross_entropy(out, y), "accuracy": (out.argmax(-1) == y).double().mean()}


def bundles(pick, name=None):
    """A random bundle, by a function that picks one of several; with a block that must be in it, if one is named."""
    given = kind = pick(sorted(INPUTS)) if name is None or BLOCKS[name][0] == "any" else BLOCKS[name][0]
    blocks = []

    def add(block):
        nonlocal kind
        blocks.append(block)
        kind = FOLLOWING.get(block, kind)

    if name is not None:
        if BLOCKS[name][0] == "any":
            add(pick(sorted(n for n, (of, _) in BLOCKS.items() if of == kind)))
        add(name)
    for _ in range(pick([1, 2, 3] if name else [1, 2, 3, 4, 5])):
        add(pick(sorted(n for n, (of, _) in BLOCKS.items() if of == kind or (of == "any" and blocks))))
    return Bundle(
        given,
        tuple(blocks),
        trials=pick([1, 2, 3, 2, 5, 3, 2, 4, 9]),
        optimizer=pick(sorted(OPTIMIZERS)),
        groups=pick([1, 2]),
        clip=pick([None, None, 0.5]),
        unit_steps=pick([None, None, 4]),
        loss=pick(["nll", "squares", "smooth", "margin"]),
        alike=pick([False, True]),
        seed=pick(range(1000)),
    )
