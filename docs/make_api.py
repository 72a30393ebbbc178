"""Writes docs/api.md from the docstrings of the public names.

    make docs

tests/test_docs.py fails while the page differs from what this makes.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import penstock

PAGE = Path(__file__).with_name("api.md")
HEAD = """\
# API

Every public name, with the docstring it has in the code: `make docs` makes this page from them. Import them as
`import penstock as ps`. [The guide](guide.md) says when to use what.
"""
GROUPS: dict[str, tuple[str, ...]] = {
    "Studies": ("Study", "tune", "load"),
    "Tasks": ("Task", "FunctionTrial", "Paused"),
    "Surrogates": ("Surrogate",),
    "Recurring jobs": ("Recurring", "Recurrence"),
    "Results": ("Result", "Trial"),
    "Simulated clusters": ("Simulated", "Curve", "TabulatedTask", "Tabulated"),
    "Spaces": ("uniform", "loguniform", "quniform", "qloguniform", "randint", "choice", "grid"),
    "Algorithms": ("Grid", "Random", "SuccessiveHalving", "Hyperband", "ASHA", "BOHB", "SyncBOHB", "PBT"),
    "Errors": ("PenstockError", "SpaceError", "StudyError", "TaskError", "LogError", "SoloWarning"),
}
WITH_METHODS = {
    "Study",
    "Task",
    "FunctionTrial",
    "Recurring",
    "Recurrence",
    "Result",
    "Trial",
}  # of an algorithm only the engine calls them
GIVEN = {
    "Task",
    "FunctionTrial",
    "Recurrence",
    "Result",
    "Trial",
}  # no arguments to show: subclassed, or made by Penstock
WIDTH = 100


def page() -> str:
    """The whole of docs/api.md."""
    grouped = [name for names in GROUPS.values() for name in names]
    if sorted(grouped) != sorted(penstock.__all__):
        raise SystemExit(f"GROUPS must hold each public name once: {set(grouped) ^ set(penstock.__all__)}")
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts.extend(_entry(name, getattr(penstock, name)) for name in names)
    return "\n".join(parts)


def _entry(name: str, thing: Any) -> str:
    bare = name in GIVEN or (inspect.isclass(thing) and issubclass(thing, BaseException))
    signature = "" if bare else _signature(name, thing) + "\n"
    members = _members(thing) if name in WITH_METHODS else ""
    return f"### `{name}`\n\n{signature}{_markdown(thing)}{members}"


def _members(kind: type) -> str:
    rows = [_attribute(*one) for one in _attributes(kind)]
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            rows.append(f"- `{name}`: {_line(member)}")
        elif inspect.isfunction(member):
            rows.append(_method(name, member))
    return "\nIt has:\n\n" + "\n".join(rows) + "\n"


def _method(name: str, method: Any) -> str:
    first, *rest = _markdown(method).split("\n\n")
    body = "".join("\n\n" + "\n".join(f"  {line}".rstrip() for line in part.splitlines()) for part in rest)
    return f"- `{name}{_arguments(method)}`: {first.strip()}{body.rstrip()}"


def _attribute(name: str, annotation: str, value: str, text: str) -> str:
    return f"- `{name}: {annotation} = {value}`: {text}"


def _attributes(kind: type) -> list[tuple[str, str, str, str]]:
    """Class attributes with a docstring below them: Python keeps those in the source alone."""
    (body,) = ast.parse(dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = []
    for one, below in zip(body.body, body.body[1:], strict=False):
        documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(one, ast.AnnAssign) and one.value is not None and documented:
            text = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
            found.append((ast.unparse(one.target), ast.unparse(one.annotation), ast.unparse(one.value), text))
    return found


class _Bare(str):
    """An annotation that is shown as it is written, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _arguments(thing: Any) -> str:
    signature = inspect.signature(thing)
    parameters = [
        p if p.annotation is p.empty else p.replace(annotation=_Bare(p.annotation))
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    back = signature.return_annotation
    shown = back is not signature.empty and back != "None" and not inspect.isclass(thing)
    return str(signature.replace(parameters=parameters, return_annotation=_Bare(back) if shown else signature.empty))


def _signature(name: str, thing: Any) -> str:
    text = f"{name}{_arguments(thing)}"
    if len(text) > WIDTH:
        inside, _, back = text[len(name) + 1 :].rpartition(")")
        text = f"{name}(\n    {_split(inside)},\n){back}"
    return f"```python\n{text}\n```\n"


def _split(arguments: str) -> str:
    """One argument a line; a comma inside brackets separates none."""
    depth, text = 0, ""
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        text += ",\n   " if character == "," and not depth else character
    return text


def _line(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _markdown(thing: Any) -> str:
    """A docstring as Markdown: examples become code, arguments a list."""
    parts = []
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        if paragraph.startswith(">>>"):
            parts.append(f"```python\n{paragraph}\n```")
        elif paragraph.startswith("Args:"):
            lines = re.sub(r"\n {8,}", " ", paragraph.removeprefix("Args:")).splitlines()
            items = (line.strip().partition(": ") for line in lines if line.strip())
            parts.append("Arguments:\n\n" + "\n".join(f"- `{name}`: {text}" for name, _, text in items))
        else:
            parts.append(paragraph)
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"Wrote {PAGE}")
