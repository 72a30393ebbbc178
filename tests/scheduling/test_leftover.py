"""Trials of weight 0 get what the others leave idle."""

from dataclasses import replace

from penstock.scheduling.fifo import fifo
from penstock.scheduling.leftover import leftover
from penstock.scheduling.waterfill import waterfill
from penstock.speed.model import UNKNOWN
from tests.contracts.schedulers import SchedulerContract
from tests.scheduling.simulated_groups import SimulatedTrial, cluster, demands, empty


class TestContract(SchedulerContract):
    scheduler = staticmethod(leftover(waterfill))


def test_they_wait_while_others_need_all_devices() -> None:
    for scheduler in (fifo, waterfill):
        waiting = demands([SimulatedTrial(5) for _ in range(4)])
        waiting = [replace(one, weight=0.0, group="targets") if one.trial < 2 else one for one in waiting]
        for devices, begun in ((1, {2}), (2, {2, 3}), (3, {2, 3, 0}), (4, {0, 1, 2, 3})):
            made = leftover(scheduler)(empty(cluster(devices)), waiting, UNKNOWN)
            assert {one.trial for one in made} == begun
        alone = [one for one in waiting if one.weight == 0]
        assert {one.trial for one in leftover(scheduler)(empty(cluster(2)), alone, UNKNOWN)} == {0, 1}
