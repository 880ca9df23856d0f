"""What can be said of a tensor without touching what it holds, and where accelerate keeps it between calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..offload.onload_bytes import parts, size


def library(module: str, name: str) -> Any:
    """``name`` of ``module``, if that is imported already; nothing is imported for this."""
    return getattr(sys.modules.get(module), name, None)


def of_class(thing: object, module: str, *names: str) -> bool:
    """Whether it is an instance of one of the classes ``names`` that ``module`` defines, imported or not."""
    return any(c.__name__ in names and c.__module__ == module for c in type(thing).__mro__)


def stored(tensor: Any) -> str:
    """The dtype of what is in memory: of a quantized tensor of torchao that of its largest part."""
    inside = parts(tensor)
    return stored(max(inside, key=size)) if inside else dtype(tensor)


def total(tensors: Iterable[Any], seen: set[int]) -> int:
    """The bytes of those that are not ``seen``; they are then."""
    new = {id(tensor): tensor for tensor in tensors if id(tensor) not in seen}
    seen.update(new)
    return sum(map(size, new.values()))


def dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def dtypes(tensors: Iterable[Any]) -> dict[str, int]:
    return dict(Counter(map(stored, tensors)))


def devices(tensors: Iterable[Any]) -> dict[str, int]:
    return dict(Counter(str(tensor.device) for tensor in tensors))


# -- accelerate's hooks --------------------------------------------------------------------------


def offloading(module: Any) -> list[Any]:
    """The hooks on it that take its weights away after each call."""
    hook = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", [hook])  # a SequentialHook holds several
    return [each for each in hooks if getattr(each, "offload", False) is True]


def execution_device(hook: Any) -> str:
    device = getattr(hook, "execution_device", None)
    return f"device {device}" if isinstance(device, int) else str(device)


def home(hook: Any, name: str) -> str:
    """Where ``hook`` keeps the tensor ``name`` of its module between calls; empty if it does not.

    A weight on the disk is found by its name in the index, and not read.
    """
    weights: Any = getattr(hook, "weights_map", None)
    while hasattr(weights, "dataset") and hasattr(weights, "prefix"):
        weights, name = weights.dataset, f"{weights.prefix}{name}"
    if hasattr(weights, "index") and hasattr(weights, "state_dict"):
        if name not in weights.state_dict:
            return "disk" if name in weights.index else ""
        weights = weights.state_dict
    if not isinstance(weights, dict) or name not in weights:
        return ""
    return _device(weights, name)


def _device(weights: Mapping[str, Any], name: str) -> str:
    held = dict.get(weights, name) if isinstance(weights, dict) else weights[name]  # experts on the disk are not read
    return str(getattr(held, "device", "cpu"))
