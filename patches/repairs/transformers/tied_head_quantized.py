"""Any list in ``llm_int8_skip_modules`` makes a tied head a quantized layer without packed weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...config import quantizers, skip_list
from ...engine import Finding, Message, Patch
from ..reproducers import tiny_models
from ..reproducers.quantized_models import load_quantized

if TYPE_CHECKING:
    from torch.nn import Module


def with_tied(quantizer: Any, model: Module, kept: Iterable[str] | None) -> Iterable[str] | None:
    """Return ``kept`` and the tied linear layers of ``model``, if a list of the user's has replaced the default."""
    names = quantizer.quantization_config.llm_int8_skip_modules
    if names is None:
        return kept
    tied = sorted(_tied(model).intersection(skip_list.find_linear_layers(model)))
    new = [path for path in tied if not any(skip_list.skips_layer(name, path) for name in names)]
    if not new:
        return kept
    if not quantizer.pre_quantized:
        skip_list.also_skip(quantizer, new)
    return [*(kept or ()), *new]


def _tied(model: Any) -> set[str]:
    """Return the paths of the modules of ``model`` whose weights are tied to another's."""
    if hasattr(model, "all_tied_weights_keys"):
        tied: dict[str, str] = model.all_tied_weights_keys
        return {name.removesuffix(".weight") for name in (*tied, *tied.values())}
    from transformers import PreTrainedModel

    heads = [_tied_head(module) for module in model.modules() if isinstance(module, PreTrainedModel)]
    return {path for path, module in model.named_modules() if any(module is head for head in heads)}


def _tied_head(model: Any) -> Any:
    """Return the head of ``model``, on transformers 4, if it is tied to the embeddings."""
    tied = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", True)
    return model.get_output_embeddings() if tied else None


def defect() -> Finding:
    """Load a tiny Llama with a tied head in 4 bits, with a list of modules to skip, and run it."""
    import torch
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["q_proj"])
    try:
        model = load_quantized(tiny_models.make_llama(tie_word_embeddings=True), how, device_map="cpu")
    except AttributeError as error:
        if "is not an nn.Module" not in str(error):
            raise
        return Finding(True, f"while loading: {error}")
    head = model.lm_head
    if type(head) is torch.nn.Linear:
        return Finding(head.weight is not model.model.embed_tokens.weight, "the head is nn.Linear, and tied")
    return Finding(True, f"the head is {type(head).__name__}, its weight {head.weight.dtype}")


PATCH = Patch(
    id="transformers-tied-head-quantized",
    summary="any llm_int8_skip_modules makes a tied head a quantized layer without a quantization state",
    groups=("from_pretrained", "layers"),
    silent=True,
    messages=(
        Message(
            "'Parameter' object has no attribute 'compress_statistics'",
            "peft/tuners/ia3/model.py",
            parts=("object has no attribute 'compress_statistics'",),
            holds=(".weight.compress_statistics",),
        ),
        Message("`weight` is not an nn.Module", "torch/nn/modules/module.py", parts=("` is not an nn.Module",)),
    ),
    links=(
        "https://github.com/huggingface/transformers/issues/45674",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1634",
    ),
    why="""
        Without a list, transformers does not quantize the head of a model. Any list replaces that default. If the
        head is tied to the embeddings (small Llama, Qwen and Gemma models), it becomes a ``Linear4bit`` or
        ``Linear8bitLt`` whose weight is the floating-point embedding. Its forward raises ``AssertionError`` or
        ``'Parameter' object has no attribute 'CB'``, and transformers 4.57 raises ``'weight' is not an nn.Module``
        while loading. With ``bitsandbytes-linear4bit-plain-weight`` the layer computes, but peft and ``all-linear``
        find a quantized layer without a quantization state. All releases (transformers #45674, #45734, bitsandbytes
        #1634).
    """,
    repair="""
        With the repair a tied head is never quantized, whatever the list, and is added to the list in the
        configuration of the model, so that a saved model loads without the plugin. A head that is not tied is
        quantized by such a list as before.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=tuple(
        edit
        for kept, when in (
            ("model._keep_in_fp32_modules", "transformers>=5"),
            ("keep_in_fp32_modules", "transformers<5"),
        )
        for edit in quantizers.rewrite_both_quantizers(
            quantizers.BEFORE_LOADING, kept, f"_patches_with_tied(self, model, {kept})", with_tied, when
        )
    ),
    defect=defect,
)
