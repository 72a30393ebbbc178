"""Every example does what its docstring says, by the command in it; most with fewer trials."""

import ast
import json
from pathlib import Path

import pytest

from tests.programs import run

EXAMPLES = Path(__file__).parents[1] / "examples"
FEWER = {
    "cluster": "--trials 9",
    "digits": "--trials 6",
    "function": "--trials 4",
    "samplers": "--trials 12",
    "surrogates": "--trials 8",
    "workers": "--trials 6",
}


@pytest.fixture(autouse=True)
def _examples_are_here(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""


def works(name: str) -> str:
    """What an example's command shows, which has ended well."""
    (command,) = [line.strip() for line in docstring(name).splitlines() if line.startswith("    ")]
    assert f"examples/{name}.py" in command
    shown = run(f"{command} {FEWER.get(name, '')}").stdout
    studies = json.loads(run("penstock list --json").stdout)
    assert len(studies) == {"fused": 2, "plans": 2, "simulated": 2}.get(name, 1)
    assert all(study["ended"] == "done" and study["best"] is not None for study in studies)
    pages = [Path(line.removeprefix("wrote ")) for line in shown.splitlines() if line.startswith("wrote ")]
    assert len(pages) == (4 if name == "plots" else 0)
    assert all("plotly" in page.read_text() for page in pages)
    return shown


OWN = {"fused", "recurring", "resume"}  # they have tests of their own, below


@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - OWN))
def test_the_command_in_its_docstring_works(name: str) -> None:
    works(name)


@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - {"recurring"}))
def test_the_command_line_finds_its_study(name: str) -> None:
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    assert any(isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "study" for n in tree.body)
    assert ast.unparse(tree.body[-1]).startswith("if __name__ == '__main__':")


def test_a_recurring_job_needs_less_for_the_same_accuracy() -> None:
    shown = works("recurring")
    first, last = (float(line.split()[-2]) for line in shown.splitlines() if line.startswith(("day 0 ", "day 9 ")))
    assert last < first


def test_a_study_that_was_stopped_ends_as_one_that_was_not() -> None:
    works("resume")
    Path(".penstock").rename("whole")
    shown = run("python examples/resume.py").stdout
    assert "Stopped, target" in shown
    assert "Went on, done" in shown
    assert _curves(".penstock") == _curves("whole")
    assert "Went on, done" in run("python examples/resume.py").stdout


def test_a_study_finds_the_same_fused_as_solo() -> None:
    solo, fused, agree = works("fused").splitlines()
    assert solo.startswith("Solo: ")
    assert fused.startswith("Fused: ")
    assert solo.partition("Best: ")[2] == fused.partition("Best: ")[2] != ""
    assert float(agree.split()[-1].rstrip(".")) < 1e-9  # invariant 2, in float64
    modes = {name: json.loads(run(f"penstock show waves-{name} --json").stdout)["modes"] for name in (1, 2)}
    assert modes == {1: {"solo": 64}, 2: {"fused": 64}}


def _curves(dir: str) -> list[tuple[int, object, object]]:
    top = json.loads(run(f"penstock show resume --dir {dir} --json --curves --top 99").stdout)["top"]
    return [(trial["number"], trial["config"], trial["curve"]) for trial in top]
