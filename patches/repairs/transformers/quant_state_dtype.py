"""4-bit layers of a bf16 checkpoint that is loaded in fp16 dequantize to bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...quantized.four_bit import quant_states

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


def follow(quantizer: Any, model: Module) -> bool:
    """Give the quantization states of ``model`` the dtype that was asked for. True: what the caller sets."""
    if quantizer.pre_quantized:
        _follow(model, None)
    return True


def _follow(module: Any, dtype: torch.dtype | None) -> None:
    """``dtype`` is the dtype of the model that ``module`` is a part of; a part that is a model has its own."""
    dtype = _asked(getattr(module, "config", None)) or dtype
    state = quant_states.get_quant_state(getattr(module, "weight", None))
    if dtype is not None and state is not None:
        state.dtype = dtype
    for child in module.children():
        _follow(child, dtype)


def _asked(config: Any) -> torch.dtype | None:
    import torch

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
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
    load = LlamaForCausalLM.from_pretrained
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as packed:
        LlamaForCausalLM(LlamaConfig(vocab_size=8, **size)).save_pretrained(plain)
        load(plain, quantization_config=how, torch_dtype=torch.bfloat16).save_pretrained(packed)
        model = load(packed, torch_dtype=torch.float16)
    dtype = model.model.layers[0].mlp.up_proj.weight.quant_state.dtype
    return Finding(dtype is not torch.float16, f"asked for torch.float16, weights are dequantized in {dtype}")


_AFTER = "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer._process_model_after_weight_loading"
_NAMES = {"_patches_follow": follow}

PATCH = Patch(
    id="transformers-quant-state-dtype",
    summary="4-bit layers of a bf16 checkpoint loaded in fp16 dequantize to bf16",
    groups=("asked", "merge"),
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
    edits=(
        Rewrite(
            _AFTER,
            find="setattr(model, 'is_loaded_in_4bit', True)",
            replace="setattr(model, 'is_loaded_in_4bit', _patches_follow(self, model))",
            names=_NAMES,
            when="transformers>=5.4",
        ),
        Rewrite(
            _AFTER,
            find="model.is_loaded_in_4bit = True",
            replace="model.is_loaded_in_4bit = _patches_follow(self, model)",
            names=_NAMES,
            when="transformers<5.4",
        ),
    ),
    defect=defect,
)
