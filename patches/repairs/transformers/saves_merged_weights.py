"""``save_pretrained`` joins the packed weights of quantized layers and loses their quantization states."""

from __future__ import annotations

from typing import Any

from ...config.quantizers import reads_packed_weights
from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import tiny_models
from ..reproducers.quantized_models import save_quantized


def revertible(conversions: list[Any], model: Any) -> list[Any]:
    """Return ``conversions`` without the ones that would join the weights of quantized layers of ``model``."""
    kinds = ("Linear4bit", "Linear8bitLt")
    weights = [f"{path}.weight" for path, module in model.named_modules() if type(module).__name__ in kinds]
    return [each for each in conversions if not weights or not _joins(each, weights)]


def _joins(conversion: Any, weights: list[str]) -> bool:
    """Tell whether ``conversion``, reverted, changes one of ``weights``."""
    only_renames = not getattr(conversion, "operations", None)
    if only_renames or reads_packed_weights(conversion):  # transformers-save-prequantized is about the latter
        return False
    reverted = conversion.reverse_transform()
    return any(reverted.rename_source_key(weight)[1] is not None for weight in weights)


def defect() -> Finding:
    """Load a tiny HRM in 4 bits, save it, and load it again."""
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HrmTextConfig

    torch.manual_seed(0)
    config = HrmTextConfig(vocab_size=16, head_dim=32, **{**tiny_models.SIZE, "num_hidden_layers": 2})
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    ids = torch.arange(8)[None]
    with tempfile.TemporaryDirectory() as packed, torch.no_grad():
        model = save_quantized(packed, AutoModelForCausalLM.from_config(config), how, device_map="cpu").eval()
        expected = model(ids, use_cache=False).logits
        try:
            again = AutoModelForCausalLM.from_pretrained(packed, device_map="cpu").eval()
            logits = again(ids, use_cache=False).logits
        except (AttributeError, RuntimeError, AssertionError, ValueError) as error:
            return Finding(True, f"loaded again: {type(error).__name__}: {str(error).partition('.')[0]}")
    off = ((logits - expected).norm() / expected.norm()).item()
    return Finding(not off < 1e-5, f"loaded again, logits off by {off:.1e} of their norm")


PATCH = Patch(
    id="transformers-saves-merged-weights",
    summary="a 4-bit or INT8 model whose checkpoint joins layers (HRM) is saved without its quantization states",
    groups=("from_pretrained", "save"),
    messages=(Message("'NoneType' object has no attribute 'dtype'", "figure"),),
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/core_model_loading.py#L1882",),
    why="""
        Some checkpoints hold several layers in one tensor (HRM: ``gqkv_proj`` becomes the layers ``q_proj``,
        ``k_proj``, ``v_proj`` and ``gate_proj``). ``save_pretrained`` joins them again. It also joins packed
        weights, and writes one quantization state for all of them. A model that was saved in 4 bits or INT8 then
        cannot be loaded (``quant_state is required``, ``'NoneType' object has no attribute 'dtype'``), and its
        weights are lost. transformers 5.10 to 5.23.
    """,
    repair="""
        With the repair such layers are saved separately, each under its own name with its own quantization state.
        ``from_pretrained`` finds them, also without the plugin. A floating-point model, and conversions that
        concern no quantized layer, are saved as before. If you saved a model without the repair, quantize and save
        it again.
    """,
    requires=("transformers>=5.10", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite(
            "transformers.core_model_loading:revert_weight_conversion",
            find="weight_conversions[::-1]",
            replace="_patches_revertible(weight_conversions, model)[::-1]",
            names={"_patches_revertible": revertible},
        ),
    ),
    defect=defect,
)
