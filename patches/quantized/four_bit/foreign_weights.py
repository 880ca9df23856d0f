"""Packed 4-bit weights of another layer, as a plain tensor in the place of a layer's weight.

Packed weights do not tell their quantization state, and the state of the layer fits its own packed weights only. So the
contents are compared when the plain tensor takes the place of the layer's own weight: later there is nothing to compare
with. A layer that holds others keeps a fingerprint of its own, by which it knows them if they come back. If the layer gets
another quantization state, or its state another absmax, that is taken to fit what the layer holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...process import call_stack
from ...process.tensor_bits import fingerprint
from ..own_packed_weights import is_own_packed_weight
from . import quant_states

if TYPE_CHECKING:
    pass

_NOTED = "_patches_packed_replaced"
Noted = tuple[int, Any, Any, bool]
"""Fingerprint of the packed weights that the layer was quantized to, its quantization state and absmax at that time, and whether
it holds other packed weights. Plain values: a pickle of the layer loads without the plugin."""


def record_replaced_weight(layer: Any, old: Any) -> None:
    """The weight ``old`` of ``layer`` was replaced: note whether its quantization state still fits."""
    from bitsandbytes.nn import Params4bit

    weight, noted = layer._parameters.get("weight"), _noted(layer)
    if weight is None or weight is old:
        return
    if isinstance(weight, Params4bit):
        vars(layer).pop(_NOTED, None)
    elif not _is_plain_packed(layer, weight):
        return
    elif noted is not None:
        setattr(layer, _NOTED, (*noted[:3], fingerprint(weight) != noted[0]))
    elif (
        isinstance(old, Params4bit)
        and quant_states.get_quant_state(old) is quant_states.get_quant_state(layer)
        and not old.is_meta
    ):
        if old.dtype != weight.dtype or not is_own_packed_weight(weight, old):
            state: Any = quant_states.get_quant_state(layer)
            setattr(layer, _NOTED, (fingerprint(old), state, state.absmax, True))


def _noted(layer: Any) -> Noted | None:
    """What was noted of ``layer``, as long as it has the statistics that it was noted of."""
    noted: Noted | None = vars(layer).get(_NOTED)
    if noted is None:
        return None
    state = quant_states.get_quant_state(layer)
    if state is noted[1] and state is not None and state.absmax is noted[2]:
        return noted
    vars(layer).pop(_NOTED)
    return None


def refuse_foreign_weight(layer: Any) -> None:
    """Raise if ``layer`` holds packed weights that are not its own, and no quantization state for them."""
    noted = _noted(layer)
    if noted is None or not noted[3] or quant_states.get_quant_state(layer.weight) is not None:
        return
    if _is_plain_packed(layer, layer.weight):
        raise RuntimeError(
            f"the weight of {type(layer).__name__} {call_stack.name_of(layer)!r} was replaced by a plain tensor that differs from the "
            "packed weight of the layer, so the quantization state of the layer (layer.quant_state) does not fit it. "
            "Assign the Params4bit of the other layer, or load 'weight' and its statistics with load_state_dict"
        )


def _is_plain_packed(layer: Any, weight: Any) -> bool:
    """Whether ``weight`` is a whole plain tensor of as many bytes as the packed weights of ``layer``."""
    import torch

    state = quant_states.get_quant_state(layer)
    if state is None or state.shape is None or type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_meta:
        return False
    return bool(weight.nbytes == quant_states.packed_bytes(state.shape))
