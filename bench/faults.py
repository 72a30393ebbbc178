"""Studies that are killed at random points, each compared with the undisturbed study.

    python bench/faults.py [--kills 1000] [--seed 0] [--minutes 55] [--only ASHA/fused/3] [--json]
    python bench/faults.py --lines    # cut off after every line of the log instead of at random points
    python bench/faults.py --disk     # a disk that is full, read-only, slow, goes away, or has written zeros

A kill is SIGKILL, SIGTERM, SIGINT or SIGHUP to the driver, once or twice, SIGKILL to a worker process, or both. Every
algorithm is tried in every mode. After its kills a study must end, with each report once, every curve equal, and on one
worker every decision equal (invariant 4). No process, file or shared memory may be left. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench.killing import MODES, Case, differences, lines_of, own_memory, prepare, torment, undisturbed
from tests.cut import ALGORITHMS, copied


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=55.0)
    parser.add_argument("--only", help="algorithms and modes, as ASHA, ASHA/fused or ASHA/fused/3")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.disk:
        from bench.disks import main as disks

        return disks()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="penstock-faults-"))
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    own_memory()
    shared = set(os.listdir("/dev/shm"))
    prepare()
    wrong = lines(options, folder) if options.lines else kills(options, folder)
    left = [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]  # a cache of torch's own
    wrong += [f"{temporary / name} is left" for name in left]
    wrong += [f"/dev/shm/{name} is left" for name in sorted(set(os.listdir("/dev/shm")) - shared)]
    for one in wrong:
        print(one)
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def cases(only: str | None, seed: int) -> Iterator[Case]:
    """Every algorithm in every mode, again and again."""
    words = (only or "").split("/")
    for number in [int(words[2])] if len(words) == 3 else count():
        for mode in MODES:
            for algorithm in ALGORITHMS:
                if words[0] in ("", algorithm) and (len(words) < 2 or words[1] == mode):
                    yield Case(algorithm, mode, number, seed)


def kills(options: argparse.Namespace, folder: Path) -> list[str]:
    """Kill studies until there were enough kills, or time is up; gives everything that went wrong."""
    began, done, studies = time.monotonic(), Counter[tuple[str, str]](), 0
    differ, wrong = Counter[tuple[str, str]](), list[str]()
    for case in cases(options.only, options.seed):
        key = case.algorithm, case.mode
        whole = folder / f"{case.algorithm} {case.mode}"
        if not whole.exists():
            undisturbed(case, whole)
        dir = folder / str(case).replace("/", " ")
        outcome = torment(case, dir, whole, options.kills - done.total())
        done[key] += outcome.kills
        studies += 1
        if outcome.wrong:
            differ[key] += 1
            again = f'python bench/faults.py --kills 1000 --seed {case.seed} --only "{case}"'
            wrong.append(f"{case}: {'; '.join(outcome.wrong)}\n  again: {again}\n  kept:  {dir}")
            print(wrong[-1], file=sys.stderr)
        else:
            shutil.rmtree(dir)
        if done.total() >= options.kills or time.monotonic() - began > 60 * options.minutes:
            break
    seconds = time.monotonic() - began
    if options.json:
        for (algorithm, mode), number in done.items():
            row = {"algorithm": algorithm, "mode": mode, "kills": number, "different": differ[algorithm, mode]}
            print(json.dumps(row))
    else:
        _table(done, differ)
    total = f"{done.total()} kills of {studies} studies in {seconds:.0f} s: {differ.total()} different"
    print(total, file=sys.stderr if options.json else sys.stdout)
    return wrong


def _table(done: Counter[tuple[str, str]], differ: Counter[tuple[str, str]]) -> None:
    print(f"{'kills (studies that differ)':28}" + "".join(f"{mode:>24}" for mode in MODES))
    for algorithm in dict.fromkeys(algorithm for algorithm, _ in done):
        cells = [f"{done[algorithm, mode]} ({differ[algorithm, mode]})" for mode in MODES]
        print(f"{algorithm:28}" + "".join(f"{cell:>24}" for cell in cells))


def lines(options: argparse.Namespace, folder: Path) -> list[str]:
    """Cut studies on one worker off after every line, and resume them."""
    wrong, tried = list[str](), 0
    for case in cases(options.only, options.seed):
        if case.number > 0:
            break
        if not MODES[case.mode].ordered:
            continue
        whole, parts = folder / f"{case.algorithm} {case.mode}", folder / f"{case.algorithm} {case.mode} parts"
        with copied(whole, parts, range(10**6)):
            case.run(whole)
        for dir in sorted(parts.iterdir(), key=lambda dir: int(dir.name)):
            case.run(dir)
            tried += 1
            wrong += [f"{case} after line {dir.name}: {said}" for said in differences(case, dir, whole)]
        print(f"{case.algorithm:18} {case.mode:9} {lines_of(whole / 's/log.jsonl'):4} lines", flush=True)
        shutil.rmtree(parts)
    print(f"{tried} cuts: {len(wrong)} differ")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
