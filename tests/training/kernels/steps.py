"""A program: the kernels that a step needs, and those that Triton would look up, on a machine without a device.

Triton is told of a device of capability 90, and nothing is launched there. Run as ``python steps.py FILE``, the program
writes a JSON object into FILE.
"""

import hashlib
import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from penstock.training.kernels import (
    all_layers,
    attention,
    convolution,
    depthwise,
    moments,
    needed,
    normalization,
    patches,
    tuning,
    weighing,
)
from penstock.training.kernels.at_once import AtOnce, join
from penstock.training.kernels.geometry import Geometry

MODULES = (all_layers, attention, convolution, depthwise, moments, normalization, patches, weighing)
WHERE = Geometry.of((4, 4), (3, 3), (2, 2), (1, 1), (1, 1))


class Device:
    """A device that nothing can be launched on."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@triton.jit
def _other(x):
    pass


def step(trials=2, examples=2):
    """Every kernel, forward and backward; those of all layers once a step is over."""
    x = torch.ones(trials, examples, 4, 4, 4, requires_grad=True)
    w = torch.ones(trials, 4, 4, 3, 3, requires_grad=True)
    ones = torch.ones(trials, 4, requires_grad=True)

    def convolve():
        made = weighing.convolution(x, w, WHERE)[0]
        join(torch.autograd.grad(made.sum(), [x, w]))

    AtOnce().run(convolve, [w])
    depthwise.depthwise(x, w[:, 0].flatten(2).mT, WHERE).sum().backward()
    normalization.batch_norm(x, ones, ones, torch.ones(trials), None, 1)[0].sum().backward()
    attention.attention(*[x.flatten(0, 1)] * 3).sum().backward()


def looked_up(of=step):
    """The names under which Triton looks for the kernels of a step in its cache, one for each."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    names = []

    def compile(source, target, options):
        backend = make_backend(target)
        env = get_cache_invalidating_env_vars()
        key = get_cache_key(source, backend, backend.parse_options(dict(options)), env_vars=env)
        names.append(hashlib.sha256(key.encode()).hexdigest())
        return mock.MagicMock()

    with ExitStack() as stack:
        for module in MODULES:
            for value in vars(module).values():
                if isinstance(value, triton.JITFunction) and hasattr(value, "compile"):  # it was launched
                    stack.enter_context(mock.patch.object(value, "compile", compile))
        with tuning.untimed():
            of()
    return names


def lying(name):
    """Those missing of a step's kernels, and how many are loaded, where the kernels of one name lie in the cache."""

    def of():
        with mock.patch.object(needed, "lies_there", lambda job: job.name == name), needed.needed(load=True) as jobs:
            step()
        missing.extend(job.name for job in jobs)

    missing = []
    loaded = looked_up(of)
    return missing, len(loaded)


def collecting():
    """Gradients that are added up from so many parts that every number of entries at a time comes up."""
    by = patches.cut(WHERE, 4, 4, 1, 1, torch.device("cpu"))
    for parts in (1, 4, 16, 64, 256):
        patches.collect(torch.ones(1, parts, by.constants["K"], by.columns), by, torch.ones(1, 4, 4, 9))


def additions(job):
    """How the threads of a device share each sum of a kernel, by its shape: that fixes the order of additions."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    made, target, options = needed.source(job)
    backend, context, stages = make_backend(target), ir.context(), {}
    options = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, made.language)
    functions = backend.get_codegen_implementation(options)
    code, metadata = made.make_ir(target, options, functions, backend.get_module_map(), context), {}
    for stage in ("ttir", "ttgir"):
        code = stages[stage](code, metadata)
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", str(code), re.MULTILINE))
    sums = re.findall(r"\(tensor<(\d+x\d+)xf32, (#\w+)>\) -> tensor", str(code))
    return {shape: layouts[name] for shape, name in sums}


def main():
    driver.set_active(Device())
    asked = []
    other = torch.ones(1)
    with ExitStack() as stack:
        for module in MODULES:
            if hasattr(module, "runs"):
                stack.enter_context(mock.patch.object(module, "runs", return_value=True))
        stack.enter_context(mock.patch.object(tuning, "_here", return_value="a device"))
        stack.enter_context(mock.patch.object(tuning, "_fastest", side_effect=AssertionError("timed")))
        stack.enter_context(mock.patch("torch.cuda.is_current_stream_capturing", return_value=False))
        triton.knobs.runtime.jit_cache_hook = before = lambda fn, **_: asked.append(fn.name) or True
        with needed.needed() as jobs:
            step()
            _other[1,](other)
        with needed.needed() as others:
            step(5, 1024)
        with needed.needed() as sums:
            collecting()
        assert triton.knobs.runtime.jit_cache_hook is before
        triton.knobs.runtime.jit_cache_hook = None
        names = looked_up()
        weighing._weigh.device_caches[0][0].clear()  # it is forgotten here, as in another process
        elsewhere, there = lying("_spread"), lying("_weigh")
    found = {"jobs": jobs, "digests": [needed.digest(job) for job in jobs], "looked_up": names, "asked": asked}
    found |= {"lying": [there, elsewhere], "others": [job.name for job in others if job not in jobs]}
    found["alone"] = {shape: how for job in sums for shape, how in additions(job).items()}
    found["together"] = additions(next(job for job in jobs if job.name == "_collect_all"))
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
