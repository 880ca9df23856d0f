"""Some models read the weight of a layer themselves: in 4 bits outputs are wrong, or forward raises an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...config import quantizers, skip_list, weights_read
from ...engine import Finding, Message, Patch
from ..reproducers.quantized_models import load_quantized

if TYPE_CHECKING:
    from torch.nn import Module

_READERS = (
    # activations are cast to the dtype of the weight
    ("Blip2ForImageTextRetrieval", "itm_head vision_projection text_projection"),
    ("Blip2TextModelWithProjection", "text_projection"),
    ("Blip2VisionModelWithProjection", "vision_projection"),
    ("FalconMambaForCausalLM HYV4ForCausalLM Mamba2ForCausalLM MambaForCausalLM xLSTMForCausalLM", "lm_head"),
    ("GraniteSpeech5Encoder", "input_linear"),
    ("AXK2Indexer DeepseekV32Indexer Dots3NoteTextIndexer Glm5NextTextIndexer GlmMoeDsaIndexer", "weights_proj"),
    ("HYV4Indexer MistralLarge4TextIndexer", "weights_proj"),
    ("Kosmos2_5VisionMlp Pix2StructTextDenseGatedActDense Pix2StructVisionMlp", "wo"),
    ("LongT5DenseActDense LongT5DenseGatedActDense Pop2PianoDenseActDense Pop2PianoDenseGatedActDense", "wo"),
    ("SwitchTransformersDenseActDense UdopDenseActDense UdopDenseGatedActDense", "wo"),
    ("Swin2SRSelfAttention Swinv2SelfAttention", "continuous_position_bias_mlp.0"),
    ("UniSpeechForPreTraining Wav2Vec2ConformerForPreTraining Wav2Vec2ForPreTraining", "project_q"),
    # the weight is a matrix in a product
    ("ConditionalDetrMHAttentionMap DetrMHAttentionMap MaskFormerDetrMHAttentionMap", "k_proj"),
    ("DabDetrMHAttentionMap", "k_linear"),
    ("DisentangledSelfAttention", "in_proj"),
    ("LayoutLMv2Encoder LayoutLMv3Encoder", "rel_pos_bias rel_pos_x_bias rel_pos_y_bias"),
    ("LongcatFlashTopkRouter", "classifier"),
    ("MambaMixer", "dt_proj"),
    ("MobileBertLMPredictionHead", "decoder dense"),
    ("TDNNLayer", "kernel"),
    ("WavLMAttention", "q_proj k_proj v_proj out_proj"),
)
READ = weights_read.by_class(_READERS)
"""Classes of transformers, and their layers whose weight they read."""


def skip_layers_read(quantizer: Any, model: Module) -> Callable[..., list[str]]:
    """Return ``quantizer.get_modules_to_not_convert``, whose list has the layers whose weight ``model`` reads, too."""
    get: Callable[..., list[str]] = quantizer.get_modules_to_not_convert
    if quantizer.pre_quantized:
        return get
    read = weights_read.find_layers_read(
        model, READ, quantizer.quantization_config, skip_list.find_linear_layers(model)
    )

    def run(*args: Any, **kwargs: Any) -> list[str]:
        names = get(*args, **kwargs)
        more = [path for path in read if not any(skip_list.skips_layer(name, path) for name in names)]
        if more:
            # A list replaces the default, which is in ``names`` if there was none.
            skip_list.set_list(quantizer, [*sorted(names), *more])
        return [*names, *more]

    return run


def defect() -> Finding:
    """Load a tiny LongT5 in 4 bits, and run it beside one whose weights were rounded to the same values."""
    import bitsandbytes
    import torch
    from transformers import BitsAndBytesConfig, LongT5Config, LongT5ForConditionalGeneration

    torch.manual_seed(0)
    config = LongT5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    rounded = LongT5ForConditionalGeneration(config).eval()
    model = load_quantized(rounded, how, torch_dtype=torch.float32).eval()
    for path, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            rounded.get_submodule(path).weight.data = weight.float()
    ids = torch.arange(16)[None]
    with torch.no_grad():
        try:
            logits, expected = (each(input_ids=ids, decoder_input_ids=ids).logits for each in (model, rounded))
        except TypeError as error:
            return Finding(True, str(error))
    off = ((logits - expected).norm() / expected.norm()).item()
    return Finding(not off < 1e-2, f"logits off by {off:.1e} of their norm")


PATCH = Patch(
    id="transformers-weight-read-by-model",
    summary="LongT5, Switch and others are wrong in 4 bits: they cast activations to the dtype of packed weights",
    groups=("from_pretrained", "layers"),
    silent=True,
    messages=(
        Message(
            "Expected size for first two dimensions of batch2 tensor to be: [2, 1] but got: [2, 8].",
            "torch/lib/libtorch_cpu.so",
            parts=("Expected size for first two dimensions of batch2 tensor to be",),
        ),
        Message(
            "result type Float can't be cast to the desired output type Byte",
            "torch/lib/libtorch_cpu.so",
            parts=(" can't be cast to the desired output type ",),
        ),
    ),
    words=("loss is nan, or does not fall",),
    links=(
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/longt5/modeling_longt5.py#L293",
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/mamba/modeling_mamba.py#L438",
    ),
    why="""
        If a layer is quantized, its ``weight`` holds packed bytes. Some model files read it:

        - They cast activations to its dtype (``hidden_states.to(self.wo.weight.dtype)``), which is ``torch.uint8``
          in 4 bits. LongT5 and Switch are silently wrong by 1.5 of the norm of their outputs. udop, pix2struct,
          kosmos2_5, blip_2 and the indexers of DeepSeek V3.2 and similar models have the same line. Swin v2 makes
          its table of positions in this dtype. T5 itself keeps these layers in float32.
        - They use it as a matrix (``self.dt_proj.weight @ x``): Mamba raises an error about shapes. WavLM and
          wav2vec2's heads for speakers read weights in the same way.

        transformers 4.53 to 5.23.
    """,
    repair="""
        With the repair such a layer stays in floating point when a model is quantized, as with
        ``llm_int8_skip_modules``, and is added to that list in the configuration, so that a saved model loads without
        the plugin. It affects only the layers in a list in the file of the patch (``READ``), and only if the installed
        source still reads their weight. If the cast does harm only in 4 bits, INT8 stays as it was. A checkpoint that
        is already quantized is loaded as its file says; there ``bitsandbytes-integer-input`` raises an error.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=quantizers.rewrite_both_quantizers(
        quantizers.BEFORE_LOADING,
        find="self.get_modules_to_not_convert",
        replace="_patches_skip_layers_read(self, model)",
        function=skip_layers_read,
    ),
    defect=defect,
)
