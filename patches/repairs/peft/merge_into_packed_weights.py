"""Merging C3A, or MiSS and Bone of older peft, into INT8 layers silently loses the adapter."""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch
from ...engine.gate import satisfied
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ...quantized.weights import dense_weight
from ..reproducers.adapted_layer import quantized_layer


def defect() -> Finding:
    """Merge C3A, or before peft 0.16 Bone, into an INT8 layer, and ask the model the same again."""
    import peft
    import torch

    base = torch.nn.Sequential(quantized_layer(int8=True))
    config: Any
    if satisfied("peft>=0.16"):
        tuner, config = "C3A", peft.C3AConfig(block_size=16, target_modules=["0"], init_weights="gaussian")
    else:
        tuner, config = "Bone", peft.BoneConfig(r=16, target_modules=["0"], init_weights=False)
    model = peft.get_peft_model(base, config)
    x = torch.randn(4, 64)
    with torch.no_grad():
        expected = model(x)
        with model.disable_adapter():
            added = expected - model(x)
        try:
            model.merge_adapter()
        except NotImplementedError as error:
            return Finding(False, f"the merge is refused: {error}")
        lost = float((model(x) - expected).norm() / added.norm())
    return Finding(lost > 0.5, f"{tuner} merged into INT8: {lost:.0%} of what it adds is lost")


# layers without code for packed weights that write into the weight of any layer; VeRA since 0.20 and OFT since 0.21 ask
_WRITES_INTO_ANY_WEIGHT = {
    "c3a.layer:C3ALinear": "peft>=0.16",
    "miss.layer:MissLinear": "peft>=0.17,<0.20",
    "bone.layer:BoneLinear": "peft<0.19",
    "fourierft.layer:FourierFTLinear": "",
    "waveft.layer:WaveFTLinear": "peft>=0.18",
    "lora.layer:Linear": "",
    "adalora.layer:SVDLinear": "",
    "ia3.layer:Linear": "",
    "randlora.layer:Linear": "peft>=0.16",
    "vblora.layer:Linear": "",
    "vera.layer:Linear": "peft<0.20",
    "oft.layer:Linear": "peft<0.21",
    "road.layer:Linear": "peft>=0.18",
    "adamss.layer:Linear": "peft>=0.19",
    "gralora.layer:Linear": "peft>=0.19",
    "pvera.layer:Linear": "peft>=0.19",
    "unilora.layer:Linear": "peft>=0.20",
    "supertuning.layer:Linear": "peft>=0.21",
}


PATCH = Patch(
    id="peft-merge-into-packed-weights",
    former_ids=("peft-merge-into-codes",),
    summary="merging C3A, or MiSS and Bone of older peft, into INT8 layers loses the adapter, silently",
    groups=("merge",),
    silent=True,
    links=("https://github.com/huggingface/peft/blob/main/src/peft/tuners/c3a/layer.py",),
    why="""
        These tuners do not know quantized layers. They train beside them, which is right, but merge by adding to
        ``base_layer.weight``, which in a ``Linear8bitLt`` holds packed weights from -127 to 127. C3A leaves floats
        there; MiSS and Bone cast back to INT8. The layer goes on computing with the packed weights in its state, so
        the merged model computes what the base model does, silently. A saved model holds neither the base nor the
        merged weights. C3A: peft since 0.16. MiSS: 0.17 to 0.19, before it merged through a backend that quantizes.
        Bone: up to 0.18. In 4 bits all three raise errors about shapes. FourierFT and WaveFT do so in 4 bits and
        INT8.

        LoRA and DoRA have layers of their own for models with ``is_loaded_in_8bit``. A model without this flag, whose
        user put in the bitsandbytes layers, gets the plain layer: ``merge(safe_merge=True)`` loses LoRA silently, DoRA
        adds to packed weights, and without ``safe_merge`` LoRA raises ``result type Float can't be cast``. Other tuners
        also get the plain layer in such a model: IA3 loses all that it multiplies by, RandLoRA computes wrong outputs
        once it is merged into an INT8 layer (130 % off), OFT before 0.21 merges into packed weights, and AdaLoRA, VeRA,
        PVeRA and RoAd raise errors about a shape or dtype. GraLoRA, UniLoRA, VB-LoRA, AdaMSS and Super-Tuning raise
        such errors in any quantized model.

        IA3 and AdaLoRA have no merge into quantized layers, and raise a ``NotImplementedError`` without a message.
    """,
    repair="""
        With the repair, ``merge`` raises an error before anything is changed. It names the tuner and the layer and
        says what to do, as for HRA, PEANuT and DEFT (``packed_weights_as_values.py``). Merging into unquantized layers
        works as before.
    """,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(
        *(dense_weight.refuse_merge(f"{layer}.merge", when) for layer, when in _WRITES_INTO_ANY_WEIGHT.items()),
        dense_weight.refuse_no_merge("merge"),
        dense_weight.refuse_no_merge("unmerge"),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # get_peft_model moves the layer
    ),
    defect=defect,
)
