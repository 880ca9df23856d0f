"""A tiny FLUX pipeline on disk, with two text encoders of transformers; loaded with quantized components, and run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel, PipelineQuantizationConfig,
)  # fmt: skip
from transformers import ByT5Tokenizer, CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

from patches.repairs.reproducers import image_models
from tests.repairs.diffusers import image_options

COMPONENTS = ("transformer", "text_encoder", "text_encoder_2")
"""The components that are quantized."""
KINDS = ("nf4", "nf4-nested")
if "int8" in image_options.BOTH:  # where it is not, diffusers refuses to move an INT8 model
    KINDS = ("int8", *KINDS)


def save_pipeline(folder: Path) -> Path:
    """A pipeline in bfloat16, always the same; its folder."""
    transformer = image_models.make_flux(in_channels=16, num_layers=2)  # it seeds
    text = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    words = {letter: number for number, letter in enumerate(["<|startoftext|>", "<|endoftext|>", "a</w>", "b</w>"])}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "max_position_embeddings": 16}
    t5 = T5Config(
        vocab_size=384, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    vae = {"block_out_channels": (32,), "norm_num_groups": 8, "use_quant_conv": False, "use_post_quant_conv": False}
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(**vae, latent_channels=4, shift_factor=0.1, scaling_factor=1.5),
        text_encoder=CLIPTextModel(CLIPTextConfig(**text, num_attention_heads=4, **tokens)),
        tokenizer=CLIPTokenizer(vocab=words, merges=[], model_max_length=16),
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=ByT5Tokenizer(),
        transformer=transformer,
    )
    pipe.to(torch.bfloat16).save_pretrained(folder)
    return folder


def options(kind: str) -> dict[str, Any]:
    """What a user gives to ``BitsAndBytesConfig``, of either library."""
    if kind == "int8":
        return {"load_in_8bit": True}
    how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": kind.endswith("nested")}
    return {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16, **how}


def quantization(kind: str, components: Iterable[str] = COMPONENTS) -> PipelineQuantizationConfig:
    backend = "bitsandbytes_8bit" if kind == "int8" else "bitsandbytes_4bit"
    return PipelineQuantizationConfig(
        quant_backend=backend, quant_kwargs=options(kind), components_to_quantize=list(components)
    )


def load(folder: Path, kind: str, **also: Any) -> FluxPipeline:
    """The pipeline in ``folder`` with quantized components; "plain" is as it was saved."""
    config = {} if kind == "plain" else {"quantization_config": quantization(kind)}
    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16, **{**config, **also})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_transformer(folder: Path, kind: str, device_map: dict[str, Any], offload_folder: Path) -> Any:
    from diffusers import BitsAndBytesConfig

    how = {"device_map": device_map, "offload_folder": offload_folder, "torch_dtype": torch.bfloat16}
    config = BitsAndBytesConfig(**options(kind))
    return FluxTransformer2DModel.from_pretrained(folder / "transformer", quantization_config=config, **how)


def draw(pipe: FluxPipeline) -> torch.Tensor:
    """The image that ``pipe`` makes of a prompt, on the host: text encoders, two steps of the transformer, and the VAE."""
    size = {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 8}
    generator = torch.Generator("cpu").manual_seed(0)
    return pipe("a b", prompt_2="hello", **size, output_type="pt", generator=generator).images.cpu()


def places(pipe: FluxPipeline) -> dict[str, set[str]]:
    """The types of the devices that tensors of the quantized layers of each component are on."""
    from tests.device.layers import places

    return {name: {place.partition(":")[0] for place in places(getattr(pipe, name))} for name in COMPONENTS}
