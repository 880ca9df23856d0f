"""A LoRA for FLUX cannot be loaded into a 4-bit FLUX Depth or Canny, whose first layer is wider."""

from __future__ import annotations

from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import image_models


def defect() -> Finding:
    """Load an adapter of a tiny FLUX, its first layer included, into a 4-bit one with twice as many input channels."""
    import tempfile

    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxControlPipeline

    generator = torch.Generator().manual_seed(0)
    adapter = {
        f"transformer.x_embedder.lora_{name}.weight": torch.randn(*shape, generator=generator)
        for name, shape in (("A", (4, 64)), ("B", (64, 4)))
    }
    with tempfile.TemporaryDirectory() as folder:
        image_models.save_flux(folder, in_channels=128)
        model = image_models.load_flux(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    others = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = FluxControlPipeline(FlowMatchEulerDiscreteScheduler(), transformer=model, **others)
    try:
        pipe.load_lora_weights(adapter)
    except RuntimeError as error:
        return Finding(True, f"RuntimeError: {error}")
    loaded = model.x_embedder.lora_A["default_0"].weight
    kept = torch.equal(loaded[:, :64], adapter["transformer.x_embedder.lora_A.weight"]) and not loaded[:, 64:].any()
    return Finding(not kept, "loaded, with zeros for the other channels" if kept else "other weights were loaded")


PATCH = Patch(
    id="diffusers-lora-of-narrower-model",
    summary="a LoRA for FLUX cannot be loaded into a 4-bit FLUX Depth, Canny or other Control model",
    groups=("layers",),
    messages=(
        Message(
            "output with shape [4, 1] doesn't match the broadcast shape [4, 64]",
            "figure",
            parts=("output with shape [", "] doesn't match the broadcast shape ["),
        ),
    ),
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/lora_pipeline.py",),
    why="""
        FLUX Depth and Canny have 128 input channels, FLUX 64. When a LoRA of FLUX that adapts ``x_embedder`` is
        loaded into one of them (Hyper-SD, Turbo), diffusers fills its ``lora_A`` with zeros up to the width of the
        layer. It computes the width of a 4-bit layer in order to compare it, but then takes the width of the packed
        bytes, which lie in one column: ``output with shape [16, 1] doesn't match the broadcast shape [16, 64]``.
        INT8 and plain models are right. All releases.
    """,
    repair="""
        The zeros are filled up to the width that was compared. Other models are loaded as before.
    """,
    requires=("diffusers>=0.33", "peft>=0.16", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite(
            "diffusers.loaders.lora_pipeline:FluxLoraLoaderMixin._maybe_expand_lora_state_dict",
            find="base_weight_param.shape[1]",
            replace="base_module_shape[1]",
        ),
    ),
    defect=defect,
)
