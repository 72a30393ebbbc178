"""A training step as a graph of operators, and the graph as text, which another process can read and compile.

The trace computes nothing: its tensors are fake. What the graph reads besides the step's inputs, such as the places of
dropout's draws, becomes an input too, so that the text has no tensor in it. Equal texts are equal steps, on any data.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import fx

from penstock.training.fused.stacked import Unfusable

Text = Any  # of JSON: a value as it is, or a list whose first says what it stands for
_PLAIN = (bool, int, float, str, type(None))
_NAMED = (torch.dtype, torch.layout, torch.memory_format)  # written as ``torch.float32``


@dataclass(frozen=True)
class Traced:
    """A step that was traced: its text, and the tensors that it reads besides its inputs."""

    text: str
    kept: tuple[torch.Tensor, ...]
    device: torch.device

    @cached_property
    def key(self) -> str:
        """A name for everything that is in the text."""
        return sha256(self.text.encode()).hexdigest()


def traced(run: Callable[..., torch.Tensor], given: Sequence[torch.Tensor]) -> Traced:
    """Trace a function of tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    kept: list[torch.Tensor] = []
    nodes = [_written(node, graph, kept) for node in graph.graph.nodes]
    tensors = [_kind(tensor) for tensor in (*given, *kept)]
    text = json.dumps({"settings": _settings(given[0].device), "tensors": tensors, "nodes": nodes})
    return Traced(text, tuple(kept), given[0].device)


def read(text: str) -> tuple[fx.GraphModule, list[dict[str, Any]]]:
    """The graph in a text, and its inputs, each as arguments of ``torch.empty_strided``.

    Settings that a compiler looks at are brought to what they were where the step was traced.
    """
    said = json.loads(text)
    for name, value in said["settings"].items():
        _SETTINGS[name][2](value)
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    inputs = [graph.placeholder(f"kept_{i}") for i, kind in enumerate(said["nodes"]) if kind[0] == "get_attr"]
    found = iter(inputs)
    first: fx.Node | None = inputs[0] if inputs else None
    for kind, name, target, args, kwargs in said["nodes"]:
        if kind == "get_attr":
            nodes[name] = next(found)
            continue
        if kind == "placeholder" and first is not None:
            with graph.inserting_before(first):  # the step's own inputs come first
                nodes[name] = graph.placeholder(name)
            continue
        values = tuple(_read(arg, nodes) for arg in args), {at: _read(arg, nodes) for at, arg in kwargs.items()}
        nodes[name] = graph.create_node(kind, _operator(target) if kind == "call_function" else target, *values, name)
    kinds = [
        {"size": size, "stride": stride, "dtype": _value(dtype), "device": torch.device(device)}
        for size, stride, dtype, device in said["tensors"]
    ]
    return fx.GraphModule(torch.nn.Module(), graph), kinds


def operators(graph: fx.GraphModule) -> set[Any]:
    """The operators that a graph calls."""
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


def _kind(tensor: torch.Tensor) -> Text:
    return list(tensor.shape), list(tensor.stride()), str(tensor.dtype), str(tensor.device)


def _written(node: fx.Node, graph: fx.GraphModule, kept: list[torch.Tensor]) -> Text:
    target: Any = node.target
    if node.op == "get_attr":
        held = operator.attrgetter(target)(graph)
        if not isinstance(held, torch.Tensor):
            raise Unfusable(f"its graph has a {type(held).__name__}, which no other process can compile")
        kept.append(held)
    elif node.op == "call_function":
        if not isinstance(target, torch._ops.OpOverload) and target is not operator.getitem:
            raise Unfusable(f"its graph calls {target}, which is no operator of torch's")
        target = "getitem" if target is operator.getitem else str(target)
    args: list[Any] = [_text(arg) for arg in node.args]
    return node.op, node.name, target, args, {name: _text(arg) for name, arg in node.kwargs.items()}


def _text(value: Any) -> Text:
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if isinstance(value, list | tuple):
        return ["list", *map(_text, value)]
    if type(value) in _PLAIN:
        return value
    if isinstance(value, _NAMED):
        return ["torch", str(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    raise Unfusable(f"its graph has a {type(value).__name__}, which no other process can read")


def _read(text: Text, nodes: dict[str, fx.Node]) -> Any:
    if not isinstance(text, list):
        return text
    what, *rest = text
    if what == "node":
        return nodes[rest[0]]
    if what == "list":
        return [_read(one, nodes) for one in rest]
    return torch.device(rest[0]) if what == "device" else _value(rest[0])


def _value(name: str) -> Any:
    """``torch.float32`` of its name."""
    return getattr(torch, name.removeprefix("torch."))


def _operator(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


# What a compiler looks at besides the graph, by type of device: how it is read here, and set there.
_SETTINGS: dict[str, tuple[str, Callable[[], Any], Callable[[Any], object]]] = {
    "threads": ("cpu", torch.get_num_threads, torch.set_num_threads),
    "matmul tf32": (
        "cuda",
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_tf32", value),
    ),
    "cudnn tf32": (
        "cuda",
        lambda: torch.backends.cudnn.allow_tf32,
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
    ),
}


def _settings(device: torch.device) -> dict[str, Any]:
    return {name: here() for name, (of, here, _) in _SETTINGS.items() if of == device.type}
