"""What modules of the user's hold that may differ from trial to trial: numbers, and the config as a whole."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.training.comparing import compared
from penstock.training.fused.numbers import Plain
from penstock.training.reads import ReadConfig
from penstock.trial import Config


def attributes_of(model: nn.Module, *, whole: bool = True) -> dict[str, Plain]:
    """The numbers among the attributes of modules that are not torch's own, by path and name; ``whole``: integers too.

    An integer is often a shape, or what a branch looks at: how it is used decides whether trials may differ in it.
    """
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
        for name, value in vars(module).items()
        if type(value) is float or (whole and type(value) is int)
    }


def configs_of(model: nn.Module, config: Config) -> list[str]:
    """The attributes of modules that are the trial's whole config, as ``self.config = config`` makes them.

    Lightning's ``hparams`` are one too, where the module was made with the whole config.
    """
    plain = dict.copy(config)  # which notes no read, as the config itself may
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, dict)
        and value
        and dict.keys(value) == plain.keys()
        and _plainly_read(value)
        and compared(dict.copy(value)) == compared(plain)
    ]


def _plainly_read(value: dict[str, Any]) -> bool:
    """Whether it is a dict, or one whose values are attributes too and which is read as a dict besides."""
    kind = type(value)
    if kind is dict:
        return True
    if hasattr(kind, "__missing__") or any(getattr(kind, name) is not getattr(dict, name) for name in _READING):
        return False
    names = [name for name in dict.keys(value) if not hasattr(kind, name)]
    return hasattr(kind, "__getattr__") and all(getattr(value, name, None) is value[name] for name in names)


_READING = ("__getitem__", "__contains__", "__iter__", "get", "keys", "values", "items", "copy", "__or__", "__ror__")


class Held(dict[str, Any]):
    """A config that a module holds in a dict with attributes: whatever is read of it is read of the config."""

    def __init__(self, config: Config) -> None:
        super().__init__({name: dict.__getitem__(config, name) for name in dict.keys(config)})  # which reads nothing
        object.__setattr__(self, "_config", config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in dict.keys(self):
            raise AttributeError(name)
        return self[name]


def _delegated(name: str) -> None:
    setattr(Held, name, lambda self, *args: getattr(self._config, name)(*args))


for _name in _READING:
    _delegated(_name)


def attribute(model: nn.Module, label: str) -> Any:
    """What a module holds under the path and name that ``attributes_of`` and ``configs_of`` give."""
    path, _, name = label.rpartition(".")
    return vars(model.get_submodule(path))[name]


def hold(model: nn.Module, label: str, config: Config) -> None:
    """Let a module read the config where it holds one of its own."""
    before = attribute(model, label)
    set_attribute(model, label, config if type(before) is dict or isinstance(before, ReadConfig) else Held(config))


def set_attribute(model: nn.Module, label: str, value: Any) -> None:
    """Let a module have another value under the path and name that ``attributes_of`` and ``configs_of`` give."""
    path, _, name = label.rpartition(".")
    vars(model.get_submodule(path))[name] = value
