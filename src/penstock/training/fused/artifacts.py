"""Compiled steps in files: made by Inductor in one process, and loaded in a fraction of a second in another.

The files lie in the user's cache folder, for later studies too. A file's name has a digest of the step and of all that
it was compiled for, and one of its own content: a file that was damaged, or that is another's, is passed over and
deleted. This module alone knows how torch compiles, saves and loads: of ``torch._inductor`` it needs
``standalone_compile`` and ``CompiledArtifact``, which torch 2.11 to 2.13 have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from penstock import __version__
from penstock.training.fused.traces import operators, read
from penstock.training.kernels.needed import OURS
from penstock.training.kernels.needed import folder as triton_folder
from penstock.training.kernels.side import MODULES
from penstock.training.kernels.tuning import kept_in

MEMORY = 0.1  # the share of a device's memory that compiling may take, to time kernels there
Run = Callable[..., Any]


def folder() -> Path:
    """Where the files of this user lie."""
    return kept_in() / "steps"


def name_of(key: str, device: torch.device) -> str:
    """The first half of a file's name: a digest of the step and of all that compiling depends on."""
    return sha256(f"{key} {_made_for(device)}".encode()).hexdigest()[:32]


@cache
def _made_for(device: torch.device) -> str:
    if device.type == "cuda":
        named = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    else:
        named = torch.backends.cpu.get_cpu_capability()
    return f"{named}, torch {torch.__version__}, python {sys.version_info[:2]}, penstock {__version__}"


def found(name: str) -> Path | None:
    """The file of that name, whole; any other that has its place is deleted."""
    for file in folder().glob(f"{name}.*"):
        with suppress(OSError):
            if file.suffix == f".{sha256(file.read_bytes()).hexdigest()[:32]}":
                return file
        drop(file)
    return None


def drop(file: Path) -> None:
    """Delete a file that is of no use."""
    with suppress(OSError):
        file.unlink()


def loaded(file: Path) -> Run:
    """The compiled step in a file, a function of its tensors."""
    from torch._inductor import config
    from torch._inductor.standalone_compile import CompiledArtifact

    if torch.cuda.is_available():  # or Inductor would move Triton's cache, where Penstock's kernels lie
        os.environ.setdefault("TRITON_CACHE_DIR", triton_folder())
    with config.patch(compile_threads=1):  # or Inductor would start processes of its own, with nothing to compile
        run: Run = CompiledArtifact.load(path=str(file), format="binary")
    return run


def import_inductor() -> None:
    """Import all that a trace and loading need, which takes seconds."""
    for name in ("torch.fx.experimental.proxy_tensor", "torch._inductor.standalone_compile"):
        import_module(name)
    import_module("torch._inductor.compile_fx")


def compile_text(text: str, name: str) -> None:
    """Compile a traced step into its file."""
    if (there := found(name)) is not None:
        try:
            loaded(there)  # which compiles what it needs besides the file, and is not there any more
        except Exception:
            drop(there)
        else:
            return
    if '"penstock.' in text:  # one of Penstock's own operators, which are known once their modules are imported
        for module in MODULES:
            import_module(OURS + module)
    graph, kinds = read(text)
    device = kinds[0]["device"]
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(device)
            torch.cuda.set_per_process_memory_fraction(min(MEMORY, free / whole / 2), device)
        _leave_alone(graph)
        _save(_compiled(graph, kinds), name)


def _compiled(graph: torch.fx.GraphModule, kinds: list[dict[str, Any]]) -> Any:
    from torch._inductor import standalone_compile
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:  # inputs that take no memory
        given: list[Any] = [torch.empty_strided(**kind) for kind in kinds]
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        return standalone_compile(graph, given, dynamic_shapes="from_tracing_context", options={})


def _save(compiled: Any, name: str) -> None:
    """Write a file whole before it has its name."""
    folder().mkdir(parents=True, exist_ok=True)
    part = folder() / f"part {os.getpid()}"
    try:
        compiled.save(path=str(part), format="binary")
        os.replace(part, folder() / f"{name}.{sha256(part.read_bytes()).hexdigest()[:32]}")
    finally:
        drop(part)


def _leave_alone(graph: torch.fx.GraphModule) -> None:
    """Tell Inductor that Penstock's kernels are called as they are.

    Inductor would find that out by itself. But torch 2.11 first writes a text of everything that an argument was
    computed from, even where nobody reads it, and a residual network doubles that text at every block.
    """
    from torch._inductor import lowering

    for op in operators(graph):
        if str(op).startswith("penstock.") and op not in lowering.lowerings:
            lowering.make_fallback(op, layout_constraint=lowering.constrain_to_fx_strides)  # type: ignore[no-untyped-call]
