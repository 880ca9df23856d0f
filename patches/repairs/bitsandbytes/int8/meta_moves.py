"""INT8 modules cannot go to the meta device or come back, and their packed weights and scales stay behind."""

from __future__ import annotations

from typing import Any

from ....engine import Finding, Message, Patch, Rewrite
from ....quantized.int8 import row_scales, weight_moves
from ....quantized.weights import meta_weights
from ....quantized.weights.module_moves import follow_moves


def _follow_weight(layer: Any, old: dict[str, Any], address: int) -> None:
    """Put the packed weights and scales of a quantized ``layer`` where its weight is now."""
    from bitsandbytes.nn import Int8Params

    before, weight = old.get("weight"), layer._parameters.get("weight")
    if isinstance(before, Int8Params) and row_scales.is_int8(before) and row_scales.is_int8(weight):
        weight_moves.follow_move(layer, weight, address)


def defect() -> Finding:
    """Move a quantized model to meta and back, as before loading a checkpoint."""
    import copy

    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)).to("cpu").eval()
    saved, x = {k: v.clone() for k, v in model.state_dict().items()}, torch.randn(4, 64)
    expected = copy.deepcopy(model)(x)
    try:
        model.to("meta").to_empty(device="cpu").load_state_dict(saved)
    except RuntimeError as error:
        return Finding(True, f"to('meta'): {str(error)[:60]}...")
    same = torch.equal(model(x), expected)
    return Finding(not same, f"outputs after a move to meta and back {'are the same' if same else 'differ'}")


PATCH = Patch(
    id="bitsandbytes-int8-meta-moves",
    summary="to('meta') and to_empty raise an error on INT8 modules, and leave packed weights and SCB where they were",
    groups=("move",),
    silent=True,
    messages=(
        Message(
            "Creating a Parameter from an instance of type Int8Params requires that detach() returns an instance of the same type",
            "torch/nn/parameter.py",
            parts=("Creating a Parameter from an instance of type Int8Params",),
            holds=("Creating a Parameter from an instance of type ",),
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        ``module.to("meta")`` and ``to_empty`` on a ``Linear8bitLt`` or ``Embedding8bit`` raise ``Creating a
        Parameter from an instance of type Int8Params requires that detach() returns an instance of the same type``,
        because torch makes a new ``Parameter`` if it cannot swap ``.data``. If it can, as between CPU and GPU, only
        ``param.data`` moves. The packed weights and scales on the parameter and in ``state`` stay where they were,
        unless the layer is moved by itself. All releases.
    """,
    repair="""
        The repair wraps ``_apply`` of both classes. The new parameter keeps its class, and packed weights and
        scales follow the weight, on the parameter and in the state. From meta the scales come back uninitialized,
        like the weight, and ``load_state_dict`` fills both. Scales are moved, never cast, because ``.half()`` would
        round them.

        Some programs move a model away with ``.to`` and bring its parameters back through ``.data`` (diffusers'
        group offloading without streams). They found the packed weights and scales of a layer that had not run yet
        still on the device. With the repair these move away with the weight, and the first forward moves them back
        to it.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        *(follow_moves(layer, "Int8Params", _follow_weight) for layer in ("Linear8bitLt", "Embedding8bit")),
        Rewrite(
            "bitsandbytes.nn.modules:Linear8bitLt.init_8bit_state",
            "self.weight.CB = None",
            "_patches_bring(self)\nself.weight.CB = None",
            names={"_patches_bring": weight_moves.follow_data},
        ),
        meta_weights.INT8,
    ),
    defect=defect,
)
