"""States: cut, changed, exchanged or removed, while their study is interrupted.

Rule: the study goes on to the same trials as the undisturbed one, or is refused with a message.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import penstock as ps
from tests.cut import copied
from tests.fuzzing.cases import Kind, What, Wrong, refused
from tests.fuzzing.logs import facts, study

STUDIES = ("halving", "population")


def make(random: Random) -> What:
    name, lines = random.choice(STUDIES), random.choice([12, 18, 24, 30])
    files = sorted(path.name for path in (_made(name, lines) / "s" / "states").glob("*.pt"))
    what: What = {"study": name, "lines": lines}
    if not files:
        return {**what, "does": "nothing", "file": ""}
    file = random.choice(files)
    size = (_made(name, lines) / "s" / "states" / file).stat().st_size
    return {
        **what,
        "file": file,
        "does": random.choice(["cut", "change", "change", "remove", "empty", "folder", "exchange", "zeros"]),
        "at": random.randint(0, size - 1),
        "other": random.choice(files),
        "bits": random.randint(1, 255),
    }


def check(what: What) -> str:
    made = _made(what["study"], what["lines"])
    dir = Path(".penstock")
    shutil.copytree(made / "s", dir / "s", ignore=shutil.ignore_patterns("lock"))
    _disturb(dir / "s" / "states" / what["file"], what)
    try:
        result = study(what["study"], dir).run(progress=False)
    except ps.PenstockError as error:
        return refused(error)
    if facts(result) != _answer(what["study"]):
        raise Wrong(f"wrong answer: {facts(result)} instead of {_answer(what['study'])}")
    return "done"


def _disturb(path: Path, what: What) -> None:
    if what["does"] == "nothing":
        return
    if what["does"] == "exchange":
        other = path.with_name(what["other"])
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
        return
    data = bytearray(path.read_bytes())
    path.unlink()
    if what["does"] == "folder":
        path.mkdir()
    elif what["does"] == "change":
        data[what["at"]] ^= what["bits"]
        path.write_bytes(data)
    elif what["does"] == "cut":
        path.write_bytes(data[: what["at"]])
    elif what["does"] == "zeros":
        path.write_bytes(bytes(len(data)))
    elif what["does"] == "empty":
        path.write_bytes(b"")


@cache
def _made(name: str, lines: int) -> Path:
    """A study that was cut off after so many lines of its log."""
    dir = Path(mkdtemp(prefix="fuzz-state-"))
    with copied(dir / "whole", dir, (lines,)):
        study(name, dir / "whole").run(progress=False)
    there = dir / str(lines)
    return there if there.exists() else dir / "whole"


@cache
def _answer(name: str) -> str:
    return facts(study(name, Path(mkdtemp(prefix="fuzz-state-"))).run(progress=False))


STATES = Kind("states", make, check)
