"""Models that take latents as a sequence of tokens, as FLUX does."""

from __future__ import annotations

import torch

from .tiny import WIDTH, Draw, Inputs, Tiny, grid, mask, step


def tokens(draw: Draw, channels: int = WIDTH, **also: object) -> Inputs:
    """Sixteen latents, eight tokens of text, and their positions."""
    return {
        "hidden_states": draw(1, 16, channels),
        "encoder_hidden_states": draw(1, 8, WIDTH),
        "timestep": step(),
        "img_ids": grid(1, 4, 4),
        "txt_ids": torch.zeros(8, 3),
        **also,
    }


def _pooled(draw: Draw) -> Inputs:
    return tokens(draw, pooled_projections=draw(1, WIDTH))


def _four_axes(draw: Draw, channels: int) -> Inputs:
    ids = {"img_ids": grid(1, 4, 4, 1)[None], "txt_ids": torch.zeros(1, 8, 4)}
    return tokens(draw, channels, **ids)


def _qwen(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 16, 64),
        "encoder_hidden_states": draw(1, 8, WIDTH),
        "encoder_hidden_states_mask": mask(1, 8),
        "timestep": step(),
        "img_shapes": [[(1, 4, 4)]],
    }


def _qwen21(draw: Draw) -> Inputs:
    places = torch.tensor([[False] * 8 + [True] * 4])  # each stands for four latents
    return {**_qwen(draw), "img_mask": places}


def _control(make: object, draw: Draw) -> Inputs:
    inputs = make(draw)  # type: ignore[operator]
    return {**inputs, "controlnet_cond": draw(*inputs["hidden_states"].shape)}


def _hidream(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 4, 8, 8),
        "timesteps": step(),
        "encoder_hidden_states_t5": draw(1, 8, WIDTH),
        "encoder_hidden_states_llama3": draw(2, 1, 8, WIDTH),
        "pooled_embeds": draw(1, WIDTH),
    }


def _ideogram(draw: Draw) -> Inputs:
    indicator = torch.tensor([[3] * 8 + [2] * 16])
    return {
        "hidden_states": draw(1, 24, 64),
        "timestep": step(0.5),
        "encoder_hidden_states": draw(1, 24, WIDTH),
        "position_ids": torch.cat([grid(8, 1, 1), grid(1, 4, 4)])[None].long(),
        "segment_ids": torch.ones(1, 24, dtype=torch.long),
        "indicator": indicator,
    }


def _krea(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 16, 64),
        "encoder_hidden_states": draw(1, 8, 2, WIDTH),
        "timestep": step(0.5),
        "position_ids": torch.cat([torch.zeros(8, 3), grid(1, 4, 4)]),
        "encoder_attention_mask": mask(1, 8),
    }


def _fibo(draw: Draw) -> Inputs:
    layers = [draw(1, 8, WIDTH // 2) for _ in range(2)]
    return tokens(draw, text_encoder_layers=layers, encoder_hidden_states=draw(1, 8, WIDTH))


TABLE = {
    "FluxTransformer2DModel": Tiny(_pooled),
    "FluxControlNetModel": Tiny(lambda draw: _control(_pooled, draw)),
    "Flux2Transformer2DModel": Tiny(
        lambda draw: _four_axes(draw, 64) | {"guidance": step()}, {"in_channels": 64, "axes_dims_rope": (4, 4, 4, 4)}
    ),
    "Flux3Transformer2DModel": Tiny(
        lambda draw: _four_axes(draw, 64) | {"img_ids": grid(1, 4, 4, 1), "txt_ids": torch.zeros(8, 4)},
        {"in_channels": 64, "cond_in_channels": 64, "axes_dims_rope": (4, 4, 4, 4)}
    ),
    "BriaTransformer2DModel": Tiny(tokens),
    "BriaFiboTransformer2DModel": Tiny(_fibo, {"text_encoder_dim": WIDTH // 2}),
    "ChromaTransformer2DModel": Tiny(
        tokens, {"approximator_num_channels": 64, "approximator_hidden_dim": 64, "approximator_layers": 1}
    ),
    "LongCatImageTransformer2DModel": Tiny(tokens),
    "OvisImageTransformer2DModel": Tiny(tokens),
    "QwenImageTransformer2DModel": Tiny(_qwen),
    "QwenImageControlNetModel": Tiny(lambda draw: _control(_qwen, draw)),
    "QwenImage21Transformer2DModel": Tiny(_qwen21),
    "NucleusMoEImageTransformer2DModel": Tiny(
        _qwen, {"num_layers": 5, "num_experts": 4, "moe_intermediate_dim": 64, "capacity_factors": 4.0}
    ),
    "HiDreamImageTransformer2DModel": Tiny(
        _hidream,
        {"patch_size": 2, "in_channels": 4, "caption_channels": [WIDTH, WIDTH], "axes_dims_rope": (8, 4, 4), "max_resolution": (8, 8),
         "llama_layers": (0, 1)},
    ),
    "Ideogram4Transformer2DModel": Tiny(_ideogram, {"in_channels": 64, "mrope_section": (4, 2, 2)}),
    "Krea2Transformer2DModel": Tiny(
        _krea,
        {"num_text_layers": 2, "text_num_attention_heads": 4, "text_num_key_value_heads": 4, "text_intermediate_size": 128,
         "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1},
    ),
}  # fmt: skip
