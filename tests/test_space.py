"""The search space: what it refuses, that draws are keyed, and that nothing it makes leaves it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

import penstock as ps
from penstock.domains import Choice, Domain, Range
from penstock.errors import SpaceError
from penstock.log.events import Asked, decode, encode
from penstock.space import Space


class Relu:
    pass


def define_by_run(trial: Any) -> dict[str, Any]:
    if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "sgd":
        trial.suggest_float("momentum", 0, 0.99)
    width = trial.suggest_int("width", 16, 64, step=16)
    trial.suggest_float("lr", 1e-4, 1, log=True)
    trial.suggest_float("dropout", 0.05, 0.5, step=0.1)
    return {"double": 2 * width}


SPEC = {
    "lr": ps.loguniform(1e-4, 1),
    "momentum": ps.uniform(0, 0.99),
    "dropout": ps.quniform(0, 0.5, 0.1),
    "hidden": ps.qloguniform(16, 512, 16),
    "layers": ps.randint(1, 5),
    "act": ps.choice(["relu", Relu, (64, 32)]),
    "kernel": ps.grid([3, 5]),
    "epochs": 3,
}
SPACE = Space.of(SPEC)
seeds, numbers = st.integers(0, 2**31), st.integers(0, 10**6)


def logged(config: dict[str, Any]) -> dict[str, Any]:
    event = decode(encode(Asked(0, config, 1, "rung 0"), 0), 0)
    assert isinstance(event, Asked)
    return event.config


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    low, high = sorted(draw(st.tuples(*[st.floats(-1e6, 1e6)] * 2)))
    q = draw(st.none() | st.sampled_from([0.1, 0.25, 3.0, 1 / 3, 0.07, 50, 1e-3]))
    if draw(st.booleans()):
        return ps.randint(int(low), int(high) + 1)
    if draw(st.booleans()):
        low, high = abs(low) + 1e-6, max(abs(low), abs(high)) + 1
        make = (ps.loguniform, ps.qloguniform)
    else:
        make = (ps.uniform, ps.quniform)
    if q is None:
        return make[0](low, high)
    assume(high - low > q)
    return make[1](low, high, q)


# What it refuses


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.uniform(1, 0), r"uniform needs low at most high, got 1.0 and 0.0: swap them\?"),
        (lambda: ps.uniform(0, math.inf), "uniform needs a finite number as high, got inf"),
        (lambda: ps.uniform(math.nan, 1), "uniform needs a finite number as low, got nan"),
        (lambda: ps.uniform("0", 1), "uniform needs a finite number as low, got '0'"),
        (lambda: ps.uniform(False, 1), "uniform needs a finite number as low, got False"),
        (
            lambda: ps.loguniform(0, 1),
            "loguniform needs low above 0, got 0.0: there is no logarithm of it; use uniform",
        ),
        (lambda: ps.qloguniform(-1, 1, 0.1), "qloguniform needs low above 0, got -1.0"),
        (lambda: ps.quniform(0, 1, 0), "quniform needs q above 0, got 0: it is the distance between two values"),
        (lambda: ps.quniform(0, 1, math.nan), "quniform needs a finite number as q, got nan"),
        (
            lambda: ps.quniform(0.1, 0.2, 0.5),
            r"quniform needs a multiple of q between low and high, quniform\(0.1, 0.2, 0.5\) has none: lower q\?",
        ),
        (lambda: ps.randint(3, 3), "randint needs low below high, which is never drawn, got 3 and 3"),
        (lambda: ps.randint(0, 1.5), "randint needs a whole number as high, got 1.5: for others there is uniform"),
        (lambda: ps.randint(True, 3), "randint needs a whole number as low, got True"),
        (lambda: ps.choice([]), "choice needs at least one value, got none"),
        (lambda: ps.grid(()), "grid needs at least one value, got none"),
        (lambda: ps.choice("adam"), r"choice must be a list or tuple of values, got 'adam': write \['adam'\]"),
        (lambda: ps.choice({1, 2}), "choice must be a list or tuple of values, got {1, 2}: give a list, as the order"),
        (lambda: ps.grid({"a": 1}), "grid must be a list or tuple of values, got {'a': 1}: give the list of its keys"),
        (lambda: ps.choice(3), r"choice must be a list or tuple of values, got 3: write \[3\]"),
        (
            lambda: ps.choice([1, ps.uniform]),
            r"choice has the function uniform\(low, high\), uncalled, among its values",
        ),
        (lambda: ps.choice([FloatDistribution]), "choice has the class FloatDistribution, uncalled, among its values"),
        (lambda: ps.choice([lambda: 1, lambda: 2]), "choice has two values that the log cannot tell apart"),
        (lambda: ps.choice([(1, 2), [1, 2]]), r"cannot tell apart, \[1, 2\]: name them by strings"),
        (lambda: ps.choice([Relu, repr(Relu)]), "choice has two values that the log cannot tell apart"),
        (lambda: ps.choice([ps.uniform(0, 1)]), r"choice has the range uniform\(0, 1\) among its values"),
        (lambda: Space.of({}), "The space has nothing to tune, {} is all constant: add a parameter such as 'lr'"),
        (lambda: Space.of({"lr": 0.1}), "nothing to tune, {'lr': 0.1} is all constant"),
        (lambda: Space.of([("lr", ps.uniform(0, 1))]), r"The space must be a dict such as .* got \[\('lr'"),
        (lambda: Space.of(None), "The space must be a dict such as .* got None"),
        (lambda: Space.of({1: ps.uniform(0, 1)}), "A parameter's name must be a string, got 1: write '1'"),
        (lambda: Space.of({"o": {"lr": ps.uniform(0, 1)}}), "o has a range inside .* give it a name of its own"),
        (lambda: Space.of({"o": [IntDistribution(0, 1)]}), "o has a range inside .* give it a name of its own"),
        (
            lambda: Space.of({**SPEC, "m": ps.uniform}),
            r"m must be a range or a constant, got the function uniform\(low, high\), uncalled: call it with its",
        ),
        (lambda: Space.of({**SPEC, "m": [ps.choice]}), r"m must be .*, got the function choice\(values\), uncalled"),
        (
            lambda: Space.of({**SPEC, "m": FloatDistribution}),
            "m must be a range or a constant, got the class FloatDistribution, uncalled: call it with its arguments",
        ),
        (
            lambda: Space.of({**SPEC, "m": lambda spec: 1}),
            r"m must be .*, got the function <lambda>, which is not called: choose among functions by ps.choice",
        ),
        (lambda: Space.of({**SPEC, "m": len}), "m must be a range or a constant, got the function len, which is not"),
        (
            lambda: Space.of({"lr": type("Float", (), {"__module__": "ray.tune.search.sample"})()}),
            "lr is Ray Tune's own",
        ),
    ],
)
def test_bad_input_is_refused_with_a_message(make: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        make()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda trial: trial.suggest_float("lr", 1, 0), "suggest_float of 'lr' needs low at most high"),
        (lambda trial: trial.suggest_float("lr", 0, 1, log=True), "suggest_float of 'lr' needs low above 0"),
        (lambda trial: trial.suggest_int("n", 2, 1), "suggest_int of 'n' needs low at most high, got 2 and 1: swap"),
        (
            lambda trial: trial.suggest_int("n", 0, 1, log=True),
            "suggest_int of 'n' needs low of at least 1 with log, got 0",
        ),
        (lambda trial: trial.suggest_int("n", 0, 1, step=0), "suggest_int of 'n' needs step of at least 1, .* got 0"),
        (lambda trial: trial.suggest_int("n", 1, 9, step=2, log=True), "step of at least 1, and 1 with log, got 2"),
        (lambda trial: trial.suggest_categorical("o", []), "suggest_categorical of 'o' needs at least one value"),
        (lambda trial: None, r"must suggest a parameter, such as .* it suggested \[\] and returned None"),
        (lambda trial: trial.suggest_int("n", 1, 9), r"return a dict or nothing; it suggested \['n'\] and returned \d"),
        (
            lambda trial: {"n": 2 ** trial.suggest_int("n", 3, 3)},
            "suggested n=3 and returned n=8: give one of them another name",
        ),
    ],
)
def test_a_bad_function_is_refused_with_a_message(function: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        Space.of(function).draw(0, 0)


# Draws


def test_draws_are_the_same_in_every_process_and_version() -> None:
    assert Space.of({"lr": ps.uniform(0, 1)}).draw(0, 0) == {"lr": 0.791126038743046}
    assert Space.of({"n": ps.randint(0, 10**6), "act": ps.choice(["a", "b", "c"])}).draw(7, 3) == {
        "n": 895317,
        "act": "c",
    }


def test_drawing_needs_neither_optuna_nor_torch_and_no_hash_seed() -> None:
    code = """
import sys
from penstock import choice, loguniform, randint
from penstock.space import Space
from penstock.algorithms.sampling import Search
space = Space.of({"lr": loguniform(1e-4, 1), "act": choice([len, "relu"]), "n": randint(0, 99)})
print(Search(space, "loss", "min").draw(5), space.perturb(space.draw(0, 5), 0, 5, 1), space.describe())
assert not {"optuna", "torch", "numpy"} & sys.modules.keys()
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@given(seeds, numbers)
def test_adding_a_parameter_moves_no_other(seed: int, number: int) -> None:
    before = SPACE.draw(seed, number)
    after = Space.of({"new": ps.uniform(0, 1), **SPEC}).draw(seed, number)
    assert {name: after[name] for name in before} == before


def test_draws_differ_by_seed_number_and_name() -> None:
    space = Space.of({"a": ps.uniform(0, 1), "b": ps.uniform(0, 1)})
    values = [v for seed in range(20) for number in range(20) for v in space.draw(seed, number).values()]
    assert len(set(values)) == 800


@given(ranges(), st.floats(0, 1, exclude_max=True))
def test_a_draw_lies_in_its_range(domain: Range, u: float) -> None:
    value = domain.at(u)
    assert domain.holds(value)
    assert type(value) is (int if domain.whole else float)
    assert domain.low <= value <= domain.high


@given(
    st.floats(-100, 100), st.floats(1, 50), st.sampled_from([0.1, 0.25, 0.7, 1.0, 3]), st.floats(0, 1, exclude_max=True)
)
def test_quantised_draws_are_multiples_inside_the_bounds(low: float, width: float, q: float, u: float) -> None:
    assume(width > q)
    value = ps.quniform(low, low + width, q).at(u)
    assert low <= value <= low + width
    assert value == round(value, 10), "what a person would write: 0.3, not 0.30000000000000004"
    assert math.isclose(value / q, round(value / q), abs_tol=1e-9)


def test_quantised_and_whole_end_points_are_as_likely_as_the_rest() -> None:
    steps = [(k + 0.5) / 1000 for k in range(1000)]
    for domain in (ps.quniform(0, 1, 0.25), ps.randint(0, 5), ps.choice(range(5))):
        drawn = [domain.at(u) for u in steps]
        assert [drawn.count(value) for value in sorted(set(drawn))] == [200] * 5
    assert [ps.randint(0, 5).at(u) for u in (0, 1 - 2**-53)] == [0, 4]


def test_logarithmic_draws_are_even_in_the_logarithm() -> None:
    drawn = [ps.loguniform(1e-4, 1).at((k + 0.5) / 400) for k in range(400)]
    assert [sum(10.0**e <= v < 10.0 ** (e + 1) for v in drawn) for e in (-4, -3, -2, -1)] == [100] * 4


def test_a_whole_number_stands_for_all_that_rounds_to_it() -> None:
    domain = Space.of({"n": IntDistribution(1, 4, log=True)}).domains["n"]
    drawn = [domain.at((k + 0.5) / 1000) for k in range(1000)]
    shares = [math.log((n + 0.5) / (n - 0.5)) / math.log(4.5 / 0.5) for n in (1, 2, 3, 4)]
    assert [drawn.count(n) for n in (1, 2, 3, 4)] == pytest.approx([1000 * share for share in shares], abs=1)


def test_constants_and_equal_bounds() -> None:
    assert Space.of({"lr": ps.uniform(2, 2), "depth": 3, "widths": [1, 2]}).draw(0, 0) == {
        "lr": 2.0,
        "depth": 3,
        "widths": [1, 2],
    }


def test_a_function_draws_conditionally_and_by_name() -> None:
    space = Space.of(define_by_run)
    configs = [space.draw(0, number) for number in range(50)]
    for config in configs:
        assert ("momentum" in config) == (config["optimizer"] == "sgd")
        assert config["width"] in (16, 32, 48, 64)
        assert config["double"] == 2 * config["width"]
        assert config["dropout"] in (0.05, 0.15, 0.25, 0.35, 0.45)
    assert {config["optimizer"] for config in configs} == {"sgd", "adam"}
    alone = Space.of(lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1, log=True)})
    assert [alone.draw(0, n)["lr"] for n in range(50)] == [config["lr"] for config in configs]


def test_a_function_sees_an_optuna_trial() -> None:
    def function(trial: Any) -> None:
        a, b = trial.suggest_int("n", 1, 1000, log=True), trial.suggest_int("n", 1, 1000, log=True)
        trial.set_user_attr("note", "ignored")
        assert (a, trial.params, trial.number) == (b, {"n": a}, 9)

    assert 1 <= Space.of(function).draw(0, 9)["n"] <= 1000


# Optuna's side


def test_optuna_distributions_keep_their_meaning() -> None:
    spec = {
        "a": FloatDistribution(0.05, 0.45, step=0.1),
        "b": FloatDistribution(1e-3, 1, log=True),
        "c": IntDistribution(1, 9, step=4),
        "d": IntDistribution(1, 100, log=True),
        "e": CategoricalDistribution(["x", None, True]),
    }
    space = Space.of(spec)
    assert space.distributions() == spec
    domains = space.domains
    assert [domains["a"].point(k) for k in range(domains["a"].size or 0)] == [0.05, 0.15, 0.25, 0.35, 0.45]
    assert {domains["c"].at(k / 100) for k in range(100)} == {1, 5, 9}
    assert {domains["d"].at(k / 1000) for k in range(1000)} >= {1, 2, 100}
    assert domains["e"].at(0.5) is None


@given(ranges())
def test_what_optuna_may_draw_is_finished_into_the_space_without_a_warning(domain: Range) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distribution: Any = domain.distribution()
    assert (distribution.low, distribution.high) == (domain.low, domain.high)
    space = Space({"x": domain}, {"depth": 3})
    for value in (distribution.low, (distribution.low + distribution.high) / 2, distribution.high):
        config = space.finish({"x": value})
        assert domain.holds(config["x"])
        assert config["depth"] == 3


def test_distributions() -> None:
    assert SPACE.distributions() == {
        "lr": FloatDistribution(1e-4, 1, log=True),
        "momentum": FloatDistribution(0, 0.99),
        "dropout": FloatDistribution(0, 0.5, step=0.1),
        "hidden": FloatDistribution(16, 512, log=True),
        "layers": IntDistribution(1, 4),
        "act": CategoricalDistribution(["relu", repr(Relu), "[64, 32]"]),
        "kernel": CategoricalDistribution([3, 5]),
    }


@given(seeds, numbers)
def test_a_config_comes_back_from_optuna_and_from_the_log(seed: int, number: int) -> None:
    for space in (SPACE, Space.of(define_by_run)):
        config = space.draw(seed, number)
        params, distributions = space.params(logged(config))
        assert params.keys() == distributions.keys() == config.keys() - {"epochs", "double"}
        assert all(d._contains(d.to_internal_repr(params[name])) for name, d in distributions.items())
        assert space.restore(logged(config)) == config
        if space is SPACE:
            assert space.finish(params) == config


def test_restoring_leaves_what_is_not_in_the_space_as_it_is() -> None:
    config = {"lr": 7.0, "act": "tanh", "epochs": 4, "gone": [1]}
    assert SPACE.restore(config) == config
    assert SPACE.params(config) == ({}, {})
    old = {"optimizer": "lion", "width": 16}
    assert Space.of(define_by_run).restore(old) == old
    assert Space.of(define_by_run).params(old) == ({}, {})
    changed = {**Space.of(define_by_run).draw(0, 0), "double": 1}
    assert Space.of(define_by_run).restore(changed) == changed


# Grid


def grid(space):
    return [space.grid_point(number) for number in range(space.grid_size())]


def test_the_grid_is_in_order_with_the_last_name_fastest() -> None:
    space = Space.of({"a": ps.grid([2, 1]), "c": "x", "b": ps.randint(0, 3), "q": ps.quniform(0, 0.3, 0.3)})
    expected = [{"a": a, "b": b, "q": q, "c": "x"} for a in (2, 1) for b in (0, 1, 2) for q in (0.0, 0.3)]
    assert grid(space) == expected
    assert grid(Space.of({"a": ps.uniform(1, 1), "b": ps.choice([Relu, None])})) == [
        {"a": 1, "b": Relu},
        {"a": 1, "b": None},
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"n": ps.grid([1]), "lr": ps.loguniform(1e-4, 1)},
            r"Grid cannot enumerate lr=loguniform\(0.0001, 1\): use ps.grid\(\[...\]\), ps.choice\(\[...\]\)",
        ),
        (define_by_run, "Grid needs a dict, got the function define_by_run"),
        ({"n": ps.randint(0, 10**9)}, "Grid takes at most 1000000 configs, got 1000000000: use fewer values"),
    ],
)
def test_what_the_grid_refuses(spec: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        Space.of(spec).grid_size()


# Perturbing


@given(seeds, numbers, st.integers(0, 100))
def test_perturbing_stays_in_the_space(seed: int, number: int, generation: int) -> None:
    config = SPACE.draw(seed, number)
    for _ in range(5):
        config = SPACE.perturb(logged(config), seed, number, generation)
        SPACE.check(config)
        assert config["act"] in ("relu", Relu, (64, 32)), "a real object, though it came from the log"


@given(ranges(), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_a_nudge_stays_in_its_range_and_moves(domain: Range, at: float, u: float) -> None:
    value = domain.at(at)
    nudged = domain.nudge(value, u)
    assert domain.holds(nudged)
    if domain.step is not None and domain.low + domain.step <= value <= domain.high - domain.step and value:
        assert nudged != value


def test_perturbing_multiplies_numbers_and_takes_neighbours_of_choices() -> None:
    spec = {"lr": ps.loguniform(1e-6, 1e6), "n": ps.randint(1, 1000), "o": ps.choice(list("abcde"))}
    space = Space.of(spec)
    perturbed = [space.perturb({"lr": 1.0, "n": 100, "o": "c"}, 0, n, 1, resample=0) for n in range(100)]
    assert {config["lr"] for config in perturbed} == {0.8, 1.2}
    assert {config["n"] for config in perturbed} == {80, 120}
    assert {config["o"] for config in perturbed} == {"b", "d"}
    edge = [space.perturb({"lr": 1e6, "n": 1, "o": "a"}, 0, n, 1, resample=0) for n in range(100)]
    assert {config["lr"] for config in edge} == {8e5, 1e6}
    assert {config["n"] for config in edge} == {1, 2}
    assert {config["o"] for config in edge} == {"a", "b"}


def test_perturbing_draws_a_part_anew_and_is_keyed() -> None:
    space, config = Space.of({"lr": ps.uniform(0, 1)}), {"lr": 0.5}
    perturbed = [space.perturb(config, 0, n, 1) for n in range(1000)]
    assert 200 < sum(c["lr"] not in (0.4, 0.6) for c in perturbed) < 300
    assert perturbed == [space.perturb(config, 0, n, 1) for n in range(1000)]
    for other in ((1, 3, 1), (0, 4, 1), (0, 3, 2)):
        assert space.perturb(config, 0, 3, 1, resample=1) != space.perturb(config, *other, resample=1)


def test_perturbing_a_value_outside_the_space_draws_anew() -> None:
    assert 0 <= Space.of({"lr": ps.uniform(0, 1)}).perturb({"lr": 7.0}, 0, 0, 0, resample=0)["lr"] <= 1
    assert Space.of({"o": ps.choice(["a"])}).perturb({}, 0, 0, 0, resample=0) == {"o": "a"}


def test_perturbing_needs_a_dict() -> None:
    with pytest.raises(
        SpaceError, match=r"PBT needs a dict, got the function define_by_run: write the space as a dict"
    ):
        Space.of(define_by_run).perturb({}, 0, 0, 0)


# Checking and describing


@given(seeds, numbers)
def test_check_accepts_what_was_drawn_and_logged(seed: int, number: int) -> None:
    SPACE.check(logged(SPACE.draw(seed, number)))
    Space.of(define_by_run).check({"any": "thing"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 2.0}, r"has lr=2.0, which is not in loguniform\(0.0001, 1\): restore the space, or start a study of"),
        ({"lr": "0.1"}, "has lr='0.1', which is not in"),
        ({"layers": 5}, "has layers=5, which is not in randint"),
        ({"layers": 2.0}, "has layers=2.0, which is not in randint"),
        ({"layers": True}, "has layers=True, which is not in randint"),
        ({"dropout": 0.25}, "has dropout=0.25, which is not in quniform"),
        ({"act": "tanh"}, "has act='tanh', which is not in choice"),
        ({"kernel": True}, "has kernel=True, which is not in grid"),
        ({"epochs": 4}, "has epochs=4, which the space has as 3"),
        ({"more": 1}, "has more=1, which the space has not"),
        ({"momentum": None}, "has momentum=None, which is not in uniform"),
    ],
)
def test_check_names_what_disagrees(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        SPACE.check({**logged(SPACE.draw(0, 0)), **change})


@pytest.mark.parametrize("name", ["lr", "epochs"])
def test_check_names_what_is_missing(name: str) -> None:
    config = SPACE.draw(0, 0)
    del config[name]
    with pytest.raises(SpaceError, match=f"has no '{name}', which the space has"):
        SPACE.check(config)


NUMPY = [np.int64(16), np.float32(0.5), np.bool_(True), torch.tensor(3), np.array(2.5), (np.int8(1), [np.int8(2)])]
PLAIN = [16, 0.5, True, 3, 2.5, (1, [2])]


def test_numbers_of_numpy_and_torch_come_back_from_the_log_as_plain_ones() -> None:
    assert repr(ps.choice(NUMPY).values) == repr(tuple(PLAIN))
    assert repr(ps.grid(np.array([1, 2])).values) == "(1, 2)"
    for number, plain in zip(NUMPY, PLAIN, strict=True):
        space = Space.of({"lr": ps.uniform(0, 1), "c": number, "w": ps.choice([number, "x"]), "d": {"in": number}})
        assert repr(space.constants) == repr({"c": plain, "d": {"in": plain}})
        config = space.draw(0, 0)
        assert space.restore(logged(config)) == config
        assert repr(space.domains["w"].point(0)) == repr(plain)
        assert "np." not in repr(logged(config))

    def returns(trial: Any) -> dict[str, Any]:
        return {"double": np.int64(2) * trial.suggest_categorical("w", [np.int64(8)])}

    assert repr(Space.of(returns).draw(0, 0)) == "{'w': 8, 'double': 16}"


def test_functions_among_choices_survive_the_process() -> None:
    def act() -> None: ...

    space = Space.of({"act": ps.choice([act, "none"])})
    config = logged({"act": act})
    assert space.restore(config) == {"act": act}
    assert "0x" not in f"{config} {space.describe()} {space.distributions()} {space.params(config)}"


def test_describe_is_json_and_tells_spaces_apart() -> None:
    description = SPACE.describe()
    assert description == json.loads(json.dumps(description))
    assert isinstance(description, dict)
    assert description["lr"] == "loguniform(0.0001, 1)"
    assert description["hidden"] == "qloguniform(16, 512, 16)"
    assert description["act"] == f"""choice(['relu', {repr(Relu)!r}, [64, 32]])"""
    assert description["epochs"] == "3"
    assert Space.of({**SPEC, "epochs": 3.0}).describe() != description
    assert Space.of({**SPEC, "momentum": ps.uniform(0.0, 0.99)}).describe() == description


def test_describe_tells_functions_apart_by_their_source() -> None:
    descriptions = {
        Space.of(f).describe() for f in (define_by_run, logged, eval("lambda t: 1"), eval("lambda t: 2"), len)
    }
    assert len(descriptions) == 5
    assert str(Space.of(define_by_run).describe()).startswith("define_by_run ")


def test_a_description_can_be_read() -> None:
    spec = {**SPEC, "s": FloatDistribution(0.05, 0.45, step=0.1), "i": IntDistribution(1, 9, log=True)}
    space = Space.of(spec)
    read = Space.read(json.loads(json.dumps(space.describe())))
    assert read is not None
    assert read.distributions().keys() == space.distributions().keys()
    for name, domain in space.domains.items():
        same = read.domains[name]
        assert (same == domain) or (
            isinstance(same, Choice) and isinstance(domain, Choice) and same.marks == domain.marks
        )
    params = space.params(space.draw(0, 0))[0]
    assert read.params(logged(space.draw(0, 0)))[0].keys() == params.keys()
    for unreadable in (
        "define_by_run 01234567",
        {"x": "choice([inf])"},
        {"x": "normal(0, 1)"},
        {"x": "uniform("},
        None,
    ):
        assert Space.read(unreadable) is None


def test_a_space_is_a_space() -> None:
    assert Space.of(SPACE) is SPACE
    assert isinstance(SPACE.domains["lr"], Domain)
