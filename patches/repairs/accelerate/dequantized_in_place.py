"""A quantized layer that was dequantized in place is quantized again when it is moved, and cannot be offloaded."""

from __future__ import annotations

from ...engine import Finding, Message, Part, Patch, Rewrite
from ...quantized.weights import dequantized_in_place


def defect_moving() -> Finding:
    """Dequantize a layer in place, and move the model to where it is."""
    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu")
    weight = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    layer.weight.data = weight
    layer.__class__ = torch.nn.Linear
    x = torch.randn(2, 64)
    model = torch.nn.Sequential(layer).to("cpu")
    try:
        error = (model(x) - x @ weight.t()).norm().item()
    except RuntimeError as raised:
        return Finding(True, f"after to('cpu'): {str(raised)[:70]}")
    return Finding(error > 1e-4, f"after to('cpu') the layer differs from its weight by {error:.1e}")


def defect_offloading() -> Finding:
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
    summary="layers that were dequantized in place are quantized again when they are moved, and cannot be offloaded",
    groups=("offload", "move", "layers"),
    silent=True,
    messages=(
        Message(
            "expected m1 and m2 to have the same dtype, but got: float != signed char",
            "torch/lib/libtorch_cpu.so",
            parts=("expected m1 and m2 to have the same dtype, but got",),
        ),
    ),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L724",
        "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/modeling.py#L278",
    ),
    why="""
        An INT8 layer that was dequantized in place is quantized again by the next ``.to()``, and then fails.
        ``layer.weight.data = dequantized`` and ``layer.__class__ = torch.nn.Linear`` turn a ``Linear8bitLt`` into a
        plain layer without touching its parents. Its weight is still an ``Int8Params``, which quantizes its values
        when it is moved. After ``model.to(device)`` the plain layer multiplies floats by int8: ``expected m1 and m2
        to have the same dtype``. All releases.

        4-bit and INT8 layers that were dequantized in place cannot be offloaded. ``layer.weight.data =
        dequantized`` leaves the class of the weight as it was, ``Params4bit`` or ``Int8Params``, and accelerate
        decides by the name of the class. It treats the values of a 4-bit layer as packed weights and raises
        ``Cannot copy out of meta tensor; no data!``. It quantizes the values of an INT8 layer again. The forward
        then multiplies floats by int8, or, if the user gave the layer a forward of its own, silently uses packed
        weights as if they were values. accelerate up to 1.15.
    """,
    repair="""
        If a module is moved with ``.to()``, the repair moves the values of a weight that was dequantized in place as
        they are. It looks for the module only if a floating-point weight still has packed weights or scales of an
        earlier quantization. A weight in a ``Linear8bitLt`` is quantized as before, also if it was given other values.

        If accelerate moves such a weight, the repair puts a plain ``Parameter`` in its place. A 4-bit weight counts as
        dequantized if it is larger than its packed weights would be. An INT8 weight counts if its module is no longer a
        ``Linear8bitLt``, or has a forward of its own. A ``Linear8bitLt`` with new floating-point weights is quantized
        as before. If packed weights were cast to floating point, an error names the layer.
    """,
    former_ids=("bitsandbytes-int8-dequantized-in-place",),
    parts=(
        Part(
            "offloading",
            ("accelerate>=0.26.1", "bitsandbytes>=0.46.1"),
            "1.15.0",
            (
                Rewrite(
                    "accelerate.utils.modeling:set_module_tensor_to_device",
                    find="old_value = getattr(module, tensor_name)",
                    replace="old_value = _patches_parameter_to_move(module, tensor_name)",
                    names={"_patches_parameter_to_move": dequantized_in_place.parameter_to_move},
                ),
            ),
            defect_offloading,
        ),
        Part(
            "moving",
            ("bitsandbytes>=0.46.1",),
            "0.50.2",
            tuple(
                Rewrite(
                    "bitsandbytes.nn.modules:Int8Params.to",
                    find=f"device, dtype, non_blocking, {rest} = torch._C._nn._parse_to(*args, **kwargs)",
                    replace=f"""
                        if (plain := _patches_to_plain_parameter(self)) is not None:
                            return plain.to(*args, **kwargs)
                        device, dtype, non_blocking, {rest} = torch._C._nn._parse_to(*args, **kwargs)
                    """,
                    names={"_patches_to_plain_parameter": dequantized_in_place.to_plain_parameter},
                    when=when,
                )
                for rest, when in (("convert_to_format", "bitsandbytes<0.49"), ("_", "bitsandbytes>=0.49"))
            ),
            defect_moving,
        ),
    ),
)
