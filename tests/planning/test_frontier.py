from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from penstock.planning.draws import Draws
from penstock.planning.execution import Choice, Execution
from penstock.planning.frontier import frontier
from penstock.planning.planner import plan
from penstock.planning.spec import Times
from penstock.planning.weights import Weights, weigh
from penstock.speed.curve import Curve
from tests.planning.jobs import cloud, instance, job

PREPARING, DATA = 10.0, 200.0  # seconds of a node, in which no stage ends, and what each new node costs
PRICES = (1.0, 2.5)  # a second
STAGES = [(9, 1), (5, 3), (2, 9), (4, 12)]  # the last stage has more trials again: nodes may be worth holding


def by_hand(path):
    """Seconds and cost of a plan of constant times: nodes of one device, and of two, which a trial may both have."""
    now, cost, before, below, took, ends = 0.0, 0.0, None, 0, 0.0, []
    for (trials, budget), (type, nodes) in zip(STAGES, path, strict=True):
        kept = min(nodes, before[1]) if before and before[0] == type else 0
        new, wait = nodes - kept, 0.0
        if before:
            gone = before[1] - kept
            cost += PRICES[before[0]] * (sum(sorted(ends)[:gone]) + kept * took)
            wait = max(0.0, PREPARING - took) if new else 0.0
        elif new:
            wait = PREPARING
        cost += PRICES[type] * (kept * wait + new * PREPARING) + DATA * new
        length = 10.0 * (budget - below)
        devices = nodes * (type + 1)
        if type == 1 and nodes >= trials:
            ends = [0.6 * length] * trials
        else:
            counts = [trials // devices + (slot < trials % devices) for slot in range(devices)]
            ends = [max(counts[slot : slot + type + 1]) * length for slot in range(0, devices, type + 1)]
            ends = [end for end in ends if end]
        took = max(ends)
        ends += [took] * (nodes - len(ends))
        now, before, below = now + wait + took, (type, nodes), budget
    return now, cost + PRICES[before[0]] * sum(ends)


def alone(scaling=(1,)):
    return (Times(Draws(10.0), Curve(scaling=scaling)),)


def test_every_point_is_its_deadlines_optimum_and_none_is_missing():
    types = (instance("one", 1, 3600 * PRICES[0]), instance("two", 2, 3600 * PRICES[1]))
    made = job(*STAGES, times={"one": alone(), "two": alone((1, 0.6))})
    on = cloud(*types, preparing=Draws(PREPARING), data=DATA, data_price=1.0)
    execution = Execution(made, made.stages, on, samples=1)
    found = frontier(weigh(execution, ahead=True)[0])
    choices = list(product((0, 1), range(1, 7)))
    plans = {path: by_hand(path) for path in product(choices, repeat=4)}
    best = np.array(sorted(plans.values()))
    kept = best[np.concatenate([[True], best[1:, 1] < np.minimum.accumulate(best[:, 1])[:-1] - 1e-6])]
    assert [(one.seconds, one.cost) for one in found] == [pytest.approx(tuple(row)) for row in kept]
    for one in found:
        path = tuple((choice.offer, choice.nodes) for choice in one.path)
        assert plans[path] == pytest.approx((one.seconds, one.cost))
        outcome = execution.run(one.path)
        assert (outcome.seconds[0], outcome.cost[0]) == pytest.approx((one.seconds, one.cost))
    held = [one for one in found if one.path[2].offer == one.path[3].offer and one.path[2].nodes > 2]
    assert held, "some plan holds nodes that a stage does not need"


def graph(random, stages, nodes):
    """Random whole weights, of two offers with so many nodes each."""
    choices = tuple(Choice(offer, count) for offer in (0, 1) for count in range(1, nodes + 1))
    shapes = [(1, len(choices)), *[(len(choices), len(choices))] * (stages - 1)]
    seconds = tuple(random.integers(1, 60, shape).astype(float) for shape in shapes)
    cost = tuple(random.integers(0, 90, shape).astype(float) for shape in shapes)
    return Weights(choices, seconds, cost, random.integers(0, 9, len(choices)).astype(float))


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=60)
def test_on_any_weights_the_frontier_has_all_plans_that_no_other_beats(seed, stages, nodes):
    weights = graph(np.random.default_rng(seed), stages, nodes)
    points = sorted(weights.means(path) for path in product(weights.choices, repeat=stages))
    kept = []
    for seconds, cost in points:
        if not kept or cost < kept[-1][1]:
            kept.append((seconds, cost))
    assert [(one.seconds, one.cost) for one in frontier(weights)] == kept


@pytest.mark.parametrize("seed", [0, 1])
def test_on_larger_graphs_each_deadlines_plan_is_the_one_of_a_solver(seed):
    weights = graph(np.random.default_rng(seed), stages=6, nodes=6)
    found = frontier(weights)
    for deadline in (found[(1 + seed) * len(found) // 3].seconds,):
        model = cp_model.CpModel()
        took, paid, reached = [], [], None
        for seconds, cost in zip(weights.seconds, weights.cost, strict=True):
            into = [[] for _ in weights.choices]
            out = [[] for _ in seconds]
            for at, to in np.ndindex(*seconds.shape):
                change = model.new_bool_var("")
                into[to].append(change)
                out[at].append(change)
                took.append(int(seconds[at, to]) * change)
                paid.append(int(cost[at, to]) * change)
            if reached is None:
                model.add_exactly_one(out[0])
            else:
                for before, after in zip(reached, out, strict=True):
                    model.add(sum(before) == sum(after))
            reached = into
        paid += [int(last) * sum(changes) for last, changes in zip(weights.last, reached, strict=True)]
        model.add(sum(took) <= int(deadline))
        model.minimize(sum(paid))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(model) == cp_model.OPTIMAL
        best = max((one for one in found if one.seconds <= deadline), key=lambda one: one.seconds)
        assert best.cost == round(solver.objective_value)


def test_means_add_up_to_the_means_of_whole_executions_where_times_vary():
    on = cloud(instance(spot=3000.0, losses=20.0), most=4, head=60.0)
    made = job((9, 1), (3, 3), (1, 9), std=3.0, own=0.1)
    execution = Execution(made, made.stages, on, samples=16)
    (weights,) = weigh(execution, ahead=True)
    for nodes in ((2, 3, 1), (4, 2, 1), (1, 1, 1)):
        path = tuple(Choice(at % 2, count) for at, count in enumerate(nodes))
        same = tuple(Choice(1, count) for count in nodes)
        for one in (path, same):
            outcome = execution.run(one)
            assert weights.means(one) == pytest.approx((outcome.seconds.mean(), outcome.cost.mean()))
    # Of a first stage, the means are those of samples whatever its nodes take: each trial begins with its own node.
    on = cloud(most=4, arrival=Draws(4.0, 2.0), preparing=Draws(2.0, 1.0), head=60.0)
    alone = job((9, 1), std=3.0, own=0.1)
    execution = Execution(alone, alone.stages, on, samples=16)
    for nodes in (1, 3, 4):
        outcome = execution.run((Choice(0, nodes),))
        means = weigh(execution, ahead=True)[0].means((Choice(0, nodes),))
        assert means == pytest.approx((outcome.seconds.mean(), outcome.cost.mean()))


@pytest.mark.parametrize(("preparing", "minimum"), [(100.0, 0.0), (15.0, 60.0)])
def test_a_plan_is_the_best_of_all_also_where_nodes_are_late_or_short_lived(preparing, minimum):
    types = (instance("one", 1, 3600 * PRICES[0]), instance("two", 2, 3600 * PRICES[1]))
    made = job(*STAGES[:3], times={"one": alone(), "two": alone((1, 0.6))})
    on = cloud(*types, most=4, preparing=Draws(preparing), minimum=minimum)
    execution = Execution(made, made.stages, on, samples=1)
    choices = [Choice(type, nodes) for type, nodes in product((0, 1), range(1, 5))]
    plans = [execution.run(path) for path in product(choices, repeat=3)]
    points = np.array([(one.seconds[0], one.cost[0]) for one in plans])
    quickest = points[:, 0].min()
    for deadline in quickest * np.array([1.0 + 1e-9, 1.1, 1.3, 1.6, 2.0]):
        best = points[points[:, 0] <= deadline, 1].min()
        assert plan(made, on, deadline=float(deadline)).cost == pytest.approx(best)
