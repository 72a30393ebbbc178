"""What a worker's program tells of a task that fails."""

from __future__ import annotations

import pickle
import threading

import pytest

from penstock.executors.serving import _described


class Own(Exception):
    """Has what cannot be sent, or cannot be made again of what was."""

    def __init__(self, told, more):
        super().__init__(told)
        self.lock = more


class Failing:
    def __init__(self, error):
        self.error = error

    def describe_all(self, configs, *, train, trials, variants):
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (KeyError("lr"), KeyError, "'lr'"),
        (Own("told", 0), RuntimeError, "Own: told"),
        (Own("told", threading.Lock()), RuntimeError, "Own: told"),
    ],
)
def test_an_error_of_any_class_reaches_the_driver(error, kind, told):
    sent = pickle.loads(pickle.dumps(_described(Failing(error), [{}], True, [])))
    assert (type(sent), str(sent)) == (kind, told)
    assert "in describe_all" in sent.__notes__[0]
