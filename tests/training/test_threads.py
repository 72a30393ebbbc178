"""The threads that a worker on a CPU computes with: measured once for a study, logged, and kept."""

from itertools import count

import pytest
import torch

import penstock as ps
from penstock.log.events import Measured, Placed
from penstock.training import threads
from penstock.training.cores import cores
from tests.studies import log, studies
from tests.tasks import Blobs

study = studies(Blobs, {"lr": ps.loguniform(1e-3, 1)}, trials=2)


class Counted(Blobs):
    """Notes how many threads there are at each loss."""

    def loss(self, model, batch, config):
        SEEN.append(torch.get_num_threads())
        return super().loss(model, batch, config)


SEEN: list[int] = []


@pytest.fixture
def several(monkeypatch):
    """A user who has said nothing, on three cores; gives what sets the times of one thread and of all."""
    for name in threads.GIVEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 3)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    SEEN.clear()

    def times(one, all):
        def timed(step, most):
            step()
            return {1: one, most: all}

        monkeypatch.setattr(threads, "timed", timed)

    yield times
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def measured(**where):
    return [event for event in log(**where) if isinstance(event, Measured) and event.kind == "threads"]


@pytest.mark.parametrize(("one", "all", "taken"), [(1.0, 0.5, 3), (1.0, 0.95, 1), (0.5, 1.0, 1)])
def test_a_study_computes_with_the_faster_number_of_threads_and_logs_it_before_any_trial_is_placed(
    several, one, all, taken
):
    several(one, all)
    study(Counted()).run(progress=False)
    assert SEEN[-1] == taken
    events = log()
    (event,) = measured()
    assert (event.size, event.table) == (taken, {1: one, 3: all})
    assert events.index(event) < next(i for i, other in enumerate(events) if isinstance(other, Placed))


def test_a_resumed_study_keeps_the_threads_of_its_log_whatever_would_be_measured_now(several):
    several(0.5, 1.0)
    study(Counted(), trials=1).run(progress=False)
    several(1.0, 0.5)
    study(Counted(), trials=2).run(progress=False, allow_changes=True)
    assert SEEN[-1] == 1
    assert [event.size for event in measured()] == [1]


def test_nothing_is_measured_where_the_user_has_said_how_many_threads_there_are(several, monkeypatch):
    several(0.5, 1.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    study(Counted()).run(progress=False)
    assert set(SEEN) == {3}
    assert not measured()


def test_a_deterministic_study_measures_nothing_and_logs_its_threads(several):
    several(0.5, 1.0)
    study(Counted()).run(progress=False, deterministic=True)
    assert set(SEEN) == {3}
    assert [(event.size, event.table) for event in measured()] == [(3, {})]


def test_measuring_leaves_the_curves_as_they_are(several, monkeypatch):
    several(0.5, 1.0)
    first = study(name="measured").run(progress=False)
    monkeypatch.setattr(threads, "looked", lambda *args, **how: None)
    torch.set_num_threads(1)
    second = study(name="plain").run(progress=False)
    torch.set_num_threads(3)
    assert [trial.curve for trial in first.trials] == [trial.curve for trial in second.trials]


def test_steps_take_turns_and_a_few_that_wait_for_a_core_count():
    taken, now, before = [], [0.0], torch.get_num_threads()

    def step():
        taken.append(torch.get_num_threads())
        stalls = taken[-1] == 4 and taken.count(4) % 10 == 0
        now[0] += 0.0201 if stalls else 0.001 / taken[-1]

    made = threads.timed(step, 4, lambda: now[0])
    assert [count for i, count in enumerate(taken) if i == 0 or taken[i - 1] != count] == [1, 4] * threads.ROUNDS
    assert made == {1: pytest.approx(0.001), 4: pytest.approx((0.0201 + 9 * 0.00025) / 10)}
    assert torch.get_num_threads() == before


def test_steps_that_take_long_are_timed_once():
    clock, taken = count(), []
    threads.timed(lambda: taken.append(0), 4, lambda: next(clock) * 1.0)
    assert len(taken) == 2


def test_an_error_while_steps_are_timed_gives_the_threads_back():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        threads.timed(lambda: 1 / 0, 4)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("group", "files", "found"),
    [
        ("0::/", {"sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
        ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "50000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 1),
        ("0::/elsewhere", {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, 4),
        ("4:cpu,cpuacct:/a", {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "250000",
                              "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 3),
        ("1:cpu:/", {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 4),
        ("4:memory:/", {"sys/fs/cgroup/cpu.max": "100000 100000"}, 4),
        ("", {}, 4),
    ],
)  # fmt: skip
def test_no_more_cores_than_the_quotas_of_the_groups_around_a_process(tmp_path, monkeypatch, group, files, found):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for name, text in {"proc/self/cgroup": f"{group}\n" if group else "", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores(tmp_path) == found
