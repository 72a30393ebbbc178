"""Trials trained as one model and each alone, and how far what came out of the two is apart."""

import math
from dataclasses import replace
from itertools import islice

import torch

from penstock.training.data import DataCache
from penstock.training.fused import compiles, speeding, traces
from penstock.training.fused.bundle import Fused
from penstock.training.fused.compiled import CompiledStep, trace
from penstock.training.fused.recipe import Recipe
from penstock.training.loop import Training
from penstock.training.sources import Source

CPU = torch.device("cpu")


class Trials:
    """Makes the trials of one task, which share their data as a worker's do."""

    def __init__(self, task, seed=0, device=CPU):
        self.task, self.seed, self.device, self.cache = task, seed, device, DataCache(task, seed, device)

    def make(self, number, config, data=None):
        data = data or self.cache.get(config)
        return Training(self.task, number, config, data, seed=self.seed, device=self.device, metric="loss", mode="min")

    def alone(self, number, config, steps):
        """A trial after some steps on its own, and its metrics."""
        run = self.make(number, config)
        return run, go_on(run, steps)


def as_traced(step, inputs):
    """A step as its trace, which went through its text: what Inductor would compile."""
    made = trace(step, inputs)
    return CompiledStep(step, inputs, traces.read(made.text)[0], made.kept, step.way.read)


class Instead:
    """Stands for Inductor beside training: a step is there once it was asked for so many times, as its trace."""

    idle, imported, warm, delay = True, True, False, 0.0

    def __init__(self, monkeypatch, looks=0):
        self.looks, self.asked, self.loads = looks, {}, 0
        for module in (compiles, speeding):
            monkeypatch.setattr(module, "inductor", lambda: self)

    def prepared(self):
        return True

    def waits(self, unknown):
        return unknown if self.delay is None else self.delay

    def ready(self, traced):
        self.asked[traced.key] = self.asked.get(traced.key, 0) + 1
        return self.asked[traced.key] > self.looks

    def load(self, traced):
        self.loads += 1
        return traces.read(traced.text)[0]


def go_on(run, steps):
    """Train a trial alone by some steps; gives its metrics."""
    return [metrics for metrics in islice(run.steps(), steps) if metrics is not None]


class Together:
    """A fused bundle that is stepped by hand; ``curves`` has the metrics of each trial that was ever in it."""

    def __init__(self, *ways, recipe=None, **known):
        self.recipe = recipe or Recipe(**({"ways": list(ways)} if ways else {}), **known)
        self.fused = Fused(self.recipe)
        self.curves = {}

    def enter(self, *trials):
        for trial in trials:
            self.fused.enter(trial)
            self.curves.setdefault(id(trial), [])
        return self

    def leave(self, *trials):
        for trial in trials:
            self.fused.leave(trial)

    def step(self, steps=1, **kwargs):
        for _ in range(steps):
            self.fused.step(**kwargs)
            self.end_units()
        return self

    def end_units(self):
        ended = self.fused.take_ended()
        if ended:
            rows = self.fused.evaluate(ended)()
            self.fused.take_metrics(ended, rows)
            for trial, row in zip(ended, rows, strict=True):
                self.curves[id(trial)].append(row)

    def curve(self, trial):
        return self.curves[id(trial)]


def leaves(tree, path=""):
    """The leaves of nested dicts and sequences, each with its path."""
    if isinstance(tree, dict | list | tuple) and not tree:
        yield f"{path} empty", None
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, f"{path}/{name}")
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from leaves(value, f"{path}/{place}")
    else:
        yield path, tree


def farthest(one, other):
    """(distance, where) of the two leaves of two trees that differ most; infinite where they are of another kind.

    Numbers above 1 count by their ratio; a NaN equals a NaN.
    """
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    if ours.keys() != theirs.keys():
        return math.inf, f"only in one of the two: {sorted(ours.keys() ^ theirs.keys())}"
    return max(((_distance(value, theirs[path]), path) for path, value in ours.items()), default=(0.0, ""))


def _distance(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return math.inf
        one, other = one.detach().double(), other.detach().double()
        same = (one == other) | (one.isnan() & other.isnan())
        far = ((one - other).abs() / other.abs().clamp(min=1)).masked_fill(same, 0.0).nan_to_num(math.inf)
        return float(far.max()) if far.numel() else 0.0
    if isinstance(one, float) and isinstance(other, float):
        return _distance(torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))
    return 0.0 if type(one) is type(other) and one == other else math.inf


def assert_equal(one, other):
    """Every bit."""
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[path]), path
        else:
            assert value == theirs[path] or value != value, path


class Changed(Source):
    """The same batches with every tensor of them changed."""

    def __init__(self, source, change):
        super().__init__(source.seed, source.length)
        self.source, self.change = source, change

    def batches(self, epoch, start, size):
        for batch in self.source.batches(epoch, start, size):
            yield tuple(map(self.change, batch))

    def all(self, size):
        return self.source.all(size)


def nudged(tensor, towards=math.inf):
    """Every number one unit in its last place farther."""
    return tensor.nextafter(torch.full_like(tensor, towards)) if tensor.is_floating_point() else tensor


def rounding_controls(trials, number, config, steps, *, random):
    """How far a trial's state and metrics come apart by rounding alone, again and again in other ways.

    The first compares it with a run that permutes the rows inside each batch. Where masks belong to places in the batch
    that is another training: then the numbers of the batch are nudged instead, or those of the model.
    """
    alone, curve = trials.alone(number, config, steps)
    data = trials.cache.get(config)
    changes = [] if random else [lambda t: t.flip(0), lambda t: t.roll(1, 0), lambda t: t.roll(2, 0)]
    if any(t.is_floating_point() for t in data.train.tensors):
        changes += [nudged, lambda t: nudged(t, -math.inf)]
    for change in [*changes, math.inf, -math.inf]:  # the last two are of the model
        source = Changed(data.train, change) if callable(change) else data.train
        other = trials.make(number, config, replace(data, train=source))
        if change in (math.inf, -math.inf):
            with torch.no_grad():
                for p in other.model.parameters():
                    p.copy_(nudged(p, change))
        other_curve = go_on(other, steps)
        yield farthest([other.state(drawn=False), other_curve], [alone.state(drawn=False), curve])[0]


class Alone:
    """A trial trained alone by some steps, to compare with."""

    def __init__(self, trials, number, config, steps):
        self.run, self.curve = trials.alone(number, config, steps)
        self.controls = rounding_controls(trials, number, config, steps, random=self.run.randomness.used)
        self.control, self.name = 0.0, f"trial {number}"

    def assert_like(self, run, curve, said=""):
        """Parameters, buffers, optimizer, scheduler, position, best weights and metrics agree: to 1e-9, or to ten times
        the rounding control. What rounding does to an adaptive optimizer varies a lot, so controls are taken until one
        is large enough.
        """
        state = run if isinstance(run, dict) else run.state(drawn=False)
        far, where = farthest([state, curve], [self.run.state(drawn=False), self.curve])
        while far > max(1e-9, 10 * self.control) and (control := next(self.controls, None)) is not None:
            self.control = max(self.control, control)
        assert far <= max(1e-9, 10 * self.control), (
            f"{said} {self.name} is {far:.2g} from its run alone at {where}; rounding control {self.control:.2g}"
        )
