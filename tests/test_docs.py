"""The pages say what is so: links lead somewhere, names exist, code runs, and the API page is up to date."""

import ast
import doctest
import importlib.util
import re
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

import penstock
from penstock.cli.app import app
from tests.programs import run

REPO = Path(__file__).parents[1]
SOURCE = REPO / "src" / "penstock"
PAGES = [REPO / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(REPO.glob("docs/*.md"))
ARCHITECTURE = (REPO / "docs" / "architecture.md").read_text()
MODULES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
)


def test_the_api_page_is_what_the_docstrings_make() -> None:
    spec = importlib.util.spec_from_file_location("make_api", REPO / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    assert (REPO / "docs" / "api.md").read_text() == make_api.page(), "out of date: run `make docs`"


@pytest.mark.parametrize("name", MODULES)
def test_lines_in_docstrings_run(name: str) -> None:
    module = import_module(name)
    assert doctest.testmod(module, extraglobs={"penstock": penstock}).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    known = {name: {option for one in command.params for option in one.opts} for name, command in commands.items()}
    text = re.sub(r"`python bench/[^`]+`|mypy --strict", "", page.read_text())
    for code in re.findall(r"`(penstock [^`\n]+)`|^(penstock .+)$", text, re.M):
        name, *rest = "".join(code).split("#")[0].split()[1:]
        assert {word for word in rest if word.startswith("--")} <= known[name], code
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= set().union(*known.values())


def test_the_guide_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "guide.md").read_text(), re.S)
    assert len(blocks) > 5
    (tmp_path / "guide.py").write_text("\n".join(blocks))
    run("python guide.py")


def test_the_architecture_page_has_a_line_for_every_file() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", ARCHITECTURE.partition("## Folders")[2].partition("## Invariants")[0]))
    modules = [
        path for path in SOURCE.rglob("*.py") if len(ast.parse(path.read_text()).body) > 1
    ]  # not only a docstring
    files = {str(path.relative_to(SOURCE)) for path in modules}
    assert named == files


def test_the_architecture_page_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", ARCHITECTURE))
    there = {name for path in REPO.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) > 20
    assert named <= there, named - there


def test_the_architecture_page_names_methods_that_exist() -> None:
    methods: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for kind in ast.walk(ast.parse(path.read_text())):
            if isinstance(kind, ast.ClassDef):
                names = set(re.findall(r"def (\w+)\(|self\.(\w+)", ast.unparse(kind)))
                methods.setdefault(kind.name, set()).update("".join(pair) for pair in names)
    for kind, method in re.findall(r"`([A-Z]\w+)\.(\w+)`", ARCHITECTURE):
        assert method in methods[kind], f"{kind}.{method}"
