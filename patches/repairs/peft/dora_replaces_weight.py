"""DoRA gives the base layer a new weight in every forward, and INT8 layers lose their scales by that."""

from __future__ import annotations

from ...engine import Finding, Message, Patch, Rewrite
from ...quantized.int8 import row_scales
from ..reproducers.adapted_layer import quantized_model, relative_error


def defect() -> Finding:
    """Compare an INT8 layer before DoRA with the same layer after two forwards with DoRA, when it is switched off."""
    from peft import LoraConfig, get_peft_model

    base, x = quantized_model(int8=True, bias=False)
    expected = base(x)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0"], use_dora=True))
    try:
        model(x), model(x)
    except AttributeError as raised:
        return Finding(True, f"second forward of a DoRA layer in INT8: {raised}")
    with model.disable_adapter():
        error = relative_error(model(x), expected)
    return Finding(error > 1e-2, f"relative error of the output of the base layer {error:.1e}")


PATCH = Patch(
    id="peft-dora-replaces-weight",
    summary="DoRA on INT8 fails on a CPU in the second forward: the first drops SCB",
    groups=("cpu", "train"),
    silent=True,
    messages=(Message("'NoneType' object has no attribute 'unsqueeze'", "figure"),),
    links=("https://github.com/huggingface/peft/blob/main/src/peft/utils/integrations.py",),
    why="""
        ``dequantize_module_weight`` once moved CPU weights to CUDA, and still moves them back at its end:
        ``module.weight = module.weight.to(device)``. Since peft 0.15 nothing was moved, and ``to`` makes a second
        parameter over the same memory. After its first forward an INT8 layer keeps the scales in its state, so the
        new parameter has packed weights without scales. The next forward reads both from it, and training fails
        with ``'NoneType' object has no attribute 'unsqueeze'`` (bitsandbytes >= 0.48.1). On 0.46.1 ``to`` quantizes
        the packed weights as if they were values: every scale silently becomes 127, as soon as the adapter is
        added. Affects DoRA on INT8 models on a CPU; bitsandbytes 0.47.0 and 0.48.0 are not affected.
    """,
    repair="""
        The repair does not replace a weight that is already on its device. The parameter of a 4-bit layer stays the
        same object too. Before its first forward an INT8 weight refers to its packed weights twice, as data and as
        ``CB``. If a program has replaced only the data, the new parameter of peft used the new data for both. The
        weight that stays does the same.
    """,
    requires=("peft>=0.15", "bitsandbytes>=0.46.1,!=0.47.0,!=0.48.0"),
    tested_up_to="0.21.2",
    edits=(
        Rewrite(
            "peft.utils.integrations:dequantize_module_weight",
            find="module.weight = module.weight.to(device)",
            replace="""
                if module.weight.device != device:
                    module.weight = module.weight.to(device)
                else:
                    _patches_take_packed_weight(module.weight)
            """,
            names={"_patches_take_packed_weight": row_scales.take_packed_weight_of_data},
        ),
    ),
    defect=defect,
)
