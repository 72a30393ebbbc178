"""Whatever a check changes inside of values is put back."""

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from penstock.training.contents import Contents, _installed, of_user


class Slotted:
    __slots__ = ("count", "late", "tensors")

    def __init__(self):
        self.count, self.tensors = 0, [torch.zeros(2)]


def test_what_containers_objects_and_optimizers_hold_is_put_back():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    slotted, queue, array = Slotted(), deque([1, 2], maxlen=2), np.zeros(2)
    kept = ({"queue": queue}, [array], slotted, optimizer)
    before = {k: v.clone() for k, v in optimizer.state[parameter].items()}, parameter.detach().clone()
    contents = Contents(kept)
    for _ in range(2):  # as often as one likes
        optimizer.step()
        queue.append(3)
        array += 1
        slotted.count, slotted.late = 5, True
        slotted.tensors[0].add_(1)
        slotted.tensors.append(None)
        contents.put_back()
        assert all(torch.equal(optimizer.state[parameter][k], v) for k, v in before[0].items())
        assert torch.equal(parameter, before[1])
        assert list(queue) == [1, 2]
        assert array.tolist() == [0, 0]
        assert slotted.count == 0
        assert not hasattr(slotted, "late")
        assert [one.tolist() for one in slotted.tensors] == [[0, 0]]


def test_generators_of_the_users_own_are_put_back():
    own = torch.Generator().manual_seed(1), np.random.default_rng(1), np.random.RandomState(1), random.Random(1)

    def draw():
        return [torch.rand((), generator=own[0]).item(), own[1].random(), own[2].rand(), own[3].random()]

    contents = Contents([SimpleNamespace(), own])
    first = draw()
    contents.put_back()
    assert draw() == first


def test_packages_that_pip_has_installed_are_not_the_users(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for folder in ("library", "own"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        (tmp_path / folder / "inside.py").touch()
    import own.inside  # noqa: F401

    assert of_user("own.inside")
    (tmp_path / "library-1.0.dist-info").mkdir()
    _installed.cache_clear()
    import library.inside  # noqa: F401

    assert not of_user("library.inside")
    assert not of_user("torch.nn")
    assert not of_user("collections")
    assert of_user(__name__)
    _installed.cache_clear()


def test_large_values_are_left_as_they_are():
    texts = ["text"] * (1 << 17)
    contents = Contents([texts, torch.zeros(1 << 21)])
    assert len(contents._kept) == 2
    contents.put_back()
