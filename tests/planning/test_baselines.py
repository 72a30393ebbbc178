import pytest

from penstock.planning.baselines import greedy, naives, statics, step
from penstock.planning.execution import Choice, Execution
from penstock.planning.weights import weigh
from penstock.speed.curve import Curve
from tests.planning.jobs import cloud, instance, job


def made(*stages, devices=2, most=6, curve=None):
    whole = job(*stages, curve=curve or Curve(scaling=(1, 0.6)))
    execution = Execution(whole, whole.stages, cloud(instance(devices=devices), most=most), samples=1)
    return execution, weigh(execution, ahead=True)[0]


def test_static_plans_keep_their_nodes_and_cost_by_hand():
    execution, weights = made((8, 1), (2, 3))
    found = {path[0].nodes: weights.means(path) for path in statics(execution)}
    # On two nodes, 8 trials take two rounds of 10 s on four devices, and 2 trials take 12 s on two each.
    assert found[2] == pytest.approx((20 + 12, 2 * 2 * 32))
    assert found[4] == pytest.approx((10 + 12, 2 * (4 * 10 + 2 * 12 + 2 * 12))), "idle nodes are held all the time"


def test_naive_plans_keep_a_trials_devices():
    execution, _ = made((4, 1), (2, 3), (1, 5))
    assert {tuple(choice.nodes for choice in path) for path in naives(execution)} == {(2, 1, 1), (4, 2, 1)}


def test_a_step_divides_devices_evenly_and_frees_a_node():
    execution, _ = made((10, 1), (1, 2), devices=4, most=6)
    assert [step(execution, 0, Choice(0, nodes)) for nodes in (6, 5, 3, 2, 1)] == [5, 3, 2, 1, 0]
    assert step(execution, 1, Choice(0, 3)) == 2


def test_the_greedy_plan_of_a_job_is_the_one_by_hand():
    # 8 trials for 10 s, 2 for 20 s, 1 for 40 s; a trial is 1/0.6 times as fast on two devices, and no faster on more.
    execution, weights = made((8, 1), (2, 3), (1, 7))
    # The cheapest static cluster for 70 s has two nodes: 20 + 12 + 24 = 56 s, and 2·2·56 = 224. From there the last
    # stage gives up a node at no delay (48 saved), and the second does at a delay of 8 s: 2·(2·12 − 20) = 8 saved. The
    # first stage cannot: 40 s are 20 s more. From four nodes, the first stage's step to two saves nothing.
    assert [choice.nodes for choice in greedy(execution, weights, 70)] == [2, 1, 1]
    assert weights.means(greedy(execution, weights, 70)) == pytest.approx((20 + 20 + 24, 2 * (40 + 20 + 24)))
    # For 60 s the second step is too late from two nodes. From four, 10 + 20 + 24 s are soon enough.
    assert [choice.nodes for choice in greedy(execution, weights, 60)] == [4, 1, 1]
    assert greedy(execution, weights, 45) is None


def test_the_greedy_plan_takes_the_step_that_saves_most_for_its_delay_first():
    # On two nodes, 6 + 4.5 s. One node for the trial alone is 1.5 s later and saves 6; for the two trials, 4 s and 4.
    # There is time for either step, and not for both.
    execution, weights = made((2, 1), (1, 2), most=2, curve=Curve(scaling=(1, 0.6, 0.5, 0.45)))
    assert [choice.nodes for choice in greedy(execution, weights, 14.6)] == [2, 1]
