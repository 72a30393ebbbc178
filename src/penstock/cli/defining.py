"""Whether a Python file has a `study`, found in its source: a file that has none is not run to find out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import StudyError


def check_defines_study(file: Path) -> None:
    """Refuse a file that can have no `study` once it is imported, such as a script that looks at results."""
    try:
        source = file.read_bytes()
        names = set(_bound(ast.parse(source).body))
    except (OSError, SyntaxError, ValueError):
        return  # the import says what is wrong
    if not {"study", "*"} & names:
        raise StudyError(
            f"Expected {file} to define a `study`, as the study was begun by that file, and it has no `study`: it is "
            "not run. Go on with `penstock run FILE --name NAME`, where FILE is the file of the study."
        )


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """The names that the statements of a module bind, in its branches and loops as well; "*" for a star import.

    >>> sorted(_bound(ast.parse("import os\\nif os: study, x = make()").body))
    ['os', 'study', 'x']
    """
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.If) and _is_main(node.test):
            yield from _bound(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((one.asname or one.name).split(".")[0] for one in node.names)
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.stmt):
                yield from _bound([part])
            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                yield from _bound(part.body)
            else:
                yield from (
                    name.id for name in ast.walk(part) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                )


def _is_main(test: ast.expr) -> bool:
    """Whether a branch is taken only when Python runs the file: an import does not see what it binds."""
    names = {name.id for name in ast.walk(test) if isinstance(name, ast.Name)}
    return isinstance(test, ast.Compare) and names == {"__name__"}
