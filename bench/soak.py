"""Many studies in one process: memory, descriptors, threads and disk must stay flat.

    python bench/soak.py [--minutes 40] [--studies 60] [--json]

Every algorithm runs in every mode, one study after another, for so many minutes and at least so many studies. After
each study the process is measured. The first round, in which libraries are loaded and caches filled, does not count. A
line is fitted to each measurement: its rise over the whole run must be within the noise, three times the spread around
the line. Descriptors, threads and disk must not rise at all. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from itertools import cycle
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench.killing import MODES, Case
from tests.cut import ALGORITHMS

PAGE = os.sysconf("SC_PAGE_SIZE")
ENOUGH = 30  # studies after the first round: with fewer, a rise of memory says nothing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--studies", type=int, default=60)
    parser.add_argument("--only", help="one mode, such as fused")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)  # temporary files are measured too
    modes = [mode for mode in MODES if options.only in (None, mode)]
    # Modes change fastest: after one study in each mode everything is loaded.
    cases = [Case(algorithm, mode, 0, 0) for algorithm in ALGORITHMS for mode in modes]
    rows, began = list[dict[str, float]](), time.monotonic()
    for number, case in enumerate(cycle(cases)):
        case.run(folder / "study")
        shutil.rmtree(folder / "study")
        rows.append(measured(folder))
        if options.json:
            print(json.dumps({"study": number, "case": str(case), **rows[-1]}), flush=True)
        if number + 1 >= options.studies and time.monotonic() - began > 60 * options.minutes:
            break
    shutil.rmtree(folder)
    first = len(cases) if len(rows) >= len(cases) + ENOUGH else len(modes)
    return report(rows[first:], time.monotonic() - began, len(rows))


def measured(folder: Path) -> dict[str, float]:
    """What the process has now."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    disk = sum(path.stat().st_size for path in folder.rglob("*"))
    return {
        "memory in MB": resident / 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "disk in bytes": disk,
    }


def report(rows: list[dict[str, float]], seconds: float, studies: int) -> int:
    """Print the rise of each measurement; 1 where one is beyond the noise."""
    print(f"{studies} studies in {seconds:.0f} s, the last {len(rows)} of them measured")
    print(f"{'':16}{'first':>12}{'last':>12}{'rise':>12}{'noise':>12}")
    wrong = 0
    for name in rows[0]:
        values = [row[name] for row in rows]
        rise, noise = fitted(values)
        memory = name.startswith("memory")
        flat = rise <= max(noise, 0.5) if memory else rise <= noise and values[-1] <= values[0]
        wrong += not flat and (not memory or len(rows) >= ENOUGH)
        print(f"{name:16}{values[0]:12.2f}{values[-1]:12.2f}{rise:12.3f}{noise:12.3f}{'' if flat else '  RISES'}")
    return 1 if wrong else 0


def fitted(values: list[float]) -> tuple[float, float]:
    """The rise of a line through some values, over all of them, and three times their spread around it."""
    if len(values) < 2:
        return 0.0, 0.0
    slope, start = statistics.linear_regression(range(len(values)), values)
    apart = [value - (start + slope * i) for i, value in enumerate(values)]
    return slope * (len(values) - 1), 3 * statistics.pstdev(apart)


if __name__ == "__main__":
    sys.exit(main())
