"""HRA, PEANuT, DEFT, HiRA, Bone and MiSS compute with packed INT8 weights as if these were values."""

from __future__ import annotations

from ...adapters.base_weight import read_dense
from ...engine import Finding, Patch, Rewrite
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ...quantized.weights import dense_weight
from ..reproducers.adapted_layer import show_untrained_error


def defect() -> Finding:
    """Compare the outputs of an INT8 layer with and without HRA before its first step, which changes nothing."""
    from peft import HRAConfig

    return show_untrained_error(HRAConfig(r=4, target_modules=["0"]), int8=True)


_BASE = "self.get_base_layer().weight"
_HRA_FORWARD = "hra.layer:HRALinear.forward"


PATCH = Patch(
    id="peft-packed-weights-as-values",
    former_ids=("peft-codes-as-weights",),
    summary="HRA, PEANuT, DEFT, HiRA, Bone and MiSS use INT8 packed weights as if they were dequantized: outputs and gradients are wrong",
    groups=("layers", "train"),
    silent=True,
    links=(
        "https://github.com/huggingface/peft/blob/main/src/peft/tuners/hra/layer.py",
        "https://github.com/huggingface/peft/issues/3736",
    ),
    why="""
        Most tuners of peft without code for quantized layers call the layer and add their own part, which is right.
        Six of them read ``base_layer.weight`` instead. The weight of a ``Linear8bitLt`` holds packed weights from
        -127 to 127, and its scales are stored elsewhere. There is no message:

        - HRA rotates the weight in each forward and multiplies by the result: every output is the output of a model
          with other weights (relative error 1.17 on a small Llama, also untrained, when HRA should change nothing).
          peft since 0.16.
        - PEANuT computes its update from the weight: a relative error of 1.4 once it is trained. Since 0.19.
        - DEFT starts as the identity with respect to the weight that it reads: 1.2 before the first step. Since
          0.20.
        - HiRA multiplies the weight by its trained update. It has its own INT8 layers for models with
          ``is_loaded_in_8bit``. A model without this flag, whose user put in the bitsandbytes layers, gets the
          plain one. Since 0.20.
        - Bone and MiSS with ``init_weights="bat"`` multiply blocks of the weight by what they train, and do not
          call the layer: an output that is tens of times too large, also untrained. Bone in 0.16 to 0.18, MiSS in
          0.17 to 0.19.

        An adapter that was trained like this fits no other base: neither the unquantized model nor the 4-bit one.
        In 4 bits all raise errors about shapes; on INT8 HRA and Bone before 0.16 raise one about dtypes. Upstream
        repaired one such tuner, KappaTune (peft #3736).
    """,
    repair="""
        The repair gives them the dequantized weight. INT8 and 4-bit layers then equal the same adapter on the
        dequantized model. Unquantized layers give the same parameter as before. An adapter that was trained on
        packed weights now gives other outputs, the same as on any other base: train it again.

        None of these tuners can merge into packed weights: the update is lost, and values that do not fit in 8 bits
        wrap around (HRA: 12 % off the unmerged model). For INT8, as for 4 bits, ``merge`` now raises an error that
        says what to do.

        FSDP2 gathers packed weights into a plain ``Parameter``, and a pruned or parametrized layer has a plain
        tensor, which these six and DoRA's ``dequantize_module_weight`` do not recognize as quantized. They are
        dequantized by the scales of the layer as well. SHiRA reads ``quant_state`` of a 4-bit weight, which such a
        parameter does not have (since 0.20): it gets the weight by the quantization state of the layer. On INT8
        layers of a 16-bit model it multiplies its input by a weight in float32: ``self and mat2 must have the same
        dtype``. It gets the weight in the dtype of the input.
    """,
    cost="""
        One dequantized weight for each HRA, PEANuT, HiRA, Bone and MiSS layer in a forward, as these tuners need
        for any layer.
    """,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(
        Rewrite(
            f"peft.tuners.{_HRA_FORWARD}",
            f"orig_weight = {_BASE}.data",
            "orig_weight = _patches_dense_weight(self.get_base_layer()).data",
            names={"_patches_dense_weight": dense_weight.dequantize_weight},
            when="peft>=0.16",
        ),
        Rewrite(f"peft.tuners.{_HRA_FORWARD}", f"{_BASE}.data.dtype", "orig_weight.dtype", when="peft>=0.16"),
        dense_weight.dequantize_in_forward(_HRA_FORWARD, "peft<0.16"),
        dense_weight.refuse_merge("hra.layer:HRALinear.merge"),
        read_dense("bone.layer:BoneLinear.forward", "self.base_layer.weight", "peft<0.19", dtype="x.dtype"),
        read_dense("miss.layer:MissLinear.forward", "self.base_layer.weight", "peft>=0.17,<0.20", dtype="x.dtype"),
        read_dense("peanut.layer:Linear.get_delta_weight", _BASE, "peft>=0.19"),
        dense_weight.refuse_merge("peanut.layer:Linear.merge", "peft>=0.19"),
        read_dense("deft.layer:DeftLayer.reset_deft_parameters", _BASE, "peft>=0.20"),
        dense_weight.refuse_merge("deft.layer:DeftLinear.merge", "peft>=0.20"),
        read_dense("hira.layer:Linear.forward", _BASE, "peft>=0.20", dtype="_prod_AB.dtype"),
        dense_weight.refuse_merge("hira.layer:Linear.merge", "peft>=0.20,<0.21"),
        dense_weight.refuse_merge("hira.layer:HiraLayer._merge", "peft>=0.21", "weight = {}.weight"),
        *(
            Rewrite(
                "peft.utils.integrations:dequantize_module_weight",
                f"{test}\n    return weight",
                f"{test}\n    return _patches_weight_or_dense(module, weight)",
                names={"_patches_weight_or_dense": dense_weight.weight_or_dense},
            )
            for test in ("if isinstance(weight, torch.Tensor):", 'if cls_name not in ("Params4bit", "Int8Params"):')
        ),
        Rewrite.to_call(
            "peft.tuners.shira.layer:Linear.forward",
            "self.get_base_weight()",
            dense_weight.base_weight_for_input,
            "self, x",
            when="peft>=0.20",
        ),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # get_peft_model moves the layer
    ),
    defect=defect,
)
