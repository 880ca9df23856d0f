"""Saving quantized experts under the names that transformers 4 gave each matrix, in 4 bits and INT8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import gpt_oss_layout
from .experts_in_model import makes_parameter, matrices_per_expert_of, weight_converters
from .packed_experts import PackedExperts
from .tensor import QuantizedExperts

State = dict[str, Any]
_TABLES = ("quant_map", "nested_quant_map")  # shared by all experts in memory; each matrix in a file needs its own copy


def without_ties(remove: Callable[[State, Any], State], state: State, model: Any) -> State:
    """Call ``remove_tied_weights_from_state_dict`` without the quantized experts: it compares addresses, and they have none."""
    experts, rest = _split(state)
    removed = remove(rest, model)
    return {**removed, **experts} if experts else removed


def revert_conversion(revert: Callable[[Any, State], State], model: Any, state: State) -> State:
    """Call ``revert_weight_conversion``, and save quantized experts as packed weights and statistics, matrix by matrix."""
    experts, rest = _split(state)
    found = revert(model, rest)
    for name, value in experts.items():
        for weight, (expert, part) in checkpoint_names(revert, model, name, value).items():
            found.update(_entries(value.packed, expert, part, weight))
    return found


def _split(state: State) -> tuple[State, State]:
    """Return the quantized experts of ``state``, and the rest, which is ``state`` itself if there are none."""
    experts = {name: value for name, value in state.items() if isinstance(value, QuantizedExperts)}
    return experts, {name: value for name, value in state.items() if name not in experts} if experts else state


def _entries(packed: PackedExperts, expert: int, part: int, weight: str) -> State:
    """Return one matrix as ``Linear4bit`` or ``Linear8bitLt`` is saved."""
    if packed.kind.int8:
        here, layer = packed.parts[part], weight.removesuffix("weight")
        scales = {f"{layer}SCB": here.absmax[expert], f"{layer}weight_format": torch.tensor(0, dtype=torch.uint8)}
        return {weight: here.codes[expert], **scales}
    matrix, quantization = list(packed.matrices(expert))[part]
    statistics = quantization.as_dict(packed=True).items()
    own = {f"{weight}.{key}": tensor.clone() if key in _TABLES else tensor for key, tensor in statistics}
    return {weight: matrix, **own}


def checkpoint_names(
    revert: Callable[[Any, State], State], model: Any, name: str, experts: QuantizedExperts
) -> dict[str, tuple[int, int]]:
    """Return the name of each matrix in a checkpoint, with the number of its expert and of its part.

    To find the names, transformers converts a parameter whose values are these numbers.
    """
    count, parts = experts.packed.count, experts.packed.parts
    if experts.swapped:  # read from linear layers, and saved as such
        return {f"{gpt_oss_layout.matrix_name(name)}.{expert}.weight": (expert, 0) for expert in range(count)}
    if any(makes_parameter(each, name) and not matrices_per_expert_of(each) for each in weight_converters(model)):
        # The converter does not just stack whole matrices, so the names of its checkpoint cannot be used.
        return {f"{name}.{expert}.weight": (expert, 0) for expert in range(count)}
    rows = torch.cat([torch.full((part.shape[0],), i) for i, part in enumerate(parts)])
    traced = torch.arange(count)[:, None] * len(parts) + rows
    traced = traced[:, :, None].repeat(1, 1, 2)  # up to 5.17 a single column is squeezed
    apart = revert(model, {name: traced})
    found = {}
    for key, value in apart.items():
        numbers = value.unique().tolist() if value.dim() == 2 and key.endswith(".weight") else []
        if len(numbers) == 1 and value.shape[0] == parts[numbers[0] % len(parts)].shape[0]:
            found[key] = divmod(int(numbers[0]), len(parts))
    if len(found) == count * len(parts) == len(set(found.values())):
        return found
    if len(parts) > 1 or len(apart) != 1:
        raise NotImplementedError(
            f"{name}: quantized experts are saved one by one, and transformers has no names for the single experts of "
            "this model. Call model.dequantize() before saving"
        )
    (whole,) = apart
    return {f"{whole}.{expert}.weight": (expert, 0) for expert in range(count)}
