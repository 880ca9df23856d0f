"""4-bit and INT8 layers that were dequantized in place cannot be offloaded.

``layer.weight.data = dequantized`` leaves the class of the weight as it was, ``Params4bit`` or ``Int8Params``, and
accelerate decides by the name of the class. It treats the values of a 4-bit layer as packed weights and raises
``Cannot copy out of meta tensor; no data!``. It quantizes the values of an INT8 layer again. The forward then
multiplies floats by int8, or, if the user gave the layer a forward of its own, silently uses packed weights as if they
were values. accelerate up to 1.15.

The repair puts a plain ``Parameter`` in the place of such a weight when accelerate moves it. A 4-bit weight counts as
dequantized if it is larger than its packed weights would be. An INT8 weight counts if its module is no longer a
``Linear8bitLt``, or has a forward of its own. A ``Linear8bitLt`` with new floating-point weights is quantized as
before. If packed weights were cast to floating point, an error names the layer.
"""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...quantized.weights import dequantized_in_place


def defect() -> Finding:
    """Dequantize a 4-bit and an INT8 layer in place, and offload them."""
    import bitsandbytes as bnb
    import torch
    from accelerate import cpu_offload
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    torch.manual_seed(0)
    four = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4").to("cpu")
    eight = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu")
    four.weight.data = dequantize_4bit(four.weight.data, four.weight.quant_state)
    eight.weight.data = int8_vectorwise_dequant(eight.weight.data, eight.weight.SCB)
    four.__class__ = eight.__class__ = torch.nn.Linear
    model, x = torch.nn.Sequential(four, eight).requires_grad_(False), torch.randn(2, 64)
    expected = model(x)
    cpu_offload(model, execution_device=torch.device("cpu"))
    try:
        error = (model(x) - expected).norm().item()
    except (NotImplementedError, RuntimeError) as raised:
        return Finding(True, f"forward of the offloaded layers: {str(raised).split(';')[0][:80]}")
    return Finding(not error == 0, f"outputs of the offloaded layers differ by {error:.1e}")


PATCH = Patch(
    id="accelerate-dequantized-in-place",
    summary="4-bit and INT8 layers that were dequantized in place cannot be offloaded",
    links=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/modeling.py#L278",),
    requires=("accelerate>=0.26.1", "bitsandbytes>=0.46.1"),
    tested_up_to="1.15.0",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "accelerate.utils.modeling:set_module_tensor_to_device",
            find="old_value = getattr(module, tensor_name)",
            replace="old_value = _patches_to_move(module, tensor_name)",
            names={"_patches_to_move": dequantized_in_place.parameter_to_move},
        ),
    ),
    defect=defect,
)
