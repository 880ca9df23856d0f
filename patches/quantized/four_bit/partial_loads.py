"""A packed 4-bit weight and its quantization state that a program loads from several files, one by one.

``load_state_dict(strict=False)`` for each file of a checkpoint is right for every other parameter. The files are divided by
size, so a file may end between a packed weight and its absmax. A part alone is meaningless: until the rest comes, the layer
has no quantization state, and its forward raises an error that names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...process import call_stack
from . import quant_states
from .quant_state_dict import IncompleteState, read_quantized_weight

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from torch import Tensor

_PARTS = "_patches_loaded_in_parts"
"""On a layer: the quantization state that it had when the last part came, and the parts."""
Group = dict[str, "Tensor"]
"""Tensors by the rest of their key after ``weight.``; the packed weight itself under ""."""
Parts = dict[str, "Tensor | None"]
"""A group in which None stands for the packed weight, which the layer holds."""


def collect_part(layer: Any, group: Group, assign: bool) -> bool:
    """Keep the incomplete ``group`` if the rest may come from another file, and tell so; else change nothing."""
    weight, packed = layer.weight, group.get("")
    if assign or not quant_states.is_packed(weight) or weight.is_meta or not call_stack.loads_in_parts():
        return False
    if packed is not None and (packed.dtype, packed.shape) != (weight.dtype, weight.shape):
        return False
    parts = _parts(layer)
    if packed is not None:
        weight.data.copy_(packed)
    quant_states.set_quant_state(None, weight, layer)
    _keep(layer, {**parts, **group})
    return True


def note_own(layer: Any, group: Group, assign: bool) -> None:
    """Keep the incomplete ``group``, which equals the layer's own entries: those still to come may differ."""
    if not assign and call_stack.loads_in_parts():
        _keep(layer, {**_parts(layer), **group})


def read_with_parts(layer: Any, group: Group, assign: bool) -> tuple[Tensor, QuantState]:
    """Return ``read_quantized_weight`` of ``group``, with the parts that came before if it lacks some."""
    try:
        return read_quantized_weight(layer, group, assign)
    except IncompleteState:
        if not (parts := _parts(layer)):
            raise
        return read_quantized_weight(layer, _whole(layer, {**parts, **group}), assign)


def is_waiting(layer: Any) -> bool:
    """Tell whether ``layer`` was loaded in parts, and has no quantization state until the rest comes."""
    return quant_states.get_quant_state(layer.weight) is None and bool(_parts(layer))


def forget_parts(layer: Any) -> None:
    """Forget the parts of ``layer``, which are complete."""
    vars(layer).pop(_PARTS, None)


def refuse_missing_parts(layer: Any) -> None:
    """Raise if ``layer`` was loaded in parts, and the rest has not come."""
    if not is_waiting(layer):
        return
    try:
        read_quantized_weight(layer, _whole(layer, _parts(layer)), False)
    except ValueError as error:
        raise RuntimeError(
            f"{type(layer).__name__} {call_stack.name_of(layer)!r} was loaded in parts, by load_state_dict(strict=False), and has no "
            f"quantization state yet: {error}. Load the file that has the rest"
        ) from None


def _keep(layer: Any, parts: Parts) -> None:
    own: Parts = {"": None} if "" in parts else {}  # the weight of the layer holds it
    setattr(layer, _PARTS, (quant_states.get_quant_state(layer.weight), {**parts, **own}))


def _parts(layer: Any) -> Parts:
    """Return the parts that came for ``layer``; none if it got another quantization state since."""
    state, parts = vars(layer).get(_PARTS, (None, {}))
    same = quant_states.get_quant_state(layer.weight) is state and (
        state is not None or quant_states.get_quant_state(layer) is None
    )
    return parts if same else {}


def _whole(layer: Any, parts: Parts) -> Group:
    return {key: layer.weight.data if tensor is None else tensor for key, tensor in parts.items()}
