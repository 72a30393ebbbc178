"""First in, first out."""

from penstock.scheduling.base import Assignment
from penstock.scheduling.fifo import fifo
from penstock.speed.curve import Curve
from penstock.speed.model import UNKNOWN
from tests.contracts.schedulers import SchedulerContract
from tests.scheduling.simulated_groups import SimulatedTrial, cluster, demands, empty, simulate


class TestContract(SchedulerContract):
    scheduler = staticmethod(fifo)


def test_free_devices_go_to_those_that_have_waited_longest() -> None:
    waiting = demands([SimulatedTrial(units) for units in (1, 9, 5)])
    assert fifo(empty(cluster(2)), waiting, UNKNOWN) == [Assignment(0, ("gpu 0",)), Assignment(1, ("gpu 1",))]


def test_the_longest_trial_of_the_papers_example_is_its_makespan() -> None:
    trials = [SimulatedTrial(units) for units in (4, 4, 12, 30)]
    assert simulate(fifo, trials, 5, Curve.of(2, 2, 1, 5)).makespan == 30
