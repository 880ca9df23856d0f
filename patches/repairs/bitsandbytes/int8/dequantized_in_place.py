"""An INT8 layer that was dequantized in place is quantized again by the next ``.to()``, and then fails.

``layer.weight.data = dequantized`` and ``layer.__class__ = torch.nn.Linear`` turn a ``Linear8bitLt`` into a plain
layer without touching its parents. Its weight is still an ``Int8Params``, which quantizes its values when it is moved.
After ``model.to(device)`` the plain layer multiplies floats by int8: ``expected m1 and m2 to have the same dtype``.
All releases.

The repair moves the values of such a weight as they are. It looks for the module only if a floating-point weight still
has packed weights or scales of an earlier quantization. A weight in a ``Linear8bitLt`` is quantized as before, also if
it was given other values.
"""

from __future__ import annotations

from ....engine import Finding, Patch, Rewrite
from ....quantized.weights import dequantized_in_place


def defect() -> Finding:
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


PATCH = Patch(
    id="bitsandbytes-int8-dequantized-in-place",
    summary="an INT8 layer that was dequantized in place and made nn.Linear is quantized again by to(), and fails",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L724",),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    seen_on=("2.13",),
    edits=tuple(
        Rewrite(
            "bitsandbytes.nn.modules:Int8Params.to",
            find=f"device, dtype, non_blocking, {rest} = torch._C._nn._parse_to(*args, **kwargs)",
            replace=f"""
                if (plain := _patches_plain(self)) is not None:
                    return plain.to(*args, **kwargs)
                device, dtype, non_blocking, {rest} = torch._C._nn._parse_to(*args, **kwargs)
            """,
            names={"_patches_plain": dequantized_in_place.to_plain_parameter},
            when=when,
        )
        for rest, when in (("convert_to_format", "bitsandbytes<0.49"), ("_", "bitsandbytes>=0.49"))
    ),
    defect=defect,
)
