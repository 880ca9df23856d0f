"""Packed 4-bit weights of another layer, as a plain tensor in the place of a layer's weight.

Packed weights do not tell their quantization state, and that of the layer fits only those that it was quantized to. So the
contents are compared when the plain tensor takes the place of the layer's own weight: later there is nothing to compare
with. A layer that holds others keeps a digest of its own, by which it knows them if they come back. If the layer gets
another quantization state, or its state another absmax, that is taken to fit what the layer holds.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ..process import stack
from ..weights.own_codes import are_own
from . import four_bit_state

if TYPE_CHECKING:
    from torch import Tensor

_NOTED = "_patches_packed_replaced"
Noted = tuple[bytes, Any, Any, bool]
"""Digest of the packed weights that the layer was quantized to, its quantization state and absmax at that time, and whether
it holds other packed weights. Plain values: a pickle of the layer loads without the plugin."""


def replaced(layer: Any, old: Any) -> None:
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
        setattr(layer, _NOTED, (*noted[:3], _digest(weight) != noted[0]))
    elif isinstance(old, Params4bit) and four_bit_state.of(old) is four_bit_state.of(layer) and not old.is_meta:
        if old.dtype != weight.dtype or not are_own(weight, old):
            state: Any = four_bit_state.of(layer)
            setattr(layer, _NOTED, (_digest(old), state, state.absmax, True))


def _noted(layer: Any) -> Noted | None:
    """What was noted of ``layer``, as long as it has the statistics that it was noted of."""
    noted: Noted | None = vars(layer).get(_NOTED)
    if noted is None:
        return None
    state = four_bit_state.of(layer)
    if state is noted[1] and state is not None and state.absmax is noted[2]:
        return noted
    vars(layer).pop(_NOTED)
    return None


def refuse(layer: Any) -> None:
    """Raise if ``layer`` holds packed weights that are not its own, and no quantization state for them."""
    noted = _noted(layer)
    if noted is None or not noted[3] or four_bit_state.of(layer.weight) is not None:
        return
    if _is_plain_packed(layer, layer.weight):
        raise RuntimeError(
            f"the weight of {type(layer).__name__} {stack.name_of(layer)!r} was replaced by a plain tensor that differs from the "
            "packed weight of the layer, so the quantization state of the layer (layer.quant_state) does not fit it. "
            "Assign the Params4bit of the other layer, or load 'weight' and its statistics with load_state_dict"
        )


def _is_plain_packed(layer: Any, weight: Any) -> bool:
    """Whether ``weight`` is a whole plain tensor of as many bytes as the packed weights of ``layer``."""
    import torch

    state = four_bit_state.of(layer)
    if state is None or state.shape is None or type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_meta:
        return False
    return bool(weight.nbytes == four_bit_state.packed_bytes(state.shape))


def _digest(packed: Tensor) -> bytes:
    import torch

    data = packed.detach().as_subclass(torch.Tensor).cpu().contiguous().view(torch.uint8).flatten()
    return hashlib.blake2b(data.numpy().data, digest_size=16).digest()
