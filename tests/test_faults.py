"""Short runs, with fixed seeds, of the benches that kill studies, fail their disk, and run many in one process."""

import os
import random
import resource
import signal
from pathlib import Path

import pytest

from bench.killing import Case, differences
from penstock.errors import PenstockError
from tests.programs import run

BENCH = Path(__file__).parents[1] / "bench"


def test_studies_that_are_killed_at_random_points_are_as_undisturbed_ones():
    said = run(f"python {BENCH}/faults.py --kills 11 --seed 1 --only BOHB").stdout  # in one mode after another
    assert said.splitlines()[-1].endswith("0 different")


def test_a_bench_that_finds_a_difference_says_so():
    Path("whole").mkdir()
    Path("part").mkdir()
    case, other = Case("ASHA", "function", 0, 0), Case("ASHA", "function", 0, 1)
    case.run(Path("whole"))
    other.run(Path("part"))
    assert differences(case, Path("whole"), Path("whole")) == []
    (said,) = differences(case, Path("part"), Path("whole"))
    assert said.startswith("decision 0 is ('asked', 0, ")


@pytest.mark.parametrize("bytes", [1, 3000, 7000, 13000])
def test_a_disk_that_is_full_ends_a_study_in_one_message_and_it_goes_on_once_there_is_room(bytes):
    """No file may grow beyond some bytes: the log is the one that does."""
    case = Case("ASHA", "function", 0, 0)
    case.run(Path("whole"))
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))
        with pytest.raises(PenstockError) as told:
            case.run(Path("part"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(told.value)
    case.run(Path("part"))
    assert differences(case, Path("part"), Path("whole")) == []


def test_the_zeros_that_a_power_loss_leaves_are_cut_off():
    case = Case("ASHA", "function", 0, 0)
    case.run(Path("whole"))
    rng = random.Random(0)
    for point in range(3):
        dir = Path(f"part {point}")
        case.run(dir)
        log = dir / "s" / "log.jsonl"
        lines = log.read_bytes().splitlines(keepends=True)
        kept = b"".join(lines[: rng.randint(2, len(lines) - 1)])
        log.write_bytes(kept + bytes(log.stat().st_size - len(kept)))
        for state in (dir / "s" / "states").glob("*.pt"):
            os.truncate(state, 0)
        case.run(dir)
        assert differences(case, dir, Path("whole")) == []


def test_five_studies_in_one_process_leave_no_descriptor_and_no_thread():
    said = run(f"python {BENCH}/soak.py --studies 5 --minutes 0 --only 'solo, 2 workers'").stdout
    assert "RISES" not in "".join(line for line in said.splitlines() if "memory" not in line)
