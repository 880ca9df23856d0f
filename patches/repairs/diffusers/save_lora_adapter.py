"""``save_lora_adapter`` raises an error for a quantized model, whatever it is asked to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import image_models

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def state_dict_of_adapter(upstream: Callable[..., Any], model: Any, name: str, upcast: bool) -> dict[str, Tensor]:
    """Call peft's ``get_peft_model_state_dict`` without casting a quantized ``model``; cast the result if ``upcast``."""
    import torch

    if not getattr(model, "is_quantized", False):
        state: dict[str, Tensor] = upstream(model.to(dtype=torch.float32 if upcast else None), adapter_name=name)
        return state
    state = upstream(model, adapter_name=name)
    if not upcast:
        return state
    # A copy of a quantized layer in modules_to_save: its storage may have a floating-point dtype.
    packed = {p.data_ptr() for p in model.parameters() if type(p).__name__ in ("Params4bit", "Int8Params")}
    return {
        key: tensor.float() if tensor.is_floating_point() and tensor.data_ptr() not in packed else tensor
        for key, tensor in state.items()
    }


def defect() -> Finding:
    """Add an adapter to a tiny 4-bit FLUX, save it, and load it into another one."""
    import tempfile

    import torch
    from peft import LoraConfig

    how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as adapter:
        image_models.save_flux(base)
        model, other = image_models.load_flux(base, **how), image_models.load_flux(base, **how)
        model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_k"], init_lora_weights=False))
        try:
            model.save_lora_adapter(adapter)
        except ValueError as error:
            return Finding(True, f"ValueError: {error}")
        other.load_lora_adapter(adapter, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    inputs = image_models.flux_inputs(torch.float32)
    same = torch.equal(model(**inputs)[0], other(**inputs)[0])
    return Finding(not same, "saved and loaded" if same else "another adapter was saved")


PATCH = Patch(
    id="diffusers-save-lora-adapter",
    summary="save_lora_adapter() of a quantized image model fails",
    groups=("save",),
    messages=(
        Message(
            "Casting a quantized model to a new `dtype` is unsupported. To set the dtype of unquantized layers, please use the "
            "`torch_dtype` argument when loading the model using `from_pretrained` or `from_single_file`",
            "diffusers/models/modeling_utils.py",
            parts=("Casting a quantized model to a new `dtype` is unsupported.",),
        ),
    ),
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/peft.py",),
    why="""
        ``model.add_adapter(...)``, training and ``model.save_lora_adapter(folder)`` are the way to train a LoRA on
        one model of diffusers without a pipeline. The method begins with ``self.to(dtype=None)``, and a quantized
        model refuses each ``to`` that names a dtype: ``Casting a quantized model to a new `dtype` is unsupported``.
        So a trained adapter cannot be saved. ``upcast_before_saving=True`` asks for float32 and fails in the same
        way. All releases, all quantization methods.
    """,
    repair="""
        A quantized model is not cast. With ``upcast_before_saving=True`` the tensors of the adapter are saved in
        float32, and the model keeps its own. For a model that is not quantized, nothing changes: upstream casts the
        model itself.
    """,
    requires=("diffusers>=0.33", "peft", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite.to_call(
            "diffusers.loaders.peft:PeftAdapterMixin.save_lora_adapter",
            find="""
                get_peft_model_state_dict(
                    self.to(dtype=torch.float32 if upcast_before_saving else None), adapter_name=adapter_name
                )
            """,
            function=state_dict_of_adapter,
            arguments="get_peft_model_state_dict, self, adapter_name, upcast_before_saving",
        ),
    ),
    defect=defect,
)
