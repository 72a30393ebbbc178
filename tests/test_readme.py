"""README's commands and example, run as written, but for fewer units."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.request import urlopen

import pytest

import penstock
from tests.programs import run

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text()
SHELL = [
    line.split("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()
]
EXAMPLE, FROM_OPTUNA, FROM_RAY_TUNE = re.findall(r"```python\n(.*?)```", README, re.S)
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def commands(*kinds: str) -> list[str]:
    return [line for line in SHELL if line.startswith(kinds)]


def typed(command: str, cwd: Path) -> str:
    """What a command shows, typed into a shell."""
    done = subprocess.run(command, shell=True, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_is_run_here() -> None:
    assert sorted(SHELL) == sorted([*commands("make "), *commands("pip "), *commands("penstock ")])
    assert commands("make ") == ["make demo", "make wheel"]


@pytest.mark.parametrize(
    ("target", "recipe"),
    [
        ("demo", ".venv/bin/penstock run examples/digits.py"),
        ("test", ".venv/bin/python -m pytest -n 3"),
        ("wheel", "-m pip wheel --quiet --no-deps --wheel-dir dist ."),
    ],
)
def test_make_has_its_commands(target: str, recipe: str) -> None:
    assert typed(f"make --no-print-directory -n {target}", REPO).splitlines()[-1].endswith(recipe)


def test_the_demo_installs_only_what_it_needs() -> None:
    """A demo is made in a bare checkout here: ``-B`` takes all targets for missing."""
    wanted = typed("make --no-print-directory -n -B demo", REPO)
    assert "-e . scikit-learn" in wanted
    assert "[dev]" not in wanted
    assert "[dev]" in typed("make --no-print-directory -n -B test", REPO)


@pytest.mark.parametrize("program", [FROM_OPTUNA, FROM_RAY_TUNE], ids=["Optuna", "Ray Tune"])
def test_those_who_come_from_elsewhere_need_few_lines_and_these_run(program: str, tmp_path: Path) -> None:
    lines = [line for line in program.splitlines() if line and not line.startswith("import")]
    assert len(lines) <= 5
    (tmp_path / "coming.py").write_text(program)
    assert "ended: done · 64/64 trials" in run("python coming.py").stderr


def test_what_pip_is_told_is_there() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in commands("pip "):
        wheel = re.escape(f"dist/penstock-{penstock.__version__}-py3-none-any.whl")
        assert re.fullmatch(rf"pip install -c constraints.txt (-e ('\.\[[\w,]+\]'|\.)|{wheel})", line), line
        assert set(re.findall(r"\w+", line.partition("[")[2])) <= extras.keys(), line
    assert sorted(re.findall(r"^\| `(\w+)` \|", README, re.M)) == sorted(extras)
    assert (REPO / "constraints.txt").is_file()


def test_the_example_and_what_to_do_with_it(tmp_path: Path) -> None:
    assert "max_budget=27" in EXAMPLE
    (tmp_path / "tune.py").write_text(EXAMPLE.replace("max_budget=27", "max_budget=3"))
    first, *others, dashboard = commands("penstock ")
    shown = [typed(first, tmp_path), *(run(command).stdout for command in others)]
    assert (tmp_path / ".penstock/digits-1/best.pt").is_file()
    assert "The trained model is in .penstock/digits-1/best.pt" in shown[0]
    assert "penstock show digits-1" in shown[0]
    assert "done" in shown[1]
    assert (tmp_path / ".penstock/digits-1/csv/trials.csv").read_text().count("\n") == 81
    server = subprocess.Popen(
        [*dashboard.split(), "--port", "0"], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        (address,) = re.findall(r"http://\S+(?=,)", server.stdout.readline())
        with urlopen(address) as page:
            assert page.status == 200
        server.send_signal(signal.SIGINT)
        server.communicate()
    finally:
        server.kill()
    assert server.returncode == 0


def test_the_example_is_a_program_too(tmp_path: Path) -> None:
    assert "trials=64" in EXAMPLE
    (tmp_path / "tune.py").write_text(EXAMPLE.replace("trials=64", "trials=4"))
    shown = typed("python tune.py", tmp_path)
    assert "'lr': " in shown
    assert "'accuracy': " in shown
    assert "Linear(in_features=64" in shown


def test_the_example_is_short() -> None:
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 22
