"""Command lines: each command with good and bad words, over files and studies that are whole, broken or missing.

Rule: a command ends with 0 and its answer, or with 1 or 2 and a message on standard error; never by an exception.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from textwrap import dedent

from typer.testing import CliRunner

from penstock.cli.app import app
from tests.fuzzing.cases import Kind, What, Wrong

FILES = {
    "tuned.py": """
        import penstock as ps
        def train(trial):
            for unit in range(3):
                trial.report(unit + 1, state=unit, loss=trial.config["x"] / (unit + 1))
        study = ps.Study(train, {"x": ps.uniform(1, 2)}, metric="loss", algorithm=ps.Random(budget=2), trials=3)
    """,
    "fails.py": """
        import penstock as ps
        def train(trial):
            raise ValueError("caf\\udce9 \\x1b[31m")
        study = ps.Study(train, {"x": ps.uniform(1, 2)}, metric="loss", algorithm=ps.Random(budget=2), trials=3)
    """,
    "space.py": """
        import penstock as ps
        def space(trial):
            if trial.number == 1: raise KeyError("x")
            trial.suggest_float("x", 0, 1)
        study = ps.Study(lambda trial: trial.report(1, loss=1), space, metric="loss", mode="min",
                         algorithm=ps.Random(budget=1, concurrency=1), trials=3)
    """,
    "wrong.py": "import penstock as ps\nstudy = ps.Study(3, {}, metric='loss', algorithm=None)",
    "syntax.py": "def",
    "leaves.py": "import sys; sys.exit(3)",
    "raises.py": "raise ValueError('\\ud800')",
    "nothing.py": "",
    "other.py": "study = 3",
    "bytes.py": "\0",
    "text.txt": "study = 3",
}
COMMANDS = ("run", "resume", "show", "list", "export", "report", "dashboard", "profile", "", "--help", "--version", "x")
GOOD_NAMES, BAD_NAMES = (
    ("done", "failed"),
    ("", "-x", "..", ".", "/", "a/b", "nowhere", "é", "a\udce9", "x" * 300, "damaged"),
)
PLACES = (".penstock", "nowhere", "", ".", "text.txt", "/dev/null", "/proc/self", "new/er", "x" * 300, "empty")
MOST_DIGITS = "1" * 5000  # Python reads no longer number
OPTIONS: dict[str, tuple[str, ...]] = {
    "--name": ("new", *GOOD_NAMES, *BAD_NAMES),
    "--trials": ("1", "5", "0", "-1", "x", "1.5", "9" * 400, ""),
    "--seed": ("0", "-1", "x", "9" * 400, MOST_DIGITS),
    "--deadline": ("10m", "1e16", "1e-5", "9" * 400, "1e3s", "x", "-1", "", "nan", "0"),
    "--target": ("0.5", "nan", "x", "-1e400", "1e-5", ""),
    "--workers": ("0", "-1", "x", "1"),
    "--weight": ("1", "0", "nan", "2", "x"),
    "--sharing": ("auto", "solo", "fused", "x", ""),
    "--scheduler": ("fifo", "waterfill", "x"),
    "--growing": ("best", "evenly", "x"),
    "--on": ("local", "simulated", "rays", "", "Ray", "x"),
    "--devices": ("1", "8", "0", "x", "999999999999"),
    "--dir": PLACES,
    "--states": (*PLACES, "memory://x", "nope://x", "file://x", "::", "a\udce9"),
    "--out": (*PLACES, "page.html", "new/page.html", "a\udce9"),
    "--to": ("csv", "tensorboard", "x", ""),
    "--top": ("0", "3", "-1", "x", "9" * 30),
    "--port": ("-1", "x", "99999999", "65536"),
    "--json": (),
    "--curves": (),
    "--allow-changes": (),
    "--mixed-types": (),
    "--no-such": ("x",),
}
OWN = {
    "run": "--name --trials --seed --deadline --target --workers --weight --sharing --scheduler --growing --on "
    "--devices --dir --states --json --allow-changes --mixed-types",
    "resume": "--trials --deadline --target --workers --sharing --scheduler --on --devices --dir --states --json",
    "show": "--dir --json --top --curves",
    "list": "--dir --json",
    "export": "--to --out --dir",
    "report": "--out --dir",
    "dashboard": "--port --dir",
    "profile": "--workers --on --dir --json",
}


def make(random: Random) -> What:
    """A command, its argument, and some options: mostly its own."""
    command = random.choice(COMMANDS)
    words = [command] if command else []
    if command in ("run", "profile"):
        words += [random.choice([*["tuned.py"] * 9, *FILES, "empty", "nowhere.py", "", "a\udce9.py"])]
    elif command == "dashboard":
        words += [random.choice(BAD_NAMES)]  # the dashboard of a study that is there serves until Ctrl-C
    elif command not in ("list", "", "--help", "--version") and random.random() < 0.9:
        words += [random.choice([*GOOD_NAMES * 3, *BAD_NAMES])]
    own = OWN.get(command, "").split()
    for _ in range(random.randint(0, 4)):
        option = random.choice(own) if own and random.random() < 0.9 else random.choice(list(OPTIONS))
        good, values = random.random() < 0.5, OPTIONS[option]  # the first value is a good one
        words += [option, *([values[0] if good else random.choice(values)] if values else [])]
    if random.random() < 0.05:
        words.insert(random.randint(0, len(words)), random.choice(["--", "-", "--=", "-x", "", "\udce9"]))
    return {"words": words}


def check(what: What) -> str:
    shutil.copytree(_ground(), ".", dirs_exist_ok=True)
    words = what["words"]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in (0, 1, 2):
        raise Wrong(f"exit code: {result.exit_code} of {words}")
    if result.exit_code:
        if not result.output.strip():
            raise Wrong(f"no message: exit code {result.exit_code} of {words}")
        return "refused"
    _check_answer(words, result.stdout)
    return "done"


def _check_answer(words: list[str], out: str) -> None:
    if "--help" in words or "--version" in words or not words:
        return
    facts = None
    if "--json" in words:
        try:
            facts = json.loads(out)
        except ValueError:
            raise Wrong(f"wrong answer: no JSON from {words}: {out[:200]}") from None
    if words[0] == "run" and "--trials" in words and isinstance(facts, dict):
        asked = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--trials"][-1]
        if str(facts["total"]) != asked:
            raise Wrong(f"wrong answer: {facts['total']} trials from {words}")


@cache
def _ground() -> Path:
    """A folder with the files and some studies, made once."""
    ground = Path(mkdtemp(prefix="fuzz-ground-"))
    for name, code in FILES.items():
        (ground / name).write_bytes(dedent(code).encode("utf-8", "surrogatepass"))
    (ground / "empty").mkdir()
    runner = CliRunner()
    for file, name in (("tuned.py", "done"), ("fails.py", "failed"), ("tuned.py", "damaged")):
        runner.invoke(app, ["run", str(ground / file), "--name", name, "--dir", str(ground / ".penstock")])
    log = ground / ".penstock" / "damaged" / "log.jsonl"
    log.write_bytes(log.read_bytes().replace(b"reported", b"\xff\xfe", 1))
    return ground


LINES = Kind("lines", make, check)
