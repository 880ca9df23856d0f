"""DoRA gives the base layer a new weight in every forward, and on INT8 layers that loses the scales.

``dequantize_module_weight`` once had to move a CPU weight to CUDA, and ends with what took it back:
``module.weight = module.weight.to(device)``. Since peft 0.15 nothing moves, and ``to`` makes a second
parameter of the same memory. After its first forward an INT8 layer keeps the scales in its state; the
new parameter has codes without scales, the next forward takes both from it, and training dies with
``'NoneType' object has no attribute 'unsqueeze'`` (bitsandbytes >= 0.48). On 0.46.1 ``to`` quantizes
the codes as if they were numbers: every scale becomes 127, when the adapter is added already, and
nothing is said. Whoever trains or runs DoRA on an INT8 model on a CPU; 0.47 gets away with it.

A weight that is where it was is not replaced. The parameter of a 4-bit layer stays the same one too.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, Rewrite


def defect() -> Finding:
    """An INT8 layer with its adapter switched off, after two forwards with it, against the layer before."""
    import bitsandbytes as bnb
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base: Any = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)).to("cpu")
    base.is_loaded_in_8bit = True
    x = torch.randn(4, 64)
    expected = base(x)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0"], use_dora=True))
    try:
        model(x), model(x)
    except AttributeError as error:
        return Finding(True, f"second forward of a DoRA layer in INT8: {error}")
    with model.disable_adapter():
        off = float((model(x) - expected).norm() / expected.norm())
    return Finding(off > 1e-2, f"relative error of the base layer {off:.1e}")


PATCH = Patch(
    id="peft-dora-replaces-weight",
    summary="DoRA on INT8 fails on a CPU in the second forward: the first drops SCB",
    links=("https://github.com/huggingface/peft/blob/main/src/peft/utils/integrations.py",),
    requires=("peft>=0.15", "bitsandbytes>=0.46.1,!=0.47.0"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.14", "2.15"),
    edits=(
        Rewrite(
            "peft.utils.integrations:dequantize_module_weight",
            find="module.weight = module.weight.to(device)",
            replace="""
                if module.weight.device != device:
                    module.weight = module.weight.to(device)
            """,
        ),
    ),
    defect=defect,
)
