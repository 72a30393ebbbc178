"""The kernels that a step would have to compile: noted without compiling, and looked up in Triton's cache on disk.

Triton asks a hook before it compiles. Here the hook notes everything that Triton compiles from, and Triton passes the
launch over. So the results of such a step are worth nothing, but the list of its kernels is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple

from penstock.training.kernels.tuning import untimed

OURS = __package__ + "."
WARP = 32  # threads, on every device of CUDA

_NOTED: ContextVar[dict[Job, None] | None] = ContextVar("noted", default=None)
_LOCK = Lock()  # Triton has one hook in a process


class Job(NamedTuple):
    """A kernel that is to be compiled."""

    module: str
    name: str
    data: str  # JSON: the types of its arguments, its constants and options, as Triton writes them
    capability: int  # of the device: 90 is an H200's


@contextmanager
def needed(load: bool = False) -> Iterator[list[Job]]:
    """Note the kernels of Penstock that are launched and would have to be compiled, and launch none of them.

    The list is complete at the end. Block sizes are not timed. Kernels that this process has loaded run as ever, and so
    do those of other libraries. ``load``: kernels that lie in Triton's cache are loaded, and run too. Where the list is
    not empty, everything that was computed and written meanwhile must be thrown away.
    """
    from triton import knobs

    jobs: list[Job] = []
    noted: dict[Job, None] = {}
    with _LOCK, untimed():
        before, token = knobs.runtime.jit_cache_hook, _NOTED.set(noted)

        def hook(**given: Any) -> Any:
            if (here := _NOTED.get()) is None or not given["fn"].module.startswith(OURS):
                return before(**given) if before is not None else None
            job = _job(**given)
            if load and lies_there(job):
                return None
            here[job] = None
            return True

        knobs.runtime.jit_cache_hook = hook
        try:
            yield jobs
        finally:
            knobs.runtime.jit_cache_hook = before
            _NOTED.reset(token)
            jobs += noted


def _job(*, fn: Any, compile: dict[str, Any], **_: Any) -> Job:
    from triton.runtime import driver

    data = compile["specialization_data"]
    return Job(fn.module, fn.name, data, driver.active.get_current_target().arch)


def source(job: Job) -> tuple[Any, Any, dict[str, Any]]:
    """A kernel's source, target and options, as ``triton.compile`` takes them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    said = {name: _tuples(value) for name, value in json.loads(job.data).items() if name != "attrs_vals"}
    values = json.loads(job.data)["attrs_vals"]  # these are lists of lists
    made = ASTSource(
        getattr(import_module(job.module), job.name),
        dict(said["signature"]),
        dict(zip(said["constant_keys"], said["constant_vals"], strict=True)),
        dict(zip(said["attrs_keys"], values, strict=True)),
    )
    return made, GPUTarget("cuda", job.capability, WARP), dict(said["options"])


def _tuples(value: Any) -> Any:
    """JSON has lists where kernels have tuples, and Triton's keys tell one from the other."""
    if isinstance(value, dict):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list) else value


def name_parts() -> None:
    """Have Triton read the parts of all kernels' names that are files of its own; it keeps what it found."""
    with suppress(ImportError):  # another Triton reads them with the first name
        from triton.runtime.cache import triton_key

        triton_key()


@cache
def digest(job: Job) -> str:
    """The name that a kernel has in Triton's cache. It depends on everything that compiling depends on."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    made, target, options = source(job)
    backend = make_backend(target)
    key = get_cache_key(made, backend, backend.parse_options(options), env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def folder() -> str:
    """Where Triton's cache lies now. Inductor moves the cache when it is first used."""
    from triton import knobs

    return str(knobs.cache.dir)


def lies_there(job: Job) -> bool:
    """Whether a kernel lies in Triton's cache, so that it is loaded in milliseconds."""
    from triton.runtime.cache import get_cache_manager

    return bool(get_cache_manager(digest(job)).get_group(f"{job.name[:150]}.json"))
