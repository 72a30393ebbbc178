"""Every kind of case, by name."""

from __future__ import annotations

from tests.fuzzing.cases import Kind
from tests.fuzzing.lines import LINES
from tests.fuzzing.logs import LOGS
from tests.fuzzing.spaces import SPACES
from tests.fuzzing.states import STATES
from tests.fuzzing.tasks import TASKS

KINDS: dict[str, Kind] = {kind.name: kind for kind in (LINES, SPACES, TASKS, LOGS, STATES)}
