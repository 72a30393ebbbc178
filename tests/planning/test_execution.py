import math

import numpy as np
import pytest

from penstock.planning.draws import Draws
from penstock.planning.execution import Choice, Execution
from penstock.planning.layout import Layout, lay, needed
from penstock.planning.queueing import lost, queue
from penstock.planning.spec import Times
from penstock.speed.curve import Curve
from tests.planning.jobs import cloud, instance, job


def run(made, on, *nodes, samples=1, ahead=True, held=None):
    execution = Execution(made, made.stages, on, samples=samples, held=held)
    return execution.run(tuple(Choice(0, one) for one in nodes), ahead=ahead)


def within(samples, expected):
    """Whether a mean is an expected value to within four standard errors of the mean."""
    return abs(samples.mean() - expected) < 4 * samples.std() / math.sqrt(len(samples))


def test_a_plan_of_constant_times_costs_what_it_costs_by_hand():
    # Four trials on two nodes of two devices take 10 s; then one trial for 20 units at 0.6 on one node takes 120 s.
    outcome = run(job((4, 1), (1, 21)), cloud(), 2, 1)
    assert outcome.seconds.tolist() == pytest.approx([130.0])
    assert outcome.cost.tolist() == pytest.approx([2 * (2 * 10 + 120)])
    assert outcome.costs.tolist() == [pytest.approx([40.0, 240.0])]


def test_trials_wait_for_devices_and_a_node_goes_when_its_last_trial_ends():
    # Five trials on two nodes of two devices: the fifth begins on the first device once that is free.
    outcome = run(job((5, 1)), cloud(), 2)
    assert outcome.seconds.tolist() == pytest.approx([20.0])
    assert outcome.cost.tolist() == pytest.approx([2 * (20 + 10)])
    kept = run(job((5, 1), (4, 2)), cloud(), 2, 2)
    assert kept.cost.tolist() == pytest.approx([2 * (40 + 20)]), (
        "a node that the next stage needs is paid to the barrier"
    )


def test_nodes_are_paid_from_when_they_come_and_the_others_while_they_wait():
    slow = cloud(arrival=Draws(5.0), preparing=Draws(3.0))
    outcome = run(job((2, 1), (4, 2)), slow, 1, 2, ahead=False)
    assert outcome.seconds.tolist() == pytest.approx([8 + 10 + 8 + 10])
    assert outcome.cost.tolist() == pytest.approx([2 * ((3 + 10 + 10) + (3 + 10))]), "the first goes with its trials"


def test_trials_begin_on_the_nodes_that_are_there_and_a_node_that_is_not_needed_goes_then():
    slow = cloud(arrival=Draws(50.0), preparing=Draws(3.0))
    # The second node would be ready 53 s after the barrier: by then the first has trained all four trials.
    outcome = run(job((2, 1), (4, 2)), slow, 1, 2, ahead=False)
    assert outcome.seconds.tolist() == pytest.approx([53 + 10 + 20])
    # Of three nodes the first two to be ready are taken, which are the first two of three exponential times.
    made = job((2, 1), unit=100.0, curve=Curve())
    spare = run(made, cloud(instance(devices=1), arrival=Draws(6.0, 6.0)), 3, samples=4000)
    assert within(spare.seconds, 100 + 6.0 * (1 / 3 + 1 / 2))
    assert spare.cost.tolist() == pytest.approx([2 * 2 * 100] * 4000), "the third is not waited for"


def test_nodes_that_are_asked_for_ahead_are_there_at_the_barrier():
    slow = cloud(arrival=Draws(5.0), preparing=Draws(3.0))
    outcome = run(job((2, 1), (4, 2)), slow, 1, 2)
    assert outcome.seconds.tolist() == pytest.approx([8 + 10 + 10])
    assert outcome.cost.tolist() == pytest.approx([2 * ((3 + 10 + 10) + (3 + 10))])


def test_nodes_are_asked_for_no_earlier_than_the_barrier_before():
    slow = cloud(instance(devices=1), arrival=Draws(50.0))
    assert run(job((2, 1), (4, 2)), slow, 1, 4).seconds.tolist() == pytest.approx([50 + 20 + 10])  # asked for at 20
    early = run(job((1, 1), (1, 2), (3, 3)), slow, 1, 1, 3)
    assert early.seconds.tolist() == pytest.approx([50 + 10 + 10 + 30]), "the first node has trained all by then"


def test_a_node_is_paid_for_the_minimum_at_least():
    outcome = run(job((4, 1), (1, 21)), cloud(minimum=60.0), 2, 1)
    assert outcome.cost.tolist() == pytest.approx([2 * (60 + 10 + 120)]), "the node that stays is over the minimum"


def test_a_function_is_paid_while_it_trains():
    outcome = run(job((5, 1)), cloud(billing="function", minimum=60.0), 2)
    assert outcome.cost.tolist() == pytest.approx([5 * 10 * 1.0])


def test_the_head_node_and_data_are_paid_too():
    outcome = run(job((4, 1), (1, 21)), cloud(head=3600.0, data=10.0, data_price=0.5), 2, 1)
    assert outcome.cost.tolist() == pytest.approx([2 * 140 + 130 + 2 * 5.0])


def test_nodes_that_are_held_come_at_once_and_their_minimum_was_paid():
    slow = cloud(minimum=60.0, arrival=Draws(5.0))
    outcome = run(job((2, 1)), slow, 1, held=Choice(0, 3))
    assert (outcome.seconds.tolist(), outcome.cost.tolist()) == (pytest.approx([10.0]), pytest.approx([20.0]))


def test_trials_share_devices_where_that_ends_sooner_than_a_queue():
    sharing = Times(Draws(10.0), Curve(sharing=(1, 1.2, 1.5, 1.7)))
    stage = job((8, 1), times={"gpu": (sharing,)})
    assert lay(stage.stages[0], (sharing,), 2, 1) == Layout(2, 1, 4, 1, 2)
    assert run(stage, cloud(), 1).seconds.tolist() == pytest.approx([17.0])
    assert lay(stage.stages[0], (sharing,), 2, 2).devices == 0.5


def test_a_trial_gets_the_most_devices_that_all_can_have_on_the_fewest_nodes():
    times = (Times(Draws(10.0), Curve(scaling=(1, 0.6, 0.5, 0.4, 0.35, 0.3))),)
    work = job((3, 1)).stages[0]
    found = {nodes: (lay(work, times, 4, nodes).width, lay(work, times, 4, nodes).nodes) for nodes in (1, 2, 3, 5)}
    assert found == {1: (1, 1), 2: (2, 2), 3: (4, 3), 5: (6, 5)}
    assert needed(3, 6, 4) == 5


@pytest.mark.parametrize("trials", [1, 3, 12])
def test_the_last_of_n_exponential_trials_ends_after_the_harmonic_number(trials):
    made = job((trials, 1), unit=1.0, std=1.0, curve=Curve())
    outcome = run(made, cloud(instance(devices=1), most=12), trials, samples=4000)
    assert within(outcome.seconds, sum(1 / k for k in range(1, trials + 1)))


def test_units_of_a_trial_that_waits_add_up():
    made = job((3, 4), unit=1.0, std=0.5, curve=Curve())
    outcome = run(made, cloud(instance(devices=1)), 1, samples=4000)
    assert within(outcome.seconds, 12.0)
    assert outcome.seconds.var() == pytest.approx(12 * 0.25, rel=0.1)


def test_a_trial_keeps_its_own_speed_over_its_stages():
    made = job((1, 5), (1, 10), unit=1.0, own=0.3, curve=Curve())
    outcome = run(made, cloud(instance(devices=1)), 1, 1, samples=4000)
    assert within(outcome.seconds, 10.0)
    assert outcome.seconds.std() == pytest.approx(3.0, rel=0.1), "and not the less of draws that differ by stage"


@pytest.mark.parametrize(("rate", "again"), [(0.01, 0.0), (0.2, 3.0)])
def test_losses_cost_what_restarts_under_exponential_losses_cost(rate, again):
    units, length, rows = 3, 5.0, 20_000
    extra = lost(np.random.default_rng(0), np.full((rows, 1), units * length), np.full((rows, 1), units), rate, again)
    whole = units * (math.exp(rate * length) - 1) * (1 / rate + again)
    assert within(extra[:, 0], whole - units * length)


def test_nodes_of_a_spot_market_take_longer_and_cost_less():
    spot = instance(spot=1800.0, losses=60.0)
    execution = Execution(job((1, 1)), job((1, 1)).stages, cloud(spot), samples=2000)
    sure, cheap = (execution.run((Choice(offer, 1),)) for offer in (0, 1))
    assert sure.seconds.mean() < cheap.seconds.mean()
    assert cheap.cost.mean() < sure.cost.mean()


def test_sums_of_draws_cut_off_at_zero_have_the_mean_and_spread_of_their_draws():
    for count in (3, 200):
        one = Draws(4.0, 6.0, "normal")
        totals = one.totals(np.random.default_rng(0), np.full(5000, count))
        assert within(totals, count * one.expected)
        assert totals.std() == pytest.approx(one.deviation * math.sqrt(count), rel=0.05)


@pytest.mark.parametrize("rows", [1, 3, 90])  # of more samples than a few, numpy takes the place of a heap
@pytest.mark.parametrize("slots", [1, 2, 5, 9])
@pytest.mark.parametrize("most", [6, 50])
def test_a_queue_gives_each_trial_the_device_that_is_free_first(rows, slots, most):
    lengths = np.random.default_rng(rows * slots).integers(1, most, (rows, 9)).tolist()
    begin = np.tile(10.0 * np.arange(slots), (len(lengths), 1))
    ends, last_began = queue(np.array(lengths, dtype=float), slots, begin)
    for row, began_last, trials in zip(ends, last_began, lengths, strict=True):
        free, began = [float(10 * slot) for slot in range(slots)], [0.0] * slots
        for length in trials:
            first = min(range(slots), key=lambda slot: free[slot])
            last, began[first] = free[first], length
            free[first] += length
        used = [end if there else min(end, last) for end, there in zip(free, began, strict=True)]
        assert sorted(row.tolist()) == sorted(used)
        assert began_last == last


def test_equal_questions_have_equal_samples():
    made, on = job((4, 1), (1, 3), std=2.0, own=0.1), cloud(arrival=Draws(5.0, 1.0))
    first, second = (run(made, on, 2, 1, samples=8) for _ in range(2))
    assert (first.seconds == second.seconds).all()


def test_the_last_of_n_nodes_that_come_by_chance_is_waited_for():
    made = job((6, 1), unit=100.0, curve=Curve())
    outcome = run(made, cloud(instance(devices=1), arrival=Draws(4.0, 4.0)), 6, samples=4000)
    assert within(outcome.seconds, 100 + 4.0 * sum(1 / k for k in range(1, 7)))
