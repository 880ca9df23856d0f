"""A quantized model that does not fit the device is refused, or loaded with layers that are not quantized."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping

from ...config.quantizers import BEFORE_LOADING, QUANTIZERS
from ...engine import Finding, Message, Patch, Rewrite
from ...loading import (
    checkpoint_keys,
    chunked_quantization,
    device_maps,
    dispatching,
    module_sizes,
    offload_v4,
    offload_v5,
    resize_embeddings,
    weights_stored_separately,
)
from ..reproducers import tiny_models


def defect() -> Finding:
    """Load a tiny Llama in 4 bits with its layer on the disk."""
    import tempfile

    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    load = LlamaForCausalLM.from_pretrained
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as folder:
        tiny_models.save_llama(base)
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


_CHECK_FILES = (
    "checkpoint_files[0].endswith('.safetensors') => "
    "checkpoint_keys.check_whole_files(checkpoint_files).endswith('.safetensors')"
)
_DISPATCH = (
    "dispatch_model(model, **device_map_kwargs) => "
    "dispatching.dispatch_offloaded(dispatch_model, model, device_map_kwargs)"
)
_HOOKS, _MODEL = "transformers.integrations.accelerate", "transformers.modeling_utils"

_FROM_5 = {
    **dict.fromkeys(
        (f"{quantizer}.validate_environment" for quantizer in QUANTIZERS),
        "values != {'cpu'} and ('cpu' in values or 'disk' in values) => device_maps.is_refused(self, values)",
    ),
    f"{_HOOKS}:_get_device_map": """
        infer_auto_device_map => module_sizes.infer_by_true_sizes(infer_auto_device_map, max_memory, hf_quantizer)
        return device_map => return device_maps.plan_device_map(model, device_map, hf_quantizer)
    """,
    f"{_HOOKS}:accelerate_disk_offload": _CHECK_FILES,
    f"{_HOOKS}:accelerate_dispatch": _DISPATCH,
    "transformers.core_model_loading:convert_and_load_state_dict_in_model": """
        get_device(device_map, renamed_key, valid_torch_device=True)
            => offload_v5.read_device(get_device, device_map, renamed_key, model, hf_quantizer)
        load_config.disk_offload_folder => offload_v5.offload_folder(load_config, model, disk_offload_index)
        is_env_variable_true('HF_DEACTIVATE_ASYNC_LOAD')
            => offload_v5.reads_one_at_a_time(is_env_variable_true('HF_DEACTIVATE_ASYNC_LOAD'), device_map)
        mapping.convert => chunked_quantization.convert_in_chunks(mapping, device_map)
        param_device == 'disk' and (target_name not in model_buffers or offload_buffers)
            => param_device == 'disk' and (target_name not in model_buffers or offload_buffers) and not (
                offload_v5.is_left_on_disk(device_map, hf_quantizer, target_name, param, mapping, disk_offload_index)
            )
        offload_and_maybe_resave_param
            => offload_v5.resave_or_explain(offload_and_maybe_resave_param, device_map)
        set_param_for_module => offload_v5.set_and_offload(set_param_for_module, device_map)
        if thread_pool is not None: thread_pool.shutdown(wait=False, cancel_futures=True)
            =>
            offload_v5.end_loading(device_map)
            if thread_pool is not None: thread_pool.shutdown(wait=False, cancel_futures=True)
    """,
}

_BEFORE_5 = {
    **dict.fromkeys(
        (f"{quantizer}.validate_environment" for quantizer in QUANTIZERS),
        """
        'cpu' in device_map_without_lm_head.values() or 'disk' in device_map_without_lm_head.values()
            => not device_maps.supports_offload(self) and (
                'cpu' in device_map_without_lm_head.values() or 'disk' in device_map_without_lm_head.values()
            )
        """,
    ),
    **dict.fromkeys(
        (f"{quantizer}.{BEFORE_LOADING}" for quantizer in QUANTIZERS),
        "value in ['disk', 'cpu'] => value in ['disk', 'cpu'] and not device_maps.supports_offload(self)",
    ),
    f"{_MODEL}:_get_device_map": """
        infer_auto_device_map(model, dtype=target_dtype, **device_map_kwargs)
            => module_sizes.infer_by_true_sizes(infer_auto_device_map, max_memory, hf_quantizer)(
                model, dtype=target_dtype, **device_map_kwargs
            )
        return device_map => return device_maps.plan_device_map(model, device_map, hf_quantizer)
        check_tied_parameters_on_same_device
            => device_maps.skip_tied_check(check_tied_parameters_on_same_device, device_map, hf_quantizer)
    """,
    f"{_MODEL}:PreTrainedModel.from_pretrained": f"""
        {_DISPATCH}
        cls._load_pretrained_model => offload_v4.load_files(cls._load_pretrained_model, device_map)
        safe_open(checkpoint_files[0], framework='pt') => checkpoint_keys.open_safetensors(checkpoint_files[0])
    """,
    f"{_MODEL}:PreTrainedModel._load_pretrained_model": f"""
        {_CHECK_FILES}
        expand_device_map(device_map, checkpoint_keys)
            => offload_v4.expand_device_map(expand_device_map, device_map, checkpoint_keys)
        get_disk_only_shard_files(device_map, weight_map)
            => offload_v4.files_to_skip(get_disk_only_shard_files, device_map, weight_map)
    """,
    f"{_MODEL}:_load_state_dict_into_meta_model": """
        device_map[''] not in ('cpu', torch.device('cpu')) => device_map[''] not in ('cpu', 'disk', torch.device('cpu'))
        not is_safetensors => not offload_v4.is_placed(device_map, is_safetensors)
    """,
}

_PLACED = "device_map, model, param_name, param, hf_quantizer, disk_offload_index, _load_parameter_into_model"

_OF_SOME_RELEASES = {
    "transformers==5.2.0": {  # it takes all that is on meta, at the address 0, for one tied weight
        f"{_MODEL}:PreTrainedModel._adjust_tied_keys_with_tied_pointers": (
            "self.state_dict() => dispatching.without_meta_tensors(self.state_dict())"
        ),
    },
    "transformers>=5,<5.13": {  # they hang no hooks on a model that is on the disk whole
        f"{_MODEL}:PreTrainedModel.from_pretrained": """
            len(set(device_map.values())) > 1
                => len(set(device_map.values())) > 1 or dispatching.needs_hooks(device_map)
        """,
    },
    "transformers>=4.57,<5": {
        f"{_MODEL}:_load_state_dict_into_meta_model": f"""
            param_device == 'disk' => offload_v4.place_tensor({_PLACED}) or param_device == 'disk'
        """,
    },
    "transformers<4.57": {
        f"{_MODEL}:_load_state_dict_into_meta_model": f"""
            param_device == 'disk'
                => offload_v4.place_tensor({_PLACED}, state_dict, unexpected_keys) or param_device == 'disk'
        """,
        f"{_MODEL}:PreTrainedModel._load_pretrained_model": """
            {k[len(_prefix):] if k.startswith(_prefix) else k: v for k, v in device_map.items()}
                => offload_v4.device_map_within(device_map, _prefix)
        """,
    },
}

_MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        checkpoint_keys,
        chunked_quantization,
        device_maps,
        dispatching,
        module_sizes,
        offload_v4,
        offload_v5,
    )
}
_OUR_FUNCTION = re.compile(rf"\b({'|'.join(_MODULES)})\.(\w+)")


def _edits(when: str, tables: Mapping[str, str]) -> Iterator[Rewrite]:
    """Yield the edits of the releases ``when``: for each target a table, whose rows say ``find => replace``."""
    for target, table in tables.items():
        for row in re.split(r"\n(?=\S)", textwrap.dedent(table).strip()):
            find, replace = row.split("=>")
            names = {f"_patches_{name}": getattr(_MODULES[module], name) for module, name in _OUR_FUNCTION.findall(row)}
            replace = _OUR_FUNCTION.sub(r"_patches_\2", textwrap.dedent(replace))
            yield Rewrite(target, find.strip(), replace.strip(), names=names, when=when)


PATCH = Patch(
    id="transformers-device-map-refused",
    former_ids=("transformers-refuses-what-does-not-fit",),
    summary="a quantized model that does not fit is refused: some modules are dispatched on the CPU or the disk",
    groups=("offload", "from_pretrained"),
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
        *_edits("transformers>=5", _FROM_5),
        *_edits("transformers<5", _BEFORE_5),
        *(edit for when, tables in _OF_SOME_RELEASES.items() for edit in _edits(when, tables)),
        weights_stored_separately.WITH_CHECKPOINT,
        Rewrite.to_call(
            f"{_MODEL}:PreTrainedModel.resize_token_embeddings",
            find="self._resize_token_embeddings",
            function=resize_embeddings.resize_unless_offloaded,
            arguments="self",
        ),
    ),
    defect=defect,
)
