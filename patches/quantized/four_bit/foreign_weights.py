"""Packed 4-bit weights of another layer, as a plain tensor in the place of a layer's weight.

Packed weights do not tell their quantization state, and the state of the layer fits its own packed weights only. So the
contents are compared when the plain tensor takes the place of the layer's own weight: later there is nothing to compare
with. A layer that holds foreign packed weights keeps a fingerprint of its own, to know them if they come back. If the
layer gets another quantization state, or its state another absmax, that state is taken to fit the present weight.
"""

from __future__ import annotations

from typing import Any

from ...process import call_stack
from ...process.tensor_bits import fingerprint
from ..own_packed_weights import is_own_packed_weight
from . import quant_states

_NOTED = "_patches_packed_replaced"
Noted = tuple[int, Any, Any, bool]
"""Fingerprint of the layer's own packed weights, its quantization state and absmax at that time, and whether the present
packed weights are foreign. A plain tuple: a pickle of the layer loads without the plugin."""


def record_replaced_weight(layer: Any, old: Any) -> None:
    """Note whether the quantization state of ``layer`` still fits, after its weight ``old`` was replaced."""
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
    elif isinstance(old, Params4bit) and not old.is_meta:
        state: Any = quant_states.get_quant_state(layer)
        was_own = quant_states.get_quant_state(old) is state
        if was_own and (old.dtype != weight.dtype or not is_own_packed_weight(weight, old)):
            setattr(layer, _NOTED, (fingerprint(old), state, state.absmax, True))


def _noted(layer: Any) -> Noted | None:
    """Return the note on ``layer``; None, and drop it, if the layer got another quantization state or absmax since."""
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
    """Tell whether ``weight`` is a whole plain tensor of as many bytes as the packed weights of ``layer``."""
    import torch

    state = quant_states.get_quant_state(layer)
    if state is None or state.shape is None or type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_meta:
        return False
    return bool(weight.nbytes == quant_states.packed_bytes(state.shape))
