"""A model that was loaded from a 4-bit or INT8 checkpoint cannot be saved, before or after ``dequantize()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config.quantizers import reads_packed_weights
from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import tiny_models
from ..reproducers.quantized_models import save_quantized

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightTransform


def without_packed_weights(conversions: list[WeightTransform] | None) -> list[WeightTransform] | None:
    """Return ``conversions`` without the ones that join a quantized parameter, which a layer writes as it is stored."""
    return conversions and [each for each in conversions if not reads_packed_weights(each)]


def defect() -> Finding:
    """Load a tiny Llama from a 4-bit checkpoint, save it and load it again."""
    import tempfile

    import torch
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        save_quantized(second, tiny_models.make_llama(), how, device_map="cpu")
        model = LlamaForCausalLM.from_pretrained(second, device_map="cpu")
        try:
            model.save_pretrained(first)
        except NotImplementedError:
            return Finding(True, "save_pretrained(): NotImplementedError")
        again = LlamaForCausalLM.from_pretrained(first, device_map="cpu").state_dict()
    same = all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    return Finding(not same, "saved and loaded" if same else "other values were saved")


_SOURCE = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/core_model_loading.py"

PATCH = Patch(
    id="transformers-save-prequantized",
    summary="a model loaded from a 4-bit or INT8 checkpoint cannot be saved, before or after dequantize()",
    groups=("save", "merge"),
    messages=(
        Message("[op.reverse_op for op in self.operations[::-1]]", "transformers/core_model_loading.py"),
        Message("We could not revert some weight conversions because of offlading", "transformers/modeling_utils.py"),
    ),
    links=("https://github.com/huggingface/transformers/pull/45743", f"{_SOURCE}#L1887"),
    why="""
        transformers 5 notes on a model how its tensors were converted on loading, and ``save_pretrained`` reverts
        that: fused experts become one tensor for each expert, renamed keys get their old names. For a 4-bit or INT8
        checkpoint it also notes how packed weights and scales became one parameter, which it cannot revert:
        ``save_pretrained`` raises a ``NotImplementedError`` without a message. It does so if the model is still
        quantized, if an adapter was merged into it (the end of a QLoRA run on a published 4-bit checkpoint), and,
        before transformers 5.24, after ``dequantize()``. An offloaded model raises ``We could not revert some
        weight conversions because of offlading``.
    """,
    repair="""
        Nothing has to be reverted: quantized layers write packed weights and scales under the names of the
        checkpoint, and plain layers have neither. Models that are quantized while they are loaded have no such note
        and are saved this way. The repair ignores these notes while a model is saved and keeps all others. Models
        without them are saved as before.
    """,
    requires=("transformers>=5", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite.to_call(
            "transformers.core_model_loading:revert_weight_conversion",
            find="getattr(model, '_weight_conversions', None)",
            function=without_packed_weights,
            arguments="getattr(model, '_weight_conversions', None)",
        ),
    ),
    defect=defect,
)
