"""Studies on a disk that is full, read-only, slow, has written zeros, or goes away.

Every study must end in one message, or go on, and after the disk is mended it must go on to equal curves. ``disk.c`` is
compiled and loaded before libc; this program starts itself again with it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from bench.killing import Case, differences, left_over, prepare, start, undisturbed
from penstock.errors import PenstockError

KINDS = {1: "full", 2: "read-only", 3: "slow", 4: "zeros", 5: "gone"}
COUNTS = 6  # a disk that only counts the bytes
POINTS = (0.0, 0.05, 0.3, 0.6, 0.9)  # parts of the bytes that an undisturbed study writes
CASES = [("ASHA", "function"), ("PBT", "solo"), ("ASHA", "fused"), ("SuccessiveHalving", "solo, 2 workers")]
LOADED = "PENSTOCK_DISK"
SECONDS = 120  # a study that takes longer hangs


def main() -> int:
    if LOADED not in os.environ:
        return _again()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    prepare()
    folder, wrong = Path(tempfile.mkdtemp(prefix="penstock-disk-")), list[str]()
    print(f"{'disk':10} {'study':34} {'bytes':>8}  {'said':60}")
    for algorithm, mode in CASES:
        case = Case(algorithm, mode, 0, 0)
        whole = folder / f"{algorithm} {mode}"
        undisturbed(case, whole)
        counted = folder / f"{algorithm} {mode} counted"
        counted.mkdir()
        _run(case, counted, COUNTS, 10**9)
        total = 10**9 - int((counted / "left").read_text())
        for kind, name in KINDS.items():
            for point in POINTS if kind != 3 else POINTS[:1]:
                bytes = round(point * total)
                dir = folder / f"{algorithm} {mode} {name} {point}"
                dir.mkdir()
                said = _fails(case, dir, kind, bytes, whole)
                print(f"{name:10} {case!s:34} {bytes:8}  {said[0][:100]}", flush=True)
                wrong += [f"{name} after {bytes} bytes, {case}: {one}; kept in {dir}" for one in said[1:]]
    print(f"{len(wrong)} wrong")
    for one in wrong:
        print(one)
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def _again() -> int:
    """Run this program with the disk that fails."""
    with tempfile.TemporaryDirectory() as built:
        library = str(Path(built) / "disk.so")
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise SystemExit("Expected a C compiler, which makes the disk that fails: install gcc.")
        source = str(Path(__file__).with_name("disk.c"))
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": library, LOADED: library}
        return subprocess.run([sys.executable, *sys.argv], env=environment).returncode


def _fails(case: Case, dir: Path, kind: int, bytes: int, whole: Path) -> list[str]:
    """Run a study on a disk that fails, and then on one that does not: the message, and all that is wrong."""
    code = _run(case, dir, kind, bytes)
    text = (dir / "said").read_text().strip()
    said = [(text or f"it ended with {code}").splitlines()[-1] if code else "it ends well"]
    if code not in (0, 4):
        said.append(f"it ended with {code}: {text[-300:]}")
    if "Traceback" in text:
        said.append("a traceback")
    (dir / "said").unlink()
    code = _run(case, dir, 0, 0)
    if code != 0:
        return [*said, f"resumed, it ended with {code}: {(dir / 'said').read_text()[-300:]}"]
    return said + differences(case, dir, whole) + left_over()


def _run(case: Case, dir: Path, kind: int, bytes: int) -> int:
    """Run a study in a process of its own; 4 is one message of Penstock's, 3 any other error."""
    library = ctypes.CDLL(os.environ[LOADED])
    study = dir / "s"

    def work() -> None:
        library.set_fault(kind, ctypes.c_long(bytes), f"{study}/".encode())
        try:
            case.run(dir)
        except PenstockError as error:
            os.write(2, f"{error}\n".encode())
            os._exit(4)
        (dir / "left").write_text(str(library.bytes_left()))

    def limited() -> None:
        signal.alarm(SECONDS)
        work()

    pid = start(limited, dir / "said")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left_over()
    return code
