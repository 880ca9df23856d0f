"""A quantized mixture of experts that transformers 4 saved cannot be loaded with transformers 5, nor saved again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...config import quantizers
from ...engine import CannotShow, Finding, Message, Patch, Rewrite
from ...engine.gate import satisfied
from ...experts import quantize_request, quantized_sizes
from ...loading import weights_stored_separately
from ...quantized.quantized_experts import is_quantized_experts


def with_expert_converters(mapping: list[Any], model: Any, load_config: Any, state: Iterable[str]) -> list[Any]:
    """Return the conversions that a model is loaded by, with converters for quantized experts where they are needed."""
    if getattr(load_config.hf_quantizer, "quantization_config", None) is None:
        return mapping
    from ...experts import expert_converters

    return expert_converters.converters(mapping, model, load_config, state, quantize_request.is_requested())


def remove_ties(remove: Callable[..., Any], state: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return ``state`` without tied weights, as ``remove`` of transformers does, which cannot tell experts apart."""
    from ...experts import saving

    return saving.without_ties(remove, state, model)


def revert_conversion(revert: Callable[..., Any], model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Give ``state`` the names and tensors of a checkpoint, as ``revert`` does, and of quantized experts as well."""
    from ...experts import saving

    return saving.revert_conversion(revert, model, state)


def dequantize_experts(model: Any, dtype: Any) -> Any:
    """Make the quantized experts of ``model`` floating point too, and return it."""
    import torch

    new: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if is_quantized_experts(parameter):
                if id(parameter) not in new:
                    new[id(parameter)] = torch.nn.Parameter(parameter.dequantize().to(dtype or parameter.dtype))
                module._parameters[name] = new[id(parameter)]
    return model


def bytes_held(parameter: Any) -> int:
    """Return the bytes of a parameter, also of quantized experts."""
    if is_quantized_experts(parameter):
        return int(parameter.nbytes)
    return int(parameter.nelement() * parameter.element_size())


def defect() -> Finding:
    """Load a tiny Qwen3-MoE whose experts were saved as transformers 4 saved them in 4 bits."""
    import tempfile

    from transformers import AutoModelForCausalLM

    from ..reproducers import mixtures

    if satisfied("transformers<5"):
        raise CannotShow("transformers 4 keeps each expert as linear layers, and loads them as it saved them")
    with tempfile.TemporaryDirectory() as packed:
        values = mixtures.save_as_transformers_4(packed)
        try:
            model = AutoModelForCausalLM.from_pretrained(packed, device_map={"": "cpu"})
        except RuntimeError as error:
            return Finding(True, f"while loading: {str(error).partition('.')[0]}")
        got = model.model.layers[0].mlp.experts.gate_up_proj
    if got.shape != values.shape:
        return Finding(True, f"loaded; experts have shape {tuple(got.shape)}, expected {tuple(values.shape)}")
    off = float((got.dequantize() - values).abs().max())
    return Finding(off > 0, f"loaded; relative error of the experts {off:.1e}")


_SAVE = "transformers.modeling_utils:PreTrainedModel.save_pretrained"

PATCH = Patch(
    id="transformers-experts-of-linear-layers",
    summary="a quantized mixture of experts that transformers 4 saved cannot be loaded with transformers 5",
    groups=("experts", "save"),
    messages=(
        Message(
            "You set `ignore_mismatched_sizes` to `False`, thus raising an error. For details look at the above report!",
            "transformers/utils/loading_report.py",
        ),
    ),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849",
        "https://github.com/huggingface/transformers/issues/39859",
    ),
    why="""
        transformers 4 kept each expert as linear layers, which ``load_in_4bit`` and ``load_in_8bit`` quantized. The
        4-bit mixtures of the Hub have packed weights and a quantization state for each matrix of each expert, the
        INT8 ones scales (``SCB``). transformers 5 keeps all experts of a layer in one parameter of three
        dimensions. It stacks the packed weights as if they were matrices and finds no place for the quantization
        states. Loading fails with a mismatch of shapes, or, from 5.0 to 5.16, gives a model whose experts have the
        shape of packed weights.
    """,
    repair="""
        With the repair such a parameter is an ``Experts4bit`` or ``Experts8bit``. It has the shape and dtype of the
        experts in floating point, and holds packed weights and quantization states as they are in the file. Nothing
        is dequantized while loading, and products take one expert at a time. ``save_pretrained`` writes the same
        names and bytes again. If the file has the experts of a layer in floating point, they are loaded as before.
    """,
    requires=("transformers>=5", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite.to_call(
            "transformers.core_model_loading:convert_and_load_state_dict_in_model",
            find="load_config.weight_mapping or []",
            function=with_expert_converters,
            arguments="load_config.weight_mapping or [], model, load_config, state_dict",
        ),
        weights_stored_separately.WITH_CHECKPOINT,
        Rewrite.to_call(
            "transformers.quantizers.base:HfQuantizer.param_element_size",
            find="param.element_size()",
            function=quantized_sizes.bytes_of_element,
            arguments="self, model, param_name, param",
        ),
        Rewrite.to_call(
            _SAVE,
            find="remove_tied_weights_from_state_dict(state_dict, model_to_save)",
            function=remove_ties,
            arguments="remove_tied_weights_from_state_dict, state_dict, model_to_save",
        ),
        *(
            Rewrite.to_call(
                _SAVE,
                find=f"revert_weight_conversion(model_to_save, {state})",
                function=revert_conversion,
                arguments=f"revert_weight_conversion, model_to_save, {state}",
                when=when,
            )
            for state, when in (("state_dict", ""), ("shard_state_dict", "transformers>=5.14"))
        ),
        *quantizers.rewrite_both_quantizers(
            "_dequantize",
            find="return model",
            replace="return _patches_dequantize_experts(model, dtype)",
            function=dequantize_experts,
        ),
        Rewrite.to_call(
            "transformers.modeling_utils:PreTrainedModel.get_memory_footprint",
            find="param.nelement() * param.element_size()",
            function=bytes_held,
            arguments="param",
        ),
    ),
    defect=defect,
)
