"""What a bench has measured before, so that a bench that was cut short goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Known:
    """Measurements by name, each a line of JSON in a file as soon as it is made; without a file they are not kept."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._found = path, dict[str, Any]()
        if path is not None and path.exists():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # the last line of a bench that was killed may be torn
            path.write_text(whole, encoding="utf-8")
            self._found.update(map(json.loads, whole.splitlines()))

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """A measurement, made where it is not known."""
        if name not in self._found:
            self._found[name] = measure()
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([name, self._found[name]]) + "\n")
        return self._found[name]
