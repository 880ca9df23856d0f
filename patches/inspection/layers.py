"""Read the layers of a model: each on its own first, then as lines of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..experts.experts_in_model import holds_row_concatenated_experts
from ..offload.forward_uses import bytes_per_use, count_forward_uses
from .records import Asked, Layers, Place
from .tensors import (
    Modules,
    dtype_name,
    execution_device,
    imported_attribute,
    is_instance_of,
    offload_hooks,
    offload_place,
    own_parameters,
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
    """Empty if it is offloaded."""
    offload_place: str
    """"cpu" or "disk"; empty if it is not offloaded."""
    runs_on: str
    """The device to which it is onloaded."""
    offloaded_bytes: int
    """Bytes of its own that are offloaded."""
    bytes_per_forward: int
    """Bytes that a forward copies to the device, weights shared with another layer included."""
    lost: bool
    """It is on meta, and no hook onloads its weights."""
    tied: bool

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @property
    def offloaded(self) -> str:
        """As in ``Layers.offloaded``; empty if it is not offloaded."""
        return f"{self.offload_place}, runs on {self.runs_on}" if self.runs_on else ""


def find_layers(modules: Modules, not_these: set[int]) -> list[Layer]:
    """Return all layers but adapters, which have only the parameters ``not_these`` (by id)."""
    seen: set[int] = set()
    owners = Counter(id(p) for _, module in modules for p in own_parameters(module))
    found = [_layer(name, module, hook, owners, seen) for name, module, hook in _with_hooks(modules, not_these)]
    if not any(layer.bytes_per_forward for layer in found):
        return found
    used = count_forward_uses(modules[0][1])
    return [replace(each, bytes_per_forward=used[id(each.module)] * each.bytes_per_forward) for each in found]


def _with_hooks(modules: Modules, not_these: set[int]) -> Iterator[tuple[str, Any, tuple[Any, str] | None]]:
    """Yield each layer with the hook that offloads its weights, and the prefix of their names there."""
    above: dict[str, Any] = {}  # hooks that offload all modules below them
    for name, module in modules:
        own = offload_hooks(module)
        above.update((name, hook) for hook in own if getattr(hook, "place_submodules", False))
        if all(id(p) in not_these for p in own_parameters(module)) and "qweight" not in module._buffers:
            continue
        over = next((top for top in above if not top or f"{name}.".startswith(f"{top}.")), None)
        if own:
            yield name, module, (own[0], "")
        elif over is not None:
            yield name, module, (above[over], f"{name[len(over) :].lstrip('.')}.")
        else:
            yield name, module, None


def _layer(name: str, module: Any, hook: tuple[Any, str] | None, owners: Counter[int], seen: set[int]) -> Layer:
    parameters = own_parameters(module)
    weight = read_weight(module, hook[0] if hook else None)
    if parameters and all(id(p) in seen for p in parameters):  # counted with the module that it shares them with
        weight = replace(weight, parameters=0)
    offloaded_bytes = total_bytes((p for p in parameters if p.is_meta), set(seen))
    buffers = [b for b in module._buffers.values() if b is not None]
    devices = {str(t.device) for t in parameters or buffers}
    device, place, runs_on, lost = " and ".join(sorted(devices)), "", "", False
    if "meta" in devices:
        meta = [key for key, p in module._parameters.items() if p is not None and p.is_meta]
        places = {offload_place(hook[0], f"{hook[1]}{key}") if hook else "" for key in meta}
        lost = "" in places or hook is None
        if hook is not None and not lost:
            device, place, runs_on = "", " and ".join(sorted(places)), execution_device(hook[0])
    return Layer(
        name=name,
        module=module,
        weight=weight,
        bytes=total_bytes((*parameters, *buffers, *weight.extra), seen),
        device=device,
        offload_place=place,
        runs_on=runs_on,
        offloaded_bytes=offloaded_bytes,
        bytes_per_forward=bytes_per_use(module),
        lost=lost,
        tied=any(owners[id(p)] > 1 for p in parameters),
    )


def layer_lines(layers: Iterable[Layer], naming: Naming) -> tuple[Layers, ...]:
    """Group layers that are alike, in the order in which the model has the first of each."""
    groups: dict[tuple[str, ...], list[Layer]] = {}
    for layer in layers:
        weight = layer.weight
        reason = "" if weight.quantized else reason_not_quantized(layer, naming)
        parameter = _main_parameter(layer)
        compute = weight.compute or dtype_name(parameter)
        key = (layer.kind, weight.quantized, reason, stored_dtype(parameter), compute, weight.statistics)
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


def _main_parameter(layer: Layer) -> Any:
    """Return the weight of the layer, or its largest parameter."""
    module, own = layer.module, own_parameters(layer.module)
    weight = module._parameters.get("weight")
    if weight is None and own:
        weight = max(own, key=lambda p: int(p.numel()))
    return module._buffers["qweight"] if weight is None else weight


def reason_not_quantized(layer: Layer, naming: Naming) -> str:
    """Say why a layer is not quantized."""
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
    if holds_row_concatenated_experts(module):
        return "2-D parameters of all experts: nothing quantizes these"
    if max(p.dim() for p in own_parameters(module)) < 2:
        return "one-dimensional, as in norms"
    if type(module) is not imported_attribute("torch.nn", "Linear") and not is_instance_of(
        module, "transformers.pytorch_utils", "Conv1D"
    ):
        return "not an nn.Linear"
    return naming.skipped(layer.name)


def holds_experts(layer: Layer) -> bool:
    """Tell whether a parameter holds many experts: three dimensions, and no convolution or position."""
    if layer.weight.quantized or is_instance_of(layer.module, "torch.nn.modules.conv", "_ConvNd"):
        return False
    return any(p.dim() >= 3 and p.shape[0] > 1 for p in own_parameters(layer.module))


# -- of all layers together ------------------------------------------------------------------------


def place_lines(layers: Sequence[Layer]) -> tuple[Place, ...]:
    """Return the places where weights lie between uses, those where layers run first; none if nothing is offloaded."""
    counts: Counter[str] = Counter()
    quantized: Counter[str] = Counter()
    held: Counter[str] = Counter()
    copied: dict[str, Counter[str]] = {}
    for layer in layers:
        place = layer.offload_place or layer.device
        counts[place] += 1
        quantized[place] += bool(layer.weight.quantized)
        if layer.offload_place:
            held[place] += layer.offloaded_bytes
            held[layer.runs_on] += layer.bytes - layer.offloaded_bytes  # statistics and buffers
            copied.setdefault(place, Counter())[layer.runs_on] += layer.bytes_per_forward
        else:
            held[place] += layer.bytes
    if not copied:
        return ()
    names = sorted(held, key=lambda place: place in copied)
    return tuple(Place(n, counts[n], quantized[n], held[n], dict(copied.get(n, {}))) for n in names)


def requested_config(layers: Sequence[Layer], naming: Naming) -> Asked | None:
    """Compare what was requested when the model was quantized with the model; None if bitsandbytes did not quantize it."""
    precision = next((bits for bits in ("4bit", "8bit") if naming.setting(f"load_in_{bits}")), "")
    if not precision:
        return None
    skip = naming.setting("llm_int8_skip_modules")
    linear = [layer for layer in layers if _is_linear(layer)]
    floating = [p for layer in layers for p in own_parameters(layer.module) if p.is_floating_point()]
    compute = str(naming.setting("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
    return Asked(
        precision=precision,
        default_list=skip is None,
        skip=tuple(skip or ()),
        skipped=sum(not layer.weight.quantized for layer in linear),
        of=len(linear),
        dtypes=dict(Counter(dtype_name(p) for p in floating if type(p).__name__ not in ("Params4bit", "Int8Params"))),
        compute=compute if precision == "4bit" else "",
        threshold=naming.setting("llm_int8_threshold") if precision == "8bit" else None,
    )


def _is_linear(layer: Layer) -> bool:
    names = ("Linear", "Linear4bit", "Linear8bitLt", "Conv1D")
    return layer.kind in names or is_instance_of(layer.module, "torch.nn", "Linear")
