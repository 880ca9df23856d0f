"""4-bit layers of a bf16 checkpoint that is loaded in fp16 dequantize to bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...quantized.four_bit import state_dtypes
from ..reproducers import tiny_models
from ..reproducers.quantized_models import save_quantized

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


def set_state_dtypes(quantizer: Any, model: Module) -> bool:
    """Give the quantization states of ``model`` the dtype that was asked for. Return True, which the caller sets."""
    if quantizer.pre_quantized:
        state_dtypes.set_below(model, None, _dtype_of)
    return True


def _dtype_of(module: Any) -> torch.dtype | None:
    """Return the dtype of ``module``, a part of a model that may be a model itself."""
    import torch

    config = getattr(module, "config", None)
    found = vars(config) if hasattr(config, "__dict__") else {}
    for name in ("_pre_quantization_dtype", "dtype", "_dtype"):
        value = found.get(name)
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return value
    return None


def defect() -> Finding:
    """Save a tiny Llama of bf16 in 4 bits, and load it in float16."""
    import tempfile

    import torch
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
    with tempfile.TemporaryDirectory() as packed:
        save_quantized(packed, tiny_models.make_llama(), how, torch_dtype=torch.bfloat16)
        model = LlamaForCausalLM.from_pretrained(packed, torch_dtype=torch.float16)
    dtype = model.model.layers[0].mlp.up_proj.weight.quant_state.dtype
    return Finding(dtype is not torch.float16, f"asked for torch.float16, weights are dequantized in {dtype}")


PATCH = Patch(
    id="transformers-quant-state-dtype",
    summary="4-bit layers of a bf16 checkpoint loaded in fp16 dequantize to bf16",
    groups=("from_pretrained", "merge"),
    silent=True,
    words=("loss is nan, or does not fall",),
    links=(
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/quantizers/quantizer_bnb_4bit.py",
    ),
    why="""
        A 4-bit layer dequantizes its weight in the dtype of its quantization state, which is read from the file. If
        a bf16 checkpoint is loaded with ``dtype=torch.float16``, as on every T4, each weight is first rounded to
        the 8 bits of bf16 and then cast. ``model.dequantize()``, merging and peft read bf16 from an fp16 model, and
        a model that is saved again has bf16 in each quantization state and fp16 in its configuration. A model that
        is quantized while it is loaded has the dtype that the user gave. All releases that load 4-bit checkpoints.
    """,
    repair="""
        The repair gives the quantization state of each layer the dtype in which the rest of the model is loaded.
        Packed weights and absmax stay the same. If both dtypes are the same, nothing changes.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=tuple(
        Rewrite(
            "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer._process_model_after_weight_loading",
            find=sets_flag.format("True"),
            replace=sets_flag.format("_patches_set_state_dtypes(self, model)"),
            names={"_patches_set_state_dtypes": set_state_dtypes},
            when=when,
        )
        for sets_flag, when in (
            ("setattr(model, 'is_loaded_in_4bit', {})", "transformers>=5.4"),
            ("model.is_loaded_in_4bit = {}", "transformers<5.4"),
        )
    ),
    defect=defect,
)
