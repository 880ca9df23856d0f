"""``from_single_file`` cannot quantize: it takes each file for one that holds packed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...config import quantizers
from ...engine import CannotShow, Finding, Message, Patch, Rewrite
from ...engine.gate import satisfied
from ..reproducers import image_models

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def quantizer_for(upstream: Callable[..., Any], config: Any, checkpoint: dict[str, Any]) -> Any:
    """Call ``DiffusersAutoQuantizer.from_config``; the quantizer quantizes if ``checkpoint`` holds plain weights."""
    quantizer = upstream(config)
    if quantizers.is_bitsandbytes(quantizer) and not any(map(_of_one_byte, checkpoint.values())):
        # Older ones quantize packed INT8 weights again when they are moved: the error stays.
        if quantizer.quantization_config.load_in_4bit or satisfied("bitsandbytes>=0.48"):
            quantizer.pre_quantized = False
    return quantizer


def _of_one_byte(tensor: Any) -> bool:
    """Tell whether ``tensor`` may be packed, or has a float8 dtype, which bitsandbytes cannot quantize."""
    dtype = getattr(tensor, "dtype", None)
    return dtype is not None and dtype.itemsize == 1


def finish_loading(quantizer: Any, model: Any, dtype: torch.dtype | None) -> Any:
    """Call ``postprocess_model``, and put into the configuration of ``model`` what it is saved with."""
    finished = quantizer.postprocess_model(model)
    if quantizers.is_bitsandbytes(quantizer):
        model.register_to_config(quantization_config=quantizer.quantization_config, _pre_quantization_dtype=dtype)
    return finished


def defect() -> Finding:
    """Load a tiny FLUX in 4 bits from a single file and from its folder."""
    import tempfile
    from pathlib import Path

    import torch
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel
    from safetensors.torch import save_file

    if satisfied("diffusers<0.35"):
        raise CannotShow("before diffusers 0.35 the tensors of a single file must have the names of the original model")
    how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    with tempfile.TemporaryDirectory() as folder:
        image_models.save_flux(folder)
        expected = image_models.load_flux(folder, **how)
        file = Path(folder, "flux.safetensors")
        save_file(FluxTransformer2DModel.from_pretrained(folder).state_dict(), file)
        options: dict[str, Any] = {"quantization_config": BitsAndBytesConfig(**how), "torch_dtype": torch.float32}
        try:
            with image_models.as_with_gpu():
                model = FluxTransformer2DModel.from_single_file(str(file), config=folder, **options)
        except ValueError as error:
            return Finding(True, f"ValueError: {error}")
    inputs = image_models.flux_inputs(torch.float32)
    same = torch.equal(model(**inputs)[0], expected(**inputs)[0])
    return Finding(not same, "the model that from_pretrained gives" if same else "another model")


PATCH = Patch(
    id="diffusers-single-file-not-quantized",
    summary="from_single_file(quantization_config=BitsAndBytesConfig(...)) fails",
    groups=("from_pretrained", "save"),
    messages=(
        Message(
            "Supplied state dict for context_embedder.weight does not contain `bitsandbytes__*` and possibly other `quantized_stats` components.",
            "diffusers/quantizers/bitsandbytes/bnb_quantizer.py",
            parts=("does not contain `bitsandbytes__*` and possibly other `quantized_stats` components.",),
        ),
        Message("Missing quantization component `SCB`", "diffusers/quantizers/bitsandbytes/bnb_quantizer.py"),
    ),
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/single_file_model.py",),
    why="""
        ``FluxTransformer2DModel.from_single_file(path, quantization_config=BitsAndBytesConfig(load_in_4bit=True))``
        raises ``Supplied state dict … does not contain `bitsandbytes__*``, and in INT8 ``Missing quantization component
        `SCB```. ``from_single_file`` creates the quantizer without saying what the file holds, and by default the
        quantizer expects packed weights, as in a GGUF file. So fine-tunes that are published as one file of 16-bit
        weights cannot be quantized. All releases.
    """,
    repair="""
        If the file holds no tensor whose values take one byte, the weights are quantized while they are loaded, to
        the same bits as by ``from_pretrained``. Other files are read as before, float8 ones too, which bitsandbytes
        cannot quantize. The configuration of the model says how it was quantized, so that it can be saved and
        loaded. The model is on the CPU unless ``device`` says otherwise, as upstream. INT8 needs bitsandbytes 0.48;
        older ones quantize packed weights again when they are moved.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite.to_call(
            "diffusers.loaders.single_file_model:FromOriginalModelMixin.from_single_file",
            find="DiffusersAutoQuantizer.from_config(quantization_config)",
            function=quantizer_for,
            arguments="DiffusersAutoQuantizer.from_config, quantization_config, checkpoint",
        ),
        Rewrite.to_call(
            "diffusers.loaders.single_file_model:FromOriginalModelMixin.from_single_file",
            find="hf_quantizer.postprocess_model(model)",
            function=finish_loading,
            arguments="hf_quantizer, model, torch_dtype",
        ),
    ),
    defect=defect,
)
