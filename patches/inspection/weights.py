"""Read how one layer is quantized, and whether it has the statistics that it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..quantized.four_bit import quant_states
from ..quantized.int8 import row_scales
from ..quantized.quantized_experts import is_quantized_experts
from .tensors import count_devices, dtype_name, is_instance_of, offload_place, own_parameters

BNB = "bitsandbytes.nn.modules"
OF_INPUT = "its input's"


@dataclass(frozen=True)
class Weight:
    """The weight of a layer: its contents and its state."""

    bits: str = ""
    """``"4"`` or ``"8"``, if the class of the layer or of its weight is one of bitsandbytes."""
    quantized: str = ""
    statistics: str = ""
    compute: str = ""
    parameters: int = 0
    extra: tuple[Any, ...] = ()
    """The statistics: tensors beside the parameters and buffers."""
    fault: str = ""
    """An entry of :data:`.problems.FAULTS`; empty if the weight has none."""
    dequantized_dtype: str = ""
    """The dtype of the values that packed 4-bit weights stand for."""


def read_weight(module: Any, hook: Any) -> Weight:
    """Read the weight of a layer. ``hook`` is the one that offloads it, if there is one."""
    weight = module._parameters.get("weight")
    if is_instance_of(module, BNB, "Linear4bit") or is_instance_of(weight, BNB, "Params4bit"):
        return _four_bit(module, weight, hook)
    if is_instance_of(module, BNB, "Linear8bitLt") or is_instance_of(weight, BNB, "Int8Params"):
        return _int8(module, weight, hook)
    if experts := [p for p in own_parameters(module) if is_quantized_experts(p)]:
        return _experts(module, experts)
    if (state := _parametrized(module)) is not None:
        return _from_state(state, module._parameters["original"], "", hook)
    if weight is not None and type(weight).__module__.split(".")[0] == "torchao":
        return Weight("", type(weight).__name__, "present", dtype_name(weight), int(weight.numel()))
    if "qweight" in module._buffers:
        return Weight("", f"{type(module).__module__.split('.')[0]}'s own", "", "", _elements(module))
    return Weight(parameters=_elements(module))


def _experts(module: Any, experts: list[Any]) -> Weight:
    """Read quantized experts, which carry their statistics with them."""
    packed = experts[0].packed
    kind = packed.kind.quant_type
    how = f"{kind} experts, double" if packed.nested_code is not None else f"{kind} experts"
    return Weight("8" if packed.kind.int8 else "4", how, "present", dtype_name(experts[0]), _elements(module))


def _elements(module: Any) -> int:
    return sum(int(p.numel()) for p in own_parameters(module))


def _parametrized(module: Any) -> Any:
    """Return the state of a parameter that ``bitsandbytes.nn.parametrize`` quantized; None if there is none."""
    if "original" not in module._parameters:
        return None
    return next(filter(None, map(quant_states.get_quant_state, module.children())), None)


def _four_bit(module: Any, weight: Any, hook: Any) -> Weight:
    state = quant_states.get_quant_state(weight) or quant_states.get_quant_state(module)
    given = vars(module).get("compute_dtype")
    compute = str(given).removeprefix("torch.") if given is not None else OF_INPUT
    if weight is None:
        return Weight("4", "4-bit", "missing", compute)
    if state is not None and not _is_unpacked(weight, state):
        return _from_state(state, weight, compute, hook)
    kind = str(getattr(weight, "quant_type", "4-bit"))
    if not weight.dtype.is_floating_point or quant_states.is_marked_quantized(weight):
        elements = 2 * int(weight.numel()) * int(weight.element_size())
        return Weight("4", kind, "missing", compute, elements, fault="no state")
    fault = "not quantized yet" if is_instance_of(weight, BNB, "Params4bit") else "plain"
    return Weight("4", "", "", compute, int(weight.numel()), fault=fault)


def _is_unpacked(weight: Any, state: Any) -> bool:
    """Tell whether it has the shape that ``state`` describes: then it is not packed, whatever its class says."""
    return bool(weight.dtype.is_floating_point and tuple(weight.shape) == tuple(state.shape or ()))


def _from_state(state: Any, weight: Any, compute: str, hook: Any) -> Weight:
    double = getattr(state, "state2", None)
    extra = tuple(t for t in (state.absmax, getattr(double, "absmax", None)) if t is not None)
    elements = math.prod(map(int, state.shape or ()))
    how = f"{state.quant_type}, double" if double is not None else str(state.quant_type)
    dtype = dtype_name(state)
    there = set(count_devices(extra))
    if weight.is_meta:
        elsewhere = hook is not None and "meta" in there
    else:
        elsewhere = there != {str(weight.device)}
    statistics, fault = "present", ""
    if not extra:
        statistics, fault = "missing", "no state"
    elif elsewhere:
        statistics, fault = f"on {', '.join(sorted(there))}", "scales elsewhere"
    elif quant_states.is_for_cpu_kernel(state):
        statistics, fault = "present, packed for AVX512", "packed"
    return Weight("4", how, statistics, compute or dtype, elements, extra, fault, dtype)


def _int8(module: Any, weight: Any, hook: Any) -> Weight:
    if weight is None:
        return Weight("8", "int8", "missing", OF_INPUT)
    state = vars(module).get("state")  # the first forward moves what the weight holds there
    held = row_scales.held_tensors(weight, state)
    own_scales, _, state_scales, state_packed = held
    scales = own_scales if own_scales is not None else state_scales
    elements, extra = int(weight.numel()), _beside(weight, held)
    if str(weight.dtype) != "torch.int8":
        if not is_instance_of(weight, BNB, "Int8Params"):
            return Weight("8", "", "", dtype_name(weight), elements, fault="plain")
        if getattr(weight, "has_fp16_weights", False):
            return Weight("8", "int8 in each call", "", OF_INPUT, elements, extra)
        return Weight("8", "", "", OF_INPUT, elements, extra, fault="not quantized yet")
    statistics, fault = "present", ""
    if hook is not None and weight.is_meta and offload_place(hook, "SCB"):
        statistics = "present, offloaded"
        fault = "resident" if state_packed is not None and not state_packed.is_meta else ""
    elif scales is None:
        statistics, fault = "missing", "no scales"
    elif not weight.is_meta and scales.device != weight.device:
        statistics, fault = f"on {scales.device}", "scales elsewhere"
    return Weight("8", "int8", statistics, OF_INPUT, elements, extra, fault)


def _beside(weight: Any, held: list[Any]) -> tuple[Any, ...]:
    """Return the tensors outside of the memory of ``weight``, each once."""
    found = {id(t): t for t in held if t is not None and t is not weight}
    return tuple(t for t in found.values() if t.dtype != weight.dtype or t.data_ptr() != weight.data_ptr())
