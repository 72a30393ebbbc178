"""The runs of a recurring job, as the engine asks for them."""

import pytest

from penstock.algorithms.recurring import Ended, Phase, Recurrences
from penstock.algorithms.sampling import Search
from penstock.domains import choice
from penstock.errors import StudyError
from penstock.space import Space
from penstock.trial import Report, Usage
from tests.contracts.algorithms import AlgorithmContract


class TestContract(AlgorithmContract):
    """Each recurrence is one run of the default; by "max" its target is out of reach, by "min" any report has it."""

    trials = 6

    def algorithm(self) -> Recurrences:
        made = Recurrences(
            config={"x": 0.5, "y": "a", "epochs": 3},
            sizes=[16, 32],
            default=16,
            target=1e300,
            max_budget=3,
            recurrences=20,
            policy="default",
        )
        made.keep([Phase(overlap=2)])
        return made

    def sampler(self, learns: bool) -> None:
        return None


def search(trials, mode="max"):
    made = Search(Space.of({"lr": 0.1, "x": choice([1, 2])}), "m", mode, trials=trials)
    made.wrote = []
    made.write = made.wrote.append
    return made


def make(**changes):
    given = {"config": {"lr": 0.1}, "sizes": [16, 32, 64], "default": 32, "target": 0.9, "max_budget": 10}
    return Recurrences(**{**given, "recurrences": 20, **changes})


def step(algorithm, trial, unit, value, seconds=1.0, joules=None):
    """Report a unit of a trial; gives the members that are asked for next."""
    metrics = {} if value is None else {"m": value}
    algorithm.tell(Report(trial, unit, metrics, usage=Usage(seconds, joules=joules)))
    return [(group.name, m.trial, m.config["batch_size"], m.budget) for group in algorithm.ask() for m in group.members]


def test_a_run_that_nothing_can_stop_is_granted_whole_and_ends_with_the_unit_that_reaches_the_target():
    algorithm, found = make(policy="default"), search(2)
    algorithm.begin(found)
    (group,) = algorithm.ask()
    assert group.members[0].config == {"lr": 0.1, "batch_size": 32, "recurrence": 0}
    assert (group.members[0].budget, algorithm.until) == (10, 0.9)
    assert step(algorithm, 0, 1, 0.5) == []
    assert step(algorithm, 0, 2, 0.9) == [("recurrence 1", 1, 32, 10)]
    assert algorithm.drops() == [], "the model of the last recurrence is kept"
    assert step(algorithm, 1, 1, 0.95) == []
    assert algorithm.drops() == [0]
    assert [(run.size, run.units, run.seconds, run.verdict) for run in algorithm.ended] == [
        (32, 2, 2.0, "reached"),
        (32, 1, 1.0, "reached"),
    ]
    assert [Ended.of(line) for line in found.wrote] == algorithm.ended


def test_a_run_is_stopped_before_the_unit_that_would_pass_its_stake_and_repeated_at_once():
    algorithm = make(policy="zeus", sizes=[16, 32])
    algorithm.begin(search(3))
    algorithm.ask()
    for unit in (1, 2, 3):
        assert step(algorithm, 0, unit, 0.5) == []
    assert step(algorithm, 0, 4, 0.9) == [("recurrence 1", 1, 16, 1)], "the first unit tells what a unit costs"
    asked = []  # the least cost is 4 seconds, and beta is 2
    for unit in range(1, 8):
        asked += step(algorithm, 1, unit, 0.1)
    assert asked == [("recurrence 1", 1, 16, budget) for budget in (4, 6, 7, 8)]
    assert step(algorithm, 1, 8, 0.1) == [("recurrence 1", 2, 32, 1)], "the second round begins with the cheapest"
    assert algorithm.drops() == [1]
    assert (algorithm.ended[1].verdict, algorithm.ended[1].stake) == ("stopped", 8.0)


def test_the_default_that_misses_the_target_ends_its_recurrence():
    algorithm = make(policy="default", max_budget=2, target=0.2)
    algorithm.begin(search(2, "min"))
    algorithm.ask()
    assert step(algorithm, 0, 1, 0.4) == []
    assert step(algorithm, 0, 2, 0.5) == [("recurrence 1", 1, 32, 2)]
    assert (algorithm.ended[0].verdict, algorithm.ended[0].best) == ("missed", 0.4)
    assert step(algorithm, 1, 1, None) == []
    assert (algorithm.ended[1].verdict, algorithm.ended[1].best) == ("failed", None)


def test_joules_count_as_eta_says_and_no_meter_is_time_alone():
    for eta, joules, cost in ((0.5, 150.0, 200.0), (1.0, 150.0, 150.0), (0.0, 150.0, 250.0), (1.0, None, 250.0)):
        algorithm = make(policy="default", eta=eta)
        algorithm.keep([Phase(max_power=250.0)])
        algorithm.begin(search(1))
        algorithm.ask()
        step(algorithm, 0, 1, 0.9, joules=joules)
        assert algorithm.ended[0].cost == cost
        assert algorithm.ended[0].joules == joules


def test_units_cost_what_runs_had_and_else_what_dry_steps_foretell():
    algorithm = make()
    algorithm.keep([Phase(unit_costs={16: 4.0, 32: 2.0, 64: 1.0}, dry=True, max_power=100.0)])
    algorithm.begin(search(2))
    algorithm.ask()
    assert algorithm.terms(0).unit_costs == {16: 4.0, 32: 2.0, 64: 1.0}
    step(algorithm, 0, 1, 0.9, seconds=5.0, joules=100.0)
    rate = (0.5 * 100 + 0.5 * 100 * 5) / 5  # an evaluation takes 3 seconds beside the steps, at every size
    assert algorithm.terms(1).unit_costs == pytest.approx({16: 7 * rate, 32: 5 * rate, 64: 4 * rate})


def test_without_dry_steps_every_size_costs_what_the_default_does():
    algorithm = make(policy="zeus")
    algorithm.keep([Phase(unit_costs={}, dry=True)])
    algorithm.begin(search(2))
    algorithm.ask()
    step(algorithm, 0, 1, 0.9, seconds=5.0)
    assert algorithm.terms(1).unit_costs == {16: 5.0, 32: 5.0, 64: 5.0}


def test_another_device_keeps_the_units_and_forgets_the_costs():
    algorithm = make(risk=1.0)
    old, new = {16: 1.0, 32: 1.0, 64: 1.0}, {16: 9.0, 32: 3.0, 64: 1.0}
    algorithm.keep([Phase(unit_costs=old, device="a"), Phase(1, unit_costs=new, device="b")])
    algorithm.begin(search(3))
    algorithm.ask()
    asked = step(algorithm, 0, 1, 0.9, seconds=1e6)
    assert asked == [("recurrence 1", 1, 64, 1)], (
        "the default's units are known from before, and no cost of then is lost"
    )
    assert algorithm.terms(1).unit_costs == new


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"default": 48}, r"^default must be one of batch_sizes=\[16, 32, 64\], got 48\.$"),
        ({"scaling": "cubic"}, r'^scaling must be "sqrt", "linear" or None, got \'cubic\'\.$'),
        ({"policy": "best"}, r"^policy must be one of staked, zeus, grid, default, got 'best'\.$"),
        ({"eta": 2}, r"^eta must be a number from 0 to 1, got 2\.$"),
        ({"risk": -1}, r"^risk must be a number from 0 to 1, got -1\.$"),
        ({"sizes": [16, 0]}, r"^a batch size must be a whole number of at least 1, got 0\.$"),
    ],
)
def test_another_setting_is_refused_in_one_message(change, said):
    with pytest.raises(StudyError, match=said):
        make(**change)
