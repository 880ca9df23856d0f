"""Facts about a tensor that are read without touching its values, and where accelerate keeps it between calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..offload.forward_uses import bytes_of_parameter, parts_of_parameter

Modules = Sequence[tuple[str, Any]]
"""Each module of a model once, with its name, a parent before its children."""


def imported_attribute(module: str, name: str) -> Any:
    """Return ``name`` of ``module``, if that module is imported already; import nothing."""
    return getattr(sys.modules.get(module), name, None)


def is_instance_of(thing: object, module: str, *names: str) -> bool:
    """Tell whether ``thing`` is an instance of one of the classes ``names`` that ``module`` defines; import nothing."""
    return any(c.__name__ in names and c.__module__ == module for c in type(thing).__mro__)


def own_parameters(module: Any) -> list[Any]:
    """Return the parameters of the module itself."""
    return [p for p in module._parameters.values() if p is not None]


def stored_dtype(tensor: Any) -> str:
    """Return the dtype in memory: of a quantized tensor of torchao the dtype of its largest part."""
    inside = parts_of_parameter(tensor)
    return stored_dtype(max(inside, key=bytes_of_parameter)) if inside else dtype_name(tensor)


def total_bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    """Add up the bytes of the tensors that are not ``seen``, and add these to ``seen``."""
    new = {id(tensor): tensor for tensor in tensors if id(tensor) not in seen}
    seen.update(new)
    return sum(map(bytes_of_parameter, new.values()))


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def count_dtypes(tensors: Iterable[Any]) -> dict[str, int]:
    return dict(Counter(map(stored_dtype, tensors)))


def count_devices(tensors: Iterable[Any]) -> dict[str, int]:
    return dict(Counter(str(tensor.device) for tensor in tensors))


# -- accelerate's hooks --------------------------------------------------------------------------


def offload_hooks(module: Any) -> list[Any]:
    """Return the hooks on ``module`` that offload its weights after each call."""
    hook = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", [hook])  # a SequentialHook holds several
    return [each for each in hooks if getattr(each, "offload", False) is True]


def execution_device(hook: Any) -> str:
    device = getattr(hook, "execution_device", None)
    return f"device {device}" if isinstance(device, int) else str(device)


def offload_place(hook: Any, name: str) -> str:
    """Say where ``hook`` keeps the tensor ``name`` of its module between calls; empty if it does not.

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
    return str(getattr(dict.get(weights, name), "device", "cpu"))  # a subclass would read experts from the disk
