"""A quantized image model that does not fit the device is refused, or loaded with layers that are not quantized."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...config.quantizers import BEFORE_LOADING, QUANTIZERS_OF_DIFFUSERS
from ...engine import Finding, Message, Patch, Rewrite
from ...loading import checkpoint_keys, chunked_quantization, device_maps, dispatching, module_sizes, offload_v4
from ...offload.offload_map import OffloadMap, Place
from ..reproducers import image_models

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def plan_by_true_sizes(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``_determine_device_map``; maps of quantized models are by true sizes, and say where each module waits."""

    def _determine_device_map(
        model: Any, device_map: Any, max_memory: Any, dtype: Any, in_float32: Any, quantizer: Any
    ) -> Any:
        found = upstream(model, device_map, max_memory, dtype, in_float32, quantizer)
        if isinstance(device_map, str):
            infer = module_sizes.infer_by_true_sizes(lambda *_, **__: found, max_memory, quantizer)
            blocks = model._get_no_split_modules(device_map)
            found = infer(model, no_split_module_classes=blocks, special_dtypes=_dtypes_kept(model, in_float32))
        return device_maps.plan_device_map(model, found, quantizer)

    return _determine_device_map


def _dtypes_kept(model: Module, in_float32: list[str]) -> dict[str, Any]:
    """Return the dtypes of the parameters that stay in float32: a component of their name is in the list of the class."""
    import torch

    names = (name for name, _ in model.named_parameters())
    return {name: torch.float32 for name in names if not set(in_float32).isdisjoint(name.split("."))}


class _LoadedInto(dict[str, Place]):
    """The map that the loader of diffusers sees: nothing is on the disk, of which it would know nothing quantized."""

    def __init__(self, device_map: OffloadMap) -> None:
        super().__init__((name, "cpu" if place == "disk" else place) for name, place in device_map.items())
        self.planned = device_map


def load_files(upstream: Callable[..., Any], device_map: Any) -> Callable[..., Any]:
    """Return ``_load_pretrained_model``, which reads the files; if that fails, remove the files that were written."""
    if not isinstance(device_map, OffloadMap):
        return upstream

    def _load_pretrained_model(model: Module, state_dict: Any, files: Any, *also: Any, **options: Any) -> Any:
        device_map.stored = _stored_in(map(str, files))
        inside, quantizer = options["offload_folder"], options["hf_quantizer"]
        options |= {"device_map": _LoadedInto(device_map), "offload_folder": None, "offload_state_dict": None}
        if "is_parallel_loading_enabled" in options:  # from 0.35 on; threads would bring all to the device at once
            options["is_parallel_loading_enabled"] = False
        with offload_v4.open_folder(device_map, model, quantizer, inside, bool(device_map.stored)):
            *found, _, errors = upstream(model, state_dict, files, *also, **options)
        return (*found, device_map.index or None, errors)

    return _load_pretrained_model


def _stored_in(files: Any) -> dict[str, Any]:
    """Return for each tensor in ``files`` the entry by which accelerate finds it; none for what is not in safetensors."""
    stored = {}
    for file in files:
        if file.endswith(".safetensors") and os.path.isfile(file):  # in an archive of diffusers (DDUF) it is no file
            with checkpoint_keys.open_safetensors(file) as handle:
                stored.update({name: {"safetensors_file": file, "weight_name": name} for name in handle.keys()})
    return stored


def place_tensor(
    device_map: Any, model: Module, name: str, tensor: Tensor, quantizer: Any, state_dict: Mapping[str, Any], *also: Any
) -> bool:
    """Give ``model`` the tensor ``name``, and put it where it waits; return False where diffusers is to do it."""
    if not isinstance(device_map, _LoadedInto):
        return False

    def create(where: Place) -> None:
        quantizer.check_if_quantized_param(model, tensor, name, state_dict)
        chunked_quantization.create_in_chunks(quantizer, tensor)(model, tensor, name, where, state_dict, *also)

    planned = device_map.planned
    offload_v4.place_or_create(planned, model, name, tensor, quantizer, planned.stored, _set_tensor, create)
    return True


def dispatch(dispatch_model: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
    """Call ``accelerate.dispatch_model``; a quantized model that is on the CPU whole is there already."""
    device_map = options["device_map"]
    if getattr(model, "quantization_method", None) == "bitsandbytes" and set(map(str, device_map.values())) == {"cpu"}:
        model.hf_device_map = dict(device_map)  # dispatch_model would call model.to, which INT8 models may refuse
        return model
    return dispatching.dispatch_offloaded(dispatch_model, model, options)


def is_placed(device_map: Any) -> bool:
    """Tell whether :func:`place_tensor` gives the model all of its tensors."""
    return isinstance(device_map, _LoadedInto)


def _set_tensor(model: Module, name: str, tensor: Tensor) -> None:
    """Set a parameter or buffer; accelerate would quantize the weight beside the bias of a ``Linear4bit``."""
    import torch

    owner, own = device_maps.owner_of_tensor(model, name), name.rpartition(".")[2]
    old = owner._parameters.get(own)
    if old is None:
        owner._buffers[own] = tensor
    else:
        owner._parameters[own] = torch.nn.Parameter(tensor, requires_grad=old.requires_grad)


def defect() -> Finding:
    """Load a tiny FLUX in 4 bits with its blocks on the disk."""
    import tempfile

    import torch
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    device_map = {"": "cpu", "transformer_blocks": "disk"}
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as folder:
        image_models.save_flux(base)
        options = {"quantization_config": how, "torch_dtype": torch.float32, "offload_folder": folder}
        try:
            with image_models.as_with_gpu():
                model = FluxTransformer2DModel.from_pretrained(base, device_map=device_map, **options)
        except ValueError as error:
            return Finding(True, f"ValueError: {str(error)[:70]}")
        whole = image_models.load_flux(base, load_in_4bit=True, bnb_4bit_quant_type="nf4")
        kept, expected = (each.transformer_blocks[0].attn.to_q for each in (model, whole))
        if type(kept.weight).__name__ != "Params4bit" or not kept.weight.is_meta:
            return Finding(True, "the layer on the disk is not quantized")
        stored = kept._hf_hook.weights_map["weight"]
        differ = stored.shape != expected.weight.shape or int((stored != expected.weight.data).sum())
        return Finding(bool(differ), f"packed weights on the disk that differ from the whole model's: {int(differ)}")


_MODEL = "diffusers.models.modeling_utils:ModelMixin.from_pretrained"
_LOADER = "diffusers.models.model_loading_utils:load_model_dict_into_meta"
_OFFLOAD = "offload_weight(param, param_name, offload_folder, offload_index)"
_OFFLOADED = "'cpu' in device_map_without_no_convert.values() or 'disk' in device_map_without_no_convert.values()"
_SUPPORTS = {"_patches_supports_offload": device_maps.supports_offload}

PATCH = Patch(
    id="diffusers-device-map-refused",
    summary="a quantized image model that does not fit is refused: some modules are dispatched on the CPU or the disk",
    groups=("offload", "from_pretrained"),
    messages=(
        Message(
            "Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized model. If you want to dispatch the model on the CPU or the disk while keeping these modules in 32-bit, you need to set `load_in_8bit_fp32_cpu_offload=True` and pass a custom `device_map` to `from_pretrained`.",
            "diffusers/quantizers/bitsandbytes/bnb_quantizer.py",
            parts=("Some modules are dispatched on the CPU or the disk.",),
        ),
    ),
    links=(
        "https://github.com/huggingface/diffusers/pull/9213",
        "https://github.com/huggingface/transformers/issues/26153",
    ),
    why="""
        ``FluxTransformer2DModel.from_pretrained(..., quantization_config=BitsAndBytesConfig(...))`` with a device map
        that has "cpu" or "disk" in it, or with ``device_map="auto"`` and a model that does not fit, raises ``Some
        modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized
        model.`` The argument that the message names, ``load_in_8bit_fp32_cpu_offload``, does not exist. With the one
        that is meant, ``llm_int8_enable_fp32_cpu_offload``, these layers are not quantized, so they are four to eight
        times as large. All models of diffusers, 0.33 to 0.42.
    """,
    repair="""
        With the repair such a map gives the quantized model, equal bit for bit to one that is loaded whole, as
        transformers-device-map-refused does for models of transformers, with the same code. Each layer is quantized on
        the device where it computes. Then its packed weights stay on the CPU, or on the disk in a folder of their own
        inside ``offload_folder``, which is removed with the model. Packed weights of a quantized checkpoint in
        safetensors stay in the checkpoint. accelerate's hooks bring each layer when it is used. With
        ``llm_int8_enable_fp32_cpu_offload=True``, and with maps without "cpu" and "disk", nothing changes.
    """,
    cost="""
        Each use of an offloaded layer copies its packed weights from CPU memory or reads them from the disk.
    """,
    requires=("diffusers>=0.33", "transformers>=4.53", "bitsandbytes>=0.46.1", "accelerate>=1.1"),
    tested_up_to="0.42.1",
    edits=(
        *(
            Rewrite(
                f"{quantizer}.validate_environment",
                find=_OFFLOADED,
                replace=f"not _patches_supports_offload(self) and ({_OFFLOADED})",
                names=_SUPPORTS,
            )
            for quantizer in QUANTIZERS_OF_DIFFUSERS
        ),
        *(
            Rewrite(
                f"{quantizer}.{BEFORE_LOADING}",
                find="value in ['disk', 'cpu']",
                replace="value in ['disk', 'cpu'] and not _patches_supports_offload(self)",
                names=_SUPPORTS,
            )
            for quantizer in QUANTIZERS_OF_DIFFUSERS
        ),
        Rewrite.to_call(_MODEL, "_determine_device_map", plan_by_true_sizes, "_determine_device_map"),
        Rewrite.to_call(_MODEL, "cls._load_pretrained_model", load_files, "cls._load_pretrained_model, device_map"),
        Rewrite.to_call(
            _MODEL,
            find="dispatch_model(model, **device_map_kwargs)",
            function=dispatch,
            arguments="dispatch_model, model, device_map_kwargs",
        ),
        Rewrite(
            _LOADER,
            find="param_device == 'disk'",
            replace="""
                _patches_place_tensor(
                    device_map, model, param_name, param, hf_quantizer, state_dict, unexpected_keys
                ) or param_device == 'disk'
            """,
            names={"_patches_place_tensor": place_tensor},
        ),
        Rewrite(
            _LOADER,
            find=_OFFLOAD,
            replace=f"offload_index if _patches_is_placed(device_map) else {_OFFLOAD}",
            names={"_patches_is_placed": is_placed},
        ),
    ),
    defect=defect,
)
