"""``dtype=`` is ignored for the floating-point weights of a quantized checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...config.quantizers import is_bitsandbytes
from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import tiny_models
from ..reproducers.quantized_models import save_quantized

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

_FLOATING = ("F16", "F32", "F64", "BF16")


def new_dtype(quantizer: Any, mapping: Any, tensor: Any, dtype: torch.dtype | None, model: Module, name: str) -> Any:
    """Return the dtype in which to read ``tensor`` of the checkpoint for the parameter ``name``; None keeps the file's."""
    if not is_bitsandbytes(quantizer):
        return quantizer.get_new_dtype(mapping, tensor, dtype)
    # A slice of a safetensors file has get_dtype.
    floating = tensor.get_dtype() in _FLOATING if hasattr(tensor, "get_dtype") else tensor.is_floating_point()
    return dtype if floating and not _packed(quantizer, mapping, model, name) else None


def keeps_file_dtype(quantizer: Any, mapping: Any, model: Module, stored: str, name: str) -> bool:
    """Tell whether to read the tensor ``stored`` in the dtype of the file for the parameter ``name``."""
    return _packed(quantizer, mapping, model, name) if is_bitsandbytes(quantizer) else stored != name


def _packed(quantizer: Any, mapping: Any, model: Module, name: str) -> bool:
    """Tell whether ``name`` is the weight of a quantized layer or of experts, which the file holds packed."""
    experts = any(getattr(each, "reads_as_stored", False) for each in getattr(mapping, "operations", ()))
    return experts or bool(quantizer.param_needs_quantization(model, name))


def defect() -> Finding:
    """Save a tiny Llava and a GPT-NeoX of bf16 in 4 bits, load them with ``dtype=torch.float16``, and run them."""
    import tempfile

    import torch
    from transformers import BitsAndBytesConfig, GPTNeoXConfig, GPTNeoXForCausalLM

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
    said, wrong = [], False
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=16, **tiny_models.SIZE))
    for plain in (tiny_models.make_llava(), neox):
        with tempfile.TemporaryDirectory() as packed:
            save_quantized(packed, plain, how, **tiny_models.in_dtype(torch.bfloat16))
            model = type(plain).from_pretrained(packed, **tiny_models.in_dtype(torch.float16))
        others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float16}
        wrong = wrong or bool(others)
        said.append(f"{type(plain).__name__}: {', '.join(sorted(map(str, others))) or 'no other dtype'}")
        try:
            model(torch.arange(8)[None])
        except RuntimeError as error:
            wrong = True
            said.append(str(error))
    return Finding(wrong, f"asked for float16. {'; '.join(said)}")


_LOADING = "transformers.core_model_loading:convert_and_load_state_dict_in_model"

PATCH = Patch(
    id="transformers-checkpoint-keeps-dtype",
    summary="dtype= is ignored for the weights of a quantized checkpoint: bf16 weights with fp16 biases",
    groups=("from_pretrained", "save"),
    silent=True,
    messages=(
        Message(
            "expected scalar type BFloat16 but found Half",
            "torch/lib/libtorch_cpu.so",
            parts=("expected scalar type ", " but found "),
        ),
    ),
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/quantizers/base.py#L131",),
    why="""
        If a checkpoint that was saved in bf16 is loaded with ``dtype=torch.float16``, as on every T4, transformers
        5.21 to 5.23 gives bf16 weights and fp16 biases. The loader keeps every tensor named "weight" in the dtype
        of the file, as it must for packed weights. ``model.dtype`` and outputs are bf16, and models whose norms
        have a bias (GPT-NeoX, OPT) raise ``expected scalar type BFloat16 but found Half``. The same is true for
        every pair of dtypes, in 4 bits and INT8. On transformers 5.0 to 5.20 it affects every tensor that has
        another name in the file than in the model (GPT-NeoX since 5.17, and models that transformers 4 saved):
        ``expected m1 and m2 to have the same dtype``.
    """,
    repair="""
        The repair casts unpacked tensors while they are read, as for an unquantized checkpoint: weights of norms,
        embeddings, the head and skipped layers. Packed weights, whatever their storage dtype, and quantization
        states are read as they are. What the class of a model keeps in float32 stays in float32. If a checkpoint is
        loaded in its own dtype, nothing changes.
    """,
    cost="""
        A look at the name of each tensor.
    """,
    requires=("transformers>=5", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite.to_call(
            _LOADING,
            find="hf_quantizer.get_new_dtype(mapping, tensor, _dtype)",
            function=new_dtype,
            arguments="hf_quantizer, mapping, tensor, _dtype, model, renamed_key",
            when="transformers>=5.21",
        ),
        Rewrite.to_call(
            _LOADING,
            find="original_key != renamed_key",
            function=keeps_file_dtype,
            arguments="hf_quantizer, mapping, model, original_key, renamed_key",
            when="transformers<5.21",
        ),
    ),
    defect=defect,
)
