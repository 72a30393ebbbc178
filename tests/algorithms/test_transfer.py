"""Transfer: surrogates are searched, the best go on at full width; and how well one order foretells another."""

from collections import Counter
from random import Random as Dice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.algorithms.sampling import Search
from penstock.algorithms.spearman import interval, needed, spearman
from penstock.algorithms.transfer import CHECK, Transfer
from penstock.domains import uniform
from penstock.space import Space
from penstock.trial import Report, scale_of
from tests.contracts.algorithms import FakeSearch, Play, exhaustive, replay
from tests.contracts.algorithms import play as in_any_order


class Players(Play):
    """Tells of each trial a value by its config and its scale."""

    def run(self, value, order=min):
        return self.finish(lambda number: value(self.config(number), self.scale(number)), order)

    def member(self, number):
        return next(member for _, member in self.asked if member.trial == number)

    def config(self, number):
        return self.member(number).config

    def scale(self, number):
        return scale_of(self.member(number).variant)


def play(inner=None, scale=8, trials=20, **settings):
    made = Transfer(inner or ps.Random(budget=9), scale, **settings)
    return Players(made, FakeSearch(trials=trials))


def by_x(config, scale):
    return float(config["x"])


INNER = {
    "ASHA": lambda: ps.ASHA(max_budget=9, concurrency=4),
    "Random": lambda: ps.Random(budget=9),
    "SuccessiveHalving": lambda: ps.SuccessiveHalving(max_budget=9),
}


@pytest.mark.parametrize("name", INNER)
@given(random=st.randoms(use_true_random=False), learns=st.booleans(), pairs=st.sampled_from([0, 4]))
@exhaustive
def test_any_order_of_results_keeps_the_contract_ends_and_is_replayed(name, random, learns, pairs):
    """The suite of algorithms counts every trial; here it is the surrogates that are as many as the study asks for."""

    def made():
        return Transfer(INNER[name](), 8, best=2, pairs=pairs)

    game = in_any_order(made(), FakeSearch(12, learns=learns), random)
    first = {member.trial: (group, scale_of(member.variant)) for group, member in reversed(game.asked)}
    own = [scale for group, scale in first.values() if group != CHECK and not group.startswith("targets")]
    assert own.count(game.algorithm.scale) == 12
    ranked = game.algorithm._best(game.algorithm._configs)
    assert [number for _, number in game.algorithm._order] == ranked, "the order is kept up as scores change"
    assert replay(made(), FakeSearch(12, learns=learns), game.reports) == game.log


def test_all_failing_ends_the_search():
    game = play(pairs=4, trials=8).finish(lambda number: None)
    assert sorted(game.dropped) == sorted(game.reached)


def test_the_best_surrogates_race_at_full_width_in_rungs():
    game = play(best=4, eager=1.0).run(by_x)
    targets = [(name, member) for name, member in game.asked if member.variant == ""]
    assert Counter(name for name, _ in targets) == {"targets rung 0": 4, "targets rung 1": 2, "targets rung 2": 1}
    assert [member.budget for _, member in targets] == [1, 1, 1, 1, 3, 3, 9]
    order = sorted((game.config(n)["x"] for n in range(20)), reverse=True)
    assert [member.config["x"] for name, member in targets if name == "targets rung 0"] == order[:4]
    assert targets[-1][1].config["x"] == order[0]
    assert all(group.weight == 0 for _, groups in game.log for group in groups if group.name.startswith("targets"))


def test_targets_begin_once_a_part_of_the_surrogates_are_done():
    for eager, done in ((0.5, 10), (1.0, 20)):
        game = play(best=1, eager=eager)
        for number in range(20):
            before = len(game.asked)
            game.report(number, by_x(game.config(number), 8))
            assert (len(game.asked) > before) <= (number + 1 >= done)
        assert any(member.variant == "" for _, member in game.asked)


def test_a_target_that_is_overtaken_is_granted_no_more():
    game = play(best=1)
    for number in range(10):
        game.report(number, 1.0 if number == 3 else 0.0)
    (first,) = [member.trial for _, member in game.asked if member.variant == ""]
    game.report(10, 2.0)
    (second,) = [m.trial for _, m in game.asked if m.variant == "" and m.trial != first]
    game.run(lambda config, scale: 0.5)
    assert game.reached[first] == 1
    assert game.reached[second] == 9


def test_where_a_target_fails_the_next_config_takes_its_place():
    game = play(best=1, trials=4, eager=1.0)
    for number in range(4):
        game.report(number, float(number))
    (first,) = game.running
    game.report(first, None)
    (second,) = game.running
    assert game.config(second) == game.config(2)


def test_trials_and_samplers_count_surrogates_alone():
    import optuna

    space = Space.of({"x": uniform(0, 1)})
    search = Search(space, "m", "max", trials=12, sampler=optuna.samplers.TPESampler(n_startup_trials=4))
    game = Players(Transfer(ps.Random(budget=3, concurrency=2), 8, best=2), search)
    game.run(by_x)
    assert sum(game.scale(number) == 8 for number in game.reached) == 12
    assert len(search._storage._trials) == 12
    alone = Search(space, "m", "max", trials=12, sampler=optuna.samplers.TPESampler(n_startup_trials=4))
    plain = Players(ps.Random(budget=3, concurrency=2), alone)
    plain.run(by_x)
    drawn = [member.config for _, member in game.asked if member.variant == "surrogate 8"]
    assert drawn == [member.config for _, member in plain.asked]


def test_a_rank_check_trains_some_configs_at_twice_the_width_and_says_how_many_race():
    game = play(trials=100, pairs=16).run(by_x)
    wider = [member for name, member in game.asked if name == CHECK]
    assert {member.variant for member in wider} == {"surrogate 4"}
    assert [member.config for member in wider] == [game.config(number) for number in range(16)]
    assert game.algorithm.correlation()[0] == 1.0
    noise = Dice(0)
    noisy = play(trials=100, pairs=16).run(lambda config, scale: by_x(config, scale) + noise.uniform(0, 3000 / scale))
    known, (low, _) = noisy.algorithm.correlation()
    assert 0.5 < known < 0.95
    assert noisy.algorithm.racing == needed(round(low, 2), 100) > game.algorithm.racing


@pytest.mark.parametrize("inner", [ps.Random(budget=9), ps.Hyperband(max_budget=9)])
def test_a_rank_check_of_fewer_pairs_than_were_planned_holds_up_no_race(inner):
    """A study may have fewer trials than that, and brackets have budgets of their own."""
    game = play(inner, trials=10 if isinstance(inner, ps.Random) else None, pairs=16, best=2).run(by_x)
    assert 5 <= sum(name == CHECK for name, _ in game.asked) <= 10
    assert game.algorithm.correlation()[0] == 1.0
    targets = [member.trial for _, member in game.asked if member.variant == ""]
    assert max(game.reached[number] for number in targets) == 9


def searched(game):
    return list(dict.fromkeys(game.scale(member.trial) for name, member in game.asked if name == "random"))


def test_where_surrogates_foretell_nothing_the_search_begins_again_wider():
    """At S, orders are unlike; at S/2 they agree, so the search stays there."""
    game = play(trials=24, pairs=16, best=2)

    def pairs_first(running):
        return min(running, key=lambda number: (16 <= number < 24, number))

    game.run(lambda config, scale: by_x(config, scale) if scale < 8 else -by_x(config, scale), pairs_first)
    assert searched(game) == [8, 4]
    given_up = {m.trial for name, m in game.asked if name == "random" and m.variant == "surrogate 8"}
    assert given_up <= set(game.dropped)
    assert sum(name == "targets rung 0" for name, _ in game.asked) >= 2


def test_where_no_order_foretells_another_the_target_is_tuned():
    game = play(trials=24, pairs=16, best=2).run(lambda config, scale: (-1 if scale == 4 else 1) * by_x(config, scale))
    assert searched(game) == [8, 4, 1]
    assert len({m.trial for name, m in game.asked if name == "random" and m.variant == ""}) == 24
    assert not any(name.startswith("targets") for name, _ in game.asked)


def test_spearman_is_that_of_scipy():
    from scipy import stats

    drawn = np.random.default_rng(3)
    for _ in range(20):
        one, other = drawn.integers(0, 9, 12), drawn.integers(0, 9, 12)
        assert spearman(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)


def test_an_interval_holds_the_truth_nine_times_in_ten():
    """By Monte Carlo: of 16 pairs with a true 0.9, the interval misses it about once in ten."""
    drawn = np.random.default_rng(4)
    pearson = 2 * np.sin(np.pi * 0.9 / 6)
    held, reads = 0, []
    for _ in range(600):
        a = drawn.standard_normal(16)
        reads.append(spearman(a, pearson * a + np.sqrt(1 - pearson**2) * drawn.standard_normal(16)))
        low, high = interval(reads[-1], 16)
        held += low <= 0.9 <= high
    assert 0.84 < held / 600 < 0.96
    assert np.quantile(reads, 0.05) == pytest.approx(0.71, abs=0.04)  # of a true 0.9, once in twenty


def test_as_many_race_as_hold_the_best_with_nine_in_ten():
    assert [needed(one, 100) for one in (1.0, 0.9, 0.8)] == [1, 6, 13]
    assert needed(0.8, 1) == 1


@pytest.mark.parametrize("correlation", [0.9, 0.7])
def test_so_many_that_one_fewer_would_miss_the_best_too_often(correlation):
    """By another Monte Carlo: of 100 trials, how often the best by one order is among the first by the other."""
    drawn = np.random.default_rng(8)
    pearson = 2 * np.sin(np.pi * correlation / 6)
    one = drawn.standard_normal((20_000, 100))
    other = pearson * one + np.sqrt(1 - pearson**2) * drawn.standard_normal(one.shape)
    best = np.take_along_axis(other, one.argmax(1)[:, None], 1)
    places = (other > best).sum(1)
    k = needed(correlation, 100)
    assert np.mean(places < k) > 0.895
    assert np.mean(places < k - 1) < 0.905


def test_reports_of_a_search_that_was_given_up_are_left_aside():
    game = play(trials=8)
    game.algorithm.tell(Report(99, 1, {"m": 1.0}))
    assert game.algorithm.ask() == []
