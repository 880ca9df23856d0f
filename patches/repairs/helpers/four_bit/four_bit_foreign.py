"""Packed 4-bit weights of another layer, as a plain tensor in the place of a layer's weight.

Packed weights do not tell their quantization state, and that of the layer fits only those that it was quantized to. So the
contents are compared when the plain tensor takes the place of the layer's own weight: later there is nothing to compare
with. A layer that holds others keeps a digest of its own, by which it knows them if they come back.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ..process import stack
from ..weights.own_codes import same_bits
from . import four_bit_state

if TYPE_CHECKING:
    from torch import Tensor

_NOTED = "_patches_packed_replaced"


class _Noted(NamedTuple):
    own: bytes
    """Digest of the packed weights that the quantization state of the layer is for."""
    foreign: bool
    """Whether the layer holds others."""


def replaced(layer: Any, old: Any) -> None:
    """The weight ``old`` of ``layer`` was replaced: note whether its quantization state still fits."""
    from bitsandbytes.nn import Params4bit

    weight, noted = layer._parameters.get("weight"), vars(layer).get(_NOTED)
    if weight is None or weight is old:
        return
    if isinstance(weight, Params4bit):
        vars(layer).pop(_NOTED, None)
    elif not _is_plain_packed(layer, weight):
        return
    elif noted is not None:
        setattr(layer, _NOTED, noted._replace(foreign=_digest(weight) != noted.own))
    elif isinstance(old, Params4bit) and four_bit_state.of(old) is not None and not old.is_meta:
        own = old.detach().as_subclass(type(weight.data))
        fits = own.shape == weight.shape and own.dtype == weight.dtype
        if not fits or not same_bits(own, weight.detach().to(own.device)):
            setattr(layer, _NOTED, _Noted(_digest(own), True))


def refuse(layer: Any) -> None:
    """Raise if ``layer`` holds packed weights that are not its own, and no quantization state for them."""
    noted = vars(layer).get(_NOTED)
    if noted is not None and noted.foreign and four_bit_state.of(layer.weight) is None:
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

    data = packed.detach().cpu().contiguous().view(torch.uint8).flatten()
    return hashlib.blake2b(data.numpy().data, digest_size=16).digest()
