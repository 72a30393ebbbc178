"""Commands in forked processes end as they do in new ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SHARING
from tests.programs import PYTHON, run

SCRIPT = """
import sys
from beside import NAME
print(__name__, NAME, sys.argv, "unended", end="")
print("error", file=sys.stderr)
if "raise" in sys.argv:
    raise ValueError("told")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("argument", "code"), [("0", 0), ("3", 3), ("raise", 1)])
def test_a_script_shows_and_ends_with_the_same(argument, code):
    Path("folder").mkdir()
    Path("folder/script.py").write_text(SCRIPT)
    Path("folder/beside.py").write_text("NAME = 'beside'")
    forked = run(f"python folder/script.py {argument} 'a b'", code)
    new = subprocess.run([PYTHON, "folder/script.py", argument, "a b"], capture_output=True, text=True)
    assert (forked.stdout, forked.stderr.splitlines()[-1]) == (new.stdout, new.stderr.splitlines()[-1])
    assert new.returncode == code
    assert "beside" not in sys.modules


def test_another_exit_code_is_shown_with_all_that_was_said():
    Path("script.py").write_text("print('shown'); raise ValueError('told')")
    with pytest.raises(AssertionError, match=r"(?s)python script.py.*ended with 1.*shown.*ValueError: told"):
        run("python script.py")
    assert "Commands" in run("penstock --help").stdout


def test_files_that_run_programs_are_tested_in_one_process():
    tests = Path(__file__).parent
    running = [path for path in sorted(tests.rglob("test_*.py")) if "\nfrom tests.programs import" in path.read_text()]
    assert [str(path.relative_to(tests.parent)) for path in running] == sorted(SHARING["programs"])
