"""What a quantized layer held before an adapter was merged into it, to be put back in place of a difference.

The record is a dict of tensors and plain values on the layer of peft that merges: no parameter and no buffer, so no
state dict has it, and no class of ours, so that a pickle of a merged model can be read without us. It holds one
packed copy of the weight, on the CPU. Beside it stands a digest of the contents that the merge left behind. If the
base has others by then, because someone loaded or wrote to it, what was kept is no answer to an unmerge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..four_bit import four_bit_state
from ..int8 import int8_plain, int8_scales
from ..process import live_objects
from ..weights import in_place

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

_KEPT = "_patches_before_merge"
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_ROW, _SLAB = 1 << 14, 16
"""How many words are summed to one, and how many such rows at once: what a processor keeps near it."""


def packed(layer: Any, names: list[str]) -> dict[str, Any] | None:
    """The quantized base of ``layer`` as it is, if the adapters ``names`` are the first to be merged into it."""
    from bitsandbytes.nn import Int8Params

    if not names:
        return None
    base = layer.get_base_layer()
    unless_never_quantized(base)
    _refuse_sharded(base)
    if isinstance(getattr(base, "weight", None), Int8Params) and hasattr(base, "state"):
        int8_plain.agree(base)
    if layer.merged:
        if not _is_what_was_merged(layer, base):
            vars(layer).pop(_KEPT, None)
        return None
    return _record(base)


def unless_never_quantized(base: Any) -> None:
    """Raise if ``base`` is a quantized layer by its class alone: what merges into it would look for scales, or untie it."""
    if in_place.was_never_quantized(base) and not _trains_floats_of_its_own(base):
        raise ValueError(
            f"{type(base).__name__} {int8_scales.name_of(base)!r} has a weight that is not quantized ({base.weight.dtype}, "
            "tied to an embedding or left out of the quantization), so nothing was merged into it. Name the layer in "
            "llm_int8_skip_modules, load the model and the adapter again, then merge; or keep the adapter unmerged"
        )


def _trains_floats_of_its_own(base: Any) -> bool:
    """Whether ``base`` keeps its weight in floating point, and no other module has it: peft merges as into ``nn.Linear``."""
    if not getattr(vars(base).get("state"), "has_fp16_weights", False):
        return False
    found = live_objects.holders(base.weight, depth=1)  # none after gc.freeze()
    return bool(found) and all(holder is base for holder in found)


def _refuse_sharded(base: Any) -> None:
    """Raise if FSDP2 holds the weight of the quantized layer ``base``: this rank has a part of it."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    if isinstance(base, (Linear4bit, Linear8bitLt)) and hasattr(base.weight, "_local_tensor"):
        raise RuntimeError(
            f"{type(base).__name__} {int8_scales.name_of(base)!r} is sharded by FSDP2 (fully_shard), and a merge needs the "
            "whole packed weight, so nothing was merged into it. Save the adapter with get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)) and save_pretrained(folder, state_dict=...), load the base "
            "model and the adapter in one process, and merge there"
        )


def note(layer: Any, before: dict[str, Any] | None) -> None:
    """An adapter was merged into the base of ``layer``, which had been ``before`` if this was the first one."""
    if before is not None:
        vars(layer)[_KEPT] = before
    kept = vars(layer).get(_KEPT)
    if kept is None:
        return
    base = layer.get_base_layer()
    kept["bias changed"] = kept["bias"] is not None and digest(kept["bias"]) != digest(base.bias)
    kept["merged"] = _contents(base, kept["bias changed"])


def put_back(layer: Any) -> bool:
    """Take all adapters out of the base of ``layer`` by what it was before; False if that is not known."""
    kept = vars(layer).get(_KEPT)
    if kept is None:
        return False
    base = layer.get_base_layer()
    if not _is_what_was_merged(layer, base) or not set(layer.merged_adapters) <= layer._get_available_adapters():
        del vars(layer)[_KEPT]  # peft takes out what it can; a merged adapter that was deleted stays in
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
    kept = {name for name in vars(weight) if not name.startswith("_")} - {"data", *int8_scales.PLACES}
    own = {name: value for name, value in vars(weight).items() if name in kept}
    return {
        "scales": tensors[1]
        .reshape(-1)
        .to("cpu", torch.float32)  # as a merge leaves them: kernels of 0.46 take no other
        if int8_scales.is_int8(weight) and int8_scales.has_scales(weight)
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
        int8_scales.put(weight, weight.data, kept["scales"].to(device))
    else:
        weight.module = base if kept["knows module"] else None
    base.weight = weight
    if int8:
        base.state.reset_grads()
    elif kept["knows module"]:
        four_bit_state.give(four_bit_state.of(weight), base)
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
    """The codes and all statistics of the weight of ``base``; None if it is not quantized, or they are not there."""
    import torch
    from bitsandbytes.nn import Int8Params, Params4bit

    weight = getattr(base, "weight", None)
    if isinstance(weight, Params4bit):
        state = four_bit_state.of(weight)
        found = None if state is None else list(_statistics(state))
    elif isinstance(weight, Int8Params) and weight.dtype == torch.int8:
        read = int8_scales.current(weight, base.state)  # by the merge
        scale = int8_scales.find_scale(base) if int8_scales.is_lost(read) else read
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
    state = four_bit_state.of(base.weight)
    blocks = [] if state is None else [state.blocksize]
    return [*blocks, *(digest(t) for t in (*tensors, *([base.bias] if with_bias else ())))]


def digest(tensor: Tensor) -> int:
    """A number that other bits, or the same at other places, do not have but by chance; the same on every device."""
    import torch

    bits = _plain(tensor).contiguous().reshape(-1).view(torch.uint8)
    whole = bits.numel() // 4 * 4
    words, rest = bits[:whole].clone() if bits.storage_offset() % 4 else bits[:whole], bits[whole:].to(torch.int32)
    words = torch.cat([words.view(torch.int32), rest]) if rest.numel() else words.view(torch.int32)
    count = words.numel()
    factors = _factors(tensor.device)
    while words.numel() > 2:
        sums = [_weighted(slab, factors) for slab in words.split(_SLAB * _ROW)]
        words = torch.cat(sums).view(torch.int32)
    return hash((count, *words.tolist()))


def _weighted(words: Tensor, factors: Tensor) -> Tensor:
    """The sum of each row of ``words``, each of which counts by its place; the last row may be short."""
    import torch

    whole = words.numel() // _ROW * _ROW
    rows, rest = words[:whole].view(-1, _ROW).to(torch.int64), words[whole:].to(torch.int64)
    sums = rows.mul_(factors).sum(1) if whole else rest[:0]
    return torch.cat([sums, (rest * factors[: rest.numel()]).sum(0, keepdim=True)]) if rest.numel() else sums


_known: dict[torch.device, Tensor] = {}
"""What :func:`_factors` made, 128 KiB for each device."""


def _factors(device: torch.device) -> Tensor:
    """An odd number for each place in a row: without a pattern, and always the same."""
    import torch

    if device in _known:
        return _known[device]
    mixed = torch.arange(1, _ROW + 1, device=device) * _ODD
    for shift in (30, 27, 31):
        mixed = (mixed ^ (mixed >> shift)) * _ODD
    mixed = mixed | 1
    if type(mixed) is torch.Tensor and not mixed.is_inference():  # not what a mode made, a fake tensor among them
        _known[device] = mixed
    return mixed
