"""Models as libraries write them: dict batches, results with a loss, notes in configs, tied weights."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.training.fused.ways import Native
from tests.training.together import Together, Trials

ROWS, LENGTH, WORDS, WIDTH = 10, 5, 11, 8
CONFIGS = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}]


@dataclass
class Settings:
    words: int = WORDS
    kind: str | None = None  # which the first forward notes
    seen: list = field(default_factory=list)


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Reader(nn.Module):
    """Predicts every word from its neighbours; the table of words is that of the output."""

    def __init__(self, settings):
        super().__init__()
        self.settings = settings
        self.table = nn.Embedding(settings.words, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, settings.words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids, attention_mask, labels=None):
        x = self.table(input_ids)
        scores = (x @ x.mT).masked_fill(attention_mask[:, None] == 0, torch.finfo(x.dtype).min)
        logits = self.head(self.body(scores.softmax(-1) @ x).tanh())
        if labels is None:
            return Output(None, logits)
        if self.settings.kind is None:
            self.settings.kind = "words"
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Reading(ps.Task):
    batch_size = 4
    eval_batch_size = 4
    rows = False  # whether the data is a dataset of dicts

    def data(self, config):
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
        there = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1), generator=generator)).long()
        whole = {"input_ids": words, "attention_mask": there, "labels": words.where(there == 1, -100)}
        if self.rows:
            samples = [{name: column[i] for name, column in whole.items()} for i in range(ROWS)]
            return samples, samples[:4]
        return whole, {name: column[:4] for name, column in whole.items()}

    def model(self, config):
        return Reader(Settings()).double()

    def optimizer(self, params, config):
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9)

    def loss(self, model, batch, config):
        return model(**batch).loss


class Rows(Reading):
    rows = True


class Popping(Reading):
    """Takes the labels out of the batch, and takes the mean over valid words by hand."""

    def loss(self, model, batch, config):
        labels = batch.pop("labels")
        valid = labels != -100
        lost = F.cross_entropy(model(**batch).logits.mT, labels.where(valid, 0), reduction="none")
        return (lost * valid).sum() / valid.sum()


@pytest.mark.parametrize("task", [Reading(), Rows(), Popping()], ids=["columns", "rows", "popping"])
def test_a_library_model_trains_fused_as_alone(task):
    trials = Trials(task)
    runs = [trials.make(number, config) for number, config in enumerate(CONFIGS)]
    together = Together(Native).enter(*runs).step(6)
    assert together.recipe.named == "native"
    for number, (config, run) in enumerate(zip(CONFIGS, runs, strict=True)):
        alone, curve = trials.alone(number, config, 6)
        assert _apart(together.fused.state(run)["model"], alone.model.state_dict()) < 1e-12
        assert together.curve(run) == [pytest.approx(row, abs=1e-12) for row in curve]


def _apart(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - value).abs().max()) for name, value in other.items())


def test_tied_weights_stay_tied_when_a_trial_leaves():
    trials = Trials(Reading())
    runs = [trials.make(number, config) for number, config in enumerate(CONFIGS)]
    together = Together(Native).enter(*runs).step(2)
    together.leave(runs[1])
    assert runs[1].model.head.weight is runs[1].model.table.weight


def test_a_size_may_be_a_tensor_of_one_number():
    class Sized(Reading):
        def loss(self, model, batch, config):
            made = model(**batch).logits
            return made.view(torch.tensor(len(made)), LENGTH * WORDS).square().mean()

    trials = Trials(Sized())
    runs = [trials.make(number, config) for number, config in enumerate(CONFIGS)]
    assert Together(Native).enter(*runs).step(1).recipe.named == "native"


def test_a_dict_of_tensors_is_data_whose_batches_are_dicts():
    source = Trials(Reading()).cache.get({}).train
    batches = list(source.batches(0, 0, 4))
    assert [list(batch) for batch in batches] == [["input_ids", "attention_mask", "labels"]] * 3
    batches[0].pop("labels")  # which is no other trial's loss
    assert "labels" in next(iter(source.batches(0, 0, 4)))
    cut = next(iter(source.batches(0, 0, 4, lambda rows: slice(1, 3))))
    assert torch.equal(cut["input_ids"], batches[0]["input_ids"][1:3])
