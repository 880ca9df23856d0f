"""A quantized model that does not fit the device is refused, or loaded with layers that are not quantized."""

from __future__ import annotations

from typing import Any

from ...config.quantizers import BEFORE_LOADING, rewrite_both_quantizers
from ...engine import Finding, Message, Patch, Rewrite
from ...loading import (
    checkpoint_keys,
    chunked_quantization,
    device_maps,
    module_sizes,
    offload_v4,
    offload_v5,
    resize_embeddings,
    weights_stored_separately,
)


def defect() -> Finding:
    """Load a tiny Llama in 4 bits with its second layer on the disk."""
    import tempfile

    import torch
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

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
        kept, expected = model.model.layers[0].mlp.up_proj, whole.model.layers[0].mlp.up_proj.weight.data
        if type(kept.weight).__name__ != "Params4bit" or not kept.weight.is_meta:
            return Finding(True, "the layer on the disk is not quantized")
        stored = kept._hf_hook.weights_map["weight"]
        differ = stored.shape != expected.shape or int((stored != expected).sum())
        return Finding(bool(differ), f"packed weights on the disk that differ from the whole model's: {int(differ)}")


_LOADING = "transformers.core_model_loading:convert_and_load_state_dict_in_model"
_HOOKS = "transformers.integrations.accelerate"
_MODEL = "transformers.modeling_utils"


def _edit(target: str, find: str, replace: str, when: str, **names: Any) -> Rewrite:
    return Rewrite(target, find, replace, names={f"_patches_{name}": names[name] for name in names}, when=when)


def _common(maps: str, inferring: str, files: str, hooks: str, when: str) -> tuple[Rewrite, ...]:
    """What both loaders do: make a map, look at the files, hang hooks on the model."""
    planned = "return _patches_planned(model, device_map, hf_quantizer)"
    upstream = "infer_auto_device_map"
    counted = inferring.replace(upstream, f"_patches_counted({upstream}, max_memory, hf_quantizer)")
    first = "checkpoint_files[0].endswith('.safetensors')"
    whole = "_patches_whole(checkpoint_files).endswith('.safetensors')"
    dispatched = "dispatch_model(model, **device_map_kwargs)"
    dispatch = "_patches_dispatch(dispatch_model, model, device_map_kwargs)"
    return (
        _edit(maps, inferring, counted, when, counted=module_sizes.counted),
        _edit(maps, "return device_map", planned, when, planned=device_maps.plan_device_map),
        _edit(files, first, whole, when, whole=checkpoint_keys.check_whole_files),
        _edit(hooks, dispatched, dispatch, when, dispatch=offload_v5.dispatch_offloaded),
    )


def _from_5() -> tuple[Rewrite, ...]:
    when = "transformers>=5"
    maps, disk, hooks = (
        f"{_HOOKS}:{name}" for name in ("_get_device_map", "accelerate_disk_offload", "accelerate_dispatch")
    )
    on_disk = "param_device == 'disk' and (target_name not in model_buffers or offload_buffers)"
    left = "_patches_left(device_map, hf_quantizer, target_name, param, mapping, disk_offload_index)"
    several = "len(set(device_map.values())) > 1"
    asked = "is_env_variable_true('HF_DEACTIVATE_ASYNC_LOAD')"
    ended = "if thread_pool is not None: thread_pool.shutdown(wait=False, cancel_futures=True)"
    return (
        *rewrite_both_quantizers(
            "validate_environment",
            "values != {'cpu'} and ('cpu' in values or 'disk' in values)",
            "_patches_refused(self, values)",
            {"_patches_refused": device_maps.is_refused},
            when,
        ),
        *_common(maps, "infer_auto_device_map", disk, hooks, when),
        weights_stored_separately.WITH_CHECKPOINT,
        _edit(
            _LOADING,
            "get_device(device_map, renamed_key, valid_torch_device=True)",
            "_patches_device_of(get_device, device_map, renamed_key, model, hf_quantizer)",
            when,
            device_of=offload_v5.read_device,
        ),
        _edit(
            _LOADING,
            "load_config.disk_offload_folder",
            "_patches_folder(load_config, model, disk_offload_index)",
            when,
            folder=offload_v5.offload_folder,
        ),
        _edit(
            _LOADING,
            asked,
            f"_patches_one_at_a_time({asked}, device_map)",
            when,
            one_at_a_time=offload_v5.reads_one_at_a_time,
        ),
        _edit(
            _LOADING,
            "mapping.convert",
            "_patches_converting(mapping, device_map)",
            when,
            converting=chunked_quantization.convert_in_chunks,
        ),
        _edit(_LOADING, on_disk, f"({on_disk} and not {left})", when, left=offload_v5.is_left_on_disk),
        _edit(
            _LOADING,
            "offload_and_maybe_resave_param",
            "_patches_resaved(offload_and_maybe_resave_param, device_map)",
            when,
            resaved=offload_v5.resave_or_explain,
        ),
        _edit(
            _LOADING,
            "set_param_for_module",
            "_patches_put(set_param_for_module, device_map)",
            when,
            put=offload_v5.set_and_offload,
        ),
        _edit(
            f"{_MODEL}:PreTrainedModel._adjust_tied_keys_with_tied_pointers",
            "self.state_dict()",
            "_patches_not_on_meta(self.state_dict())",
            "transformers==5.2.0",  # it takes all that is on meta, at the address 0, for one tied weight
            not_on_meta=offload_v5.without_meta_tensors,
        ),
        _edit(
            f"{_MODEL}:PreTrainedModel.from_pretrained",
            several,
            f"({several} or _patches_is_planned(device_map))",
            "transformers>=5,<5.13",  # it hangs no hooks on a model that is on the disk whole
            is_planned=offload_v5.needs_hooks,
        ),
        _edit(_LOADING, ended, f"_patches_ended(device_map)\n{ended}", when, ended=offload_v5.end_loading),
    )


def _before_5() -> tuple[Rewrite, ...]:
    when = "transformers<5"
    maps, files = f"{_MODEL}:_get_device_map", f"{_MODEL}:PreTrainedModel._load_pretrained_model"
    loads = f"{_MODEL}:PreTrainedModel.from_pretrained"
    placing_one = f"{_MODEL}:_load_state_dict_into_meta_model"
    refused = "'cpu' in device_map_without_lm_head.values() or 'disk' in device_map_without_lm_head.values()"
    supports = {"_patches_supports": device_maps.supports_offload}
    inside = "{k[len(_prefix):] if k.startswith(_prefix) else k: v for k, v in device_map.items()}"
    given = "device_map, model, param_name, param, hf_quantizer, disk_offload_index, _load_parameter_into_model"
    return (
        *rewrite_both_quantizers(
            "validate_environment", refused, f"not _patches_supports(self) and ({refused})", supports, when
        ),
        *rewrite_both_quantizers(
            BEFORE_LOADING,
            "value in ['disk', 'cpu']",
            "value in ['disk', 'cpu'] and not _patches_supports(self)",
            supports,
            when,
        ),
        *_common(maps, "infer_auto_device_map(model, dtype=target_dtype, **device_map_kwargs)", files, loads, when),
        _edit(
            maps,
            "check_tied_parameters_on_same_device",
            "_patches_checked(check_tied_parameters_on_same_device, device_map, hf_quantizer)",
            when,
            checked=device_maps.skip_tied_check,
        ),
        _edit(
            loads,
            "cls._load_pretrained_model",
            "_patches_loading(cls._load_pretrained_model, device_map)",
            when,
            loading=offload_v4.load_files,
        ),
        _edit(
            loads,
            "safe_open(checkpoint_files[0], framework='pt')",
            "_patches_opened(checkpoint_files[0])",
            when,
            opened=checkpoint_keys.open_safetensors,
        ),
        _edit(
            files,
            "expand_device_map(device_map, checkpoint_keys)",
            "_patches_expanded(expand_device_map, device_map, checkpoint_keys)",
            when,
            expanded=offload_v4.expand_device_map,
        ),
        _edit(
            files,
            "get_disk_only_shard_files(device_map, weight_map)",
            "_patches_skipped(get_disk_only_shard_files, device_map, weight_map)",
            when,
            skipped=offload_v4.files_to_skip,
        ),
        _edit(
            files,
            inside,
            "_patches_within(device_map, _prefix)",
            "transformers<4.57",
            within=offload_v4.device_map_within,
        ),
        _edit(
            placing_one,
            "device_map[''] not in ('cpu', torch.device('cpu'))",
            "device_map[''] not in ('cpu', 'disk', torch.device('cpu'))",
            when,
        ),
        *(
            _edit(
                placing_one,
                "param_device == 'disk'",
                f"_patches_placed({given}{of_the_quantizer}) or param_device == 'disk'",
                release,
                placed=offload_v4.place_tensor,
            )
            for of_the_quantizer, release in (
                (", state_dict, unexpected_keys", "transformers<4.57"),
                ("", "transformers>=4.57,<5"),
            )
        ),
        _edit(
            placing_one,
            "not is_safetensors",
            "not _patches_is_placed(device_map, is_safetensors)",
            when,
            is_placed=offload_v4.is_placed,
        ),
    )


PATCH = Patch(
    id="transformers-device-map-refused",
    former_ids=("transformers-refuses-what-does-not-fit",),
    summary="a quantized model that does not fit is refused: some modules are dispatched on the CPU or the disk",
    groups=("offload", "asked"),
    messages=(
        Message(
            "Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized model. If you want to dispatch the model on the CPU or the disk while keeping these modules in 32-bit, you need to set `llm_int8_enable_fp32_cpu_offload=True` and pass a custom `device_map` to `from_pretrained`.",
            "transformers/quantizers/quantizer_bnb_4bit.py",
            parts=("Some modules are dispatched on the CPU or the disk.",),
        ),
    ),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/315",
        "https://github.com/huggingface/transformers/issues/26153",
    ),
    why="""
        ``from_pretrained(..., quantization_config=BitsAndBytesConfig(...), device_map="auto")`` of a model that
        does not fit, and every device map with "cpu" or "disk" beside a device, raise ``Some modules are dispatched
        on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized model.`` With the flag that
        the message names, ``llm_int8_enable_fp32_cpu_offload``, these layers are not quantized, so they are four to
        eight times as large. For a checkpoint that is already quantized the flag has no effect, because the
        configuration in its ``config.json`` replaces the one that has it. This has been the most frequent error of
        quantized loading since 2023.
    """,
    repair="""
        With the repair such a map gives the quantized model, equal bit for bit to one that is loaded whole. Each
        layer is quantized on the device where it computes. Then its packed weights stay on the CPU, or on the disk
        in a folder of their own inside ``offload_folder``, which is removed with the model. Packed weights of a
        quantized checkpoint in safetensors stay in the checkpoint and are read from there. accelerate's hooks bring
        each layer when it is used. With ``llm_int8_enable_fp32_cpu_offload=True``, and with maps without "cpu" and
        "disk", nothing changes.

        If an embedding or a head is offloaded, ``resize_token_embeddings`` raises an error that says what to do.
        Unpatched it raises ``Tensor.item() cannot be called on meta tensors``, or the next forward ``Trying to set
        a tensor of shape ...``.
    """,
    cost="""
        Each use of an offloaded layer copies its packed weights from CPU memory or reads them from the disk.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1", "accelerate>=1.1"),
    tested_up_to="5.24.0",
    edits=(
        *_from_5(),
        *_before_5(),
        Rewrite(
            f"{_MODEL}:PreTrainedModel.resize_token_embeddings",
            find="self._resize_token_embeddings",
            replace="_patches_resizing(self)",
            names={"_patches_resizing": resize_embeddings.resize_unless_offloaded},
        ),
    ),
    defect=defect,
)
