"""Input that a user could give by mistake ends with its answer or one message; cases once found wrong stay right."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzzing.cases import tried
from tests.fuzzing.kinds import KINDS

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
EXAMPLES = {"lines": 25, "spaces": 60, "tasks": 12, "logs": 25, "states": 3}


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_case_that_was_once_wrong_stays_right(path):
    kept = json.loads(path.read_text())
    assert tried(KINDS[kept["kind"]], kept["case"]) in ("done", "refused")


@pytest.mark.parametrize("kind", KINDS)
def test_any_input_is_answered_or_refused_with_a_message(kind):
    """``bench/fuzz.py`` tries thousands; here a few, whose seeds do not change from run to run."""

    @settings(
        max_examples=EXAMPLES[kind],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 10**9))
    def holds(seed):
        what = KINDS[kind].make(Random(f"{kind} {seed}"))
        assert tried(KINDS[kind], what) in ("done", "refused"), what

    holds()
