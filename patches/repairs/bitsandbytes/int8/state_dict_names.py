"""``get_model_state_dict`` fails on INT8 layers, because keys of their state dict are not attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Message, Patch, SetAttribute
from ....quantized.int8 import plain_weights, row_scales

if TYPE_CHECKING:
    from torch import Tensor


def _scale(layer: Any) -> Tensor:
    """Return the row scales as ``state_dict`` saves them; absent for a layer that is not quantized."""
    scale = row_scales.scales_to_save(layer)
    if scale is None:
        raise AttributeError(f"{type(layer).__name__!r} object has no attribute 'SCB': it is not quantized")
    return scale


def _delete_scale(layer: Any) -> None:
    plain_weights.set_scale(layer, None)


def _format(layer: Any) -> Tensor:
    """Return the layout of the packed weights as ``state_dict`` saves it, 0 for rows; absent where there are no scales."""
    import torch

    _scale(layer)
    return torch.tensor(0, dtype=torch.uint8)


def _ignore(layer: Any, value: Tensor | None = None) -> None:
    """Accept any layout: rows are the only one there is."""


def defect() -> Finding:
    """Call ``get_model_state_dict`` on a model with one INT8 layer."""
    import bitsandbytes as bnb
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    torch.manual_seed(0)
    model = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)).to("cpu")
    try:
        found = get_model_state_dict(model)
    except AttributeError as error:
        return Finding(True, f"get_model_state_dict: {error}")
    lacking = set(model.state_dict()) - set(found)
    return Finding(bool(lacking), f"get_model_state_dict lacks {len(lacking)} of {len(model.state_dict())} keys")


_LAYER = "bitsandbytes.nn.modules:Linear8bitLt"

PATCH = Patch(
    id="bitsandbytes-int8-state-dict-names",
    summary="get_model_state_dict (DCP, FSDP) fails on INT8 layers: no attribute 'SCB'",
    groups=("shard", "save"),
    messages=(Message("'Linear8bitLt' object has no attribute 'SCB'", "figure"),),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        ``Linear8bitLt`` saves ``SCB`` and ``weight_format`` beside ``weight`` and has no attribute of either name.
        ``torch.distributed.checkpoint`` finds the owner of each key by following attributes, so
        ``get_model_state_dict`` raises ``'Linear8bitLt' object has no attribute 'SCB'`` (FSDP, DCP, accelerate).
        All releases.
    """,
    repair="""
        The repair adds both as properties that return what the layer saves. They can be set and deleted, so that
        ``functional_call`` accepts a whole state dict.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        SetAttribute(f"{_LAYER}.SCB", value=property(_scale, plain_weights.set_scale, _delete_scale)),
        SetAttribute(f"{_LAYER}.weight_format", value=property(_format, _ignore, _ignore)),
    ),
    defect=defect,
)
