"""Audits: a step that is another than the trial's own is found, and a look at a trial leaves no trace."""

import itertools
import warnings

import pytest
import torch

import penstock as ps
from penstock.training.fused import audit
from penstock.training.fused.audit import Audits, Differs, Row, holdings, step_alone
from penstock.training.fused.ways import Native
from tests.tasks import Blobs
from tests.training.fused.test_watched import CountsLater, Plain, study
from tests.training.together import Together, Trials, assert_equal, farthest


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(Audits, "due", lambda *_, **__: True)


def bundle(task, *ways, trials=3):
    made = Trials(task)
    ours = [made.make(number, {"lr": 0.1, "scale": 1.0}) for number in range(trials)]
    return ours, Together(*ways).enter(*ours)


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "LBFGS-like": lambda params: Own(params, lr=0.1),
}


class Own(torch.optim.SGD):
    """Has no form for many trials, as it is not torch's own class."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_audit_leaves_no_trace(optimizer, monkeypatch):
    class Task(Blobs):
        def optimizer(self, params, config):
            return OPTIMIZERS[optimizer](params)

    # Rounding is measured at every audit.
    monkeypatch.setattr(audit, "compare", lambda start, batch, *_: step_alone(start, batch, 1e-3))
    found = []
    for due in (False, True):
        monkeypatch.setattr(Audits, "due", lambda *_, due=due, **__: due)
        ours, together = bundle(Task())
        together.step(14)
        found.append([[together.fused.state(trial), together.curve(trial)] for trial in ours])
    assert_equal(*found)


@pytest.mark.usefixtures("always")
def test_a_step_that_agrees_is_no_finding():
    _, together = bundle(Blobs())
    together.step(14)


class Frozen(Native):
    """A way that stops to follow what Python does, as a captured step would."""

    frozen = 0.0

    def run(self, *args):
        return super().run(*args) * (1 + self.frozen)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("off", [1e-6, 0.5])
def test_a_step_that_is_another_is_found(off, monkeypatch):
    _, together = bundle(Plain(), Frozen)
    together.step(3)
    monkeypatch.setattr(Frozen, "frozen", off)
    with pytest.raises(Differs, match=r"^the (parameter|optimizer's momentum_buffer of) \S+ is off by"):
        together.step()


def test_what_is_compared_is_the_whole_state():
    (first, *_), together = bundle(Blobs())
    together.step(2)
    stack = together.fused.stack
    start, before = Row(stack, first), holdings(stack, first)
    batch = next(iter(first.data.train.batches(first.epoch, first.place, first.batch_size)))
    alone = step_alone(start, batch)
    together.step()
    made = holdings(stack, first).less(before)
    assert {name.rpartition(" of ")[0] or name.rpartition(" ")[0] for name in made} == {
        "the parameter", "the buffer", "the optimizer's momentum_buffer"
    }  # fmt: skip
    assert made.keys() == alone.keys()
    assert all(bool(((made[name] - alone[name]).nan_to_num().abs() < 1e-5).all()) for name in alone)


def test_the_first_step_of_each_kind_is_audited_then_two_replays_then_about_one_in_two_hundred():
    audits = Audits(since=-1e9)
    due = [audits.due("full", 7, fast=False) for _ in range(1000)]
    assert due[0]
    assert 3 <= sum(due[1:]) <= 10
    assert audits.due("short", 7, fast=False)
    audits.begin_fast()
    early = [audits.due("full", 7, fast=True) for _ in range(20)]
    assert list(itertools.compress(range(20), early))[:3] == [0, 1, 10]
    again = Audits(since=-1e9)
    assert due == [again.due("full", 7, fast=False) for _ in range(1000)]


def test_an_audit_that_is_due_while_steps_are_timed_comes_afterwards():
    audits = Audits(since=-1e9, put_off=True)
    audits.begin_fast()
    assert [audits.due("full", 7, fast=True) for _ in range(300)].count(True) == 3, "the first ones come in any case"
    assert audits.ahead("full") > 100
    audits.put_off = False
    assert audits.ahead("full") == 0
    assert audits.due("full", 7, fast=True)
    assert not audits.due("full", 7, fast=True)


def test_audits_take_a_small_part_of_the_time():
    audits = Audits(spent=1e9)
    assert audits.due("full", 7, fast=False)  # the first of its kind, whatever it costs
    assert not any(audits.due("full", 7, fast=False) for _ in range(1000))


@pytest.mark.usefixtures("always")
def test_trials_go_on_alone_after_a_finding_as_if_they_had_never_been_together():
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.SoloWarning)
        for sharing in ("solo", "fused"):
            made[sharing] = study(CountsLater(), name=sharing).run(progress=False, sharing=sharing)
    curves = [[trial.curve for trial in result.trials] for result in made.values()]
    assert farthest(*curves)[0] <= 1e-9
