"""Clouds and trials that are not as planned: deadlines are kept wherever they can be, and nothing is lost by a kill."""

import os
import random
import signal
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest

import penstock as ps
from penstock.engine.awaited import Awaited
from penstock.engine.drift import Units
from penstock.log.events import Planned
from penstock.log.history import History
from penstock.log.writer import Log
from penstock.plans import purpose
from tests.cut import copied
from tests.engine.test_following import SECONDS, cloud, history, nodes_billed, planned, study, tabulated
from tests.studies import log


def trouble(seed):
    """A plan, and a study and a cloud that differ from it: slow trials, late nodes, a lost spot node, or several."""
    draw = random.Random(seed)
    slower = draw.choice((1.0, draw.uniform(1.15, 2.0)))
    late = draw.choice((0.0, draw.uniform(60, 150)))
    lost = [(draw.uniform(40, 250), f"a {draw.randrange(3)}")] if slower == 1.0 and not late else []
    made = planned(study(), cloud(losses=0.01 if lost else 0.0, head=0.0), deadline=draw.uniform(300, 600))
    nodes = [replace(one, queueing=10.0 + late, loss_rate=0.0) for one in made.simulation()["instances"]]
    slow = study(tabulated(slower * SECONDS), name=f"trouble {seed}")
    given = replace(made, purpose=purpose(slow))
    return slow, given, ps.Simulated.of(given, instances=nodes, losses=lost), slower


@pytest.mark.parametrize("seed", [*range(12), 44])
def test_the_deadline_is_kept_wherever_a_planner_that_is_told_the_truth_says_that_it_can_be(seed):
    slow, given, on, slower = trouble(seed)
    slow.run(on, plan=given, progress=False)
    seen = History.of(log(slow.name))
    told, guess = slow.replace(name="told"), Units.ratio

    def truth(units, running, clock):
        shown = units._drift._units > 0  # and before any unit has ended, it is not known
        return slower * SECONDS / units.seconds(TYPE, 1.0) if shown else guess(units, running, clock)

    with mock.patch.object(Units, "ratio", truth):
        told.run(on, plan=given, progress=False)
    anew = [event for event in log("told") if isinstance(event, Planned) and not event.given]
    if not any(event.plan["missed"] for event in anew):
        assert seen.clock <= given.deadline
    assert seen.ended == "done"
    assert Counter(trial.curve[-1]["budget"] for trial in seen.trials) == {1: 6, 3: 2, 9: 1}


TYPE = cloud().offers[0].instance


def test_nodes_that_a_study_begins_with_are_not_awaited_and_those_that_come_late_are_learnt_of():
    kind, awaited = ("a", "on-demand"), Awaited(planned(study(), deadline=330))
    awaited.came({"a 0": kind, "a 1": kind}, 0.0)
    awaited.want(Counter({kind: 3}), 0.0)
    assert awaited.expected(kind, 0.0) == 30.0
    assert awaited.came({"a 0": kind, "a 1": kind, "a 2": kind}, 31.0) == ""
    assert (awaited.moments(), awaited.overdue(1000.0), awaited.lag) == ([], "", 1.0)
    awaited.want(Counter({kind: 5}), 100.0)
    awaited.want(Counter({kind: 4}), 110.0)
    assert awaited.overdue(awaited.moments()[0]) == "Nodes are late: a on-demand."
    assert awaited.overdue(300.0) == ""
    assert awaited.came({f"a {n}": kind for n in range(4)}, 190.0) == "Nodes came 60 seconds later than planned."
    assert awaited.expected(kind, 200.0) == 290.0


def test_a_killed_study_goes_on_with_its_plan_and_its_cost_whatever_line_it_was_killed_at(tmp_path):
    made = planned(study(), deadline=330)
    with copied(tmp_path / "whole", tmp_path / "cut", set(range(2, 40, 3))):
        study(dir=tmp_path / "whole", name="s").run(ps.Simulated.of(made), plan=made, progress=False)
    for place in sorted((tmp_path / "cut").iterdir()):
        result = study(dir=place, name="s").run(ps.Simulated.of(made), plan=made, progress=False)
        lines = log("s", place)
        ended = History.of(lines)
        assert [event.given for event in lines if isinstance(event, Planned)].count(True) == 1
        assert ended.ended == "done"
        assert ended.cost == pytest.approx(nodes_billed(lines), abs=1e-9)
        assert Counter(trial.curve[-1]["budget"] for trial in result.trials) == {1: 6, 3: 2, 9: 1}


def test_a_study_that_sigkill_ended_is_planned_for_with_what_it_has_used():
    made = planned(study(), deadline=330)
    append, lines = Log.append, []

    def killed(self, event):
        append(self, event)
        lines.append(event)
        if len(lines) == 40:
            os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):
        with mock.patch.object(Log, "append", killed):
            study().run(ps.Simulated.of(made), plan=made, progress=False)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    spent = history().bill.total(history().clock)
    assert spent > 0
    study().run(ps.Simulated.of(made), progress=False)
    assert history().ended == "done"
    assert [event.given for event in log() if isinstance(event, Planned)].count(True) == 1
    assert history().cost == pytest.approx(nodes_billed(), abs=1e-9)
    assert history().cost > spent
