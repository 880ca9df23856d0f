"""A quantized image model that was saved in shards does not load: a layer's quantization state is in another shard."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from ...config.quantizers import QUANTIZERS_OF_DIFFUSERS
from ...engine import Finding, Message, Patch, Rewrite
from ...loading import checkpoint_keys
from ..reproducers import image_models


class _Shards(NamedTuple):
    """The checkpoint that a quantizer loads: the file of each tensor, and the tensors that were read before their turn."""

    files: dict[str, str]
    taken: set[str]


_SHARDS: weakref.WeakKeyDictionary[Any, _Shards] = weakref.WeakKeyDictionary()  # of each quantizer


def record_files(quantizer: Any, files: list[Any]) -> Any:
    """Record in which of ``files`` the tensors are that ``quantizer`` loads, and return ``quantizer``."""
    if quantizer.pre_quantized and len(files) > 1:
        found = {key: str(file) for file in files for key in checkpoint_keys.tensor_names([file], None)}
        _SHARDS[quantizer] = _Shards(found, set())
    return quantizer


def with_statistics(quantizer: Any, name: str, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a shard, ``state_dict``, and those that belong to the weight ``name`` from other shards."""
    shards = _SHARDS.get(quantizer)
    if shards is None:
        return state_dict
    of_layer = {f"{name.removesuffix('weight')}{own}" for own in ("SCB", "weight_format")}
    missing: dict[str, set[str]] = {}
    for key, file in shards.files.items():
        if (key in of_layer or key.startswith(f"{name}.")) and key not in state_dict:
            missing.setdefault(file, set()).add(key)
    found = dict(state_dict) if missing else state_dict
    for file, keys in missing.items():
        found.update(checkpoint_keys.map_tensors([file], None, keys))
        shards.taken.update(keys)
    return found


def is_taken(quantizer: Any, name: str) -> bool:
    """Tell whether the tensor ``name`` was read with its layer from a shard before this one."""
    shards = _SHARDS.get(quantizer) if quantizer is not None else None
    return shards is not None and name in shards.taken


def defect() -> Finding:
    """Save a tiny FLUX in 4 bits in shards of 20 KB, and load it."""
    import tempfile

    import torch
    from diffusers import FluxTransformer2DModel

    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as folder:
        image_models.save_flux(base)
        model = image_models.load_flux(base, load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model.save_pretrained(folder, max_shard_size="20KB")
        try:
            with image_models.as_with_gpu():
                again = FluxTransformer2DModel.from_pretrained(
                    folder, device_map={"": "cpu"}, torch_dtype=torch.float32
                )
        except ValueError as error:
            return Finding(True, f"ValueError: {str(error).split('transformer')[0].strip()} ...")
    inputs = image_models.flux_inputs(torch.float32)
    with torch.no_grad():
        same = torch.equal(again(**inputs)[0], model(**inputs)[0])
    return Finding(not same, "the same outputs" if same else "other outputs")


_METHODS = (
    f"{QUANTIZERS_OF_DIFFUSERS[0]}.create_quantized_param",
    f"{QUANTIZERS_OF_DIFFUSERS[1]}.check_if_quantized_param",
    f"{QUANTIZERS_OF_DIFFUSERS[1]}.create_quantized_param",
)

PATCH = Patch(
    id="diffusers-shards-split-layers",
    summary="a quantized image model that was saved in shards does not load",
    groups=("save",),
    messages=(
        Message(
            "Supplied state dict for transformer_blocks.0.attn.to_q.weight does not contain `bitsandbytes__*` and possibly other `quantized_stats` components.",
            "diffusers/quantizers/bitsandbytes/bnb_quantizer.py",
            parts=("does not contain `bitsandbytes__*` and possibly other `quantized_stats` components.",),
        ),
        Message("Missing quantization component `SCB`", "diffusers/quantizers/bitsandbytes/bnb_quantizer.py"),
    ),
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/modeling_utils.py#L830",),
    why="""
        ``save_pretrained`` divides a model of more than 10 GB into shards, one tensor after another, and does not keep
        packed weights and quantization state of a layer together. ``from_pretrained`` reads one shard after another
        and needs both at once: ``Supplied state dict for ... does not contain `bitsandbytes__*` ``. So a large model
        in 4 bits (Qwen-Image, HunyuanVideo, FLUX.2) that was saved without an error cannot be loaded. diffusers 0.33
        to 0.42 in 4 bits and INT8; from 0.39 on INT8 fails only if a shard ends between the row scales and ``weight_format``.
    """,
    repair="""
        With the repair the statistics of a layer are read from the shard that has them, when its packed weights are
        read. Which shard has which tensor is read once from the headers of the files. Models in one file are loaded
        as before.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite(
            "diffusers.models.modeling_utils:ModelMixin.from_pretrained",
            find="hf_quantizer.preprocess_model",
            replace="_patches_record_files(hf_quantizer, resolved_model_file).preprocess_model",
            names={"_patches_record_files": record_files},
        ),
        Rewrite(
            "diffusers.models.model_loading_utils:load_model_dict_into_meta",
            find="param_name not in empty_state_dict",
            replace="param_name not in empty_state_dict or _patches_is_taken(hf_quantizer, param_name)",
            names={"_patches_is_taken": is_taken},
        ),
        *(
            Rewrite(
                method,
                find="import bitsandbytes as bnb",
                replace="""
                    import bitsandbytes as bnb
                    state_dict = _patches_with_statistics(self, param_name, state_dict)
                """,
                names={"_patches_with_statistics": with_statistics},
            )
            for method in _METHODS
        ),
    ),
    defect=defect,
)
