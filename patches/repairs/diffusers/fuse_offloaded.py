"""``fuse_lora`` and ``unfuse_lora`` of an offloaded image model fail, or are silently lost."""

from __future__ import annotations

from ...adapters.merge_offloaded_layers import merge_onloaded, unmerge_onloaded
from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import image_models


def defect() -> Finding:
    """Fuse a LoRA into a tiny FLUX that is in CPU memory, and compare with the LoRA beside it."""
    import torch
    from accelerate import cpu_offload
    from peft import LoraConfig

    model = image_models.make_flux()
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    for module in model.modules():
        if hasattr(module, "base_layer"):
            cpu_offload(module.base_layer, execution_device=torch.device("cpu"))
    inputs = image_models.flux_inputs(torch.float32)
    with torch.no_grad():
        expected = model(**inputs)[0]
        model.fuse_lora()
        error = float((model(**inputs)[0] - expected).norm() / expected.norm())
    return Finding(error > 1e-3, f"relative error of the fused model {error:.0e}")


_LOADERS = "diffusers.loaders"
_BASE = f"{_LOADERS}.lora_base"

PATCH = Patch(
    id="diffusers-fuse-offloaded",
    summary="fuse_lora and unfuse_lora fail on offloaded layers of an image model, or are silently lost",
    groups=("offload", "merge"),
    silent=True,
    messages=(Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),),
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/peft.py#L670",),
    why="""
        ``fuse_lora`` calls ``merge`` of each layer with an adapter, and ``unfuse_lora`` calls ``unmerge``, for a model,
        a pipeline and a text encoder alike. The weight of an offloaded layer is on meta then: accelerate's hook brings
        it for a forward only. On a plain layer the result is written to the tensor on meta and silently lost, so the
        fused model computes without the adapter. On a quantized layer an error is raised: ``Tensor on device cpu is not
        on the expected device meta!`` in 4 bits, ``'NoneType' object has no attribute 'to'`` in INT8. All models of
        diffusers with a device map over the CPU or the disk, 0.33 to 0.42.
    """,
    repair="""
        The repair brings the weight of each such layer to its device before it is merged, and writes what has
        changed to where the hook reads it: into the map in memory, or to a new file. It does so one layer at a time,
        with the code of peft-merge-offloaded. Layers that are not offloaded are merged as before.
    """,
    requires=("diffusers>=0.33", "peft>=0.14", "accelerate>=0.26.1"),
    tested_up_to="0.42.1",
    edits=(
        *(
            Rewrite.to_call(target, "module.merge(**merge_kwargs)", merge_onloaded, "module, merge_kwargs")
            for target in (f"{_LOADERS}.peft:PeftAdapterMixin._fuse_lora_apply", f"{_BASE}:fuse_text_encoder_lora")
        ),
        *(
            Rewrite.to_call(target, "module.unmerge()", unmerge_onloaded, "module")
            for target in (
                f"{_LOADERS}.peft:PeftAdapterMixin._unfuse_lora_apply",
                f"{_BASE}:unfuse_text_encoder_lora",
                f"{_BASE}:LoraBaseMixin.unfuse_lora",
            )
        ),
    ),
    defect=defect,
)
