"""Some image models read the weight of a layer themselves: quantized, outputs are wrong, or forward raises an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...config import quantizers, skip_list, weights_read
from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import image_models

if TYPE_CHECKING:
    from torch.nn import Module

READ = weights_read.by_class(
    (
        # activations are cast to the dtype of the weight
        ("ImageProjection", "image_embeds"),
        (
            "AnyFlowDualTimestepTextImageEmbedding AnyFlowDualTimestepTextImageEmbeddingCausal",
            "delta_embedder.linear_1",
        ),
        # activations are cast to the dtype of the weight, or to compute_dtype, which INT8 layers do not have
        ("transformer_bria_fibo2.TimestepEmbedder", "mlp.0"),
        # the weight is an argument of a function
        ("HunyuanDiTAttentionPool", "q_proj k_proj v_proj c_proj"),
    )
)
"""Classes of diffusers, and their layers whose weight they read."""


def skip_layers_read(quantizer: Any, model: Module) -> list[str]:
    """Return the names that ``quantizer`` does not quantize, and the layers whose weight ``model`` reads."""
    import torch

    names = [name for name in quantizer.modules_to_not_convert if name is not None]
    if quantizer.pre_quantized:
        return names
    layers = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    read = weights_read.find_layers_read(model, READ, quantizer.quantization_config, layers)
    more = [path for path in read if not any(skip_list.skips_by_text(name, path) for name in names)]
    if more:
        skip_list.also_skip(quantizer, more)
        model.register_to_config(quantization_config=quantizer.quantization_config)  # type: ignore[operator]
    return [*names, *more]


def defect() -> Finding:
    """Load a tiny UNet of Kandinsky 2.2 in 4 bits, and run it beside one whose weights were rounded to the same values."""
    import tempfile

    import bitsandbytes
    import torch
    from diffusers import BitsAndBytesConfig, UNet2DConditionModel

    torch.manual_seed(0)
    rounded = UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        block_out_channels=(64,),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=64,
        encoder_hid_dim=64,
        encoder_hid_dim_type="image_proj",
        addition_embed_type="image",
    ).eval()
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_enable_fp32_cpu_offload=True,  # or diffusers refuses a map with "cpu"
    )
    with tempfile.TemporaryDirectory() as folder, image_models.as_with_gpu():
        rounded.save_pretrained(folder)
        model = UNet2DConditionModel.from_pretrained(
            folder, quantization_config=how, torch_dtype=torch.float32, device_map={"": "cpu"}
        ).eval()
    for path, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            rounded.get_submodule(path).weight.data = weight.float()
    image = {"image_embeds": torch.randn(1, 64)}
    latents = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        try:
            got, expected = (
                each(latents, 1, encoder_hidden_states=None, added_cond_kwargs=image).sample
                for each in (model, rounded)
            )
        except (TypeError, RuntimeError) as error:
            if "floating-point input" not in str(error) and "mixed dtype" not in str(error):
                raise
            return Finding(True, str(error))
    off = ((got - expected).norm() / expected.norm()).item()
    return Finding(not off < 1e-2, f"outputs off by {off:.1e} of their norm")


PATCH = Patch(
    id="diffusers-weight-read-by-model",
    summary="Kandinsky 2.2, HunyuanDiT and AnyFlow raise errors when quantized: they read packed weights themselves",
    groups=("from_pretrained", "layers"),
    silent=True,
    messages=(
        Message("mixed dtype (CPU): all inputs must share same datatype.", "torch/lib/libtorch_cpu.so"),
        Message(
            "expecting query weights shape of (64, 64), but got torch.Size([2048, 1])",
            "torch/nn/functional.py",
            parts=("expecting query weights shape of ",),
        ),
        Message(
            "Expected query, key, and value to have the same dtype, but got query.dtype: c10::BFloat16 key.dtype: c10::BFloat16 and value.dtype: float instead.",
            "torch/lib/libtorch_cpu.so",
            parts=("Expected query, key, and value to have the same dtype, but got query.dtype: ",),
        ),
        Message(
            "\"silu_cpu\" not implemented for 'Byte'",
            "torch/lib/libtorch_cpu.so",
            parts=("\" not implemented for 'Byte'",),
            holds=("silu_cpu", "\" not implemented for '"),
        ),
    ),
    links=(
        "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/embeddings.py#L1297",
        "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/embeddings.py#L1445",
    ),
    why="""
        If a layer is quantized, its ``weight`` holds packed bytes. Some model files of diffusers read it:

        - ``ImageProjection`` casts image embeddings to its dtype, which is ``torch.uint8`` in 4 bits and ``torch.int8``
          in INT8. UNets that take an image (Kandinsky 2.2) raise an error about dtypes in the norm that follows.
        - AnyFlow casts timesteps to the dtype of the first weight of ``delta_embedder``. In 4 bits forward raises
          ``"silu_cpu" not implemented for 'Byte'``. In INT8 its gate becomes zero, silently.
        - HunyuanDiT gives the weights of its attention pool to ``multi_head_attention_forward``, which raises an error
          about shapes in 4 bits and about dtypes in INT8.
        - FIBO 2 in INT8 leaves timesteps in float32. In a bfloat16 model this makes all activations float32, until
          attention raises ``Expected query, key, and value to have the same dtype``.
    """,
    repair="""
        With the repair such a layer stays in floating point when a model is quantized, as with
        ``llm_int8_skip_modules``, and is added to that list in the configuration, so that a saved model loads without
        the plugin. It affects only the layers in a list in the file of the patch (``READ``), and only if the installed
        source still reads their weight. A checkpoint that is already quantized is loaded as its file says.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=tuple(
        Rewrite(
            f"{quantizer}.{quantizers.BEFORE_LOADING}",
            find="[module for module in self.modules_to_not_convert if module is not None]",
            replace="_patches_skip_layers_read(self, model)",
            names={"_patches_skip_layers_read": skip_layers_read},
        )
        for quantizer in quantizers.QUANTIZERS_OF_DIFFUSERS
    ),
    defect=defect,
)
