"""UniLora silently learns nothing on quantized layers, because its scales are rounded to integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...process import live_objects
from ..reproducers.adapted_layer import quantized_layer

if TYPE_CHECKING:
    import torch


def dtype_of_scales(base_layer: Any, vector: torch.Tensor) -> torch.dtype:
    """Return the dtype of the weight of ``base_layer``, or if that is packed, of ``vector``."""
    dtype: torch.dtype = base_layer.weight.dtype
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else vector.dtype


def damage() -> tuple[str, ...]:
    """Count adapters that were put on before the patch was applied."""
    lost = len(live_objects.without_garbage(_with_lost_scales))
    found = f"{lost} UniLora layers have scales in an integer dtype: add the adapter again, and train it"
    return (found,) if lost else ()


def _with_lost_scales() -> list[Any]:
    from peft.tuners.unilora.layer import Linear

    layers: list[Any] = live_objects.find_instances(Linear)
    return [a for a in layers if any(not scale.dtype.is_floating_point for scale in a.unilora_scales_A.values())]


def defect() -> Finding:
    """Run a backward through UniLora on an INT8 layer."""
    import torch
    from peft import UniLoraConfig, get_peft_model

    base = torch.nn.Sequential(quantized_layer(int8=True, bias=False))
    model = get_peft_model(base, UniLoraConfig(r=4, theta_d_length=64, target_modules=["0"]))
    model(torch.randn(4, 64)).square().sum().backward()
    (vector,) = (p for p in model.parameters() if p.requires_grad)
    learning = 0 if vector.grad is None else int(vector.grad.count_nonzero())
    return Finding(learning == 0, f"{learning} of {vector.numel()} entries of the vector get a gradient")


PATCH = Patch(
    id="peft-unilora-scales",
    summary="UniLora silently learns nothing on quantized layers: its scales become zero",
    groups=("layers", "train"),
    silent=True,
    words=("loss is nan, or does not fall",),
    links=("https://github.com/huggingface/peft/blob/main/src/peft/tuners/unilora/layer.py",),
    why="""
        UniLora takes every entry of its low-rank matrices from one shared vector, times a scale below one. It
        stores the scales in the dtype of the base weight, which for packed weights is ``torch.int8`` in a
        ``Linear8bitLt`` and ``torch.uint8`` in a ``Linear4bit``. So a scale is 1 if an entry of the vector is used
        once, and 0 if it is used more often, which in a model is always so. The adapter adds nothing, all its
        gradients are zero, and the training loss stays the output of the base model, without a message. All
        releases that have it, peft 0.20 and later. It trains on unquantized layers, and with a floating-point
        ``bnb_4bit_quant_storage``.
    """,
    repair="""
        If the weight is packed, the repair stores the scales in the dtype of the vector. A floating-point weight of
        two bytes or more determines the dtype as before. An adapter that was "trained" without the patch has its
        initial values: train it again.
    """,
    requires=("peft>=0.20", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(
        Rewrite.to_call(
            "peft.tuners.unilora.layer:UniLoraLayer.update_scaling",
            "base_layer.weight.dtype",
            dtype_of_scales,
            "base_layer, self.unilora_theta_d[adapter_name]",
        ),
    ),
    defect=defect,
    damage=damage,
)
