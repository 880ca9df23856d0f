"""``Linear8bitLt`` cannot load its own ``state_dict`` after a forward, nor any with ``assign=True``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Message, Patch, Rewrite
from ....quantized.int8 import row_scales, scale_ownership
from ....quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048

if TYPE_CHECKING:
    from torch import Tensor


def _scale_to_fill(layer: Any) -> Tensor | None:
    """Return the scales that the checkpoint's are copied into, or None if ``layer`` is not quantized."""
    import torch
    from bitsandbytes.nn import Int8Params

    weight = layer.weight
    if "weight" not in layer._parameters and "weight" not in layer._buffers:
        return None  # pruned or parametrized: what makes the weight has keys of its own
    is_plain = type(weight.data) is torch.Tensor and not isinstance(weight, Int8Params)  # the DTensor of FSDP2 stays
    if weight.dtype == torch.int8 and is_plain:  # assign=True has just put it there
        empty = torch.empty(weight.shape[0], device=weight.device, dtype=torch.float32)
        layer.weight = Int8Params(weight.data, False, False, weight.data, empty)
        scale_ownership.clear_state(layer)
    if layer.weight.dtype != torch.int8:
        return None  # a new weight: the scales in the state belong to another one
    scale_ownership.on_state_dict_loaded(layer)
    return row_scales.scales_to_save(layer)


def defect() -> Finding:
    """Forward, then load what the layer itself saved."""
    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False).to("cpu").eval()
    x = torch.randn(4, 64)
    expected = layer(x)
    try:
        layer.load_state_dict(layer.state_dict())
    except RuntimeError as error:
        return Finding(True, f"load_state_dict of its own state_dict: {str(error)[:60]}...")
    same = torch.equal(layer(x), expected)
    return Finding(
        not same, f"outputs after load_state_dict of its own state_dict {'are the same' if same else 'differ'}"
    )


_TARGET = "bitsandbytes.nn.modules:Linear8bitLt._load_from_state_dict"
_CALL = "_patches_scale_to_fill(self)"
_NAMES = {"_patches_scale_to_fill": _scale_to_fill}

PATCH = Patch(
    id="bitsandbytes-int8-load-state-dict",
    summary="Linear8bitLt cannot load its own state_dict after a forward, or any with assign=True",
    groups=("save",),
    messages=(
        Message(
            "Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported. Please call module.cuda() before module.load_state_dict()",
            "bitsandbytes/nn/modules.py",
            parts=("Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported",),
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        The first forward moves the scales from the weight to the layer's state, but ``_load_from_state_dict`` looks
        for them only on the weight: ``Loading a quantized checkpoint into non-quantized Linear8bitLt is not
        supported``. By then the packed weights have been copied, so the layer has new packed weights with old
        scales. With ``assign=True`` (needed to load into a model on meta) the new weight is a plain ``Parameter``
        without scales, and the same error follows, or ``no attribute 'SCB'`` up to 0.49.2. All releases.
    """,
    repair="""
        The repair looks for the scales in both places, and makes an assigned int8 weight an ``Int8Params`` again.
        Packed weights for a weight that was never quantized are still refused without ``assign=True``. Before 0.48
        the next ``.to()`` would destroy the packed weights of such a weight, so the repair of that defect is part
        of this patch.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(_TARGET, "self.weight.SCB", _CALL, count=3, names=_NAMES, when="bitsandbytes<0.50"),
        Rewrite(_TARGET, 'getattr(self.weight, "SCB", None)', _CALL, names=_NAMES, when="bitsandbytes>=0.50"),
        Rewrite(_TARGET, "self.weight.SCB", _CALL, when="bitsandbytes>=0.50"),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # what was assigned is moved
    ),
    defect=defect,
)
