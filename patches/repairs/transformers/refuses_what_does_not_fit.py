"""A quantized model that does not fit the device is refused, or loaded with layers that are not quantized.

``from_pretrained(..., quantization_config=BitsAndBytesConfig(...), device_map="auto")`` of a model that does not fit, and
any device map with "cpu" or "disk" in it beside a device, raise ``Some modules are dispatched on the CPU or the disk. Make
sure you have enough GPU RAM to fit the quantized model.`` With the flag that the message names,
``llm_int8_enable_fp32_cpu_offload``, these layers are loaded without being quantized, four to eight times as large. For
a checkpoint that is quantized already nothing helps: the configuration in its ``config.json`` takes the place of the one that
has the flag. It is the commonest error of quantized loading since 2023.

With the repair such a map gives the quantized model, the same to the bit as when it is loaded whole: each layer is
quantized on the device where it computes, and then its packed weights wait on the CPU, or on the disk in a folder of
their own inside ``offload_folder``, which is removed with the model. Packed weights of a quantized checkpoint in
safetensors stay in the checkpoint and are read from there. accelerate's hooks bring each layer when it is used. With
``llm_int8_enable_fp32_cpu_offload=True`` nothing changes, and neither do maps without "cpu" and "disk".
What it costs: each use of an offloaded layer brings its packed weights over the bus or from the disk.
"""

from __future__ import annotations

from ...engine import CannotShow, Finding, Patch, Rewrite
from ...engine.gate import satisfied
from ..helpers.loading import checkpoint_keys, places, placing, sizes


def defect() -> Finding:
    """Load a tiny Llama in 4 bits with its second layer on the disk."""
    import tempfile

    import torch
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    if satisfied("transformers<5"):
        raise CannotShow("before transformers 5 a quantized model that does not fit is refused; not repaired there")
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    load = LlamaForCausalLM.from_pretrained
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(vocab_size=8, **size)).save_pretrained(base)
        device_map = {"": "cpu", "model.layers": "disk"}
        try:
            model = load(base, quantization_config=how, device_map=device_map, offload_folder=folder)
        except ValueError as error:
            return Finding(True, f"ValueError: {str(error)[:70]}")
        whole = load(base, quantization_config=how, device_map="cpu")
        # How such a layer computes is the defect of other patches: here only what was loaded counts.
        kept, expected = model.model.layers[0].mlp.up_proj, whole.model.layers[0].mlp.up_proj.weight.data
        if type(kept.weight).__name__ != "Params4bit" or not kept.weight.is_meta:
            return Finding(True, "the layer on the disk is not quantized")
        stored = kept._hf_hook.weights_map["weight"]
        differ = stored.shape != expected.shape or int((stored != expected).sum())
        return Finding(bool(differ), f"packed weights on the disk that differ from the whole model's: {int(differ)}")


_LOADING = "transformers.core_model_loading:convert_and_load_state_dict_in_model"
_HOOKS = "transformers.integrations.accelerate"

PATCH = Patch(
    id="transformers-refuses-what-does-not-fit",
    summary="a quantized model that does not fit is refused: some modules are dispatched on the CPU or the disk",
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/315",
        "https://github.com/huggingface/transformers/issues/26153",
    ),
    requires=("transformers>=5", "bitsandbytes>=0.46.1", "accelerate>=1.1"),
    tested_up_to="5.24.0",
    seen_on=("2.13",),
    edits=(
        *(
            Rewrite(
                f"transformers.quantizers.quantizer_bnb_{bits}bit:Bnb{bits}BitHfQuantizer.validate_environment",
                find="values != {'cpu'} and ('cpu' in values or 'disk' in values)",
                replace="_patches_refused(self, values)",
                names={"_patches_refused": places.refused},
            )
            for bits in (4, 8)
        ),
        Rewrite(
            f"{_HOOKS}:_get_device_map",
            find="infer_auto_device_map",
            replace="_patches_counted(infer_auto_device_map, max_memory)",
            names={"_patches_counted": sizes.counted},
        ),
        Rewrite(
            f"{_HOOKS}:_get_device_map",
            find="return device_map",
            replace="return _patches_planned(model, device_map, hf_quantizer)",
            names={"_patches_planned": places.planned},
        ),
        Rewrite(
            f"{_HOOKS}:accelerate_disk_offload",
            find="checkpoint_files[0].endswith('.safetensors')",
            replace="_patches_whole(checkpoint_files).endswith('.safetensors')",
            names={"_patches_whole": checkpoint_keys.whole},
        ),
        Rewrite(
            _LOADING,
            find="get_device(device_map, renamed_key, valid_torch_device=True)",
            replace="_patches_device_of(get_device, device_map, renamed_key, model, hf_quantizer)",
            names={"_patches_device_of": placing.device_of},
        ),
        Rewrite(
            _LOADING,
            find="load_config.disk_offload_folder",
            replace="_patches_folder(load_config, model, disk_offload_index)",
            names={"_patches_folder": placing.folder},
        ),
        Rewrite(
            _LOADING,
            find="param_device == 'disk' and (target_name not in model_buffers or offload_buffers)",
            replace="""
                (
                    param_device == 'disk' and (target_name not in model_buffers or offload_buffers)
                    and not _patches_left(device_map, hf_quantizer, target_name, param, mapping, disk_offload_index)
                )
            """,
            names={"_patches_left": placing.left},
        ),
        Rewrite(
            _LOADING,
            find="offload_and_maybe_resave_param",
            replace="_patches_resaved(offload_and_maybe_resave_param, device_map)",
            names={"_patches_resaved": placing.resaved},
        ),
        Rewrite(
            _LOADING,
            find="set_param_for_module",
            replace="_patches_put(set_param_for_module, device_map)",
            names={"_patches_put": placing.put},
        ),
        Rewrite(
            _LOADING,
            find="if thread_pool is not None: thread_pool.shutdown(wait=False, cancel_futures=True)",
            replace="""
                _patches_ended(device_map)
                if thread_pool is not None:
                    thread_pool.shutdown(wait=False, cancel_futures=True)
            """,
            names={"_patches_ended": placing.ended},
        ),
        Rewrite(
            f"{_HOOKS}:accelerate_dispatch",
            find="dispatch_model(model, **device_map_kwargs)",
            replace="_patches_dispatch(dispatch_model, model, device_map_kwargs)",
            names={"_patches_dispatch": placing.dispatch},
        ),
    ),
    defect=defect,
)  # fmt: skip
