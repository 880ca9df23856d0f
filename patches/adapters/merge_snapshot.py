"""Unmerge adapters from a quantized layer exactly: put back the packed weight from before the merge.

peft merges by quantizing the sum of weight and adapter, and unmerges by quantizing the difference. Both round. With the edits
of :func:`make_merge_edits` a layer of peft keeps a :class:`Snapshot` of its base layer while adapters are merged into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypedDict

from ..engine import Rewrite
from ..process import live_objects
from ..process.tensor_bits import fingerprint
from ..quantized.four_bit import quant_states
from ..quantized.int8 import plain_weights, row_scales
from ..quantized.weights import dequantized_in_place

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IN_BNB = ("Linear8bitLt", "Linear4bit")
# where it is in vars() of a layer of peft: neither a parameter nor a buffer, so in no state dict
_SNAPSHOT = "_patches_merge_snapshot"
# where 1.1 had it, and its keys: in a model that was pickled while an adapter was merged
_SNAPSHOT_OF_1_1 = "_patches_before_merge"
_KEYS_OF_1_1 = {
    "class": "weight_class",
    "codes": "packed_weight",
    "knows module": "weight_had_module",
    "bias changed": "bias_was_merged",
}


class Snapshot(TypedDict):
    """A base layer before the first merge, on the CPU: a plain dict, so that a pickled model can be read without us."""

    weight_class: type
    packed_weight: Tensor
    scales: Tensor | None  # of an INT8 weight that has its row scales; flat, float32
    attributes: dict[str, Any]  # the other attributes of a Params4bit or Int8Params, such as its quantization state
    requires_grad: bool
    weight_had_module: bool  # a Params4bit whose attribute ``module`` was its layer
    bias: Tensor | None
    bias_was_merged: bool
    merged: list[int] | None  # fingerprints of the base layer after the last merge


def make_merge_edits(module: str, *classes: str, when: str = "") -> Iterator[Rewrite]:
    """Yield the edits for the layers ``classes`` of ``peft.tuners.<module>``, which has a copy of the code for each adapter."""
    for name in classes:
        merge, unmerge = (f"peft.tuners.{module}:{name}.{method}" for method in ("merge", "unmerge"))
        yield Rewrite(
            merge,
            find="adapter_names = check_adapters_to_merge(self, adapter_names)",
            replace="""
                adapter_names = check_adapters_to_merge(self, adapter_names)
                _patches_before = _patches_packed(self, adapter_names)
            """,
            names={"_patches_packed": snapshot_before_merge},
            when=when,
        )
        yield Rewrite(
            merge,
            find="self.merged_adapters.append(active_adapter)",
            replace="""
                self.merged_adapters.append(active_adapter)
                _patches_note(self, _patches_before)
            """,
            names={"_patches_note": record_merge},
            when=when,
        )
        yield Rewrite(
            unmerge,
            find="len(self.merged_adapters) > 0",
            replace="len(self.merged_adapters) > 0 and not _patches_put_back(self)",
            names={"_patches_put_back": restore},
            when=when,
        )


def snapshot_before_merge(layer: Any, names: list[str]) -> Snapshot | None:
    """Return a snapshot of the base of ``layer``, if the adapters ``names`` are the first to be merged into it.

    Raises
    ------
    ValueError, RuntimeError
        The base cannot be merged into: its weight is not quantized, or FSDP2 holds a part of it.
    """
    from bitsandbytes.nn import Int8Params

    if not names:
        return None
    base = layer.get_base_layer()
    refuse_if_never_quantized(base)
    _refuse_sharded(base)
    if isinstance(getattr(base, "weight", None), Int8Params) and hasattr(base, "state"):
        plain_weights.check_plain_weight(base)
    if not layer.merged:
        return _take_snapshot(base)
    snapshot = _snapshot_of(layer)
    if snapshot is not None and not _holds_merged(base, snapshot):
        del vars(layer)[_SNAPSHOT]
    return None


def refuse_if_never_quantized(base: Any) -> None:
    """Raise if ``base`` is a quantized layer by its class alone: what merges into it would look for scales, or untie it."""
    if dequantized_in_place.was_never_quantized(base) and not _trains_floats_of_its_own(base):
        raise ValueError(
            f"{type(base).__name__} {row_scales.name_of(base)!r} has a weight that is not quantized ({base.weight.dtype}, "
            "tied to an embedding or left out of the quantization), so nothing was merged into it. Name the layer in "
            "llm_int8_skip_modules, load the model and the adapter again, then merge; or keep the adapter unmerged"
        )


def _trains_floats_of_its_own(base: Any) -> bool:
    """Tell whether ``base`` keeps its weight in floating point, and no other module has it: peft merges as into ``nn.Linear``."""
    if not getattr(vars(base).get("state"), "has_fp16_weights", False):
        return False
    found = live_objects.find_holders(base.weight, depth=1)  # none after gc.freeze()
    return bool(found) and all(holder is base for holder in found)


def _refuse_sharded(base: Any) -> None:
    """Raise if FSDP2 holds the weight of the quantized layer ``base``: this rank has a part of it."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    if isinstance(base, (Linear4bit, Linear8bitLt)) and hasattr(base.weight, "_local_tensor"):
        raise RuntimeError(
            f"{type(base).__name__} {row_scales.name_of(base)!r} is sharded by FSDP2 (fully_shard), and a merge needs the "
            "whole packed weight, so nothing was merged into it. Save the adapter with get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)) and save_pretrained(folder, state_dict=...), load the base "
            "model and the adapter in one process, and merge there"
        )


def record_merge(layer: Any, before: Snapshot | None) -> None:
    """Record that an adapter was merged into the base of ``layer``; ``before`` is the snapshot if it was the first one."""
    if before is not None:
        vars(layer)[_SNAPSHOT] = before
    snapshot = _snapshot_of(layer)
    if snapshot is None:
        return
    base, bias = layer.get_base_layer(), snapshot["bias"]
    snapshot["bias_was_merged"] = bias is not None and fingerprint(bias) != fingerprint(base.bias)
    snapshot["merged"] = _fingerprints(base, snapshot["bias_was_merged"])


def restore(layer: Any) -> bool:
    """Take all adapters out of the base of ``layer`` by its snapshot; return False if there is none that fits.

    There is none that fits if the base was loaded or written to since, or if a merged adapter was deleted, whose part
    stays in the weight. peft then subtracts the adapters that it has.
    """
    snapshot = _snapshot_of(layer)
    if snapshot is None:
        return False
    base = layer.get_base_layer()
    fits = _holds_merged(base, snapshot) and set(layer.merged_adapters) <= layer._get_available_adapters()
    if fits:
        _put_back(base, snapshot)
        for name in layer.merged_adapters:  # peft's DoRA keeps the norm that it merged with for the unmerge
            getattr(layer, "_caches", {}).pop(f"{name}-weight_norm", None)
        layer.merged_adapters.clear()
    del vars(layer)[_SNAPSHOT]
    return fits


def _snapshot_of(layer: Any) -> Snapshot | None:
    """Return the snapshot of the base of ``layer``; None if there is none."""
    attributes = vars(layer)
    if (old := attributes.pop(_SNAPSHOT_OF_1_1, None)) is not None:
        attributes[_SNAPSHOT] = {_KEYS_OF_1_1.get(key, key): value for key, value in old.items()}
    snapshot: Snapshot | None = attributes.get(_SNAPSHOT)
    return snapshot


def _take_snapshot(base: Any) -> Snapshot | None:
    """Return the state of ``base``; None if its weight is not quantized, or is on meta."""
    import torch

    tensors = _packed_weight_and_statistics(base)
    if tensors is None:
        return None
    weight, bias, scales = base.weight, getattr(base, "bias", None), None
    if row_scales.is_int8(weight) and row_scales.has_scales(weight):
        # as a merge leaves them: kernels of bitsandbytes 0.46 take no other
        scales = tensors[1].reshape(-1).to("cpu", torch.float32)
    cpu, others = torch.device("cpu"), {"data", "module", *row_scales.PLACES}
    own = {name: value for name, value in vars(weight).items() if not name.startswith("_") and name not in others}
    return {
        "weight_class": type(weight),
        "packed_weight": tensors[0].to(cpu),  # on a CPU no copy: a merge gives the layer another parameter
        "scales": scales,
        "attributes": {name: _moved(value, cpu) for name, value in own.items()},
        "requires_grad": weight.requires_grad,
        "weight_had_module": vars(weight).get("module") is not None,
        "bias": None if bias is None else bias.detach().clone().to(cpu),
        "bias_was_merged": False,
        "merged": None,
    }


def _put_back(base: Any, snapshot: Snapshot) -> None:
    """Give ``base`` the weight of ``snapshot`` on its device, and its bias if that was merged into."""
    import torch

    device = base.weight.device
    attributes = {name: _moved(value, device) for name, value in snapshot["attributes"].items()}
    packed = snapshot["packed_weight"].to(device)
    weight: Any = torch.Tensor._make_subclass(snapshot["weight_class"], packed, snapshot["requires_grad"])
    vars(weight).update(attributes)
    if snapshot["scales"] is not None:
        row_scales.set_weight_and_scales(weight, weight.data, snapshot["scales"].to(device))
        base.weight = weight
        base.state.reset_grads()
    else:
        weight.module = base if snapshot["weight_had_module"] else None
        base.weight = weight
        if snapshot["weight_had_module"]:
            quant_states.set_quant_state(quant_states.get_quant_state(weight), base)
    if (bias := snapshot["bias"]) is not None and snapshot["bias_was_merged"]:
        base.bias.data = bias.to(device)


def _moved(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``: a tensor, or a new quantization state in place of a QuantState."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if type(value).__name__ != "QuantState":
        return value
    new = object.__new__(type(value))
    vars(new).update((name, _moved(part, device)) for name, part in vars(value).items())
    return new


def _holds_merged(base: Any, snapshot: Snapshot) -> bool:
    """Tell whether ``base`` holds what the last merge left there."""
    return snapshot["merged"] == _fingerprints(base, snapshot["bias_was_merged"])


def _fingerprints(base: Any, with_bias: bool) -> list[int] | None:
    """Return a fingerprint of each tensor of ``base`` that a merge changes, and how many values share a scale."""
    tensors = _packed_weight_and_statistics(base)
    if tensors is None:
        return None
    state = quant_states.get_quant_state(base.weight)
    blocks = [] if state is None else [state.blocksize]
    return [*blocks, *(fingerprint(t) for t in (*tensors, *([base.bias] if with_bias else ())))]


def _packed_weight_and_statistics(base: Any) -> list[Tensor] | None:
    """Return the packed weight of ``base`` and its scales (INT8) or all tensors of its quantization state (4-bit).

    None if it is not quantized, if its scales are not known, or if any of these tensors is on meta.
    """
    import torch
    from bitsandbytes.nn import Int8Params, Params4bit

    weight = getattr(base, "weight", None)
    if isinstance(weight, Params4bit):
        state = quant_states.get_quant_state(weight)
        found = None if state is None else list(_tensors_of(state))
    elif isinstance(weight, Int8Params) and weight.dtype == torch.int8:
        read = row_scales.current_scales(weight, base.state)  # by the merge
        scale = row_scales.find_scales(base) if row_scales.is_lost(read) else read
        found = None if scale is None else [scale]
    else:
        return None
    if found is None or any(t.is_meta for t in (weight, *found)):
        return None
    # `.data`, not a view: torch refuses to make a view of a tensor from inference mode that got other data
    return [t.data.as_subclass(torch.Tensor) for t in (weight, *found)]


def _tensors_of(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of a quantization state and of the state nested in it."""
    import torch

    for value in vars(state).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) is type(state):
            yield from _tensors_of(value)
