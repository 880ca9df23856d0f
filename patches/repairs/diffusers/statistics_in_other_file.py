"""A quantized image model of several files cannot be loaded if a weight and its statistics are in two of them."""

from __future__ import annotations

import os
from typing import Any

from ...config import quantizers
from ...engine import Finding, Message, Patch, Rewrite
from ...loading import split_statistics
from ..reproducers import image_models


def missing_keys_of(quantizer: Any, model: Any, missing: list[str], files: Any) -> Any:
    """Call ``update_missing_keys``; record the ``files`` that are loaded next."""
    in_folder = all(
        isinstance(file, (str, os.PathLike)) and os.path.isfile(file) for file in files
    )  # not in an archive
    if in_folder and quantizers.is_bitsandbytes(quantizer) and quantizer.pre_quantized:
        split_statistics.record_files(quantizer, files)
    return quantizer.update_missing_keys(model, missing, prefix="")


def with_statistics(quantizer: Any, shard: dict[str, Any]) -> dict[str, Any]:
    """Return ``shard`` with the statistics of its weights if ``quantizer``, which may be None, loads packed weights."""
    return shard if quantizer is None else split_statistics.complete_shard(quantizer, shard)


def defect() -> Finding:
    """Save a tiny 4-bit FLUX in files of at most 15 kB, and load it."""
    import tempfile

    import torch
    from diffusers import FluxTransformer2DModel

    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as packed:
        image_models.save_flux(plain)
        model = image_models.load_flux(plain, load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model.save_pretrained(packed, max_shard_size=15_000)
        try:
            with image_models.as_with_gpu():
                again = FluxTransformer2DModel.from_pretrained(packed, torch_dtype=torch.float32, device_map="cpu")
        except ValueError as error:
            return Finding(True, f"ValueError: {error}")
    inputs = image_models.flux_inputs(torch.float32)
    same = torch.equal(again(**inputs)[0], model(**inputs)[0])
    return Finding(not same, "the model that was saved" if same else "another model")


PATCH = Patch(
    id="diffusers-statistics-in-other-file",
    summary="a 4-bit image model that was saved in several files often cannot be loaded",
    groups=("save",),
    messages=(
        Message(
            "Supplied state dict for transformer_blocks.0.attn.add_k_proj.weight does not contain `bitsandbytes__*` and possibly "
            "other `quantized_stats` components.",
            "diffusers/quantizers/bitsandbytes/bnb_quantizer.py",
            parts=("does not contain `bitsandbytes__*` and possibly other `quantized_stats` components.",),
        ),
        Message("Missing quantization component `SCB`", "diffusers/quantizers/bitsandbytes/bnb_quantizer.py"),
    ),
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/model_loading_utils.py",),
    why="""
        ``save_pretrained`` begins a new file where the next tensor would make one larger than ``max_shard_size``, 10 GB
        by default. A 4-bit weight, its absmax and its quantization state are tensors of their own, so the limit may
        fall between them. ``from_pretrained`` looks for the quantization state or the row scales of a weight only in
        the file of the weight: ``Supplied state dict for … does not contain `bitsandbytes__*```. Models of more than 20
        billion parameters need several files, smaller ones if ``max_shard_size`` is given. A checkpoint that cannot be
        loaded was saved without an error. 4-bit on all releases, INT8 before diffusers 0.39.
    """,
    repair="""
        The quantization state or the row scales of a weight are read from the file that holds them, when the weight is
        loaded. Checkpoints that were saved before load as well. Files in which they are together with their weights are
        loaded as before.
    """,
    cost="""
        The headers of the files are read once.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite.to_call(
            "diffusers.models.modeling_utils:ModelMixin._load_pretrained_model",
            find="hf_quantizer.update_missing_keys(model, missing_keys, prefix='')",
            function=missing_keys_of,
            arguments="hf_quantizer, model, missing_keys, resolved_model_file",
        ),
        Rewrite(
            "diffusers.models.model_loading_utils:load_model_dict_into_meta",
            find="state_dict.items()",
            replace="(state_dict := _patches_with_statistics(hf_quantizer, state_dict)).items()",
            names={"_patches_with_statistics": with_statistics},
        ),
    ),
    defect=defect,
)
