"""Packs: the paper's example, every partition of eight configs, and who joins which device."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Demand, Holding, View, kinds, room
from penstock.scheduling.packs import LARGEST, Packing, distance, features, join, pack_opt, time_distance
from penstock.speed.curve import Curve
from penstock.speed.model import Speed

TABLE_3 = {
    "batch_size": ps.grid([20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70]),
    "optimizer": ps.grid(["Adam", "SGD", "Adagrad", "Momentum"]),
    "lr": ps.grid([0.000001, 0.00001, 0.0001, 0.001, 0.01, 0.1]),
    "activation": ps.grid(["Sigmoid", "Leaky ReLu", "Tanh", "ReLu"]),
}


def config(*values):
    return dict(zip(TABLE_3, values, strict=True))


def apart(one, other):
    return distance(features(one, TABLE_3), features(other, TABLE_3))


def test_the_papers_two_configurations_are_five_apart():
    assert apart(config(20, "SGD", 0.01, "ReLu"), config(40, "Adagrad", 0.01, "ReLu")) == 5


def test_the_papers_space_has_1056_configurations_and_a_metric_on_them():
    every = [config(*values) for values in product(*(domain.values for domain in TABLE_3.values()))]
    assert len(every) == 1056
    some = every[::97]
    for one, other in product(some, some):
        assert apart(one, other) == apart(other, one) >= (one != other)
        assert all(apart(one, other) <= apart(one, third) + apart(third, other) for third in some[:3])


def test_a_range_has_levels_and_a_step_is_one():
    space = {
        "lr": ps.loguniform(1e-4, 1),
        "q": ps.quniform(0, 1, 0.25),
        "n": ps.randint(0, 5),
        "flag": ps.choice([True, False]),
    }
    low = features({"lr": 1e-4, "q": 0.0, "n": 1, "flag": True}, space)
    high = features({"lr": 1.0, "q": 0.5, "n": 3, "flag": False}, space)
    assert [distance((a,), (b,)) for a, b in zip(low, high, strict=True)] == pytest.approx([10, 2, 2, 1])


def test_the_time_distance_is_the_gain_of_a_step_with_its_sign():
    assert time_distance(2.0, (2.0, 2.0)) == -0.5
    assert time_distance(4.0, (2.0, 2.0)) == 0
    assert time_distance(5.0, (1.0, 4.0)) == 0
    assert time_distance(6.0, (1.0, 4.0)) > 0


def partitions(items):
    """Every partition of some items."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for some in partitions(rest):
        yield [[first], *some]
        for i, block in enumerate(some):
            yield [*some[:i], [first, *block], *some[i + 1 :]]


def legal(packs, bytes, memory, threshold, places):
    """Whether every pack fits, and has a member that all others are near."""
    return all(
        len(pack) == 1
        or (
            sum(bytes[i] for i in pack) <= memory
            and any(all(abs(places[i] - places[j]) <= threshold for j in pack) for i in pack)
        )
        for pack in packs
    )


@settings(max_examples=15, deadline=None)
@given(
    places=st.lists(st.integers(0, 12), min_size=8, max_size=8),
    bytes=st.lists(st.integers(1, 6), min_size=8, max_size=8),
    memory=st.integers(2, 14),
    threshold=st.sampled_from([0, 1, 3, math.inf]),
    seed=st.integers(0, 99),
)
def test_eight_configs_against_every_partition(places, bytes, memory, threshold, seed):
    made = pack_opt(
        range(8), bytes.__getitem__, memory, lambda i, j: abs(places[i] - places[j]), threshold=threshold, seed=seed
    )
    assert sorted(i for pack in made for i in pack) == list(range(8))
    assert legal(made, bytes, memory, threshold, places)
    every = [packs for packs in partitions(list(range(8))) if legal(packs, bytes, memory, threshold, places)]
    assert sorted(map(sorted, made)) in [sorted(map(sorted, packs)) for packs in every]
    for i, (centroid, *others) in enumerate(made):  # no item that came too late for a pack would still fit in
        later = [item for pack in made[i + 1 :] for item in pack]
        left = memory - sum(bytes[item] for item in (centroid, *others))
        assert all(bytes[item] > left or abs(places[item] - places[centroid]) > threshold for item in later)
    if threshold == math.inf and len(set(bytes)) == 1:  # of equal items the fewest packs that there can be
        assert len(made) == min(map(len, every))


def test_the_centroids_are_keyed():
    packs = {seed: pack_opt(range(8), lambda i: 1, 3, lambda i, j: abs(i - j), seed=seed) for seed in range(20)}
    assert packs[4] == pack_opt(range(8), lambda i: 1, 3, lambda i, j: abs(i - j), seed=4)
    assert len({str(pack) for pack in packs.values()}) > 5


# The stage


def demand(trial, at=0.0, signature="", load=1, bytes=1):
    return Demand(trial, "g", 1, trial, signature=signature, features=(float(at),), load=load, bytes=bytes)


def view(running, devices=1, memory=100):
    there = {f"gpu {i}": Device(f"gpu {i}", "h200", memory) for i in range(devices)}
    held = {d.trial: Holding(d, Assignment(d.trial, (name,))) for name, d in running.items()}
    return View(there, held, room(there, held.values()), kinds(held.values()))


def speed(most=4):
    return Speed(lambda trial: 1.0, lambda trial: Curve(sharing=(1.0,) * most))


def joined(made):
    return {name: [one.trial for one in made if one.devices == (name,)] for name in {one.devices[0] for one in made}}


def test_the_nearest_join_first_until_memory_is_full():
    waiting = [demand(1, 9.0), demand(2, 1.0), demand(3, 2.0), demand(4, 3.0, bytes=50)]
    made = join(view({"gpu 0": demand(0)}, memory=3), waiting, speed(), Packing())
    assert joined(made) == {"gpu 0": [2, 3]}
    assert all(one.packed and one.share == pytest.approx(1 / 3) for one in made)


def test_a_similarity_keeps_others_out_and_they_may_be_alone():
    waiting = [demand(1, 9.0), demand(2, 1.0), demand(3, 2.0)]
    assert joined(join(view({"gpu 0": demand(0)}), waiting, speed(), Packing(similarity=1.5))) == {"gpu 0": [2]}
    assert not join(view({"gpu 0": demand(0)}), waiting, speed(), Packing(similarity=0))


def test_by_batch_size_only_equal_ones_meet_and_at_random_the_seed_decides():
    waiting = [demand(trial, load=32 + trial % 2) for trial in range(1, 9)]
    first = demand(0, load=33)
    assert joined(join(view({"gpu 0": first}), waiting, speed(), Packing("batch_size"))) == {"gpu 0": [1, 3, 5, 7]}
    orders = {
        str(joined(join(view({"gpu 0": first}, memory=4), waiting, speed(), Packing("random", seed=s))))
        for s in range(9)
    }
    assert len(orders) > 3
    again = [join(view({"gpu 0": first}, memory=4), waiting, speed(), Packing("random", seed=1)) for _ in range(2)]
    assert again[0] == again[1]


def test_trials_of_a_signature_are_one_part_as_large_as_pays():
    waiting = [demand(trial, signature="s") for trial in range(1, 9)] + [demand(9, signature="t")]
    made = join(view({"gpu 0": demand(0, signature="s")}), waiting, speed(most=3), Packing())
    assert joined(made) == {"gpu 0": [1, 2, 9]}


def test_the_device_with_the_fewest_parts_chooses_first_and_a_pack_has_a_limit():
    both = {"gpu 0": demand(0, 0.0), "gpu 1": demand(1, 50.0)}
    made = join(
        view(both, devices=2), [demand(2, 1.0), demand(3, 49.0), demand(4, 2.0), demand(5, 48.0)], speed(), Packing()
    )
    assert joined(made) == {"gpu 0": [2, 4], "gpu 1": [3, 5]}
    many = join(view({"gpu 0": demand(0)}), [demand(trial) for trial in range(1, 50)], speed(), Packing())
    assert len(many) == LARGEST - 1
