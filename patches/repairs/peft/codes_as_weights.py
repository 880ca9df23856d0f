"""HRA, PEANuT, DEFT and HiRA compute with INT8 codes as if these were weights.

Most tuners of peft that have no code for quantized layers let the layer compute and add what is theirs, which is
right. Four read ``base_layer.weight`` instead, and the weight of a ``Linear8bitLt`` holds codes from -127 to 127
whose scales lie beside it. Nothing is said:

- HRA rotates the weight in each forward and multiplies by that: every output is that of a model with other weights
  (relative error 1.17 on a small Llama, also untrained, where HRA changes nothing). peft since 0.16.
- PEANuT takes its delta from the weight: 1.4 as soon as it is trained. Since 0.19.
- DEFT starts as the identity by what it reads: 1.2 before the first step. Since 0.20.
- HiRA multiplies the weight by what it trains. It has layers of its own for a model that says ``is_loaded_in_8bit``;
  one that does not, with layers of bitsandbytes that its user put there, gets the plain one. Since 0.20.

An adapter that was trained like that fits no other base: not the same model unquantized, nor in 4 bits. In 4 bits all
four fail with shapes that do not fit. Upstream repaired one such reader, KappaTune (peft #3736).

The repair hands them the weight that the layer stands for, dequantized by bitsandbytes: INT8 and 4-bit then equal the
same adapter on the dequantized model. Unquantized layers give the same parameter as before. An adapter that was trained
on codes gives other outputs now, those that it has on any other base: train it again.

None of them can merge into codes: what they add is lost, and what no longer fits in 8 bits wraps around (HRA: 12 % off
what the unmerged model computes). Their ``merge`` is an error now for INT8, as it is for 4 bits, and says what to do.

FSDP2 gathers codes into a plain ``Parameter``, which these four and DoRA's ``dequantize_module_weight`` do not take for
quantized: that weight is dequantized by the scales of its layer as well.

It costs one dequantized weight for each HRA, PEANuT and HiRA layer in a forward, which these tuners ask of any layer.
"""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ..helpers.int8.int8_moves import KEEP_CODES_BEFORE_048
from ..helpers.weights import dense_weight


def defect() -> Finding:
    """HRA before its first step, which changes no output."""
    import bitsandbytes as bnb
    import torch
    from peft import HRAConfig, get_peft_model

    torch.manual_seed(0)
    base = bnb.nn.Linear8bitLt(64, 48, has_fp16_weights=False).to("cpu")
    x = torch.randn(4, 64)
    expected = base(x).detach()
    model = get_peft_model(torch.nn.Sequential(base), HRAConfig(r=4, target_modules=["0"]))
    error = ((model(x) - expected).norm() / expected.norm()).item()
    return Finding(error > 0.05, f"HRA before its first step: relative error {error:.3f}")


_TUNERS = "peft.tuners"
_WEIGHT = "self.get_base_layer().weight"
_DENSE = "_patches_dense_weight(self.get_base_layer())"
_NAMES = {"_patches_dense_weight": dense_weight.of}
_NOT_QUANTIZED = 'if cls_name not in ("Params4bit", "Int8Params"):'


PATCH = Patch(
    id="peft-codes-as-weights",
    summary="HRA, PEANuT, DEFT and HiRA use INT8 packed weights as if they were dequantized: outputs and gradients are wrong",
    links=(
        "https://github.com/huggingface/peft/blob/main/src/peft/tuners/hra/layer.py",
        "https://github.com/huggingface/peft/issues/3736",
    ),
    requires=("peft>=0.16", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        Rewrite(
            f"{_TUNERS}.hra.layer:HRALinear.forward",
            f"orig_weight = {_WEIGHT}.data",
            f"orig_weight = {_DENSE}.data",
            names=_NAMES,
        ),
        Rewrite(f"{_TUNERS}.hra.layer:HRALinear.forward", f"{_WEIGHT}.data.dtype", "orig_weight.dtype"),
        dense_weight.refuse_merge("hra.layer:HRALinear.merge"),
        Rewrite(f"{_TUNERS}.peanut.layer:Linear.get_delta_weight", _WEIGHT, _DENSE, names=_NAMES, when="peft>=0.19"),
        dense_weight.refuse_merge("peanut.layer:Linear.merge", "peft>=0.19"),
        Rewrite(
            f"{_TUNERS}.deft.layer:DeftLayer.reset_deft_parameters", _WEIGHT, _DENSE, names=_NAMES, when="peft>=0.20"
        ),
        dense_weight.refuse_merge("deft.layer:DeftLinear.merge", "peft>=0.20"),
        Rewrite(
            f"{_TUNERS}.hira.layer:Linear.forward",
            _WEIGHT,
            "_patches_dense_weight(self.get_base_layer(), _prod_AB.dtype)",
            names=_NAMES,
            when="peft>=0.20",
        ),
        dense_weight.refuse_merge("hira.layer:Linear.merge", "peft>=0.20,<0.21"),
        dense_weight.refuse_merge("hira.layer:HiraLayer._merge", "peft>=0.21", "weight = {}.weight"),
        Rewrite(
            "peft.utils.integrations:dequantize_module_weight",
            f"{_NOT_QUANTIZED}\n    return weight",
            f"{_NOT_QUANTIZED}\n    return _patches_weight_or_dense(module, weight)",
            names={"_patches_weight_or_dense": dense_weight.weight_or_dense},
        ),
        *KEEP_CODES_BEFORE_048,  # get_peft_model moves the layer
    ),  # fmt: skip
    defect=defect,
)
