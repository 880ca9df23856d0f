"""What a quantized layer held before an adapter was merged into it, to be put back in place of a difference.

The record is a dict of tensors and plain values on the layer of peft that merges: no parameter and no buffer, so no
state dict has it, and no class of ours, so that a pickle of a merged model can be read without us. It holds one
packed copy of the weight, on the CPU. Beside it stands a digest of the contents that the merge left behind. If the
base has others by then, because someone loaded or wrote to it, what was kept is no answer to an unmerge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..process import live_objects
from ..process.tensor_bits import fingerprint
from ..quantized.four_bit import quant_states
from ..quantized.int8 import plain_weights, row_scales
from ..quantized.weights import dequantized_in_place

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

_KEPT = "_patches_before_merge"


def snapshot_before_merge(layer: Any, names: list[str]) -> dict[str, Any] | None:
    """The quantized base of ``layer`` as it is, if the adapters ``names`` are the first to be merged into it."""
    from bitsandbytes.nn import Int8Params

    if not names:
        return None
    base = layer.get_base_layer()
    refuse_if_never_quantized(base)
    _refuse_sharded(base)
    if isinstance(getattr(base, "weight", None), Int8Params) and hasattr(base, "state"):
        plain_weights.check_plain_weight(base)
    if layer.merged:
        if not _is_what_was_merged(layer, base):
            vars(layer).pop(_KEPT, None)
        return None
    return _record(base)


def refuse_if_never_quantized(base: Any) -> None:
    """Raise if ``base`` is a quantized layer by its class alone: what merges into it would look for scales, or untie it."""
    if dequantized_in_place.was_never_quantized(base) and not _trains_floats_of_its_own(base):
        raise ValueError(
            f"{type(base).__name__} {row_scales.name_of(base)!r} has a weight that is not quantized ({base.weight.dtype}, "
            "tied to an embedding or left out of the quantization), so nothing was merged into it. Name the layer in "
            "llm_int8_skip_modules, load the model and the adapter again, then merge; or keep the adapter unmerged"
        )


def _trains_floats_of_its_own(base: Any) -> bool:
    """Whether ``base`` keeps its weight in floating point, and no other module has it: peft merges as into ``nn.Linear``."""
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


def record_merge(layer: Any, before: dict[str, Any] | None) -> None:
    """An adapter was merged into the base of ``layer``, which had been ``before`` if this was the first one."""
    if before is not None:
        vars(layer)[_KEPT] = before
    kept = vars(layer).get(_KEPT)
    if kept is None:
        return
    base = layer.get_base_layer()
    kept["bias changed"] = kept["bias"] is not None and fingerprint(kept["bias"]) != fingerprint(base.bias)
    kept["merged"] = _contents(base, kept["bias changed"])


def restore(layer: Any) -> bool:
    """Take all adapters out of the base of ``layer`` by its state before the merge; False if that is not known."""
    kept = vars(layer).get(_KEPT)
    if kept is None:
        return False
    base = layer.get_base_layer()
    if not _is_what_was_merged(layer, base) or not set(layer.merged_adapters) <= layer._get_available_adapters():
        del vars(layer)[_KEPT]  # peft takes out the adapters that it can; a merged adapter that was deleted stays in
        return False
    _restore(base, kept)
    for name in layer.merged_adapters:  # peft's DoRA keeps the norm that it merged with for the unmerge
        getattr(layer, "_caches", {}).pop(f"{name}-weight_norm", None)
    layer.merged_adapters.clear()
    del vars(layer)[_KEPT]
    return True


def _record(base: Any) -> dict[str, Any] | None:
    import torch

    tensors = _quantized(base)
    if tensors is None:
        return None
    weight, bias = base.weight, getattr(base, "bias", None)
    kept = {name for name in vars(weight) if not name.startswith("_")} - {"data", *row_scales.PLACES}
    own = {name: value for name, value in vars(weight).items() if name in kept}
    return {
        "scales": tensors[1]
        .reshape(-1)
        .to("cpu", torch.float32)  # as a merge leaves them: kernels of 0.46 take no other
        if row_scales.is_int8(weight) and row_scales.has_scales(weight)
        else None,
        "class": type(weight),
        "codes": tensors[0].to("cpu"),  # on a CPU no copy: a merge puts another parameter in the place of this one
        "requires_grad": weight.requires_grad,
        "attributes": {name: _moved(value, torch.device("cpu")) for name, value in own.items() if name != "module"},
        "knows module": own.get("module") is not None,
        "bias": None if bias is None else bias.detach().clone().to("cpu"),
    }


def _restore(base: Any, kept: dict[str, Any]) -> None:
    import torch

    device = base.weight.device
    attributes = {name: _moved(value, device) for name, value in kept["attributes"].items()}
    codes = kept["codes"].to(device)
    weight = torch.Tensor._make_subclass(kept["class"], codes, kept["requires_grad"])
    int8 = kept["scales"] is not None
    vars(weight).update(attributes)
    if int8:
        row_scales.set_weight_and_scales(weight, weight.data, kept["scales"].to(device))
    else:
        weight.module = base if kept["knows module"] else None
    base.weight = weight
    if int8:
        base.state.reset_grads()
    elif kept["knows module"]:
        quant_states.set_quant_state(quant_states.get_quant_state(weight), base)
    if kept["bias changed"]:
        base.bias.data = kept["bias"].to(device)


def _moved(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``: a tensor, or a quantization state, of which it is a new one."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if type(value).__name__ != "QuantState":
        return value
    new = object.__new__(type(value))
    vars(new).update((name, _moved(part, device)) for name, part in vars(value).items())
    return new


def _quantized(base: Any) -> list[Tensor] | None:
    """The packed weights and all statistics of the weight of ``base``; None if it is not quantized, or they are not
    there."""
    import torch
    from bitsandbytes.nn import Int8Params, Params4bit

    weight = getattr(base, "weight", None)
    if isinstance(weight, Params4bit):
        state = quant_states.get_quant_state(weight)
        found = None if state is None else list(_statistics(state))
    elif isinstance(weight, Int8Params) and weight.dtype == torch.int8:
        read = row_scales.current_scales(weight, base.state)  # by the merge
        scale = row_scales.find_scales(base) if row_scales.is_lost(read) else read
        found = None if scale is None else [scale]
    else:
        return None
    if found is None or any(t.is_meta for t in (weight, *found)):
        return None
    return [_plain(t) for t in (weight, *found)]


def _plain(tensor: Tensor) -> Tensor:
    """The values of ``tensor``, as a tensor of torch. No view: torch makes none of what was made in inference mode and got other data."""
    import torch

    return tensor.data.as_subclass(torch.Tensor)


def _statistics(state: Any) -> Iterator[Tensor]:
    import torch

    for value in vars(state).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) is type(state):
            yield from _statistics(value)


def _is_what_was_merged(layer: Module, base: Module) -> bool:
    kept = vars(layer).get(_KEPT)
    return kept is not None and kept["merged"] == _contents(base, kept["bias changed"])


def _contents(base: Any, with_bias: bool) -> list[int] | None:
    """A digest of each tensor of ``base`` that a merge changes, and how many values share a scale."""
    tensors = _quantized(base)
    if tensors is None:
        return None
    state = quant_states.get_quant_state(base.weight)
    blocks = [] if state is None else [state.blocksize]
    return [*blocks, *(fingerprint(t) for t in (*tensors, *([base.bias] if with_bias else ())))]
