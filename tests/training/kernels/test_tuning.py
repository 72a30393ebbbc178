"""Block sizes that were timed once: remembered in the process, and in a file for the next one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

pytest.importorskip("triton")
import torch

from penstock.training.kernels import attention, convolution, depthwise, moments, normalization, tuning, weighing
from penstock.training.kernels.at_once import AtOnce, at_once
from penstock.training.kernels.geometry import Geometry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

OFFERED = [{"BM": 64}, {"BM": 128}, {"BM": 256}]


@pytest.fixture
def device(tmp_path, monkeypatch):
    """A device on which 128 is the fastest; gives what was timed there."""
    timed = []

    def fastest(offered, launch):
        timed.append(offered)
        return offered[1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "_fastest", fastest)
    monkeypatch.setattr(tuning, "_here", lambda: "a device")
    forget(monkeypatch)
    yield timed
    tuning._kept.cache_clear()


def forget(monkeypatch):
    """What a new process knows."""
    monkeypatch.setattr(tuning, "_KNOWN", {})
    tuning._kept.cache_clear()


def tuned(shape=("kernel", 1), offered=OFFERED):
    return tuning.tuned(shape, lambda: offered, lambda blocks: None)


def test_a_shape_is_timed_once_and_by_no_later_process(device, monkeypatch):
    assert tuned() == tuned() == {"BM": 128}
    forget(monkeypatch)
    assert tuned() == {"BM": 128}
    assert len(device) == 1
    tuned(("kernel", 2))
    assert len(device) == 2


def test_another_device_is_timed_anew(device, monkeypatch):
    tuned()
    forget(monkeypatch)
    monkeypatch.setattr(tuning, "_here", lambda: "another")
    tuned()
    assert len(device) == 2


def test_what_is_no_longer_offered_is_timed_anew_and_the_last_line_counts(device, monkeypatch):
    tuned()
    forget(monkeypatch)
    assert tuned(offered=OFFERED[2:] + OFFERED[:1]) == {"BM": 64}
    forget(monkeypatch)
    assert tuned(offered=OFFERED[2:] + OFFERED[:1]) == {"BM": 64}
    assert len(device) == 2


def test_what_is_timed_is_no_part_of_the_step_that_runs(monkeypatch):
    """A recorded step would lay out weights for block sizes that were not taken."""
    for name, instead in {"current_device": lambda: 0, "synchronize": lambda: None, "device": nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, instead)
    monkeypatch.setattr(tuning, "_seconds", lambda launch, blocks: launch(blocks) or 1.0)
    seen = []
    AtOnce().run(lambda: tuning._fastest(OFFERED, lambda blocks: seen.append(at_once())), [])
    assert seen == [None] * 6


@pytest.mark.parametrize("line", [b'["a device: (', b"7", b"[1, 2, 3]", b'["a", 7]', b"\xff\xfe"])
def test_a_damaged_line_costs_nothing(device, monkeypatch, line):
    tuned()
    file = tuning._file()
    file.write_bytes(line + b"\n" + file.read_bytes())
    forget(monkeypatch)
    assert tuned() == {"BM": 128}
    assert len(device) == 1


def test_a_folder_that_cannot_be_written_costs_only_timing_again(device, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tuned() == {"BM": 128}
    forget(monkeypatch)
    assert tuned() == {"BM": 128}
    assert len(device) == 2


def test_one_candidate_needs_no_timing_nor_does_the_interpreter(device, monkeypatch):
    assert tuned(offered=OFFERED[:1]) == {"BM": 64}
    monkeypatch.setattr(tuning, "interpreted", lambda: True)
    assert tuned() == {"BM": 64}
    assert not device


def test_untimed_blocks_are_the_first_candidate_unless_an_earlier_process_timed_them(device, monkeypatch):
    with tuning.untimed():
        assert tuned() == {"BM": 64}
    assert not device
    assert tuned() == {"BM": 128}, "the first candidate was not taken for good"
    forget(monkeypatch)
    with tuning.untimed():
        assert tuned() == {"BM": 128}


def test_a_backward_pass_sees_that_nothing_is_to_be_timed():
    """A device's backward passes run in a thread of their own, unless torch is told otherwise."""
    with tuning.untimed():
        assert not torch.autograd.is_multithreading_enabled()
    assert torch.autograd.is_multithreading_enabled()


def test_one_trial_more_or_less_asks_for_no_other_blocks(monkeypatch):
    """So that a trial's leaving compiles nothing."""
    asked = {5: [], 7: []}

    def tuned(shape, candidates, launch):
        asked[trials].append((shape, candidates()))
        return candidates()[0]

    for module in (attention, convolution, depthwise, moments, normalization, weighing):
        monkeypatch.setattr(module, "tuned", tuned)
    where = Geometry.of((4, 4), (3, 3), (1, 1), (1, 1), (1, 1))
    for trials in asked:
        x = torch.ones(trials, 2, 4, 4, 4, device=DEVICE)
        w = torch.ones(trials, 4, 4, 3, 3, device=DEVICE, requires_grad=True)
        weighing.convolution(x, w, where)[0].sum().backward()
        depthwise.depthwise(x, w[:, 0].flatten(2).mT, where).sum().backward()
        numbers = moments.moments(x)
        normalization.reduce(x, x, None, numbers, 0)
        normalization.normalize(x, numbers, None, 0)
        attention.attention(*[x.flatten(0, 1)] * 3)
        asked[trials].append(moments.parts(x, moments.SUMMING[0])[1])
    assert len(asked[5]) > 6
    assert asked[5] == asked[7]
