"""The trace needs names that torch does not promise: they are in one place, and a torch without them is refused."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

import penstock.surrogate
from penstock.errors import TaskError

PRIVATE = ("torch._", "torch.fx.experimental", "torch.utils._")
INTERNALS = "penstock.surrogate.internals"


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PRIVATE):
            yield node.module


def test_one_module_alone_imports_what_torch_does_not_promise():
    files = Path(penstock.surrogate.__file__).parent.glob("*.py")
    found = {file.stem: set(imported(file)) for file in files}
    assert found.pop("internals") == {
        "torch._C",
        "torch._dispatch.python",
        "torch._dynamo.source",
        "torch._subclasses.fake_tensor",
        "torch.fx.experimental.symbolic_shapes",
        "torch.utils._python_dispatch",
        "torch.utils._pytree",
    }
    assert not any(found.values())


@pytest.mark.parametrize("missing", ["torch._dispatch.python", "torch.fx.experimental.symbolic_shapes"])
def test_a_torch_without_these_names_is_refused_in_one_message(missing, monkeypatch):
    monkeypatch.delitem(sys.modules, INTERNALS, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(TaskError, match=rf"Surrogates need what torch .* does not have \(.*{missing}.*2.11 to 2.13"):
        importlib.import_module(INTERNALS)
