"""LoRA where peft's wrapper of a parameter holds quantized experts: adding, merging, unmerging.

``lora_A`` of experts is (experts * rank, in), expert by expert; ``lora_B`` is (out, rank * experts), the expert fastest.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..process.tensor_bits import fingerprint
from ..quantized.quantized_experts import is_quantized_experts

if TYPE_CHECKING:
    from .adapted_experts import Factors
    from .packed_experts import PackedExperts
    from .tensor import QuantizedExperts

_KEPT = "_patches_before_merge"


def adapts_quantized_experts(layer: Any) -> bool:
    """Tell whether the parameter that ``layer`` adapts is quantized experts."""
    return is_quantized_experts(layer.get_param())


def delta_weight(layer: Any, adapter: str) -> Any:
    """Return the delta weight of ``adapter``: as its LoRA factors for quantized experts, else dense."""
    if not adapts_quantized_experts(layer):
        return layer.get_delta_weight(adapter)
    from . import adapted_rules  # noqa: F401 - the rules for operations on them
    from .adapted_experts import Adapters

    return Adapters([split_factors(layer, adapter)])


def split_factors(layer: Any, adapter: str) -> Factors:
    """Return views of ``lora_A`` and ``lora_B``, as (experts, rows, rank) and (experts, rank, columns) of the parameter."""
    from .adapted_experts import Factors

    experts = layer.num_experts
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    a = a.reshape(experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    made = Factors(b, a, layer.scaling[adapter])
    return (
        made if getattr(layer, "_did_swap_in_out_features", False) else made.swapped()
    )  # peft before 0.19 never swaps them


def merge_adapter(layer: Any, adapter: str, safe: bool) -> bool:
    """Merge ``adapter`` into quantized experts, one expert at a time; return False if they are not quantized."""
    if not adapts_quantized_experts(layer):
        return False
    parameter = layer.get_param()
    _warn()
    new = _requantized(parameter, split_factors(layer, adapter), 1.0, adapter if safe else None)
    if not layer.merged_adapters:
        vars(layer)[_KEPT] = {"before": parameter.detach().to("cpu")}
    elif not _holds_merged(layer, parameter.packed):
        vars(layer).pop(_KEPT, None)
    parameter.data = parameter.like(packed=new)
    if _KEPT in vars(layer):
        vars(layer)[_KEPT]["merged"] = _fingerprints(new)
    layer.merged_adapters.append(adapter)
    return True


def unmerge_adapters(layer: Any) -> bool:
    """Take all merged adapters out of quantized experts; return False if they are not quantized."""
    if not adapts_quantized_experts(layer):
        return False
    parameter = layer.get_param()
    there = [adapter for adapter in layer.merged_adapters if adapter in layer.lora_A]
    if len(there) == len(layer.merged_adapters) and _holds_merged(layer, parameter.packed):
        parameter.data = vars(layer)[_KEPT]["before"].to(parameter.device)
    else:  # the experts were written to since, or a merged adapter was deleted and its part stays
        _warn()
        for adapter in there:
            parameter.data = parameter.like(packed=_requantized(parameter, split_factors(layer, adapter), -1.0))
    vars(layer).pop(_KEPT, None)
    layer.merged_adapters.clear()
    return True


def _holds_merged(layer: Any, packed: PackedExperts) -> bool:
    """Tell whether ``packed`` is as merging left it, and the experts from before were kept."""
    kept = vars(layer).get(_KEPT)
    return kept is not None and kept["merged"] == _fingerprints(packed)


def _fingerprints(packed: PackedExperts) -> list[int]:
    return [fingerprint(tensor) for tensor in packed.tensors().values()]


def _warn() -> None:
    warnings.warn(
        "Merging LoRA into quantized experts rounds the merged weights: outputs may differ from those of the model "
        "with the adapter unmerged.",
        stacklevel=4,
    )


def _requantized(experts: QuantizedExperts, adapter: Factors, sign: float, checked: str | None = None) -> PackedExperts:
    """Add ``adapter`` to experts and quantize them as they were. ``checked``: its name, if the result must be finite."""
    from .quantize import QuantizationConfig, quantize_experts_by_matrix

    adapter = adapter.swapped() if experts.swapped else adapter
    new = quantize_experts_by_matrix(
        _added(experts.packed, adapter, sign, checked), QuantizationConfig.from_packed(experts.packed)
    )
    return replace(new, kind=replace(new.kind, transposed=experts.packed.kind.transposed))


def _added(packed: PackedExperts, adapter: Factors, sign: float, checked: str | None) -> Iterator[Sequence[Any]]:
    """Give the matrices of one expert after the other in floating point, with ``adapter`` added."""
    import torch

    rows = [part.shape[0] for part in packed.parts]
    for number in range(packed.count):
        left, right = adapter.left[number].detach().float(), adapter.right[number].detach().float()
        dense = torch.addmm(packed.dequantize(number).float(), left, right, alpha=sign * adapter.scaling)
        if checked is not None and not dense.isfinite().all():
            raise ValueError(f"NaNs detected in the merged weights. The adapter {checked} seems to be broken")
        yield dense.to(packed.kind.dtype).split(rows)
