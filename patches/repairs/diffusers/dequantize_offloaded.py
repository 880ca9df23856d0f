"""``dequantize()`` of an offloaded image model gives other weights, or fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Message, Patch, Rewrite
from ...loading.dequantize_offloaded_layers import replace_offloaded_layers
from ...quantized.int8.weight_moves import keep_packed_weight
from ..reproducers import image_models

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


def dequantize_offloaded(model: Module, quantized: type[Any], dtype: torch.dtype | None) -> bool:
    """Replace the offloaded layers of the class ``quantized``, and tell whether there were any."""
    from diffusers.quantizers.bitsandbytes.utils import dequantize_bnb_weight

    def dequantize(weight: Any, state: Any) -> Any:
        return dequantize_bnb_weight(weight, state, dtype)

    return replace_offloaded_layers(model, quantized, dtype, dequantize)


def defect() -> Finding:
    """Dequantize a tiny INT8 FLUX that is in CPU memory."""
    import tempfile

    import torch
    from accelerate import cpu_offload

    with tempfile.TemporaryDirectory() as folder:
        image_models.save_flux(folder)
        model, expected = (image_models.load_flux(folder, load_in_8bit=True) for _ in range(2))
    expected.dequantize()
    cpu_offload(model, execution_device=torch.device("cpu"))
    inputs = image_models.flux_inputs(torch.float32)
    try:
        with torch.no_grad():
            model.dequantize()
            error = float((model(**inputs)[0] - expected(**inputs)[0]).norm())
    except (NotImplementedError, RuntimeError, TypeError) as raised:  # the last beside accelerate up to 1.12
        return Finding(True, f"{type(raised).__name__}: {str(raised).split(';')[0]}")
    return Finding(not error == 0, f"outputs differ from the whole model's by {error:.1e}")


_CLASS = "target_cls = bnb.nn.Linear8bitLt if quant_method == 'llm_int8' else bnb.nn.Linear4bit"

PATCH = Patch(
    id="diffusers-dequantize-offloaded",
    summary="dequantize() of a partly offloaded image model fails, or silently gives wrong weights",
    groups=("offload", "merge"),
    silent=True,
    messages=(Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),),
    links=(
        "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/quantizers/bitsandbytes/utils.py#L195",
    ),
    why="""
        Each quantized layer is replaced by a plain one with its dequantized weight. An offloaded weight is on meta, so
        the result is on meta too, without an error. The new layer gets a copy of accelerate's hook, which brings the
        packed weight as if it were the dequantized one: outputs of an INT8 model are wrong by a factor of a thousand.
        diffusers 0.33 to 0.42.
    """,
    repair="""
        The repair replaces the offloaded layers first, one at a time, with the code of
        transformers-dequantize-offloaded. It brings the weight to its device, dequantizes it like any other layer,
        writes it to where the hook reads it (for the disk, a new file) and offloads it again, with its hook. So the
        model stays offloaded. If the weights of a layer are brought by a module around it, an error is raised before
        anything is changed.
    """,
    cost="""
        The dequantized model takes as much memory or disk as plain weights.
    """,
    requires=("diffusers>=0.33", "transformers>=4.53", "accelerate>=0.26.1", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite(
            "diffusers.quantizers.bitsandbytes.utils:_dequantize_and_replace",
            find=_CLASS,
            replace=f"""
                {_CLASS}
                has_been_replaced = _patches_dequantize_offloaded(model, target_cls, dtype) or has_been_replaced
            """,
            names={"_patches_dequantize_offloaded": dequantize_offloaded},
        ),
        *keep_packed_weight(">=0.48,<0.48.2"),  # there the hook of an INT8 layer raises an error
    ),
    defect=defect,
)
