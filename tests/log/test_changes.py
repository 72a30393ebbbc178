"""What has changed since a study's log was written."""

import warnings

import pytest

import penstock as ps
from penstock.log.changes import changes
from penstock.log.events import Opened
from penstock.opening import settings_of
from penstock.seeds import DRAWS
from tests.studies import studies
from tests.tasks import Blobs, trivial


@pytest.mark.parametrize(("task", "told"), [(Blobs(), True), (trivial, False)])
def test_a_study_whose_forward_drew_otherwise_says_so(task, told):
    study = studies(task, {"lr": ps.uniform(0, 1)}, trials=1, name="s")(metric="loss", mode="min")
    now = settings_of(study, "s", [])
    assert now["draws"] == DRAWS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert changes([Opened(now)], now, True, False) == []
    before = {name: value for name, value in now.items() if name != "draws"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert changes([Opened(before)], now, True, False) == []
    assert [str(one.message).startswith("Study 's' was begun by a Penstock that keyed no") for one in caught] == [
        True
    ] * told
