"""The layers of a model: each on its own first, then as lines of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..experts.experts_in_model import holds_two_dimensional_experts
from ..offload.forward_uses import bytes_per_use, count_forward_uses
from .module_walk import Modules
from .records import Layers
from .tensors import (
    dtype_name,
    execution_device,
    imported_attribute,
    is_instance_of,
    offload_hooks,
    offload_place,
    stored_dtype,
    total_bytes,
)
from .transformers_names import Naming
from .weights import Weight, read_weight

EXAMPLES = 3


@dataclass(frozen=True)
class Layer:
    """One module that has parameters of its own."""

    name: str
    module: Any
    weight: Weight
    bytes: int
    device: str
    """Where it rests; empty if it is offloaded."""
    offloaded: str
    """Where it is kept, and where it runs."""
    waits: int
    """Bytes of its own that are kept there."""
    brings: int
    """Bytes that each use brings, weights shared with another layer included."""
    lost: bool
    """It is on meta and nothing brings its weights."""
    tied: bool

    @property
    def kind(self) -> str:
        return type(self.module).__name__


def find_layers(modules: Modules, not_these: set[int]) -> list[Layer]:
    """All layers, but what consists of the parameters ``not_these`` alone (by id): adapters."""
    seen: set[int] = set()
    owners = Counter(id(p) for _, module in modules for p in module._parameters.values() if p is not None)
    found = [_layer(name, module, hook, owners, seen) for name, module, hook in _with_hooks(modules, not_these)]
    if not any(layer.brings for layer in found):
        return found
    used = count_forward_uses(modules[0][1])
    return [replace(layer, brings=used[id(layer.module)] * layer.brings) for layer in found]


def _with_hooks(modules: Modules, not_these: set[int]) -> Iterator[tuple[str, Any, tuple[Any, str] | None]]:
    """Each layer with the hook that takes its weights away, and its name there."""
    above: dict[str, Any] = {}  # hooks that take away what lies below them
    for name, module in modules:
        own = offload_hooks(module)
        above.update((name, hook) for hook in own if getattr(hook, "place_submodules", False))
        parameters = [p for p in module._parameters.values() if p is not None]
        if all(id(p) in not_these for p in parameters) and "qweight" not in module._buffers:
            continue
        over = next((top for top in above if not top or f"{name}.".startswith(f"{top}.")), None)
        if own:
            yield name, module, (own[0], "")
        elif over is not None:
            yield name, module, (above[over], f"{name[len(over) :].lstrip('.')}.")
        else:
            yield name, module, None


def _layer(name: str, module: Any, hook: tuple[Any, str] | None, owners: Counter[int], seen: set[int]) -> Layer:
    parameters = {key: p for key, p in module._parameters.items() if p is not None}
    weight = read_weight(module, hook[0] if hook else None)
    buffers = [b for b in module._buffers.values() if b is not None]
    meta = [p for p in parameters.values() if p.is_meta]
    waits = total_bytes(meta, set(seen))
    counted = bool(parameters) and all(id(p) in seen for p in parameters.values())
    number = total_bytes((*parameters.values(), *buffers, *weight.extra), seen)
    where = sorted({str(t.device) for t in (parameters or module._buffers).values() if t is not None})
    offloaded, lost = "", False
    if "meta" in where:
        homes = (
            {offload_place(hook[0], f"{hook[1]}{key}") for key, p in parameters.items() if p.is_meta} if hook else {""}
        )
        lost = "" in homes
        if hook is not None and not lost:
            offloaded = f"{' and '.join(sorted(homes))}, runs on {execution_device(hook[0])}"
    device = "" if offloaded else " and ".join(where)
    tied = any(owners[id(p)] > 1 for p in parameters.values())
    if counted:  # with the module that it shares them with
        weight = replace(weight, parameters=0)
    return Layer(name, module, weight, number, device, offloaded, waits, bytes_per_use(module), lost, tied)


def layer_lines(layers: Iterable[Layer], naming: Naming) -> tuple[Layers, ...]:
    """Group layers that are alike, in the order in which the model has the first of each."""
    groups: dict[tuple[str, ...], list[Layer]] = {}
    for layer in layers:
        weight = layer.weight
        reason = "" if weight.how else reason_not_quantized(layer, naming)
        key = (layer.kind, weight.how, reason, _storage(layer), _compute(layer), weight.statistics)
        groups.setdefault(key, []).append(layer)
    return tuple(_line(key, group) for key, group in groups.items())


def _line(key: tuple[str, ...], group: list[Layer]) -> Layers:
    kind, how, reason, storage, compute, statistics = key
    return Layers(
        kind=kind,
        count=len(group),
        bytes=sum(layer.bytes for layer in group),
        parameters=sum(layer.weight.parameters for layer in group),
        quantized=how,
        reason=reason,
        storage=storage,
        compute=compute,
        statistics=statistics,
        devices=dict(Counter(layer.device for layer in group if layer.device)),
        offloaded=dict(Counter(layer.offloaded for layer in group if layer.offloaded)),
        tied=sum(layer.tied for layer in group),
        names=tuple(layer.name for layer in group[:EXAMPLES]),
    )


def _main(layer: Layer) -> Any:
    """The parameter that the layer is about: its weight, or the largest."""
    own = [p for p in layer.module._parameters.values() if p is not None]
    weight = layer.module._parameters.get("weight")
    if weight is None and own:
        weight = max(own, key=lambda p: int(p.numel()))
    return layer.module._buffers["qweight"] if weight is None else weight


def _storage(layer: Layer) -> str:
    return stored_dtype(_main(layer))


def _compute(layer: Layer) -> str:
    return layer.weight.compute or dtype_name(_main(layer))


def reason_not_quantized(layer: Layer, naming: Naming) -> str:
    """Why a layer is not quantized."""
    module = layer.module
    if layer.weight.fault == "plain":
        return f"a plain weight in a {layer.kind}"
    if layer.weight.fault == "not quantized yet":
        return "not yet: it is quantized when it moves to a device"
    if not naming.quantized:
        return "no layer of this model is quantized"
    if is_instance_of(module, "torch.nn.modules.sparse", "Embedding", "EmbeddingBag"):
        return "an embedding"
    if naming.is_head(module):
        return "the output head"
    if holds_experts(layer):
        return "3-D expert parameters: only nn.Linear layers are quantized"
    if holds_two_dimensional_experts(module):
        return "2-D parameters of all experts: nothing quantizes these"
    if max(p.dim() for p in module._parameters.values() if p is not None) < 2:
        return "one-dimensional, as in norms"
    if type(module) is not imported_attribute("torch.nn", "Linear") and not is_instance_of(
        module, "transformers.pytorch_utils", "Conv1D"
    ):
        return "not an nn.Linear"
    return naming.skipped(layer.name)


def holds_experts(layer: Layer) -> bool:
    """Whether each of its parameters holds many experts: three dimensions, and no convolution or position."""
    if layer.weight.how or is_instance_of(layer.module, "torch.nn.modules.conv", "_ConvNd"):
        return False
    return any(p.dim() >= 3 and p.shape[0] > 1 for p in layer.module._parameters.values() if p is not None)
