"""How one layer is quantized, and whether it has the statistics that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..quantized.four_bit import quant_states
from ..quantized.int8 import row_scales
from ..quantized.quantized_experts import is_quantized_experts
from .tensors import count_devices, dtype_name, is_instance_of, offload_place

BNB = "bitsandbytes.nn.modules"


@dataclass(frozen=True)
class Weight:
    """The weight of a layer: its contents and its state."""

    bits: str = ""
    """``"4"`` or ``"8"``, if the class of the layer or of its weight is one of bitsandbytes."""
    how: str = ""
    """As in ``Layers.quantized``."""
    statistics: str = ""
    compute: str = ""
    parameters: int = 0
    extra: tuple[Any, ...] = ()
    """Tensors beside the parameters and buffers: the statistics."""
    fault: str = ""
    """``"plain"``, ``"not quantized yet"``, ``"no state"``, ``"no scales"``, ``"scales elsewhere"``, ``"resident"`` or
    ``"packed"``: see :data:`.problems.FAULTS`."""
    state: Any = None
    """The quantization state of a 4-bit weight."""


def read_weight(module: Any, hook: Any) -> Weight:
    """``hook``: the one that takes its weights away, if there is one."""
    weight = module._parameters.get("weight")
    if is_instance_of(module, BNB, "Linear4bit") or is_instance_of(weight, BNB, "Params4bit"):
        return _four_bit(module, weight, hook)
    if is_instance_of(module, BNB, "Linear8bitLt") or is_instance_of(weight, BNB, "Int8Params"):
        return _int8(module, weight, hook)
    if experts := [p for p in module._parameters.values() if is_quantized_experts(p)]:
        return _experts(module, experts)
    if (state := _parametrized(module)) is not None:
        return _from_state(state, module._parameters["original"], "", hook)
    if weight is not None and type(weight).__module__.split(".")[0] == "torchao":
        return Weight("", type(weight).__name__, "present", dtype_name(weight), int(weight.numel()))
    if "qweight" in module._buffers:
        return Weight("", f"{type(module).__module__.split('.')[0]}'s own", "", "", _elements(module))
    return Weight(parameters=_elements(module))


def _experts(module: Any, experts: list[Any]) -> Weight:
    """Quantized experts, which carry their statistics with them."""
    packed = experts[0].packed
    kind = packed.kind.quant_type
    how = f"{kind} experts, double" if packed.nested_code is not None else f"{kind} experts"
    return Weight("8" if packed.kind.int8 else "4", how, "present", dtype_name(experts[0]), _elements(module))


def _elements(module: Any) -> int:
    return sum(int(p.numel()) for p in module._parameters.values() if p is not None)


def _parametrized(module: Any) -> Any:
    """The state of a parameter that ``bitsandbytes.nn.parametrize`` quantized."""
    if "original" not in module._parameters:
        return None
    return next(filter(None, map(quant_states.get_quant_state, module.children())), None)


def _four_bit(module: Any, weight: Any, hook: Any) -> Weight:
    state = quant_states.get_quant_state(weight) or quant_states.get_quant_state(module)
    given = vars(module).get("compute_dtype")
    compute = str(given).removeprefix("torch.") if given is not None else "its input's"
    if weight is None:
        return Weight("4", "4-bit", "missing", compute)
    if state is not None and not _whole(weight, state):
        return _from_state(state, weight, compute, hook)
    kind = str(getattr(weight, "quant_type", "4-bit"))
    if not weight.dtype.is_floating_point or quant_states.is_marked(weight):
        elements = 2 * int(weight.numel()) * int(weight.element_size())
        return Weight("4", kind, "missing", compute, elements, fault="no state")
    fault = "not quantized yet" if is_instance_of(weight, BNB, "Params4bit") else "plain"
    return Weight("4", "", "", compute, int(weight.numel()), fault=fault)


def _whole(weight: Any, state: Any) -> bool:
    """Whether it has as many elements as ``state`` describes values: then it is not packed, whatever its class says."""
    return bool(weight.dtype.is_floating_point and tuple(weight.shape) == tuple(state.shape or ()))


def _from_state(state: Any, weight: Any, compute: str, hook: Any) -> Weight:
    double = getattr(state, "state2", None)
    extra = tuple(t for t in (state.absmax, getattr(double, "absmax", None)) if t is not None)
    elements = 1
    for length in state.shape or ():
        elements *= int(length)
    how = f"{state.quant_type}, double" if double is not None else str(state.quant_type)
    compute = compute or str(state.dtype).removeprefix("torch.")
    there, at = set(count_devices(extra)), str(weight.device)
    fault, statistics = "", "present" if extra else "missing"
    if not extra:
        fault = "no state"
    elif "meta" in there if weight.is_meta and hook is not None else there != {at} and not weight.is_meta:
        fault, statistics = "scales elsewhere", f"on {', '.join(sorted(there))}"
    elif quant_states.is_for_cpu_kernel(state):
        fault, statistics = "packed", "present, packed for AVX512"
    return Weight("4", how, statistics, compute, elements, extra, fault, state)


def _int8(module: Any, weight: Any, hook: Any) -> Weight:
    if weight is None:
        return Weight("8", "int8", "missing", "its input's")
    state = vars(module).get("state")  # the first forward moves what the weight holds there
    held = row_scales.held_tensors(weight, state)
    scales = next((t for t in held[::2] if t is not None), None)
    elements, extra = int(weight.numel()), _beside(weight, held)
    if str(weight.dtype) != "torch.int8":
        if not is_instance_of(weight, BNB, "Int8Params"):
            return Weight("8", "", "", dtype_name(weight), elements, fault="plain")
        if getattr(weight, "has_fp16_weights", False):
            return Weight("8", "int8 in each call", "", "its input's", elements, extra)
        return Weight("8", "", "", "its input's", elements, extra, fault="not quantized yet")
    if hook is not None and weight.is_meta and offload_place(hook, "SCB"):
        codes = held[3]
        fault = "resident" if codes is not None and not codes.is_meta else ""
        return Weight("8", "int8", "present, offloaded", "its input's", elements, extra, fault)
    if scales is None:
        return Weight("8", "int8", "missing", "its input's", elements, extra, fault="no scales")
    if str(weight.device) != "meta" and scales.device != weight.device:
        return Weight("8", "int8", f"on {scales.device}", "its input's", elements, extra, fault="scales elsewhere")
    return Weight("8", "int8", "present", "its input's", elements, extra)


def _beside(weight: Any, held: list[Any]) -> tuple[Any, ...]:
    """The tensors outside of the memory of ``weight``, each once."""
    found = {id(t): t for t in held if t is not None and t is not weight}
    return tuple(t for t in found.values() if t.dtype != weight.dtype or t.data_ptr() != weight.data_ptr())
