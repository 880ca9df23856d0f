"""The adapters that peft has put into a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .records import Adapters
from .tensors import Modules, count_devices, count_dtypes, is_instance_of, total_bytes


@dataclass
class Adapter:
    """An adapter of one kind and name, in all layers that have it."""

    tensors: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """The name and the tensor, by the ``id`` of the tensor."""
    layers: int = 0
    active: int = 0
    merged: int = 0


Found = dict[tuple[str, str], Adapter]
"""The adapters by kind and name."""


def find_adapters(modules: Modules) -> Found:
    """Find the adapters that have tensors."""
    found: Found = {}
    for name, module in modules:
        if hasattr(type(module), "adapter_layer_names"):  # BaseTunerLayer, AuxiliaryTrainingWrapper
            _add(found, name, module)
        elif "prompt_encoder" in module._modules and is_instance_of(module, "peft.peft_model", "PeftModel"):
            for adapter, encoder in module.prompt_encoder.items():
                entry = found.setdefault((type(encoder).__name__, adapter), Adapter())
                entry.layers += 1
                entry.active += adapter == module.active_adapter
                _keep(entry, f"{name}.prompt_encoder.{adapter}".lstrip("."), encoder)
    return {key: entry for key, entry in found.items() if entry.tensors}


def tensor_ids(found: Found) -> set[int]:
    """Return the ``id`` of each tensor of the adapters."""
    return {key for entry in found.values() for key in entry.tensors}


def _add(found: Found, path: str, layer: Any) -> None:
    merged = set(getattr(layer, "merged_adapters", ()))
    active = getattr(layer, "_active_adapter", ())
    active = {active} if isinstance(active, str) else set(active)
    off = getattr(layer, "_disable_adapters", False)
    here: dict[str, list[tuple[str, Any]]] = {}
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
        for adapter, held in _held(layer, attribute):
            here.setdefault(adapter, []).append((f"{path}.{attribute}.{adapter}".lstrip("."), held))
    for adapter, parts in here.items():
        entry = found.setdefault((_kind(layer, adapter), adapter), Adapter())
        before = len(entry.tensors)
        for name, held in parts:
            _keep(entry, name, held)
        if len(entry.tensors) > before:
            entry.layers += 1
            entry.active += adapter in active and not off
            entry.merged += adapter in merged


def _held(layer: Any, attribute: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries under ``attribute`` (which may have dots), each with the name of its adapter."""
    holder = layer
    for part in attribute.split("."):
        holder = getattr(holder, part, None)
    if hasattr(holder, "items"):  # a ModuleDict, ParameterDict, BufferDict or dict
        yield from holder.items()


def _keep(entry: Adapter, name: str, held: Any) -> None:
    if hasattr(held, "_parameters"):
        named = [(f"{name}.{key}", p) for key, p in held.named_parameters()]
    else:
        named = [(name, held)] if hasattr(held, "element_size") else []
    entry.tensors.update((id(tensor), (key, tensor)) for key, tensor in named)


def _kind(layer: Any, adapter: str) -> str:
    if is_instance_of(layer, "peft.utils.other", "AuxiliaryTrainingWrapper", "ModulesToSaveWrapper"):
        return "modules_to_save" if hasattr(layer, "modules_to_save") else "trainable_tokens"
    parts = type(layer).__module__.split(".")
    kind = parts[parts.index("tuners") + 1] if "tuners" in parts[:-1] else type(layer).__name__
    uses = getattr(layer, "use_dora", None)
    return "dora" if isinstance(uses, dict) and uses.get(adapter) else kind


def adapter_lines(found: Found) -> tuple[Adapters, ...]:
    seen: set[int] = set()
    return tuple(_line(kind, name, entry, seen) for (kind, name), entry in found.items())


def _line(kind: str, name: str, entry: Adapter, seen: set[int]) -> Adapters:
    tensors = [tensor for _, tensor in entry.tensors.values()]
    return Adapters(
        kind=kind,
        name=name,
        count=entry.layers,
        bytes=total_bytes(tensors, seen),
        dtypes=count_dtypes(tensors),
        devices=count_devices(tensors),
        active=entry.active,
        merged=entry.merged,
        trainable=sum(bool(tensor.requires_grad) for tensor in tensors),
        tensors=len(tensors),
    )
