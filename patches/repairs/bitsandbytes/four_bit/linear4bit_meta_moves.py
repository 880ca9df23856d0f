"""4-bit layers cannot go to the meta device, and come back from it as something else.

``torch.nn.Module`` makes a new ``Parameter`` when it cannot swap ``.data``, which is so between meta and any
other device. For a ``Params4bit`` that raises in ``layer.to("meta")`` (``Creating a Parameter from an
instance of type Params4bit requires that detach() returns an instance of the same type``), and in
``to_empty`` it gives a plain ``Parameter``: a layer built on meta and emptied onto a device never quantizes
what is then loaded into it, without a word, and one that was quantized has lost its state. 0.46.1 to 0.50.2.

The repair wraps ``_apply`` of ``Linear4bit`` and ``Embedding4bit``: what torch makes anew becomes a
``Params4bit`` again (or the subclass that it was), with the attributes of the old one. A quantized weight keeps
its statistics; its codes are uninitialized, as every weight that comes from meta, until ``load_state_dict``
fills them.
"""

from __future__ import annotations

from ....engine import Finding, Patch, SetAttribute
from ...helpers.weights.module_moves import make_apply


def defect() -> Finding:
    """A layer built on meta, emptied onto the CPU and filled: is it quantized when it is moved?"""
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
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1525",),
    requires=("bitsandbytes>=0.46",),
    tested_up_to="0.50.2",
    seen_on=("2.8", "2.13", "2.14", "2.15"),
    edits=tuple(
        SetAttribute(f"bitsandbytes.nn.modules:{layer}._apply", make=make_apply(layer, "Params4bit"))
        for layer in ("Linear4bit", "Embedding4bit")
    ),
    defect=defect,
)
