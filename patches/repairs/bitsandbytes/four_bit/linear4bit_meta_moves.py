"""4-bit layers cannot be moved to the meta device, and layers that come back from it are never quantized."""

from __future__ import annotations

from ....engine import Finding, Message, Patch
from ....quantized.weights import meta_weights
from ....quantized.weights.module_moves import follow_moves


def defect() -> Finding:
    """Build a layer on meta, empty it onto the CPU and fill it: is it quantized when it is moved?"""
    import torch
    from bitsandbytes.nn import Linear4bit

    with torch.device("meta"):
        layer = Linear4bit(64, 64, quant_type="nf4")
    layer.to_empty(device="cpu").load_state_dict(torch.nn.Linear(64, 64).state_dict())
    layer.to("cpu")
    kind = type(layer.weight).__name__
    return Finding(kind != "Params4bit", f"the weight of a layer from meta is a {kind} in {layer.weight.dtype}")


PATCH = Patch(
    id="bitsandbytes-linear4bit-meta-moves",
    summary="4-bit layers cannot be moved to meta, and layers moved back are never quantized",
    groups=("move",),
    silent=True,
    messages=(
        Message(
            "Creating a Parameter from an instance of type Params4bit requires that detach() returns an instance of the same type",
            "torch/nn/parameter.py",
            parts=("Creating a Parameter from an instance of type Params4bit",),
            holds=("Creating a Parameter from an instance of type ",),
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1525",),
    why="""
        Between meta and any other device, ``torch.nn.Module`` cannot swap ``.data`` and makes a new ``Parameter``.
        For a ``Params4bit``, ``layer.to("meta")`` raises ``Creating a Parameter from an instance of type Params4bit
        requires that detach() returns an instance of the same type``. ``to_empty`` makes a plain ``Parameter``: a
        layer that was built on meta silently never quantizes a weight that is loaded into it, and a quantized layer
        has lost its quantization state. 0.46.1 to 0.50.2.
    """,
    repair="""
        The repair wraps ``_apply`` of ``Linear4bit`` and ``Embedding4bit``. A parameter that torch makes anew
        becomes a ``Params4bit`` again (or the subclass that it was), with the attributes of the old one. A
        quantized weight keeps its quantization state. Its packed weights are uninitialized, like every weight that
        comes from meta, until ``load_state_dict`` fills them.
    """,
    requires=("bitsandbytes>=0.46",),
    tested_up_to="0.50.2",
    edits=(
        *(follow_moves(layer, "Params4bit") for layer in ("Linear4bit", "Embedding4bit")),
        *meta_weights.FOUR_BIT,
    ),
    defect=defect,
)
