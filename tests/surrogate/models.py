"""Models and tasks whose narrower twins are looked at: the user's own classes, of every kind of layer."""

import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps

NAMES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "LBFGS")
KINDS = {name: getattr(torch.optim, name) for name in NAMES}


class Attention(nn.Module):
    """Attention of a user's own, whose forward reads a head size and a split size."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.head_size, self.split_size = heads, width // heads, width
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).split(self.split_size, dim=2)
        q, k, v = (t.view(*x.shape[:2], self.heads, self.head_size).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class Tokens(nn.Module):
    """A transformer: a table, positions, attention of three kinds, a residual, and an output."""

    def __init__(self, width=64):
        super().__init__()
        self.table = nn.Embedding(33, width)
        self.positions = nn.Parameter(torch.randn(12, width))
        self.attention = Attention(width, 4)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, dropout=0.0)
        self.head = nn.Linear(width, 33)

    def forward(self, i):
        x = self.table(i) + self.positions[: i.shape[1]]
        return self.head(self.layer(self.attention(x))).flatten(0, 1)


class Tied(nn.Module):
    """A table that is the weight of the output layer too."""

    def __init__(self, width=64):
        super().__init__()
        self.table = nn.Embedding(33, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 33)
        self.head.weight = self.table.weight

    def forward(self, i):
        return self.head(self.inner(self.table(i))).flatten(0, 1)


class Images(nn.Module):
    """Convolutions plain, depthwise, grouped and transposed; norms; a concatenation with the input; a reshape."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32, padding=1)
        self.grouped = nn.Conv2d(34, 64, 1, groups=2)
        self.groups = nn.GroupNorm(4, 64)
        self.up = nn.ConvTranspose2d(64, 16, 2, stride=2)
        self.last = nn.Linear(16 * 4 * 4, 33)

    def forward(self, x):
        h = self.depthwise(F.relu(self.norm(self.first(x))))
        h = self.up(self.groups(self.grouped(torch.cat([h, x], 1))))
        return self.last(F.adaptive_avg_pool2d(h, 4).flatten(1))


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(2, 64, num_layers=2, batch_first=True)
        self.last = nn.Linear(64, 33)

    def forward(self, x):
        return self.last(self.memory(x)[0][:, -1])


def perceptron(width=256, layers=2, classes=10):
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), *hidden, nn.Linear(width, classes))


def draws(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Narrowable(ps.Task):
    """A perceptron on a few rows; ``make`` may make another model."""

    batch_size = 32

    def __init__(self, make=perceptron):
        self.make = make

    def data(self, config):
        x = draws(96, 32)
        rows = x, x[:, :10].argmax(1)
        return rows, rows

    def model(self, config):
        return self.make()

    def optimizer(self, params, config):
        return KINDS[config.get("optimizer", "SGD")](params, lr=config["lr"], weight_decay=config.get("decay", 0))

    def scheduler(self, optimizer, config):
        return None

    def loss(self, model, batch, config):
        x, y = batch
        return F.cross_entropy(model(x), y)


class Doubles(Narrowable):
    """The same in float64."""

    def data(self, config):
        train, valid = super().data(config)
        return (train[0].double(), train[1]), (valid[0].double(), valid[1])

    def model(self, config):
        return super().model(config).double()


class Biased(nn.Module):
    """Attention whose forward reads a head size, with a table of a bias for each head; it gives its hidden states too.

    So do T5 and Swin of Hugging Face, and their decoders.
    """

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.window, self.head_size = 4, width // heads
        self.table = nn.Embedding(33, width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.bias = nn.Embedding(2 * self.window, heads)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 33)

    def forward(self, i):
        x = self.table(i)
        q, k, v = (layer(x).view(*i.shape, -1, self.head_size).transpose(1, 2) for layer in (self.q, self.k, self.v))
        places = torch.arange(i.shape[1])
        far = (places[:, None] - places).clamp(-self.window, self.window - 1) + self.window
        scores = torch.matmul(q, k.transpose(2, 3)) + self.bias(far).permute(2, 0, 1)
        y = torch.matmul(scores.softmax(-1), v).transpose(1, 2).reshape(*i.shape, -1)
        hidden = x + self.out(y)
        return {"logits": self.head(hidden).flatten(0, 1), "hidden": hidden}
