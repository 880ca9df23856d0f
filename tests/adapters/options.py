"""The options: every field of every configuration class of the installed peft, at values other than its default."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import peft
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

IN, OUT = 64, 128
NAME = "l"
"""The layer that gets the adapter."""
STRUCTURE = {
    *(field.name for field in dataclasses.fields(peft.PeftConfig)),
    *(
        "target_modules",
        "exclude_modules",
        "modules_to_save",
        "layers_to_transform",
        "layers_pattern",
        "target_parameters",
    ),
    *(
        "fan_in_fan_out",
        "megatron_config",
        "megatron_core",
        "trainable_token_indices",
        "layer_replication",
        "feedforward_modules",
    ),
    *("total_step", "progressbar"),
}
"""Fields that choose layers, or describe the model, and change nothing about a layer."""
NEEDED: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"total_step": 100, "init_r": 8, "target_r": 4},
    "C3AConfig": {"block_size": 32, "init_weights": "gaussian"},
    "IA3Config": {"feedforward_modules": []},
    "OFTConfig": {"r": 0, "oft_block_size": 16},
    "BOFTConfig": {"boft_block_size": 16},
    "FrodConfig": {"progressbar": False},
    "FourierFTConfig": {"n_frequency": 64},
    "WaveFTConfig": {"n_frequency": 64},
    "VBLoRAConfig": {"vector_length": 32, "num_vectors": 16, "topk": 2},
    "GraloraConfig": {"r": 8},
}
"""What a configuration class needs for a layer of this size."""
WITH: dict[tuple[str, Any], dict[str, Any]] = {
    ("init_lora_weights", "loftq"): {"loftq_config": {"loftq_bits": 4, "loftq_iter": 1}},
    ("init_lora_weights", "lora_ga"): {"lora_ga_config": {}},
}
"""What goes with a value, which means nothing alone."""


class Option(NamedTuple):
    """One field of one configuration class at one value; no field: the class with its defaults."""

    config: str
    field: str
    value: Any

    def __str__(self) -> str:
        shown = f"{type(self.value).__name__}(...)" if dataclasses.is_dataclass(self.value) else repr(self.value)
        return f"{self.config}({self.field}={shown})" if self.field else f"{self.config}()"

    def make(self) -> Any:
        """The configuration, for the layer ``NAME``."""
        cls = getattr(peft, self.config)
        known = {field.name for field in dataclasses.fields(cls)}
        arguments: dict[str, Any] = {"target_modules": [NAME]}
        if "r" in known:
            arguments["r"] = 4
        arguments |= NEEDED.get(self.config, {})
        arguments |= {k: _sub(cls, k, v) for k, v in WITH.get((self.field, _key(self.value)), {}).items()}
        if self.field:
            arguments[self.field] = self.value
        return cls(**arguments)


def _key(value: Any) -> Any:
    return value if isinstance(value, str) else None


def _sub(cls: type, field: str, value: Any) -> Any:
    kinds = [kind for kind in _alternatives(_hints(cls)[field]) if dataclasses.is_dataclass(kind)]
    return kinds[0](**value) if kinds and not any(kind is dict for kind in _alternatives(_hints(cls)[field])) else value


def configurations() -> list[type]:
    """The configuration classes of adapters that are put at layers, by name."""
    classes = set(PEFT_TYPE_TO_CONFIG_MAPPING.values())
    found = [cls for cls in classes if "target_modules" in {field.name for field in dataclasses.fields(cls)}]
    return sorted(found, key=lambda cls: cls.__name__)


def options() -> Iterator[Option]:
    """All of them, in one order."""
    for cls in configurations():
        yield Option(cls.__name__, "", None)
        for field in dataclasses.fields(cls):
            if field.init and field.name not in STRUCTURE:
                for value in _values(_hints(cls).get(field.name, Any), _default(field), field.name):
                    yield Option(cls.__name__, field.name, value)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _hints(cls: type) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        module = sys.modules[base.__module__]
        for name, hint in vars(base).get("__annotations__", {}).items():
            if isinstance(hint, str):
                try:
                    hint = eval(hint, {**vars(typing), **vars(module)})  # noqa: S307 - peft's own annotations
                except Exception:
                    hint = Any
            hints[name] = hint
    return hints


def _alternatives(hint: Any) -> list[Any]:
    """The types and literal values that ``hint`` allows."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [each for part in typing.get_args(hint) for each in _alternatives(part)]
    return [hint]


def _values(hint: Any, default: Any, field: str) -> list[Any]:
    """Values of the types that ``hint`` allows, without the default."""
    found: list[Any] = []
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is typing.Literal:
            found += [value for value in typing.get_args(kind) if "[" not in str(value)]
        elif kind is bool:
            found += [True, False]
        elif kind is int:
            found += [8] if default in (None, 0) else [default * 2, max(default // 2, 1)]
        elif kind is float:
            found += [0.5] if default in (None, 0, 0.0) else [default / 2]
        elif dataclasses.is_dataclass(kind):
            found.append(_instance(kind))
        elif kind is dict or typing.get_origin(kind) is dict:
            found.append({NAME: 8} if "pattern" in field else {})
        elif kind is list or typing.get_origin(kind) is list:
            found.append([1, 2])
    if "pissa" in found:  # values of the same field that its type does not list
        found += ["pissa_niter_4", "lora_ga"]
    unique: list[Any] = []
    for value in found:
        if not any(_equal(value, other) for other in (*unique, default, {})):
            unique.append(value)
    return unique


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _instance(cls: Any) -> Any:
    """A configuration inside of another, that fits the layer."""
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    fitting = {"target_modules_bd_a": [NAME], "nblocks": 2, "num_groups": 4}
    return cls(**{name: value for name, value in fitting.items() if name in names})
