"""Pickles in a log: nothing in them runs, whether the search is the same or has changed; real ones are read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cmaes
import numpy as np
import optuna
import pytest

import penstock as ps
from penstock.algorithms.pickles import check
from penstock.errors import StudyError
from penstock.log.events import Wrote, encode
from penstock.log.reader import read
from tests.tasks import trivial

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
SPACE = {"x": ps.uniform(0, 4), "y": ps.loguniform(0.1, 1)}
WIDER = {**SPACE, "x": ps.uniform(0, 5)}
TWO = np.array([[0.0, 1.0], [0.0, 1.0]])


class Evil:
    """Writes a file where its pickle is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("ran").write_text, ("code ran",)


EVIL = {
    "protocol 5": lambda: pickle.dumps(Evil(), 5),
    "protocol 0": lambda: pickle.dumps(Evil(), 0),
    "inside an optimizer": lambda: pickle.dumps(_with(cmaes.CMA(np.zeros(2), 1.0), Evil())),
    "an array of objects": lambda: pickle.dumps(np.array([Evil()], dtype=object)),
    "an array whose type is forged": lambda: pickle.dumps(np.zeros(2)).replace(b"\x8c\x02f8", b"\x8c\x02O8"),
    "an array over memory of its own": lambda: (
        b"\x80\x05cnumpy\nndarray\n(K\x01\x85\x8c\x01O\x96" + (8).to_bytes(8, "little") + b"A" * 8 + b"tRK\x00Ns."
    ),
    "another class of numpy": lambda: b"cnumpy\nmemmap\n(S'ran'\nS'f8'\nS'w+'\nI0\n(I4\nttR.",
}


def study(trials: int, sampler: optuna.samplers.BaseSampler, space: Any = SPACE, name: str = "s") -> ps.Study:
    algorithm = ps.Random(budget=1, concurrency=1)
    return ps.Study(
        trivial, space, metric="loss", mode="min", algorithm=algorithm, sampler=sampler, trials=trials, name=name
    )


def cma() -> optuna.samplers.CmaEsSampler:
    return optuna.samplers.CmaEsSampler(n_startup_trials=1, popsize=3)


def edit(data: bytes) -> int:
    """Replace every optimizer in the log, as an attacker would who knows its format; says how many there were."""
    edited = 0

    def evil(event: Wrote) -> Wrote:
        nonlocal edited
        if ":optimizer" in event.key:
            edited += 1
            return replace(event, value=data.hex())
        return event

    rewrite(evil)
    return edited


def rewrite(change: Callable[[Wrote], Wrote]) -> None:
    log = Path(".penstock/s/log.jsonl")
    events = [change(event) if isinstance(event, Wrote) else event for event in read(log)]
    log.write_text("".join(f"{encode(event, number)}\n" for number, event in enumerate(events)))


def test_an_edited_log_of_the_same_search_is_computed_again_and_its_pickle_is_never_read():
    study(10, cma()).run(progress=False)
    whole = study(16, cma(), name="whole").run(progress=False)
    assert edit(EVIL["protocol 5"]())
    result = study(16, cma()).run(progress=False)
    assert not Path("ran").exists()
    assert [t.config for t in result.trials] == [t.config for t in whole.trials]


@pytest.mark.parametrize("kind", EVIL)
def test_an_edited_log_of_a_changed_search_is_refused_in_one_message(kind):
    study(10, cma()).run(progress=False)
    assert edit(EVIL[kind]())
    changed = study(16, cma(), WIDER)
    with pytest.raises(StudyError, match=r"'cma:optimizer' of trial \d+ .*expected the state of Optuna's CMA-ES"):
        changed.run(progress=False, allow_changes=True)
    assert not Path("ran").exists()


def test_a_pickle_that_a_later_line_replaces_is_refused_too():
    study(10, cma()).run(progress=False)
    log = Path(".penstock/s/log.jsonl")
    events = []
    for event in read(log):
        if isinstance(event, Wrote) and ":optimizer" in event.key:
            events.append(replace(event, value=EVIL["protocol 5"]().hex()))
        events.append(event)
    log.write_text("".join(f"{encode(event, number)}\n" for number, event in enumerate(events)))
    with pytest.raises(StudyError, match=r"'cma:optimizer' of trial \d+ two values: expected the state"):
        study(16, cma(), WIDER).run(progress=False, allow_changes=True)
    assert not Path("ran").exists()


@pytest.mark.parametrize("settings", [{}, {"use_separable_cma": True}, {"with_margin": True}, {"lr_adapt": True}])
def test_an_honest_log_of_a_changed_search_goes_on(settings):
    def sampler() -> optuna.samplers.CmaEsSampler:
        return optuna.samplers.CmaEsSampler(n_startup_trials=1, popsize=3, **settings)

    study(10, sampler()).run(progress=False)
    changed = study(16, sampler(), WIDER)
    assert len(changed.run(progress=False, allow_changes=True).trials) == 16


@pytest.mark.parametrize(
    "optimizer",
    [
        cmaes.CMA(np.zeros(2), 1.0, seed=1),
        cmaes.CMA(np.zeros(2), 1.0, bounds=TWO, lr_adapt=True),
        cmaes.SepCMA(np.zeros(2), 1.0),
        cmaes.CMAwM(np.zeros(2), 1.0, bounds=TWO, steps=np.array([0, 0.1])),
    ],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("protocol", [4, 5])
def test_every_optimizer_of_cmaes_is_read(optimizer, protocol):
    solutions = [(optimizer.ask(), float(i)) for i in range(optimizer.population_size)]
    if not isinstance(optimizer, cmaes.CMAwM):
        optimizer.tell(solutions)
    text = pickle.dumps(optimizer, protocol).hex()
    check([Wrote(3, "cma:optimizer:0", text[:501]), Wrote(3, "cma:optimizer:1", text[501:])])


def test_a_pickle_in_pieces_in_any_order_and_with_zeros_before_their_numbers_is_seen():
    text = pickle.dumps(Evil()).hex()
    pieces = [Wrote(3, f"cma:optimizer:{i}", text[8 * i : 8 * i + 8]) for i in range(len(text) // 8 + 1)]
    for some in (pieces, pieces[::-1], [*pieces, Wrote(3, "cma:optimizer:00", "")]):
        with pytest.raises(StudyError, match="would run"):
            check(some)
    assert not Path("ran").exists()


def test_other_values_of_samplers_are_left_alone():
    check([Wrote(1, "nsga2:generation", 3), Wrote(None, "user:commit", "deadbeef"), Wrote(2, "a:0", [1.5, None])])


def test_a_value_that_a_sampler_would_not_write_is_refused():
    settings = dict(sampler=optuna.samplers.NSGAIISampler(population_size=3), trials=9)
    study(**settings).run(progress=False)
    rewrite(lambda event: replace(event, value=event.value + 1) if isinstance(event.value, int) else event)
    with pytest.raises(StudyError, match="The sampler and the log disagree: it wrote"):
        study(**settings).run(progress=False)


def test_a_long_value_that_a_sampler_would_not_write_is_told_in_brief():
    settings = dict(sampler=optuna.samplers.NSGAIISampler(population_size=3), trials=9)
    study(**settings).run(progress=False)
    rewrite(lambda event: replace(event, value="a text" * 1000) if isinstance(event.value, int) else event)
    with pytest.raises(StudyError, match="The sampler and the log disagree: it wrote 'a text") as raised:
        study(**settings).run(progress=False)
    assert len(str(raised.value)) < 600


def _with(optimizer: cmaes.CMA, value: object) -> cmaes.CMA:
    optimizer._more = value
    return optimizer
