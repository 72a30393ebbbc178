"""Input that a user could give by mistake: command lines, spaces, tasks, logs and states, thousands of each.

    python bench/fuzz.py [--count 10000] [--seed 0] [--kind lines|spaces|tasks|logs|states] [--cuts] [--json]

Each case ends with its answer, or with one message and the right exit code: no traceback, no hang, no wrong answer. The
count is divided among the kinds. A case is a function of its seed, so each violation is printed with the command that
repeats it. With --keep it becomes a file in tests/corpus, where a test tries it again. With --cuts, logs are cut at
every byte instead. The exit code is 1 if there is any violation.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

from tests.fuzzing.cases import LIMIT, Kind, What, tried
from tests.fuzzing.kinds import KINDS
from tests.fuzzing.logs import LOGS, cuts

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "corpus"
OUTCOMES = ("done", "refused", "traceback", "hang", "exit code", "no message", "wrong answer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--cuts", action="store_true", help="cut logs at every byte")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--keep", action="store_true", help="keep each violation as a file in tests/corpus")
    given = parser.parse_args()
    kinds = [LOGS] if given.cuts else [KINDS[given.kind]] if given.kind else list(KINDS.values())
    violations = 0
    rows = []
    for kind in kinds:
        began, outcomes = time.perf_counter(), Counter[str]()
        drawn = _drawn(kind, range(given.seed, given.seed + -(-given.count // len(kinds))))
        for name, what in cuts() if given.cuts else drawn:
            outcome = _try(kind, name, what, keep=given.keep)
            outcomes[outcome.partition(":")[0]] += 1
            violations += ":" in outcome
        rows.append({"kind": kind.name, **outcomes, "seconds": round(time.perf_counter() - began, 1)})
    _show(rows, json_lines=given.json)
    return 1 if violations else 0


def _drawn(kind: Kind, seeds: range) -> Iterator[tuple[str, What]]:
    """Each case with the words that repeat it."""
    for seed in seeds:
        yield f"--kind {kind.name} --seed {seed} --count 1", kind.make(Random(f"{kind.name} {seed}"))


def _try(kind: Kind, words: str, what: What, *, keep: bool) -> str:
    """The outcome of a case; a violation is printed with the command that repeats it."""
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True)  # a hang that no signal ends
    outcome = tried(kind, what)
    faulthandler.cancel_dump_traceback_later()
    if ":" in outcome:
        print(f"{outcome}\n    {json.dumps(what)[:1000]}", file=sys.stderr)
        print(f"    python bench/fuzz.py {words}", file=sys.stderr, flush=True)
        if keep:
            text = json.dumps({"kind": kind.name, "found": outcome, "case": what}, indent=1)
            name = "-".join(re.findall(r"\w+", words))
            (CORPUS / f"{name}.json").write_text(text + "\n")
    return outcome


def _show(rows: list[dict[str, object]], *, json_lines: bool) -> None:
    if json_lines:
        for row in rows:
            print(json.dumps(row))
        return
    print("".join(f"{name:>14}" for name in ("kind", *OUTCOMES, "seconds")))
    for row in rows:
        print("".join(f"{row.get(name, 0)!s:>14}" for name in ("kind", *OUTCOMES, "seconds")))


if __name__ == "__main__":
    sys.exit(main())
